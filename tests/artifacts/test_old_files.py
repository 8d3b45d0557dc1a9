"""Files, cached choices and pickles of earlier versions are read right, or refused with a sentence.

`old_files/make.py` has made them; `old_files/bd09496` was made at that commit, with PyTorch 2.13.0.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from chosen import choosing
from old_files import models, pickles
from test_artifacts import rewritten
from torch import fx

import graphwright as gw
from graphwright.report.environment import environment
from graphwright.report.report import Report
from graphwright.tuning import choice_cache

OLD = Path(__file__).parent / "old_files" / "bd09496"
CPU = torch.device("cpu")
# What these strategies have stored is code, which is executed only where the file is trusted.
CODE = {"torchscript", "inductor", "aot_inductor", "objects"}
NEED_THE_MODEL = {"eager", "inductor"}
# What compiles takes its time.
LONG = {"inductor", "aot_inductor"}
# Facts on which the file of a kind depends, so that it is built again where one differs.
BOUND = {
    "fused": {"torch"},
    "buckets": {"torch"},
    "aot_inductor": {"torch", "processor", "system"},
}
AS_SAVED, AGAIN = "as it was saved", "built again"
UNTOLD = "calls between the buckets are not padded: that was proved there"
COMPILED = "torch.compile did not take the cache that was saved, and compiled again"


def path_of(kind: str) -> Path:
    return OLD / "files" / f"{kind}.gw"


def manifest_of(kind: str) -> dict[str, Any]:
    with zipfile.ZipFile(path_of(kind)) as archive:
        return json.loads(archive.read("manifest.json"))


def kinds(*, without: Collection[str] = ()) -> list[Any]:
    found = [kind for kind in models.KINDS if kind not in without]
    return [pytest.param(k, marks=[pytest.mark.long] if k in LONG else []) for k in found]


# What differs on other machines.
ELSEWHERE = [("torch", "9.0.0"), ("processor", "another")]


def load(kind: str, *, model: bool) -> gw.TunedModule:
    """It as its own kind is loaded; `model` passes one that has other weights."""
    if kind == "range":
        pytest.importorskip("onnxruntime")
    passed = models.blank(type(models.request(kind).model)()) if model else None
    return gw.load(path_of(kind), passed, trust=kind in CODE)


@contextlib.contextmanager
def elsewhere(**facts: str) -> Iterator[None]:
    """As on a machine that differs from the one that wrote the files in these facts alone."""
    there = manifest_of("fused")["environment"] | facts
    with mock.patch("graphwright.artifacts.loading.environment", return_value=there):
        yield


@pytest.fixture
def written_here() -> None:
    """For what has to run as it was saved."""
    written = manifest_of("fused")["environment"]
    now = environment(CPU)
    for name in ("torch", "system"):
        if now[name] != written[name]:
            pytest.skip(f"written with {name} {written[name]}, and this is {now[name]}")


def answers_right(tuned: gw.TunedModule, kind: str) -> None:
    """All calls that it was tuned for are answered by what was loaded, as eager answers them."""
    asked = models.request(kind)
    calls = asked.samples
    if kind in ("buckets", "range"):
        calls = [((models.values(size, models.SIZE),), {}) for size in (2, 4)]
    with torch.no_grad():
        for args, kwargs in calls:
            mine = copy.deepcopy((args, kwargs))
            assert_alike(tuned(*mine[0], **mine[1]), asked.model(*args, **kwargs))
            assert_alike(mine[0], args)
    assert tuned.calls == {"tuned": len(calls)}


def assert_alike(mine: Any, its: Any) -> None:
    if isinstance(its, torch.Tensor):
        torch.testing.assert_close(mine, its)
    elif isinstance(its, Mapping):
        assert type(mine) is type(its)
        assert mine.keys() == its.keys()
        for name, value in its.items():
            assert_alike(mine[name], value)
    elif isinstance(its, list | tuple):
        assert len(mine) == len(its)
        for pair in zip(mine, its, strict=True):
            assert_alike(*pair)
    elif isinstance(its, models.Cache):
        assert type(mine) is models.Cache
        assert_alike(vars(mine), vars(its))
    else:
        assert mine == its


# ------------------------------------------------------------ files


def test_the_files_are_of_the_version_before() -> None:
    for kind, strategy in models.KINDS.items():
        found = manifest_of(kind)
        assert (found["schema_version"], found["strategy"]) == (1, strategy)
        assert found["environment"]["torch"] == "2.13.0+cpu"


@pytest.mark.usefixtures("written_here")
@pytest.mark.parametrize("kind", kinds(without=NEED_THE_MODEL))
def test_it_loads_without_the_model(kind: str) -> None:
    with elsewhere():
        tuned = load(kind, model=False)
    assert tuned._choice.loaded == (AS_SAVED,)
    assert tuned.report.chosen == models.KINDS[kind]
    answers_right(tuned, kind)


@pytest.mark.usefixtures("written_here")
@pytest.mark.parametrize("kind", kinds(without=LONG))
def test_it_loads_into_a_model_with_other_weights(kind: str) -> None:
    with elsewhere():
        tuned = load(kind, model=True)
    assert tuned._choice.loaded == ((AGAIN if kind in NEED_THE_MODEL else AS_SAVED),)
    answers_right(tuned, kind)
    assert_alike(dict(tuned.module.state_dict()), dict(models.request(kind).model.state_dict()))


@pytest.mark.long
@pytest.mark.usefixtures("written_here")
@pytest.mark.slow
def test_torch_compile_s_cache_is_said_not_to_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file does not say for which vectors its code was written: here it may be others."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = counters["inductor"]["fxgraph_cache_miss"]
    with elsewhere():
        tuned = load("inductor", model=True)
    assert counters["inductor"]["fxgraph_cache_miss"] > before
    assert tuned._choice.loaded == (COMPILED, AGAIN)
    answers_right(tuned, "inductor")


@pytest.mark.parametrize("kind", ["buckets", "range"])
@pytest.mark.usefixtures("written_here")
def test_sizes_between_the_buckets_are_answered_too(kind: str) -> None:
    with elsewhere():
        tuned = load(kind, model=False)
    x = models.values(3, models.SIZE)
    with torch.no_grad():
        assert_alike(tuned(x), models.request(kind).model(x))
    assert tuned.calls == {"tuned" if kind == "range" else "tuned, padded to a bucket": 1}


@pytest.mark.parametrize("kind", sorted(CODE))
def test_what_is_code_needs_trust(kind: str) -> None:
    with pytest.raises(gw.ArtifactError, match=r"is code.*\n.*trust=True"):
        gw.load(path_of(kind))


@pytest.mark.parametrize("kind", sorted(NEED_THE_MODEL))
def test_the_choice_alone_needs_the_model(kind: str) -> None:
    with pytest.raises(gw.ArtifactError, match=r"is built from the model.*\nPass the model: "):
        load(kind, model=False)


@pytest.mark.parametrize(("name", "value"), ELSEWHERE)
@pytest.mark.parametrize("kind", kinds(without=NEED_THE_MODEL))
def test_elsewhere_without_the_model_it_is_verified_or_refused(
    kind: str, name: str, value: str
) -> None:
    why = f"{name} was {manifest_of(kind)['environment'][name]} and is {value}"
    with elsewhere(**{name: value}):
        if kind == "aot_inductor":
            with pytest.raises(gw.ArtifactError) as caught:
                load(kind, model=False)
            assert caught.value.what == (
                f"{kind}.gw holds nothing that runs here without the model: {kind} is built from "
                f"the model, since {why}."
            )
            assert caught.value.remedy.startswith("Pass the model: load(path, model)")
            return
        tuned = load(kind, model=False)
    told = (UNTOLD,) if kind == "buckets" else ()
    assert tuned._choice.loaded == (f"{AS_SAVED}: {why}", *told)
    answers_right(tuned, kind)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        pytest.param(*kind.values, *each, marks=pytest.mark.slow if kind.marks else ())
        for kind in kinds()
        for each in ELSEWHERE
        # To compile this once is enough: it is the same two facts that refuse it above.
        if kind.values != ("aot_inductor",) or each is ELSEWHERE[0]
    ],
)
def test_elsewhere_with_the_model_what_is_bound_is_built_again(
    kind: str, name: str, value: str
) -> None:
    why = f"{name} was {manifest_of(kind)['environment'][name]} and is {value}"
    bound = kind in NEED_THE_MODEL or name in BOUND.get(kind, ())
    taken = mock.Mock(side_effect=AssertionError("what another machine compiled is taken"))
    with elsewhere(**{name: value}), contextlib.ExitStack() as stack:
        if bound:
            for place in ("inductor.Inductor.warm", "aot_inductor.AotInductor.load"):
                stack.enter_context(mock.patch(f"graphwright.strategies.{place}", taken))
        tuned = load(kind, model=True)
    told = (UNTOLD,) if kind == "buckets" else ()
    assert tuned._choice.loaded == (f"{AGAIN if bound else AS_SAVED}: {why}", *told)
    answers_right(tuned, kind)


@pytest.mark.parametrize("kind", kinds(without=NEED_THE_MODEL))
def test_here_it_loads_or_says_what_differs(kind: str) -> None:
    """Nothing is simulated: whatever machine and PyTorch this is."""
    written, now = manifest_of(kind)["environment"], environment(CPU)
    changes = [
        f"{name} was {written.get(name, 'none')} and is {now.get(name, 'none')}"
        for name in sorted({*written, *now} - {"threads", "cores", "python"})
        if written.get(name) != now.get(name)
    ]
    bound = BOUND.get(kind, set())
    if kind == "aot_inductor" and any(written[name] != now[name] for name in bound):
        with pytest.raises(gw.ArtifactError, match="is built from the model") as caught:
            load(kind, model=False)
        assert caught.value.what.endswith(f", since {', '.join(changes)}.")
        assert caught.value.remedy.startswith("Pass the model")
        return
    tuned = load(kind, model=False)
    told = (UNTOLD,) if kind == "buckets" and changes else ()
    first = f"{AS_SAVED}: {', '.join(changes)}" if changes else AS_SAVED
    assert tuned._choice.loaded == (first, *told)
    answers_right(tuned, kind)


def compiled_for(instructions: str, path: Path) -> None:
    """Have an artifact's machine code say that it needs these instructions."""

    def change(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        name, made = "strategy/0/package.pt2", io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(members[name])) as old, zipfile.ZipFile(made, "w") as new:
            for each in old.namelist():
                data = old.read(each)
                if each.endswith("_metadata.json"):
                    data = json.dumps(json.loads(data) | {"AOTI_CPU_ISA": instructions}).encode()
                new.writestr(each, data)
        members[name] = made.getvalue()

    rewritten(path, change)


