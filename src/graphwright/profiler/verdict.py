"""From figures to a verdict: what bounds a call, with shares of its time. Nothing is measured here.

A resource that is in use nearly all the time is what bounds a call: the host or the device. Where
neither is, each waits for the other. Two causes are named where the figures are too close to each
other for one, in a band around each threshold: noise does not turn one verdict into another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from .lines import Line
from .observation import ObservedOperation
from .roofs import Roofs
from .timing import CROWDED, ThreadTimes
from .trace import Kernel

# A second cause with at least this part of the first one's time is named beside it.
CLOSE = 0.85
# Where removing all waits would save this share of the call, they are what bounds it; below the
# first figure they are not, and between the two both causes are named.
WAITS_FROM, WAITS_SURE = 0.18, 0.25
# The part of the host's work that is Python from which on the host is bound by Python; likewise.
PYTHON_FROM, PYTHON_SURE = 0.5, 0.6
# How many times as fast another number of threads has to be; likewise.
THREADS_FROM, THREADS_SURE = 1.15, 1.3
# The share of the call from which on transfers bound it, whatever waits for them.
MOSTLY_TRANSFERS = 0.5
# Host and device that both work for this share of the call, and as much, both bound it.
BOTH_BUSY, AS_MUCH = 0.8, 0.92
# Kernels of at most so many times the shortest one's time are small.
SMALL_KERNEL = 2.5
# An operation that takes so many times as long as its roof allows reaches no roof: on a GPU, on a
# CPU, where a result's memory is new and has to be mapped, and for matrix products.
FAR_GPU, FAR_CPU, FAR_PRODUCTS = 4.0, 10.0, 12.0
# Operations on a CPU of at most so many times the time of one without work are all dispatch if
# their work is less than that.
SMALL_OPERATION = 25.0
# Elementwise operations that compute much on each element: parts of their names.
_COSTLY = (
    *("acos", "asin", "atan", "cos", "cosh", "cumsum", "digamma", "elu", "erf", "exp", "gelu"),
    *("lgamma", "log", "mish", "norm", "pow", "sigmoid", "silu", "sin", "softmax", "softplus"),
    *("std", "tan", "tanh", "var"),
)


class Cause(StrEnum):
    """What can bound a call."""

    LAUNCHES = "launches"
    PYTHON = "Python"
    WAITS = "synchronisation"
    TRANSFERS = "transfers"
    MEMORY = "memory bandwidth"
    ARITHMETIC = "arithmetic"
    CHAIN = "a serial chain of small kernels"
    NEITHER = "operations that reach neither roof"
    DISPATCH = "dispatch"
    TOO_FEW_THREADS = "too few threads"
    TOO_MANY_THREADS = "too many threads"

    @property
    def of_the_host(self) -> bool:
        """Whether it is the host's time."""
        return self in (Cause.LAUNCHES, Cause.PYTHON, Cause.DISPATCH, Cause.WAITS)


@dataclass(frozen=True)
class Verdict:
    """What bounds a call.

    Attributes:
        causes: one, or two that are too close to tell apart, the larger first.
        shares: of the call's time, by cause, the largest first; they add up to at most 1.
        lines: of the user's source that it is about, with what is there, the most important first.
        text: the verdict as a sentence or two.
    """

    causes: tuple[Cause, ...]
    shares: Mapping[Cause, float]
    lines: tuple[tuple[Line, str], ...] = ()
    text: str = ""

    @property
    def cause(self) -> Cause:
        """The one cause, or the larger of two."""
        return self.causes[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "causes": [str(cause) for cause in self.causes],
            "shares": {str(cause): share for cause, share in self.shares.items()},
            "lines": [{**line.to_dict(), "what": what} for line, what in self.lines],
            "text": self.text,
        }


@dataclass(frozen=True)
class GpuFigures:
    """What is measured of a call on a GPU; seconds of one call.

    Attributes:
        call_s: until the device is done.
        host_s: until the call has returned.
        waiting_s: in which the host waited for the device.
        copying_s: in which the host was busy with copies between host and device.
        python_s: in which the host ran Python, and neither an operation nor CUDA's runtime.
        device_s: in which the device was busy.
        parts: the device's time by cause.
    """

    call_s: float
    host_s: float
    waiting_s: float = 0.0
    copying_s: float = 0.0
    python_s: float = 0.0
    device_s: float = 0.0
    parts: Mapping[Cause, float] = field(default_factory=dict)

    @property
    def work_s(self) -> float:
        """The host's own work: neither waiting nor copying."""
        return max(0.0, min(self.host_s, self.call_s) - self.waiting_s - self.copying_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"parts": {str(k): v for k, v in self.parts.items()}}


