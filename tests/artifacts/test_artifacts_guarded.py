"""What a file may not do to the process that loads it, nor save() to files that are there."""

from __future__ import annotations

import collections
import enum
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_artifacts import rewritten, tuned_with
from torch import nn
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.calls import written_trees
from graphwright.calls.objects import apart
from graphwright.calls.written_trees import tree_of, tree_text
from graphwright.errors import ArtifactError


class Single(nn.Module):
    """A dictionary of one result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(self.linear(x))}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It as it was saved."""
    path = tmp_path_factory.mktemp("single") / "single.gw"
    torch.manual_seed(0)
    gw.save(tuned_with("fused", Single().eval(), (torch.ones(2, 4),)), path)
    return path


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that nobody has imported yet."""
    name = f"evil_{tmp_path.name.replace('-', '_')}"
    text = "import enum\nclass E(enum.Enum):\n    y = 1\ndef f():\n    return 1\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


LEAF = {"type": None, "context": None, "children_spec": []}


def node(kind: Any, context: Any, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": list(children) or [LEAF]}


def defaulting(name: str) -> dict[str, Any]:
    return {
        "default_factory_module": name,
        "default_factory_name": "f",
        "dict_context": ["y"],
    }


MEMBER = '{"__en\\u0075m__": true, "fqn": "EVIL:E", "name": "y"}'
# Schemas of trees for which PyTorch would import a module named EVIL, and such as make no sense.
TREES: dict[str, Any] = {
    "a factory": node("collections.defaultdict", defaulting("EVIL")),
    "a factory inside": node(
        "builtins.list", "null", node("collections.defaultdict", defaulting("EVIL"))
    ),
    "an escaped enumeration": node("builtins.dict", f"[{MEMBER}]"),
    "one in lists": node("builtins.dict", f"[[[{MEMBER}]]]"),
    "one alone": node("collections.deque", MEMBER),
    "one before an error": node("builtins.dict", f"[{MEMBER}, oops"),
    "one before a number too large": node("builtins.dict", f"[{MEMBER}, {'9' * 5000}]"),
    "one twice": node("builtins.dict", f'[{{"a": {MEMBER}, "a": 1}}]'),
    "one in a text": node("builtins.dict", json.dumps([f"[{MEMBER}]"])),
    "one below a leaf": LEAF | {"children_spec": [node("builtins.dict", f"[{MEMBER}]")]},
    "one beside NaN": node("builtins.dict", f"[NaN, {MEMBER}]"),
    "no text but an object": node("builtins.dict", json.loads(f"[{MEMBER}]")),
    "a named tuple that is none": node("collections.namedtuple", "collections.defaultdict"),
    "a named tuple of lists": node("collections.namedtuple", "builtins.list"),
    "a class without a name": node(pytree.NO_SERIALIZED_TYPE_NAME_FOUND, "[]"),
    "a list for a name": node(["builtins.dict"], "[]"),
    "children in a dictionary": {"type": None, "context": None, "children_spec": {"EVIL": 1}},
}


def stored(schema: Any, name: str) -> str:
    return json.dumps([1, schema]).replace("EVIL", name)


@pytest.mark.parametrize("imports", [False, True])
@pytest.mark.parametrize("kind", TREES)
def test_a_tree_imports_nothing_that_its_contexts_name(kind: str, imports: bool, evil: str) -> None:
    with pytest.raises(gw.ArtifactError, match="structure of arguments or results cannot be made"):
        tree_of(stored(TREES[kind], evil), imports=imports)
    assert evil not in sys.modules


def test_a_key_that_comes_twice_is_judged_as_it_is_read(evil: str) -> None:
    twice = '[1, {"type": "builtins.dict", "type": "collections.defaultdict", "context": "[]", '
    twice += f'"context": {json.dumps(defaulting(evil))}, "children_spec": []}}]'
    with pytest.raises(gw.ArtifactError):
        tree_of(twice)
    assert evil not in sys.modules


@pytest.mark.parametrize("depth", [900, 100_000])
def test_a_tree_of_any_depth_is_told(depth: int) -> None:
    deep = '{"type": "builtins.list", "context": "null", "children_spec": ['
    for text in (
        f"[1, {deep * depth}{']}' * depth}]",
        stored(node("builtins.dict", "[" * depth + "]" * depth), ""),
    ):
        try:
            tree_of(text)
        except gw.ArtifactError as error:
            assert "cannot be made" in str(error)  # noqa: PT017  # or it is no deeper than Python goes


@pytest.mark.parametrize("place", ["evidence", "graph"])
@pytest.mark.parametrize("kind", ["a factory", "an escaped enumeration"])
def test_a_file_imports_nothing_that_it_names(
    place: str, kind: str, single: Path, tmp_path: Path, evil: str
) -> None:
    path = tmp_path / "single.gw"
    shutil.copy(single, path)

    def change(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        tree = stored(TREES[kind], evil)
        name = "evidence.json" if place == "evidence" else "strategy/0/graph.json"
        known = json.loads(members[name])
        if place == "evidence":
            known["samples"][0]["spec"] = tree
        else:
            known["out"]["tree"] = tree
        members[name] = json.dumps(known).encode()

    rewritten(path, change)
    with pytest.raises(gw.ArtifactError, match="structure of arguments or results cannot be made"):
        gw.load(path)
    assert evil not in sys.modules


class Point(NamedTuple):
    x: Any
    y: Any


pytree._register_namedtuple(Point, serialized_type_name=f"{__name__}.Point")


class Colour(enum.Enum):
    RED = 1


def test_trees_of_classes_that_are_imported_come_back() -> None:
    for tree in (
        {"a": [1, (2, None)], "b": collections.OrderedDict(c=3), "{": 4, "5": 5},
        Point(1, [Point(2, 3)]),
        collections.deque([1, 2], maxlen=2),
        torch.Size([1, 2]),
        7,
    ):
        spec = pytree.tree_structure(tree)
        assert tree_of(tree_text(spec)) == spec


@pytest.mark.parametrize("tree", [collections.defaultdict(list, y=1), {Colour.RED: 1}])
def test_what_load_would_refuse_is_not_written(tree: Any) -> None:
    with pytest.raises(gw.ArtifactError, match=r"cannot be saved: .* import.*\n.*return"):
        tree_text(pytree.tree_structure(tree))


@pytest.mark.parametrize("trust", ["no", 1, None])
def test_trust_is_yes_or_no(trust: Any, single: Path) -> None:
    with pytest.raises(gw.OptionError, match=r"trust is .*, not True or False"):
        gw.load(single, trust=trust)


# Files that are there.


@pytest.fixture
def loaded(single: Path) -> gw.TunedModule:
    return gw.load(single)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_what_the_umask_leaves(
    loaded: gw.TunedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda _: pytest.fail("it is the whole process's"))
        gw.save(loaded, tmp_path / "new.gw")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert mode_of(tmp_path / "new.gw") == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_keeps_its_permissions(mode: int, loaded: gw.TunedModule, tmp_path: Path) -> None:
    path = tmp_path / "there.gw"
    path.touch()
    path.chmod(mode)
    gw.save(loaded, path)
    assert mode_of(path) == mode
    gw.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["there.gw"]


def test_a_link_leads_to_what_was_saved(loaded: gw.TunedModule, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    link, target = tmp_path / "link.gw", tmp_path / "deep" / "target.gw"
    link.symlink_to(Path("deep") / "target.gw")
    for _ in range(2):  # Where it leads to nothing as well.
        gw.save(loaded, link)
        assert link.is_symlink()
        gw.load(target)
    assert [file.name for file in target.parent.iterdir()] == ["target.gw"]


def test_a_pipe_is_no_place_for_a_file(loaded: gw.TunedModule, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="no regular file"):
        gw.save(loaded, tmp_path / "pipe")
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_threads_save_at_once(loaded: gw.TunedModule, tmp_path: Path) -> None:
    path = tmp_path / "all.gw"
    threads = [threading.Thread(target=gw.save, args=(loaded, path)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    gw.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["all.gw"]


def as_folder(folder: Path) -> Path:
    (folder / "there").mkdir()
    return folder / "there"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (as_folder, r"there cannot be written: .*directory.*\n.*Name a file in that folder"),
        (lambda folder: folder / ("n" * 256), r"too long.*\n.*Choose a shorter name"),
        (lambda folder: folder / ("n" * 256) / "a.gw", "There is no folder"),
    ],
    ids=["a folder", "a name too long", "a folder's name too long"],
)
def test_what_cannot_be_written_says_why(
    place: Callable[[Path], Path], text: str, loaded: gw.TunedModule, tmp_path: Path
) -> None:
    with pytest.raises(gw.ArtifactError, match=text):
        gw.save(loaded, place(tmp_path))


def test_a_name_may_be_as_long_as_names_can_be(loaded: gw.TunedModule, tmp_path: Path) -> None:
    gw.save(loaded, tmp_path / ("n" * 255))
    gw.load(tmp_path / ("n" * 255))


# Objects among results.


class Held:
    """An object with an attribute of its own, made by nobody else."""

    made = 0

    def __init__(self, x: Any, kind: Any = Colour.RED) -> None:
        type(self).made += 1
        self.x = x
        self.kind = kind
        self.cls = Point
        self.size = torch.Size([1, 2])
        self.names = frozenset({"a", "b"})


class Words(dict[str, Any]):
    """A dictionary that is an object, too."""


class Objects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(self.linear(x))
        held = Held([y, y * 2])
        return {"one": held, "other": held, "words": Words(y=y + 1)}


def spec_of(tree: Any) -> pytree.TreeSpec:
    return pytree.tree_structure(apart(tree))


HERE = {__name__.partition(".")[0], "builtins"}


def test_trees_with_objects_come_back_where_they_are_allowed() -> None:
    held = Held(torch.ones(1))
    for tree in (held, [held, held], {"a": (Point(held, 1), [Held(Held(None))])}, Words(a=[held])):
        spec = spec_of(tree)
        text = tree_text(spec)
        assert tree_of(text, objects=HERE) == spec
        with written_trees.one_file():
            assert tree_of(text, objects=HERE) == spec
            assert tree_of(text) == spec  # From now on.
        for others in (None, (), {"torch"}):
            with pytest.raises(gw.ArtifactError, match="may not make these"):
                tree_of(text, objects=others)


def test_objects_of_a_file_are_made_for_those_who_allow_it_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Objects().eval(), torch.randn(2, 4)
    path = tmp_path / "objects.gw"
    gw.save(tuned_with("fused", model, (x,)), path)
    with pytest.raises(gw.ArtifactError, match=r"objects of .*Held.*may not make"):
        gw.load(path)
    Held.made = 0
    loads = [gw.load(path, trust=True), gw.load(path, model)]
    with pytest.raises(gw.ArtifactError, match="may not make"):
        gw.load(path)
    for loaded in loads:
        with torch.no_grad():
            result, expected = loaded(x), model(x)
        Held.made -= 1  # By the model.
        assert result["one"] is result["other"]
        assert type(result["one"]) is Held
        assert type(result["words"]) is Words
        assert vars(result["one"]).keys() == vars(expected["one"]).keys()
        assert result["one"].kind is Colour.RED
        assert result["one"].cls is Point
        torch.testing.assert_close(result["one"].x, expected["one"].x)
        torch.testing.assert_close(result["words"]["y"], expected["words"]["y"])


OBJECT = {"node": "ObjectNode", "context": [f"{__name__}:Held", ["x"], False], "children": ["*"]}


@pytest.mark.parametrize(
    "change",
    [
        {"context": ["builtins:dict", ["x"], True]},
        {"context": ["builtins:object", ["x"], False]},
        {"context": [f"{__name__}:Objects", ["x"], False]},
        {"context": [f"{__name__}:Held", ["x"], True]},
        {"context": [f"{__name__}:Held", ["x", "y"], False]},
        {"context": [f"{__name__}:Held", [1], False]},
        {"context": [f"{__name__}:tree_of", ["x"], False]},
        {"node": "GivenNode", "context": 0, "children": []},
        {"node": "_Kept", "context": 0, "children": []},
        {"node": "Constant", "context": {"class": "builtins:nothing"}, "children": []},
        {"node": "Constant", "context": {"torch": "load"}, "children": []},
        {"node": "Again", "context": 0, "children": ["*"]},
        {"node": "Nothing"},
        {"context": [f"{__name__}:Held", ["__class__"], False]},
    ],
)
def test_objects_that_no_one_wrote_are_refused(change: dict[str, Any]) -> None:
    tree_of(json.dumps(OBJECT), objects=HERE)
    with pytest.raises(gw.ArtifactError):
        tree_of(json.dumps(OBJECT | change), objects=HERE)


def test_objects_of_a_module_that_is_not_imported(evil: str) -> None:
    text = json.dumps(OBJECT | {"context": [f"{evil}:C", ["x"], False]})
    with pytest.raises(gw.ArtifactError, match="not imported here"):
        tree_of(text, objects=HERE)
    assert evil not in sys.modules
    with pytest.raises(gw.ArtifactError, match="not imported here"):
        tree_of(text, imports=True)  # There is no such class in it.


def test_objects_without_a_name_are_not_written() -> None:
    local = type("Local", (), {})()
    for tree in (local, [Held(local)]):
        with pytest.raises(gw.ArtifactError, match="no module names the class Local"):
            tree_text(spec_of(tree))