@pytest.mark.usefixtures("written_here")
def test_machine_code_for_a_processor_of_the_same_name_that_has_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(path_of("aot_inductor"), tmp_path))
    compiled_for("AVX512 AMX_TILE", path)
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    with elsewhere(), pytest.raises(gw.ArtifactError) as caught:
        gw.load(path, trust=True)
    assert caught.value.what.endswith("it was compiled for AMX_TILE, which this processor lacks.")
    assert caught.value.remedy == "Pass the model."


@contextlib.contextmanager
def switched(switch: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(before)


SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast on the CPU is torch.bfloat16, and was False": lambda: torch.autocast("cpu"),
    "the default dtype is torch.float64, and was torch.float32": lambda: switched(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
    "torch.use_deterministic_algorithms is True, and was False": lambda: switched(
        torch.use_deterministic_algorithms, True, False
    ),
    "torch.backends.mkldnn.enabled is False, and was True": lambda: switched(
        torch._C._set_mkldnn_enabled, False, True
    ),
}


@pytest.mark.parametrize("told", SWITCHES)
def test_a_switch_that_differs_is_named(told: str) -> None:
    """Files of version 1 hold values without names, in an order of their own."""
    with SWITCHES[told](), pytest.raises(gw.ArtifactError) as caught:
        load("fused", model=False)
    assert caught.value.what == f"fused.gw was saved under other settings: {told}."
    assert "Set them as they were" in caught.value.remedy


@pytest.mark.parametrize("version", [0, 3])
def test_a_version_that_is_not_known_is_named_with_the_remedy(version: int, tmp_path: Path) -> None:
    path = Path(shutil.copy(path_of("fused"), tmp_path))
    rewritten(path, lambda members, manifest: manifest.update(schema_version=version))
    with pytest.raises(gw.ArtifactError, match=f"schema version {version}, and only 1 and 2 can"):
        gw.load(path)


# ------------------------------------------------------------ cached choices


class KeyFound(Exception):
    """Ends `tune` as soon as it has looked for a cached choice."""


def tuned(kind: str, written_on: Mapping[str, str]) -> gw.TunedModule:
    """Tune as it was done then, on the machine that wrote the choice."""
    asked = models.request(kind)
    quick = mock.patch.multiple("graphwright.tuning.tuner", SCREENING_S=0.02, FINAL_S_EACH=0.02)
    same = mock.patch("graphwright.tuning.tuner.environment", return_value=dict(written_on))
    with choosing(asked.strategy), quick, same, torch.no_grad():
        return gw.tune(
            asked.model,
            strategies=[asked.strategy],
            isolate=False,
            progress=False,
            **asked.options,
        )


def old_choice(kind: str) -> tuple[Path, dict[str, Any]]:
    (path,) = (OLD / "choices" / kind).iterdir()
    return path, json.loads(path.read_bytes())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, with all choices of then."""
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path))
    folder = choice_cache.folder()
    folder.mkdir(parents=True)
    for kind in models.KINDS:
        shutil.copy(old_choice(kind)[0], folder)
    return folder


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.usefixtures("cache")
def test_no_request_of_today_has_the_key_of_then(kind: str) -> None:
    """Since a key covers more switches now, a choice of then may have been made under others."""
    if kind == "range":
        pytest.importorskip("onnxruntime")
    path, old = old_choice(kind)
    look = mock.Mock(side_effect=KeyFound)
    with mock.patch("graphwright.tuning.choice_cache.recall", look), pytest.raises(KeyFound):
        tuned(kind, old["parts"]["environment"])
    key = look.call_args.args[0]
    assert path.stem == old["key"] != key.digest
    # Else it would differ on any machine and for any request.
    same = ["device", "environment", "options"]
    assert [key.parts[name] for name in same] == [old["parts"][name] for name in same]
    assert len(key.parts["calls"]) == len(old["parts"]["calls"])
    for now, then in zip(key.parts["calls"], old["parts"]["calls"], strict=True):
        assert (now["leaves"], now["aliases"]) == (then["leaves"], then["aliases"])
        # The reason that holds for every request.
        assert type(now["switches"]) is dict
        assert type(then["switches"]) is list


@pytest.mark.parametrize("kind", ["fused", "buckets", "torchscript"])
def test_old_choices_are_left_alone_and_the_model_is_tuned(kind: str, cache: Path) -> None:
    path, old = old_choice(kind)
    before = {each.name: each.read_bytes() for each in cache.iterdir()}
    found = tuned(kind, old["parts"]["environment"])
    assert not found.report.recalled
    answers_right(found, kind)
    after = {each.name: each.read_bytes() for each in cache.iterdir()}
    assert path.name in before
    assert {name: after[name] for name in before} == before
    assert tuned(kind, old["parts"]["environment"]).report.recalled == found.report.created


@pytest.mark.parametrize("kind", ["fused", "torchscript"])
def test_a_report_of_then_under_a_key_of_today_is_verified_again(kind: str, cache: Path) -> None:
    """As if the key had not changed: what was measured then is read, and its choice is right."""
    _, old = old_choice(kind)
    look = mock.Mock(side_effect=KeyFound)
    with mock.patch("graphwright.tuning.choice_cache.recall", look), pytest.raises(KeyFound):
        tuned(kind, old["parts"]["environment"])
    report = Report.from_json(json.dumps(old["report"]))
    assert choice_cache.remember(look.call_args.args[0], report) is not None
    found = tuned(kind, old["parts"]["environment"])
    assert found.report.recalled == report.created
    assert found.report.chosen == models.KINDS[kind]
    answers_right(found, kind)


# ------------------------------------------------------------ pickles


def unpickled(name: str) -> Any:
    return pickle.loads((OLD / "pickles" / f"{name}.pickle").read_bytes())


def content(value: Any) -> Any:
    """A value in words that show all it holds, so that two are the same if these are."""
    kind = type(value)
    if isinstance(value, Enum):
        return value
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, Mapping):
        return kind, {key: content(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, {f.name: content(getattr(value, f.name)) for f in dataclasses.fields(value)}
    held = {name: content(each) for name, each in getattr(value, "__dict__", {}).items()}
    if isinstance(value, list | tuple):
        return kind, [content(each) for each in value], held
    if isinstance(value, BaseException):
        return kind, str(value), held
    if isinstance(value, gw.Nodes):
        return kind, held
    return value


WRITTEN = sorted(path.stem for path in (OLD / "pickles").iterdir())


@pytest.mark.parametrize("name", [*WRITTEN, *pickles.NOT_PICKLED])
def test_every_class_path_of_then_still_imports(name: str) -> None:
    package, _, kind = name.partition("-")[0].rpartition(".")
    module = importlib.import_module(f"graphwright.{package}".rstrip("."))
    assert isinstance(getattr(module, kind), type)


def test_each_pickle_is_looked_at() -> None:
    others = {*WRITTEN} - {*pickles.VALUES}
    assert others == {*CHECKS, "Extension", "ops.Operator"}


@pytest.mark.parametrize("name", [name for name in WRITTEN if name in pickles.VALUES])
def test_a_pickle_holds_what_it_held(name: str) -> None:
    found, expected = unpickled(name), pickles.VALUES[name]()
    assert content(found) == content(expected)
    assert repr(found) == repr(expected)


def test_reports_of_then_are_shown_and_saved() -> None:
    found, expected = unpickled("Report"), pickles.report()
    assert str(found) == str(expected)
    assert found.to_json() == expected.to_json()
    assert unpickled("Profile").to_json() == pickles.profile().to_json()


X = models.values(2, models.SIZE)


@functools.cache
def right() -> dict[str, Any]:
    with torch.no_grad():
        return pickles.module()(X)


def of_graphed(found: gw.GraphedModule) -> None:
    assert type(found) is gw.GraphedModule
    with torch.no_grad():
        for _ in range(2):
            assert_alike(found(X), right())
    assert (found.statistics.captures, found.statistics.hits) == (1, 2)


def of_graphed_function(found: gw.GraphedCallable) -> None:
    assert type(found) is gw.GraphedCallable
    assert (found.pool.limit, found.pool.evict) == (1 << 30, True)
    assert_alike(found(X), X * 2)
    assert found.statistics.captures == 1


def of_buckets(found: gw.GraphedModule) -> None:
    x = models.values(3, models.SIZE)
    with torch.no_grad():
        assert_alike(found(x), pickles.module()(x))
    assert found.statistics.padded == 1


def of_fused(found: gw.FusedModule) -> None:
    assert type(found) is gw.FusedModule
    with torch.no_grad():
        assert_alike(found(X), right())


def of_tuned(found: gw.TunedModule) -> None:
    """An untuned copy: its calls go to the module."""
    assert type(found) is gw.TunedModule
    with torch.no_grad():
        assert_alike(found(X), right())
    assert found.calls == {"eager: nothing tuned": 1}
    assert "eager: nothing tuned" in found.explain()
    assert found.report.left_out == []


def of_prefetcher(found: gw.Prefetcher[torch.Tensor]) -> None:
    assert_alike([*found], [X])


def of_pass(found: Any) -> None:
    assert found in pickles.PASSES
    graph = fx.symbolic_trace(models.in_a_row)
    assert_alike(found(graph, CPU).model(X), [X * 2])


def of_result(found: Any) -> None:
    assert found.changes == (pickles.Change("a", ()),)
    assert_alike(found.model(X), X.relu())


def of_rewritten(found: Any) -> None:
    assert (found.args, found.kwargs, found.finish) == ((), {}, models.values)
    with torch.no_grad():
        assert_alike(found.model(X), right())


CHECKS: dict[str, Callable[[Any], None]] = {
    "BackgroundModule": of_tuned,
    "FusedModule": of_fused,
    "GraphedCallable": of_graphed_function,
    "GraphedModule": of_graphed,
    "GraphedModule-buckets": of_buckets,
    "Prefetcher": of_prefetcher,
    "TunedModule": of_tuned,
    "fusion.Pass": of_pass,
    "fusion.PassResult": of_result,
    "strategies.Rewritten": of_rewritten,
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_was_pickled_answers_calls(name: str) -> None:
    CHECKS[name](unpickled(name))


@pytest.mark.slow
def test_an_extension_and_its_operators_are_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path))
    made = unpickled("Extension")
    assert type(made) is gw.Extension
    assert_alike(made.old_add(X, X), X * 2)
    assert_alike(unpickled("ops.Operator")(X, X), X * 2)
