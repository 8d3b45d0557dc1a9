"""Another way to run a step answers calls only if it is right, and only if it is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from generating import agree, gpt2, mistral, prompts

import graphwright as gw
from graphwright.errors import CaptureError, OptionError
from graphwright.generation import step_trial, step_ways
from graphwright.generation.step_trial import StepRow, StepTrial
from graphwright.generation.step_ways import EAGER, INDUCTOR, StepWay
from graphwright.generation.steps import Step

transformers = pytest.importorskip("transformers")

ASKED = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Step], Step]], None]:
    """Put a way in the place of Inductor's, and take it whenever it is right."""
    monkeypatch.setattr(step_trial, "_FASTER", 1e9)
    monkeypatch.setattr(step_trial, "_TIMING_S", 0.01)
    # Whatever their times: the other one is the fastest.
    monkeypatch.setattr(
        step_trial, "_fastest", lambda rows: next(r.strategy for r in reversed(rows) if r.eligible)
    )

    def put(way: Callable[[Step], Step]) -> None:
        monkeypatch.setitem(step_ways.WAYS, INDUCTOR, StepWay(way))

    return put


def same(step: Step) -> Step:
    """Another function that does the same."""

    def other() -> None:
        step()

    return other


def changed(change: Callable[[torch.Tensor], object], model: Any) -> Callable[[Step], Step]:
    """A way that changes what the model's last module gives."""

    def way(step: Step) -> Step:
        def other() -> None:
            handle = model.lm_head.register_forward_hook(lambda _, __, out: change(out))
            step()
            handle.remove()

        return other

    return way


def row_of(report: Any) -> StepRow:
    row: StepRow = report.row(INDUCTOR)
    return row


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (gpt2, 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(gpt2, 1), (mistral, 1)]),
        pytest.param(mistral, 2, marks=pytest.mark.slow),
    ],
)
def test_a_right_way_answers_with_eager_s_tokens(make: Any, batch: int, ways: Any) -> None:
    ways(same)
    model = make()
    generator = gw.graph_generate(model)
    asked = prompts(batch) | ASKED
    report = generator.tune(**asked)
    assert report.chosen == INDUCTOR
    assert [row.eligible for row in report.rows[:2]] == [True, True]
    assert row_of(report).agreement == 1.0
    assert all(row.seconds for row in report.rows[:2])
    before = generator.statistics
    assert before.steps == before.launches == 0
    agree(model, generator, asked)
    agree(model, generator, asked | {"do_sample": True, "top_k": 9})
    assert generator.statistics.eager == {}
    assert "steps run by inductor" in generator.explain()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out: out.mul_(1.01), "are off by"),
        (lambda out: out.add_(torch.randn_like(out)), "are off by"),
        (
            lambda out: out.index_fill_(-1, torch.tensor([3]), float("inf")),
            "other logits are infinite",
        ),
    ],
)
def test_a_wrong_way_is_not_taken(change: Any, reason: str, ways: Any) -> None:
    model = gpt2()
    ways(changed(change, model))
    generator = gw.graph_generate(model)
    asked = prompts(2) | ASKED
    report = generator.tune(**asked)
    assert report.chosen == EAGER
    assert reason in row_of(report).reason
    assert reason in str(report)
    assert row_of(report).seconds is None
    agree(model, generator, asked)


def test_a_way_that_fails_says_why(ways: Any) -> None:
    def failing(step: Step) -> Step:
        def other() -> None:
            raise ValueError("no such kernel")

        return other

    ways(failing)
    model = gpt2()
    generator = gw.graph_generate(model)
    report = generator.tune(**prompts(1), **ASKED)
    assert report.chosen == EAGER
    assert row_of(report).reason == "ValueError: no such kernel"
    agree(model, generator, prompts(1) | ASKED)


@pytest.mark.slow
def test_exact_takes_only_eager_s_logits(ways: Any) -> None:
    model = gpt2()
    ways(changed(lambda out: out.mul_(1 + 1e-7), model))
    asked = prompts(1) | ASKED
    report = gw.graph_generate(model, exact=True).tune(**asked)
    assert report.chosen == EAGER
    assert "bit for bit" in row_of(report).reason
    assert gw.graph_generate(model).tune(**asked).chosen == INDUCTOR


def test_only_named_ways_are_tried(ways: Any) -> None:
    report = gw.graph_generate(gpt2(), strategies=[]).tune(**prompts(1), **ASKED)
    assert [row.strategy for row in report.rows] == [EAGER]
    with pytest.raises(OptionError, match="not a list of eager, inductor"):
        gw.graph_generate(gpt2(), strategies=["triton"])