@dataclass(frozen=True)
class CpuFigures:
    """What is measured of a call on a CPU; seconds of one call.

    Attributes:
        call_s: of the fastest call, as other work only ever adds; the sum of the others.
        python_s: outside of operations.
        dispatch_s: of operations, beside their work.
        parts: the operations' work by cause.
        threads: the call's time by number of threads; None if it was not measured.
    """

    call_s: float
    python_s: float = 0.0
    dispatch_s: float = 0.0
    parts: Mapping[Cause, float] = field(default_factory=dict)
    threads: ThreadTimes | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"parts": {str(k): v for k, v in self.parts.items()}}


def of_gpu(figures: GpuFigures) -> Verdict:
    """The verdict on a call on a GPU, without its lines and its text."""
    call_s = max(figures.call_s, 1e-12)
    device = min(1.0, figures.device_s / call_s)
    host = min(1.0, figures.work_s / call_s)
    work_s = max(figures.work_s, 1e-12)
    python = min(1.0, figures.python_s / work_s)
    saved = max(0.0, 1 - max(device, host)) if figures.waiting_s > 0.02 * call_s else 0.0

    on_device = _normalised(figures.parts, device)
    idle = 1 - device
    waits = min(idle, saved)
    shares = dict(on_device)
    shares[Cause.WAITS] = waits
    shares[Cause.PYTHON] = (idle - waits) * python
    shares[Cause.LAUNCHES] = (idle - waits) * (1 - python)

    of_host = _banded(python, PYTHON_FROM, PYTHON_SURE, Cause.PYTHON, Cause.LAUNCHES)
    of_device = _closest(on_device) or of_host
    larger, smaller = (device, host) if device >= host else (host, device)
    causes = of_device if device >= host else of_host
    if smaller >= BOTH_BUSY and smaller >= AS_MUCH * larger and of_device[0] != of_host[0]:
        other = of_host if device >= host else of_device
        causes = causes[0], other[0]
    if on_device.get(Cause.TRANSFERS, 0.0) >= MOSTLY_TRANSFERS:
        causes = (Cause.TRANSFERS,)  # Waits are for these.
    elif saved >= WAITS_SURE:
        causes = (Cause.WAITS,)
    elif saved >= WAITS_FROM:
        causes = Cause.WAITS, causes[0]
    elif larger < 1 - WAITS_SURE and smaller >= CLOSE * larger and of_device[0] != of_host[0]:
        # Nobody waits by name, yet neither is busy: one works after the other.
        causes = of_device[0], of_host[0]
    return Verdict(causes[:2], _ordered(shares))


def of_cpu(figures: CpuFigures) -> Verdict:
    """The verdict on a call on a CPU, without its lines and its text."""
    call_s = max(figures.call_s, 1e-12)
    seconds = {Cause.PYTHON: figures.python_s, Cause.DISPATCH: figures.dispatch_s, **figures.parts}
    total = max(call_s, sum(seconds.values()))
    shares = {cause: value / total for cause, value in seconds.items()}
    causes = _closest(shares) or (Cause.DISPATCH,)
    threads = figures.threads
    if threads is not None and _tells(threads):
        fewer = threads.best < threads.current
        cause = Cause.TOO_MANY_THREADS if fewer else Cause.TOO_FEW_THREADS
        if threads.gain >= THREADS_SURE:
            causes = (cause,)
        elif threads.gain >= THREADS_FROM:
            causes = cause, causes[0]
    return Verdict(causes[:2], _ordered(shares))


def _tells(threads: ThreadTimes) -> bool:
    """Whether another number of threads is faster by the program's own doing.

    Beside other work fewer threads are faster, and would not be without it.
    """
    if threads.best == threads.current:
        return False
    if threads.current > threads.cores:
        return True  # They are in each other's way whatever else runs.
    crowded = threads.others > CROWDED and threads.best < threads.current
    return threads.gain_low > 1.05 and not crowded


