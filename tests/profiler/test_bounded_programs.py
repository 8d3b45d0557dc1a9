"""Programs planted with one bound each: profile() names it, with the line, each time."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from bounded import CPU, GPU, Planted

import graphwright as gw
from graphwright.evaluation.clock import fastest_s
from graphwright.profiler.roofs import cores
from graphwright.profiler.verdict import Cause

RUNS = 2
# Verdicts of all programs that may name two causes.
MAY_BE_BETWEEN = 3
SHORT = ["small operations", "numbers in Python"]


@pytest.fixture(autouse=True)
def threads_put_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, quick: None
) -> Iterator[None]:
    """One cache for all: roofs are measured once."""
    folder = tmp_path_factory.getbasetemp() / "roofs"
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(folder))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def profiled(planted: Planted) -> gw.Profile:
    fn, args = planted.make()
    return gw.profile(fn, args)


def check(planted: Planted, found: gw.Profile) -> None:
    assert found.verdict.cause is planted.cause, f"\n{found}"
    if planted.line:
        sources = [line.source for line, _ in found.verdict.lines]
        assert any(planted.line in source for source in sources[:2]), f"\n{found}"


def on_cpu(name: str) -> gw.Profile:
    planted = CPU[name]
    # One thread has a processor to itself even beside other tests.
    torch.set_num_threads(planted.threads or 1)
    return profiled(planted)


@pytest.mark.parametrize("name", SHORT)
def test_a_bound_on_a_cpu_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphwright.profiler.profiler.cores", lambda: 1)
    found = on_cpu(name)
    for _ in range(2):
        # Other tests beside it may take the host's time from one part of a call.
        if found.verdict.cause is not CPU[name].cause:
            found = on_cpu(name)
    check(CPU[name], found)


def one_thread_for_all(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Programs whose bound is not their threads have one processor, whatever the machine has."""
    if CPU[name].cause not in (Cause.TOO_FEW_THREADS, Cause.TOO_MANY_THREADS):
        monkeypatch.setattr("graphwright.profiler.profiler.cores", lambda: 1)
    elif CPU[name].cause is Cause.TOO_FEW_THREADS and not has_room():
        pytest.skip("no second processor is free here")


def crowded(found: gw.Profile) -> bool:
    return any("while threads were timed" in note for note in found.notes)


def has_room() -> bool:
    """Whether two threads are faster than one now."""
    if cores() < 2:
        return False
    x = torch.ones(800, 800)
    found = []
    for number in (1, 2):
        torch.set_num_threads(number)
        found.append(fastest_s(lambda: x @ x, limit_s=0.5, warmup=1))
    return found[0] > 1.6 * found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CPU)
def test_no_verdict_on_a_cpu_flips(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_thread_for_all(monkeypatch, name)
    free = 0
    for _ in range(3 * RUNS):
        found = on_cpu(name)
        # A second thread gives little where other processes have the second processor.
        if CPU[name].cause is Cause.TOO_FEW_THREADS and crowded(found):
            continue
        check(CPU[name], found)
        free += 1
        if free == RUNS:
            return
    if not free:
        pytest.skip("other processes use the processors here")


@functools.cache
def on_gpu(name: str) -> gw.Profile:
    """One profile of each program, for all tests."""
    return profiled(GPU[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_a_bound_on_a_gpu_is_named(name: str) -> None:
    check(GPU[name], on_gpu(name))


@pytest.mark.gpu
def test_few_verdicts_on_a_gpu_name_two_causes() -> None:
    causes = {name: on_gpu(name).verdict.causes for name in GPU}
    assert sum(len(each) > 1 for each in causes.values()) <= MAY_BE_BETWEEN, causes


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", GPU)
def test_no_verdict_on_a_gpu_flips(name: str) -> None:
    for _ in range(RUNS):
        check(GPU[name], profiled(GPU[name]))
