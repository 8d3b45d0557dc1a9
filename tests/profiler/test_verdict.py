"""Verdicts from figures alone: each cause, the bands between two, and that noise flips nothing."""

from __future__ import annotations

import random

import pytest

from graphwright.profiler.observation import ObservedOperation
from graphwright.profiler.roofs import Roofs
from graphwright.profiler.timing import ThreadTimes, thread_times
from graphwright.profiler.trace import Kernel
from graphwright.profiler.verdict import (
    Cause,
    CpuFigures,
    GpuFigures,
    cause_on_gpu,
    of_cpu,
    of_gpu,
    parts_on_cpu,
)

US = 1e-6
GPU = Roofs(
    "a GPU",
    0,
    ((1 << 14, 2 * US), (1 << 24, 8 * US), (1 << 30, 400 * US)),
    {"float32": 50e12, "float16": 700e12, "tf32": 300e12},
    operation_s=4 * US,
    kernel_s=2 * US,
    wait_s=12 * US,
    transfers={"to device": 10e9, "to device pinned": 50e9, "to host": 8e9},
)
CPU = Roofs(
    "a CPU",
    2,
    ((1 << 14, 1 * US), (1 << 20, 50 * US), (1 << 27, 12000 * US)),
    {"float32": 100e9, "bfloat16": 20e9},
    operation_s=1 * US,
    observed_s=3 * US,
)


def operation(**changes: object) -> ObservedOperation:
    known: dict[str, object] = {
        "name": "aten::add",
        "module": "",
        "line": None,
        "nbytes": 3 << 10,
        "flops": 0,
        "dtype": "float32",
        "precision": "float32",
        "shapes": ((16, 16), (16, 16)),
        "view": False,
        "reads": False,
        "copies": "",
        "pointwise": True,
        "backward": False,
    }
    return ObservedOperation(**{**known, **changes})  # type: ignore[arg-type]


def gpu(call: float, host: float, device: float, **others: object) -> GpuFigures:
    parts = others.pop("parts", {Cause.ARITHMETIC: device * US})
    seconds = {name: value * US for name, value in others.items()}  # type: ignore[operator]
    return GpuFigures(call * US, host * US, device_s=device * US, parts=parts, **seconds)


ON_GPU = {
    Cause.LAUNCHES: gpu(1000, 980, 300, python_s=200),
    Cause.PYTHON: gpu(1000, 980, 100, python_s=800),
    Cause.WAITS: gpu(1000, 990, 550, waiting_s=500, python_s=50),
    Cause.ARITHMETIC: gpu(1000, 300, 970),
    Cause.MEMORY: gpu(1000, 300, 970, parts={Cause.MEMORY: 900 * US, Cause.ARITHMETIC: 70 * US}),
    Cause.TRANSFERS: gpu(
        1000, 990, 950, waiting_s=400, copying_s=500, parts={Cause.TRANSFERS: 900 * US}
    ),
    Cause.CHAIN: gpu(1000, 20, 960, parts={Cause.CHAIN: 960 * US}),
    Cause.NEITHER: gpu(1000, 20, 960, parts={Cause.NEITHER: 960 * US}),
}


@pytest.mark.parametrize("cause", ON_GPU)
def test_each_cause_on_a_gpu_is_the_one_verdict(cause: Cause) -> None:
    assert of_gpu(ON_GPU[cause]).causes == (cause,)


@pytest.mark.parametrize("cause", ON_GPU)
def test_noise_of_a_tenth_flips_no_verdict_on_a_gpu(cause: Cause) -> None:
    draw = random.Random(0)
    figures = ON_GPU[cause]
    for _ in range(200):

        def noisy(value: float) -> float:
            return value * draw.uniform(0.93, 1.07)

        call = noisy(figures.call_s)
        other = GpuFigures(
            call,
            min(call, noisy(figures.host_s)),
            noisy(figures.waiting_s),
            noisy(figures.copying_s),
            noisy(figures.python_s),
            min(call, noisy(figures.device_s)),
            {c: noisy(s) for c, s in figures.parts.items()},
        )
        assert of_gpu(other).causes[0] is cause


def test_shares_add_up_to_the_call() -> None:
    for figures in ON_GPU.values():
        assert sum(of_gpu(figures).shares.values()) == pytest.approx(1)
    for figures in ON_CPU.values():
        assert sum(of_cpu(figures).shares.values()) == pytest.approx(1, abs=0.05)