def _trial(dtype: torch.dtype) -> StepTrial:
    model: Any = torch.nn.Linear(1, 1, dtype=dtype)
    model.dtype = dtype
    loop: Any = type("Loop", (), {"model": model})
    nothing: Any = None
    return StepTrial(nothing, loop, nothing, nothing, 4, exact=False)


@pytest.mark.parametrize(("gap", "wrong"), [(0.02, False), (1.0, True)])
def test_rounding_may_choose_only_where_eager_s_first_two_are_close(
    gap: float, wrong: bool
) -> None:
    """Eager is off by up to 0.05 here: below a gap of 0.1, either token is right."""
    torch.manual_seed(0)
    exact = torch.randn(4, 2, 50, dtype=torch.float64) * 3
    first = exact.amax(-1, keepdim=True)
    exact[..., :1], exact[..., 1:2] = first + 2, first + 2 - gap
    eager = exact + (torch.rand_like(exact) - 0.5) * 0.02
    eager[..., 9] += 0.05
    eager[3, 1, 9] += 0.2  # So an error of 1 is within the bound of the largest error.
    mine = exact.clone()
    mine[1, 0, 1] += gap + 0.005
    problem = _trial(torch.bfloat16)._problem(mine, eager.float(), exact, "")
    asked = "it chooses other tokens in 1 place where rounding does not decide"
    assert problem == (asked if wrong else "")


def test_without_float64_only_the_same_logits_count() -> None:
    eager = torch.randn(4, 1, 20)
    trial = _trial(torch.float32)
    assert trial._problem(eager.clone(), eager, None, "not known") == ""
    assert trial._problem(eager + 1e-6, eager, None, "not known") == "not known"


def test_new_weights_are_used_and_replaced_ones_end_the_way(ways: Any) -> None:
    ways(same)
    model = gpt2()
    generator = gw.graph_generate(model)
    asked = prompts(1) | ASKED
    generator.tune(**asked)
    first = agree(model, generator, asked)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(torch.rand(64, 1) + 0.5)
    assert not torch.equal(agree(model, generator, asked), first)
    assert "steps run by inductor" in generator.explain()
    for _ in range(2):
        generator.tune(**asked)
        assert "steps run by inductor" in generator.explain()
        model.transformer.ln_f = torch.nn.LayerNorm(32)
        with pytest.warns(gw.FallbackWarning, match=r"tune\(\) has taken.*ln_f"):
            agree(model, generator, asked)
        agree(model, generator, asked)
        assert "steps run by" not in generator.explain()


def test_trying_changes_nothing(ways: Any) -> None:
    ways(same)
    model = gpt2()
    generator = gw.graph_generate(model)
    asked = prompts(2) | ASKED | {"do_sample": True}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = set(vars(model))
    torch.manual_seed(3)
    generator.tune(**asked)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    assert set(vars(model)) == names
    agree(model, generator, asked)


@pytest.mark.slow
def test_a_longer_call_runs_by_eager_s_step(ways: Any) -> None:
    ways(same)
    model = gpt2()
    generator = gw.graph_generate(model)
    report = generator.tune(**prompts(1), **ASKED)
    agree(model, generator, prompts(1) | ASKED | {"max_new_tokens": report.positions})
    assert generator.statistics.eager == {}
    assert "steps run by" not in generator.explain()


def test_calls_that_no_graph_answers_cannot_be_tried() -> None:
    generator = gw.graph_generate(gpt2())
    with pytest.raises(CaptureError, match="beam search"):
        generator.tune(**prompts(1), max_new_tokens=4, num_beams=2)
    with pytest.raises(CaptureError, match="ends at its first token"):
        generator.tune(**prompts(1), max_new_tokens=1)


@pytest.mark.slow
def test_an_encoder_and_states_take_part(ways: Any) -> None:
    ways(same)
    torch.manual_seed(0)
    t5 = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    mamba = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    for model in (
        transformers.T5ForConditionalGeneration(t5).eval(),
        transformers.MambaForCausalLM(mamba).eval(),
    ):
        model.generation_config.eos_token_id = None
        generator = gw.graph_generate(model)
        asked = prompts(1) | ASKED
        assert generator.tune(**asked).chosen == INDUCTOR
        agree(model, generator, asked)


def ways_of_graphs(generator: gw.GraphedGenerator) -> set[str]:
    """In which ways there are graphs now."""
    return {way for kept in generator._kept.values() for way, _, _ in kept._graphs}


