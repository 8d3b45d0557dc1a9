"""scripts/mutate knows each rule: what is watched, compared, refused or left to eager code."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from graphwright.calls import holders, switches
from graphwright.calls.places import StatePlace

ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "scripts" / "mutate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


mutate: Any = _load()
TABLE = tomllib.loads(mutate.TABLE.read_text())
LATER = {"torch.backends.cudnn.depthwise_kernel"}  # PyTorch 2.11 lacks it.


@functools.cache
def rules() -> list[Any]:
    """All mutations; to read the sources for them takes seconds."""
    return list(mutate.mutations())


def places(kind: str) -> set[str]:
    return set(TABLE[kind])


def functions(file: Path) -> Iterator[tuple[str, ast.AST]]:
    """The functions of a file, as the table names them."""

    def below(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = (*path, child.name)
                if isinstance(child, ast.FunctionDef):
                    yield f"{file.relative_to(mutate.SOURCE).as_posix()}:{'.'.join(inner)}", child
                yield from below(child, inner)

    yield from below(ast.parse(file.read_text()), ())


def called(function: ast.AST) -> set[str]:
    """The names of what a function calls, without those of functions inside of it."""
    calls = [node.func for node in mutate._below(function) if isinstance(node, ast.Call)]
    return {getattr(each, "id", getattr(each, "attr", "")) for each in calls}


def test_each_rule_has_a_test_or_a_reason() -> None:
    assert [each.name for each in rules() if not each.test] == []
    assert len({(each.kind, each.name) for each in rules()}) == len(rules())


def test_the_table_names_no_rule_that_is_gone() -> None:
    for kind in ("conditions", "steps", "fields", "rows"):
        for place, tests in TABLE[kind].items():
            assert tests.keys() <= set(mutate.rules_of(kind, place)), place
    known = {(each.place, each.rule) for each in rules()}
    for use, tests in TABLE["switches"].items():
        for name in tests.keys() - {mutate.OTHERS} - LATER:
            assert (f"switches: {use}", name) in known


def test_each_named_test_exists() -> None:
    known: dict[str, set[str]] = {}
    for each in rules():
        if each.test.startswith(mutate.SAME):
            assert len(each.test) > len(mutate.SAME) + 10, each.name
            continue
        file, _, name = each.test.partition("::")
        if file not in known:
            tree = ast.parse((ROOT / file).read_text())
            known[file] = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert name.partition("[")[0] in known[file], each.test


@pytest.mark.parametrize("kind", ["conditions", "steps", "fields", "rows", "switches"])
def test_an_edit_takes_one_rule_away(kind: str) -> None:
    mutation = next(each for each in rules() if each.kind == kind)
    source = ast.parse((mutate.SOURCE / mutation.file).read_text())
    assert ast.dump(mutation.edited()) != ast.dump(source)


def test_each_switch_has_a_mutation_for_each_of_its_uses() -> None:
    found = {
        (each.place.partition(": ")[2], each.rule) for each in rules() if each.kind == "switches"
    }
    for row in switches.TABLE:
        assert (("calls", row.name) in found) is (row in switches._at_calls(cuda=True)), row.name
        assert (("processes", row.name) in found) is (row in switches.CARRIED)
        either = switches.saved("cpu") | switches.saved("cuda")
        assert (("files", row.name) in found) is (row.name in either)


def _kinds(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _kinds(each)


def test_whatever_makes_a_watched_place_has_mutations() -> None:
    kinds = {each.__name__ for each in _kinds(StatePlace)}
    made = set()
    for place, function in functions(mutate.SOURCE / "calls" / "dependencies.py"):
        if not place.startswith("calls/dependencies.py:_Walker."):
            continue
        nodes = [node for node in mutate._below(function) if isinstance(node, ast.Name)]
        names = {node.id for node in nodes if node.id in kinds}
        if names:
            assert place in places("steps")
            made |= names
    assert made == kinds


def test_each_way_to_hold_something_has_a_mutation() -> None:
    rows = {each.rule for each in rules() if each.place == "calls/holders.py:_CHECKS"}
    assert rows == {str(kind) for kind in holders._Kind}


# Who asks whether something looks on, other than to decide who answers a call.
TELL = {
    "calls/methods.py:Methods._may_watch": "watches what a method runs, to tell of it",
    "calls/modules.py:ModuleProxy.__getattr__": "compiled code gets the method itself",
    "calls/signature.py:CallSignature.differences": "says it in words",
    "calls/signature.py:RangedSignature.differences": "says it in words",
    "artifacts/built_calls.py:Entries.differences": "says it in words",
    "dispatch/bucketed_callable.py:BucketedCallable._answer_padded": "a proof comes before it",
    "dispatch/fast_path.py:_fast.fast": "a faster way to the same answer",
    "graphs/composition.py:apart_from_capture": "gives the answer to others",
    "graphs/conditions.py:hidden_from_hooks_for_saved_tensors": "nothing to hide",
    "graphs/transaction.py:transaction": "refuse_hooks_for_saved_tensors has the rule",
    "training/callables/captured_pair.py:CapturedPair._warm": "likewise",
    "strategies/xla.py:_Program.__call__": "another recorder",
    "ops/custom/operator.py:Operator.__call__": "chooses between two forms of an operator",
    "ops/custom/registration.py:_no_backward.backward": "chooses the error",
}
GATES = {
    *("inside_func", "inside_transform", "has_function_mode", "is_anomaly_enabled"),
    *("under_hooks_for_saved_tensors", "refuse_hooks_for_saved_tensors", "captured_by_others"),
    *("only_for_inference", "is_compiling"),
}


def test_each_gate_has_mutations() -> None:
    asking = {
        place
        for file in mutate.SOURCE.rglob("*.py")
        for place, function in functions(file)
        if called(function) & GATES
    }
    assert asking - places("conditions") - set(TELL) == set()
    assert set(TELL) - asking == set()


def test_a_mutant_is_seen_and_one_that_nobody_sees_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"outcome": "survived"}, {"outcome": "survived"}, {"outcome": "red"}]
    monkeypatch.setattr(mutate, "_in_processes", lambda work, jobs: rows[: len(work)])
    name = "calls/leaves.py:matches | value.dtype is dtype"
    found = [each for each in rules() if each.name == name]
    monkeypatch.setattr(mutate, "mutations", lambda: found)
    assert mutate.main([name]) == 1
    rows[1] = {"outcome": "red"}
    assert mutate.main([name]) == 0
    rows[0] = {"outcome": "red"}
    assert mutate.main([name]) == 2


@pytest.mark.slow
def test_a_rule_that_is_deleted_turns_its_test_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # Its processes import it by its name.
    name = "calls/leaves.py:matches | value.dtype is dtype"
    found = next(each for each in rules() if each.name == name)
    other = found.test.partition("::")[0] + "::test_a_difference_that_nobody_wrote"
    for test, outcome in ((found.test, "red"), (other, "there is no such test")):
        assert mutate._in_processes([(test, found)], 1)[0]["outcome"] == outcome
