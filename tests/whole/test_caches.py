"""Language models as people call them: with caches, which are returned, passed in and grow."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import generative
import pytest
import torch
from chosen import choosing
from shares import share
from tiny_architectures import CASES, Case, ids
from torch import nn
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.calls.objects import apart


def is_generative(case: Case) -> bool:
    return "use_cache" in case.inputs(0)


# They read values, and what is done to their caches is not repeated in several graphs.
DIVIDED = (
    "JetMoeForCausalLM", "SwitchTransformersModel", "SwitchTransformersForConditionalGeneration",
    "AriaTextForCausalLM", "LEDForConditionalGeneration",
)  # fmt: skip
GENERATIVE = [case for case in CASES if is_generative(case)]
# It computes something else where a capture seems to be under way.
REFUSED = ("UMT5ForConditionalGeneration",)


def with_cache(case: Case) -> Case:
    config = {name: value for name, value in case.config.items() if name != "use_cache"}
    return Case(case.model, case.inputs, config, case.refused)


def inputs(case: Case, step: int) -> dict[str, Any]:
    return {name: value for name, value in case.inputs(step).items() if name != "use_cache"}


def assert_alike(mine: Any, its: Any) -> None:
    """The same tree of the same classes, with the same tensors."""
    leaves, spec = pytree.tree_flatten(apart(mine))
    theirs, expected = pytree.tree_flatten(apart(its))
    assert spec == expected
    for a, b in zip(leaves, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        else:
            assert (type(a), a) == (type(b), b)


def cache_of(result: Any) -> tuple[str, Any] | None:
    """The argument that takes a result's cache, and the cache."""
    for name in ("past_key_values", "cache_params", "state"):
        if result.get(name) is not None:
            return name, result[name]
    return None