def _banded(value: float, start: float, sure: float, one: Cause, other: Cause) -> tuple[Cause, ...]:
    if value >= sure:
        return (one,)
    return (one, other) if value >= start else (other,)


def _closest(shares: Mapping[Cause, float]) -> tuple[Cause, ...]:
    """The largest cause, and the next one if it is close; none where there is no time."""
    ordered = sorted(((s, c) for c, s in shares.items() if s > 0), reverse=True)
    if not ordered:
        return ()
    found = [ordered[0][1]]
    if len(ordered) > 1 and ordered[1][0] >= CLOSE * ordered[0][0]:
        found.append(ordered[1][1])
    return tuple(found)


def _normalised(parts: Mapping[Cause, float], total: float) -> dict[Cause, float]:
    whole = sum(parts.values())
    return {c: total * s / whole for c, s in parts.items()} if whole > 0 else {}


def _ordered(shares: Mapping[Cause, float]) -> dict[Cause, float]:
    kept = [(cause, share) for cause, share in shares.items() if share > 0]
    return dict(sorted(kept, key=lambda pair: -pair[1]))


def floor_of(operation: ObservedOperation, roofs: Roofs) -> tuple[float, float]:
    """The least seconds of an operation by its bytes and by its FLOPs, by the machine's roofs."""
    compute = 0.0
    if operation.flops:
        compute = roofs.compute_s(operation.flops, operation.precision) or 0.0
    return roofs.copy_s(operation.nbytes), compute


def cause_on_gpu(
    operation: ObservedOperation | None, kernels: Sequence[Kernel], roofs: Roofs
) -> Cause:
    """What bounds the kernels of one operation; of those that belong to none, by their times."""
    seconds = sum(kernel.seconds for kernel in kernels)
    if kernels and all(kernel.kind in ("to device", "to host") for kernel in kernels):
        return Cause.TRANSFERS
    small = seconds <= SMALL_KERNEL * roofs.kernel_s * max(1, len(kernels))
    if operation is None:
        return Cause.CHAIN if small else Cause.NEITHER
    by_bytes, by_flops = floor_of(operation, roofs)
    # The time of the smallest copy is a launch's, not that of bytes.
    by_bytes = max(0.0, by_bytes - roofs.copies[0][1])
    if small and max(by_bytes, by_flops) < 0.5 * seconds:
        return Cause.CHAIN
    if by_flops >= by_bytes and operation.flops:
        return Cause.ARITHMETIC if seconds <= FAR_PRODUCTS * by_flops else Cause.NEITHER
    return Cause.MEMORY if seconds <= FAR_GPU * by_bytes else Cause.NEITHER


def parts_on_cpu(
    operation: ObservedOperation, seconds: float, roofs: Roofs
) -> tuple[float, Cause | None, float]:
    """An operation's seconds on a CPU as those of dispatch, and of work with its cause.

    Args:
        operation: the operation.
        seconds: its time under the stopwatch.
        roofs: of the machine.
    """
    seconds = max(seconds - max(0.0, roofs.observed_s - roofs.operation_s), 0.2 * seconds)
    if operation.view:
        return seconds, None, 0.0
    by_bytes, by_flops = floor_of(operation, roofs)
    by_bytes = max(0.0, by_bytes - roofs.copies[0][1])
    small = seconds <= SMALL_OPERATION * roofs.operation_s
    if small and max(by_bytes, by_flops) < roofs.operation_s:
        return seconds, None, 0.0
    dispatch = min(seconds, roofs.operation_s)
    work = seconds - dispatch
    if operation.flops and by_flops >= by_bytes:
        near = work <= FAR_PRODUCTS * by_flops
        return dispatch, Cause.ARITHMETIC if near else Cause.NEITHER, work
    if work <= FAR_CPU * by_bytes and not (_is_costly(operation) and work > 3 * by_bytes):
        return dispatch, Cause.MEMORY, work
    return dispatch, Cause.ARITHMETIC if _is_costly(operation) else Cause.NEITHER, work


def _is_costly(operation: ObservedOperation) -> bool:
    words = operation.name.partition("::")[2].strip("_").replace(".", "_").split("_")
    return any(word in _COSTLY for word in words)