def test_a_read_that_costs_nothing_is_no_verdict() -> None:
    """The host waits nearly all the time, for a device that is busy: removing it gains nothing."""
    assert of_gpu(gpu(1000, 990, 980, waiting_s=900)).causes == (Cause.ARITHMETIC,)


def test_waits_for_transfers_are_transfers() -> None:
    """A copy from memory that is not pinned makes the host wait, and may overlap with nothing."""
    parts = {Cause.TRANSFERS: 600 * US, Cause.MEMORY: 50 * US}
    found = of_gpu(gpu(1000, 990, 650, waiting_s=500, copying_s=300, parts=parts))
    assert found.causes == (Cause.TRANSFERS,)


def test_between_launches_and_python() -> None:
    assert of_gpu(gpu(1000, 980, 200, python_s=540)).causes == (Cause.PYTHON, Cause.LAUNCHES)


def test_between_waits_and_the_device() -> None:
    found = of_gpu(gpu(1000, 990, 790, waiting_s=700))
    assert found.causes == (Cause.WAITS, Cause.ARITHMETIC)


def test_between_host_and_device_where_both_are_busy() -> None:
    found = of_gpu(gpu(1000, 960, 950, python_s=100))
    assert set(found.causes) == {Cause.LAUNCHES, Cause.ARITHMETIC}


def test_between_two_kinds_of_kernels() -> None:
    parts = {Cause.MEMORY: 480 * US, Cause.ARITHMETIC: 470 * US}
    found = of_gpu(gpu(1000, 200, 950, parts=parts))
    assert found.causes == (Cause.MEMORY, Cause.ARITHMETIC)


def test_one_after_the_other_without_a_wait_names_both() -> None:
    found = of_gpu(gpu(1000, 500, 500, python_s=50))
    assert set(found.causes) == {Cause.LAUNCHES, Cause.ARITHMETIC}


def cpu(call: float, **seconds: float) -> CpuFigures:
    parts = {
        cause: seconds.pop(name) * US
        for name, cause in (("memory", Cause.MEMORY), ("arithmetic", Cause.ARITHMETIC))
        if name in seconds
    }
    return CpuFigures(call * US, parts=parts, **{n: s * US for n, s in seconds.items()})


ON_CPU = {
    Cause.DISPATCH: cpu(1000, dispatch_s=800, python_s=150, memory=50),
    Cause.PYTHON: cpu(1000, dispatch_s=100, python_s=880, memory=20),
    Cause.MEMORY: cpu(1000, dispatch_s=20, python_s=30, memory=950),
    Cause.ARITHMETIC: cpu(1000, dispatch_s=20, python_s=30, memory=100, arithmetic=850),
}


@pytest.mark.parametrize("cause", ON_CPU)
def test_each_cause_on_a_cpu_is_the_one_verdict(cause: Cause) -> None:
    assert of_cpu(ON_CPU[cause]).causes == (cause,)


def threads(current: int, *rounds: dict[int, float]) -> ThreadTimes:
    return thread_times(current, rounds, cores=8)


def test_too_many_and_too_few_threads() -> None:
    many = threads(8, *[{1: 1.0, 2: 0.9, 8: 2.0}] * 9)
    assert of_cpu(CpuFigures(2.0, parts={Cause.MEMORY: 2.0}, threads=many)).causes == (
        Cause.TOO_MANY_THREADS,
    )
    few = threads(1, *[{1: 2.0, 4: 1.1, 8: 0.7}] * 9)
    assert of_cpu(CpuFigures(2.0, parts={Cause.MEMORY: 2.0}, threads=few)).causes == (
        Cause.TOO_FEW_THREADS,
    )


def test_a_little_faster_with_other_threads_is_between() -> None:
    few = threads(1, *[{1: 1.2, 2: 1.0}] * 9)
    found = of_cpu(CpuFigures(1.2, parts={Cause.MEMORY: 1.2}, threads=few))
    assert found.causes == (Cause.TOO_FEW_THREADS, Cause.MEMORY)


