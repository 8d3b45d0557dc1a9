"""The stages of warm-up, each by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # the field's name for it

import graphwright as gw
from graphwright.calls.modules import FunctionModule
from graphwright.graphs.comparison import Comparison
from graphwright.graphs.journal import Journal
from graphwright.graphs.observed_runs import ObservedRuns
from graphwright.graphs.recorder import Recorder
from graphwright.graphs.transaction import transaction
from graphwright.graphs.warmup import (
    check_chance,
    compare,
    find_chance,
    observe,
    repeat,
    settle,
)


def asked() -> bool:
    """Whether a capture is under way, as libraries ask."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a build without CUDA
        return False


def recorder_of(device: torch.device) -> Recorder:
    if device.type == "cuda":
        from graphwright.graphs.cuda.recorder import CudaRecorder

        return CudaRecorder(device)
    from graphwright.graphs.cpu.recorder import CpuRecorder

    return CpuRecorder(device)


@contextlib.contextmanager
def runs_of(fn: Callable[..., Any], *sample: torch.Tensor) -> Iterator[ObservedRuns]:
    recorder = recorder_of(sample[0].device)
    with (
        gw.MemoryPool() as pool,
        transaction(pool, FunctionModule(fn), lambda: None) as state,
    ):
        yield ObservedRuns(
            lambda inputs: fn(*inputs.leaves), sample, recorder, state, Comparison(), None
        )
    recorder.close()


def second_run(runs: ObservedRuns) -> tuple[Any, Any, Any, Any, Journal]:
    eager, first = observe(runs)
    journal = Journal()
    result, second = repeat(runs, first, runs.inputs(), journal)
    return eager, first, result, second, journal


def writes_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x + y


def asks(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if asked() else x + x


def reads_unless_told(x: torch.Tensor) -> torch.Tensor:
    if not asked() and bool((x > 0).all()):
        return x + 1
    for _ in range(20):
        x = torch.where(x > 0, x, x)
    return x + 1


def test_observing_tells_what_is_written_and_puts_it_back(device: torch.device) -> None:
    x, y = torch.ones(3, device=device), torch.ones(3, device=device)
    with runs_of(writes_first, x, y) as runs:
        kept, first = observe(runs)
    assert first.written == (0,)
    assert not first.reads
    assert torch.equal(kept[0], x + 2)
    assert torch.equal(x, torch.ones(3, device=device))


def test_observing_tells_of_weights_that_change(device: torch.device) -> None:
    weight = torch.zeros(3, device=device)

    def counts(x: torch.Tensor) -> torch.Tensor:
        return x + weight.add_(1)

    with runs_of(counts, torch.ones(3, device=device)) as runs:
        _, first = observe(runs)
    assert [storage.data_ptr() for storage in first.set_up] == [weight.data_ptr()]
    assert not weight.any()


def test_a_call_that_repeats_itself_is_no_other_call(device: torch.device) -> None:
    with runs_of(writes_first, torch.ones(3, device=device), torch.ones(3, device=device)) as runs:
        _, _, result, second, journal = second_run(runs)
        journal.undo()
    assert second.mutated == (0,)
    assert not second.runs_otherwise
    assert not second.looks_in_eager
    assert torch.equal(result, torch.full((3,), 3.0, device=device))


def test_repeating_tells_that_a_call_runs_otherwise_in_captures(device: torch.device) -> None:
    with runs_of(asks, torch.ones(3, device=device)) as runs:
        *_, second, _ = second_run(runs)
    assert second.runs_otherwise
    assert not second.looks_in_eager


def test_repeating_tells_that_a_call_looks_in_eager_mode(device: torch.device) -> None:
    with runs_of(reads_unless_told, torch.ones(3, device=device)) as runs:
        _, first, _, second, _ = second_run(runs)
    assert first.reads
    assert second.looks_in_eager
    assert not second.runs_otherwise


def test_a_call_that_writes_to_another_argument_the_second_time_is_refused(
    device: torch.device,
) -> None:
    def writes_if_told(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (y if asked() else x).add_(1)
        return x + y

    with runs_of(
        writes_if_told, torch.ones(3, device=device), torch.ones(3, device=device)
    ) as runs:
        _, first = observe(runs)
        journal = Journal()
        with pytest.raises(gw.CaptureError, match="told that a capture is under way"):
            repeat(runs, first, runs.inputs(), journal)
        journal.undo()


def test_results_that_differ_by_more_than_rounding_are_refused(device: torch.device) -> None:
    with runs_of(asks, torch.ones(3, device=device)) as runs:
        eager, _, result, _, journal = second_run(runs)
        compare(runs, result * (1 + 1e-7), eager, journal)
        with pytest.raises(gw.CaptureError, match="computes something else"):
            compare(runs, result * 1.01, eager, journal)


def test_a_call_with_dropout_is_compared_without(device: torch.device) -> None:
    x = torch.ones(64, device=device)
    with runs_of(F.dropout, x) as runs:
        eager, first, result, _, journal = second_run(runs)
        chance = find_chance(runs, first, journal, draws_again=False)
        other = torch.where(result > 0, 0.0, result)
        compare(runs, other, eager, journal, chance.generators)
        with pytest.raises(gw.CaptureError, match="computes something else"):
            compare(runs, other, eager, journal)
    assert len(chance.generators) == 1
    assert chance


def test_a_call_that_draws_nothing_has_no_chance(device: torch.device) -> None:
    with runs_of(torch.neg, torch.ones(3, device=device)) as runs:
        eager, first, _, _, journal = second_run(runs)
        chance = find_chance(runs, first, journal, draws_again=True)
        check_chance(runs, journal, chance, eager)
    assert not chance
    assert chance.generators == chance.draws == ()


def test_a_call_that_seeds_by_itself_is_refused(device: torch.device) -> None:
    def seeds(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return F.dropout(x)

    with runs_of(seeds, torch.ones(8, device=device)) as runs:
        eager, first, _, _, journal = second_run(runs)
        chance = find_chance(runs, first, journal, draws_again=False)
        journal.undo()
        with pytest.raises(gw.CaptureError, match="seeds its random numbers"):
            check_chance(runs, journal, chance, eager)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_settling_runs_as_often_as_asked_and_leaves_nothing(
    count: int, device: torch.device
) -> None:
    ran: list[int] = []
    state = torch.zeros(3, device=device)

    def work(x: torch.Tensor) -> torch.Tensor:
        return x + state.add_(1)

    with runs_of(work, torch.ones(3, device=device)) as runs:
        _, first = observe(runs)
        inputs, journal = runs.inputs(), Journal()
        repeat(runs, first, inputs, journal)
        assert state.all()
        runs.work = lambda inputs: (ran.append(int(state[0])), work(*inputs.leaves))
        settle(runs, inputs, journal, count)
    assert ran == [0] * count
    assert not state.any()
    arguments = {inputs.tensor(slot).untyped_storage()._cdata for slot in inputs.slots}
    assert not arguments & {*journal.external}