def test_a_hook_after_tuning_ends_the_way_for_other_choices_too(ways: Any) -> None:
    ways(same)
    model = gpt2()
    generator = gw.graph_generate(model)
    asked = prompts(1) | ASKED
    generator.tune(**asked)
    assert ways_of_graphs(generator) == {INDUCTOR}
    model.transformer.h[0].register_forward_hook(lambda _, __, out: out)
    agree(model, generator, asked | {"do_sample": True})
    assert ways_of_graphs(generator) == {EAGER}


def test_transformers_own_static_cache_in_between_changes_nothing(ways: Any) -> None:
    """It leaves attributes at the model: how long its cache was, what it has compiled."""
    ways(same)
    model = gpt2()
    generator = gw.graph_generate(model)
    asked = prompts(1) | ASKED
    generator.tune(**asked)
    agree(model, generator, asked)
    captures, before = generator.statistics.captures, set(vars(model))
    model.generate(**asked, cache_implementation="static")
    model.get_compiled_call(transformers.CompileConfig())
    assert set(vars(model)) - before
    agree(model, generator, asked)
    assert generator.statistics.captures == captures
    assert ways_of_graphs(generator) == {INDUCTOR}


@pytest.mark.slow
def test_calls_in_another_bucket_run_by_eager_s_step(ways: Any) -> None:
    ways(same)
    model = gpt2()
    generator = gw.graph_generate(model)
    asked = prompts(1) | ASKED | {"max_new_tokens": 80}
    generator.tune(**asked)
    agree(model, generator, asked | {"do_sample": True})
    assert ways_of_graphs(generator) == {INDUCTOR}
    agree(model, generator, prompts(1) | ASKED)
    assert ways_of_graphs(generator) == {INDUCTOR, EAGER}


@pytest.mark.slow
def test_another_switch_runs_eager_s_step(ways: Any) -> None:
    ways(same)
    model = gpt2()
    generator = gw.graph_generate(model)
    asked = prompts(1) | ASKED
    generator.tune(**asked)
    assert ways_of_graphs(generator) == {INDUCTOR}
    torch.use_deterministic_algorithms(True)
    try:
        agree(model, generator, asked)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ways_of_graphs(generator) == {INDUCTOR, EAGER}
    agree(model, generator, asked)


def test_a_trial_that_ends_early_leaves_eager_s_step(
    ways: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways(same)
    model = gpt2()
    generator = gw.graph_generate(model)
    asked = prompts(1) | ASKED
    generator.tune(**asked)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step_trial, "interleave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generator.tune(**asked)
    assert "steps run by" not in generator.explain()
    agree(model, generator, asked)
    assert generator.tune(**asked).chosen == INDUCTOR


def test_a_step_that_fails_later_is_not_taken_again(ways: Any) -> None:
    fails: list[int] = []

    def way(step: Step) -> Step:
        def other() -> None:
            if fails:
                raise ValueError("no kernel for this")
            step()

        return other

    ways(way)
    model = gpt2()
    generator = gw.graph_generate(model)
    asked = prompts(1) | ASKED
    generator.tune(**asked)
    fails.append(1)
    with pytest.raises(ValueError, match="no kernel for this"):
        generator.generate(**asked, repetition_penalty=1.1)
    agree(model, generator, asked | {"repetition_penalty": 1.1})


def test_inductor_is_for_a_gpu() -> None:
    report = gw.graph_generate(gpt2()).tune(**prompts(1), **ASKED)
    row = row_of(report)
    if torch.cuda.is_available():
        return
    assert report.chosen == EAGER
    assert row.reason == "on a CPU, graphs record eager's operations"


@pytest.mark.gpu
def test_inductor_s_step_is_right() -> None:
    model = gpt2().cuda()
    generator = gw.graph_generate(model)
    asked = {name: value.cuda() for name, value in prompts(2).items()} | ASKED
    report = generator.tune(**asked)
    assert row_of(report).eligible
    assert row_of(report).agreement == 1.0
    agree(model, generator, asked)
    # New values in the same memory are read, whatever way was taken.
    with torch.no_grad():
        model.transformer.wte.weight.mul_(torch.rand(64, 1, device="cuda") + 0.5)
    agree(model, generator, asked)
    model.transformer.h[0].register_forward_hook(lambda _, __, out: out)
    agree(model, generator, asked | {"do_sample": True})


def test_a_float64_run_on_another_path_says_nothing() -> None:
    eager = torch.randn(4, 1, 20)
    problem = _trial(torch.float32)._problem(eager + 1e-6, eager, eager.double() * 3, "")
    assert problem == "the float64 run takes another path than eager"