def test_threads_whose_rounds_disagree_are_no_verdict() -> None:
    """Other work on the machine: in some rounds one number is faster, in some the other."""
    rounds = [{1: 1.0, 2: 0.6}, {1: 1.0, 2: 1.5}, {1: 1.0, 2: 1.5}] * 3
    found = of_cpu(CpuFigures(1.0, parts={Cause.MEMORY: 1.0}, threads=threads(1, *rounds)))
    assert found.causes == (Cause.MEMORY,)


def test_fewer_threads_beside_other_work_prove_nothing() -> None:
    rounds = [{1: 1.0, 2: 2.0}] * 9
    for others, cause in ((0.0, Cause.TOO_MANY_THREADS), (0.5, Cause.MEMORY)):
        crowded = thread_times(2, rounds, cores=2, others=others)
        found = of_cpu(CpuFigures(2.0, parts={Cause.MEMORY: 2.0}, threads=crowded))
        assert found.causes == (cause,)
    # More threads than processors are too many whatever else runs.
    crowded = thread_times(16, [{1: 1.0, 16: 2.0}] * 9, cores=2, others=0.5)
    found = of_cpu(CpuFigures(2.0, parts={Cause.MEMORY: 2.0}, threads=crowded))
    assert found.causes == (Cause.TOO_MANY_THREADS,)
    # Even where some rounds of the others were held up.
    held_up = thread_times(16, [{1: 1.0, 16: 5.0}, {1: 5.0, 16: 5.0}], cores=2, others=0.9)
    found = of_cpu(CpuFigures(5.0, parts={Cause.MEMORY: 5.0}, threads=held_up))
    assert found.causes == (Cause.TOO_MANY_THREADS,)


def kernel(us: float, kind: str = "kernel") -> Kernel:
    return Kernel("k", 0.0, us * US, 0, kind)


def test_what_bounds_kernels() -> None:
    small = operation()
    assert cause_on_gpu(small, [kernel(2)], GPU) is Cause.CHAIN
    large = operation(nbytes=1 << 30)
    assert cause_on_gpu(large, [kernel(500)], GPU) is Cause.MEMORY
    assert cause_on_gpu(large, [kernel(5000)], GPU) is Cause.NEITHER
    product = operation(name="aten::mm", flops=10**10, nbytes=1 << 22)
    assert cause_on_gpu(product, [kernel(300)], GPU) is Cause.ARITHMETIC
    assert cause_on_gpu(operation(copies="to device"), [kernel(90, "to device")], GPU) is (
        Cause.TRANSFERS
    )
    assert cause_on_gpu(None, [kernel(2)] * 50, GPU) is Cause.CHAIN


def test_a_matrix_times_a_vector_is_memory() -> None:
    thin = operation(name="aten::mv", flops=2 * 10**7, nbytes=1 << 27)
    assert cause_on_gpu(thin, [kernel(60)], GPU) is Cause.MEMORY


def test_what_bounds_operations_on_a_cpu() -> None:
    started, cause, work = parts_on_cpu(operation(), 4 * US, CPU)
    assert (cause, work) == (None, 0)
    assert started == pytest.approx(2 * US)
    _, cause, _ = parts_on_cpu(operation(nbytes=1 << 27), 13000 * US, CPU)
    assert cause is Cause.MEMORY
    product = operation(name="aten::addmm", flops=2 * 10**9, nbytes=12 << 20)
    assert parts_on_cpu(product, 25000 * US, CPU)[1] is Cause.ARITHMETIC
    gelu = operation(name="aten::gelu", nbytes=1 << 20)
    assert parts_on_cpu(gelu, 900 * US, CPU)[1] is Cause.ARITHMETIC
    odd = operation(name="aten::scatter_add", nbytes=1 << 20)
    assert parts_on_cpu(odd, 900 * US, CPU)[1] is Cause.NEITHER
    assert parts_on_cpu(operation(view=True), 4 * US, CPU)[1] is None


def test_roofs_lie_on_what_was_measured() -> None:
    assert GPU.copy_s(0) == 0
    assert GPU.copy_s(1) == GPU.copies[0][1]
    for nbytes, seconds in GPU.copies:
        assert GPU.copy_s(nbytes) == pytest.approx(seconds)
    assert GPU.copy_s(1 << 31) == pytest.approx(800 * US)
    assert 2 * US < GPU.copy_s(1 << 20) < 8 * US
    assert GPU.compute_s(1e9, "int8") is None
    assert Roofs.from_dict(GPU.to_dict()) == GPU