def following(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the call after one, its cache excepted."""
    torch.manual_seed(1)
    if "decoder_input_ids" in given:
        rest = {n: v for n, v in given.items() if not n.startswith("decoder_")}
        return rest | {"decoder_input_ids": ids(given["decoder_input_ids"].shape[0], 1)}
    rows = given["input_ids"].shape[0]
    mask = given.get("attention_mask")
    one = {} if mask is None else {"attention_mask": torch.cat([mask, mask[:, -1:]], dim=1)}
    return {"input_ids": ids(rows, 1)} | one


def check(
    model: nn.Module, calls: list[dict[str, Any]], *, refused: bool = False, divided: bool = False
) -> None:
    """Compare two calls, and one that goes on from the cache of the second, with eager's.

    Args:
        model: the model.
        calls: arguments of the two.
        refused: whether the calls may be eager; else graphs have to answer.
        divided: whether the one that goes on may be.
    """
    graphed = gw.graph(model)
    with torch.no_grad():
        for given in calls:
            expected = model(**copy.deepcopy(given))
            result = graphed(**given)
            assert_alike(result, expected)
        if refused:
            return
        assert graphed.statistics.hits == len(calls), graphed.explain()
        cached, its = cache_of(result), cache_of(expected)
        if cached is None or its is None:
            return
        more = following(calls[-1])
        for _ in range(2):  # The first call with objects of these shapes may be eager.
            mine, other = copy.deepcopy(cached), copy.deepcopy(its)
            answer, wanted = graphed(**more, **dict([mine])), model(**more, **dict([other]))
            assert_alike(answer, wanted)
            assert_alike(mine, other)
            returned, expected_cache = cache_of(answer), cache_of(wanted)
            if expected_cache is not None:
                assert returned is not None
                assert (returned[1] is mine[1]) == (expected_cache[1] is other[1])
    assert divided or graphed.statistics.hits > len(calls), graphed.explain()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", share(GENERATIVE, of=4), ids=str)
def test_results_with_caches_and_the_call_that_follows(case: Case) -> None:
    case = with_cache(case)
    torch.manual_seed(0)
    check(
        case.build(),
        [inputs(case, step) for step in range(2)],
        refused=bool(case.refused),
        divided=case.model in DIVIDED,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        *share(generative.FEW),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive if n % 12 else pytest.mark.slow)
            for n, name in enumerate(generative.MORE)
        ),
    ],
)
def test_other_language_models_by_their_defaults(name: str) -> None:
    calls = [generative.inputs(name) for _ in range(2)]
    check(generative.build(name), calls, refused=name in REFUSED, divided=name in DIVIDED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2ForCausalLM",
        pytest.param("MT5ForConditionalGeneration", marks=pytest.mark.slow),
    ],
)
def test_fifty_steps_with_one_cache_are_right_and_captured_by_few_graphs(
    name: str, clock: Any
) -> None:
    model = generative.build(name)
    graphed = gw.graph(model)
    given = generative.inputs(name)
    with torch.no_grad():
        for text in range(2):
            mine, its = graphed(**given), model(**given)
            for _ in range(50):
                more = following(given)
                answer = graphed(**more, **dict([cache_of(mine)]))
                assert_alike(answer, model(**more, **dict([cache_of(its)])))
                assert answer.past_key_values is mine.past_key_values
            # Of each length there is but one call in a text, and a graph of it would not pay.
            assert graphed.statistics.captures <= (1 if text == 0 else 8)


def sized(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """A step with a cache of some size, positions and mask told."""
    torch.manual_seed(100 * batch + length)
    cache = model(input_ids=ids(batch, length)).past_key_values
    mask, place = torch.ones(batch, length + 1, dtype=torch.long), torch.full((batch, 1), length)
    given = {"input_ids": ids(batch, 1), "attention_mask": mask, "position_ids": place}
    return given | {"past_key_values": cache}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dimension", ["batch", "length"])
def test_a_cache_has_dimensions_for_buckets(dimension: str) -> None:
    """Padding does no harm to the batch; a step's own row comes behind the padded rows."""
    model = generative.build("Qwen2ForCausalLM")
    size: Any = torch.export.Dim(dimension)
    axis, is_batch = (0, True) if dimension == "batch" else (2, False)
    given = {"input_ids": {0: size}, "position_ids": {0: size}} if is_batch else {}
    given |= {"attention_mask": {0: size} if is_batch else {1: size + 1}}
    layer = {"keys": {axis: size}, "values": {axis: size}}
    graphed = gw.graph(
        model,
        buckets=gw.Buckets(**{dimension: [2, 4]}),
        dynamic_shapes=given | {"past_key_values": {"layers": [layer, layer]}},
        pad={"attention_mask": 0 if not is_batch else None},
    )
    with torch.no_grad():
        for n in (3, 4, 3):
            mine, its = (sized(model, *((n, 5) if is_batch else (2, n))) for _ in range(2))
            answer, expected = graphed(**mine), model(**its)
            assert_alike(answer, expected)
            assert_alike(mine["past_key_values"], its["past_key_values"])
            assert answer.past_key_values is mine["past_key_values"]
    now = graphed.statistics
    assert (now.hits, now.padded) == ((3, 2) if is_batch else (1, 0)), graphed.explain()
    if not is_batch:
        assert now.eager == {"padding is not harmless": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_prompt_is_padded_and_the_cache_that_it_makes_is_cut() -> None:
    """By the model's defaults: nothing is said of caches."""
    model = generative.build("Qwen2ForCausalLM")
    both = {0: "batch", 1: "length"}
    graphed = gw.graph(
        model,
        buckets=gw.Buckets(batch=[1, 2], length=[4, 8]),
        dynamic_shapes={"input_ids": both, "attention_mask": both},
        pad={"attention_mask": 0},
    )
    with torch.no_grad():
        for batch, length in ((1, 4), (2, 8), (1, 3), (2, 5), (2, 8)):
            mask = torch.ones(batch, length, dtype=torch.long)
            given = {"input_ids": ids(batch, length), "attention_mask": mask}
            answer, expected = graphed(**given), model(**given)
            assert_alike(answer, expected)
            # The next step goes on from it.
            step = {"input_ids": ids(batch, 1), "attention_mask": mask.new_ones(batch, length + 1)}
            results = [model(**step, past_key_values=r.past_key_values) for r in (answer, expected)]
            assert_alike(*results)
    now = graphed.statistics
    assert (now.hits, now.padded, dict(now.eager)) == (5, 2, {}), graphed.explain()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tune_takes_steps_with_caches_of_several_lengths(tmp_path: Path) -> None:
    model = generative.build("Qwen2ForCausalLM")
    first = generative.inputs("Qwen2ForCausalLM")
    with torch.no_grad():
        with choosing("fused"):  # So small a model is slower.
            tuned = gw.tune(
                model,
                samples=[first, sized(model, 2, 3), sized(model, 2, 5)],
                strategies=["fused"],
                remember=False,
                progress=False,
                isolate=False,
            )
        gw.save(tuned, tmp_path / "steps.gw")
        assert tuned.report.chosen == "fused"
        for each in (tuned, gw.load(tmp_path / "steps.gw", model)):
            assert_alike(each(**first), model(**first))
            for length in (5, 3):
                mine, its = (sized(model, 2, length) for _ in range(2))
                assert_alike(each(**mine), model(**its))
                assert_alike(mine["past_key_values"], its["past_key_values"])
            assert each.calls == {"tuned": 3}


def every_twelfth(first: int) -> list[Any]:
    """CI has time for no more of them."""
    return [
        pytest.param(name, marks=pytest.mark.exhaustive if n % 12 != first else pytest.mark.slow)
        for n, name in enumerate(generative.FEW)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", every_twelfth(0))
def test_what_tune_makes_of_language_models(name: str) -> None:
    model = generative.build(name)
    given = generative.inputs(name)
    strategies = ["eager:no_grad", "torchscript", "inductor", "fused"]
    tuned = gw.tune(
        model, kwargs=given, strategies=strategies, remember=False, progress=False, isolate=False
    )
    rows = {row.strategy: row for row in tuned.report.rows}
    assert set(strategies) <= set(rows)
    for row in rows.values():
        assert row.measurement is not None or row.reason
    with torch.no_grad():
        assert_alike(tuned(**given), model(**given))
    assert tuned.calls["tuned"] == 1
    print(name, {row.strategy: (str(row.status), row.reason) for row in rows.values()})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", every_twelfth(6))
def test_what_tune_and_fuse_make_of_a_step_with_a_cache(name: str) -> None:
    model = generative.build(name)
    given = generative.inputs(name)
    with torch.no_grad():
        found = cache_of(model(**given))
        assert found is not None
        key, cache = found
        more = following(given)

        def step() -> dict[str, Any]:
            return more | {key: copy.deepcopy(cache)}

        made = gw.tune(
            model,
            kwargs=step(),
            strategies=["torchscript", "inductor", "fused"],
            remember=False,
            progress=False,
            isolate=False,
        )
        for row in made.report.rows:
            assert row.measurement is not None or row.reason
        for called in (made, gw.fuse(model, (), step())):
            for _ in range(2):
                mine, its = step(), step()
                assert_alike(called(**mine), model(**its))
                assert_alike(mine[key], its[key])
    assert made.calls["tuned"] == 2
    print(name, {row.strategy: (str(row.status), row.reason) for row in made.report.rows})
