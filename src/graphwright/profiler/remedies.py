"""The most that each remedy can give, as a range, from what was measured.

A gain is the call's time now over its time then. Where a range has to do with the device's time
alone, `under_graph` holds it too for a call that a graph has freed of the host: the graph's time
over its time with the remedy as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .observation import Operation
from .roofs import Roofs
from .timing import CROWDED, ThreadTimes
from .trials import BF16, CHANNELS_LAST, TF32, Trial
from .verdict import Cause, CpuFigures, GpuFigures

# How far single operations that are timed by themselves may be from what they take in a call.
_APART = 0.1
# The upper end of a range of fusion over its lower end, at most; and the least that fusion removes
# of what it could, since not every chain is fused.
_WIDEST, _LEAST_FUSED = 1.45, 0.5
# Of elementwise work in float32, what half of the bytes may save.
_HALF_LOW, _HALF_HIGH = 0.3, 0.5

GRAPH, FUSION, BATCH, TRANSFERS, THREADS = (
    "graph",
    "fusion",
    "twice the batch",
    "pinned, overlapped transfers",
    "threads",
)


@dataclass(frozen=True)
class Remedy:
    """What one remedy can give.

    Attributes:
        name: of the remedy.
        low: the lower end of its gain, in times as fast; 1 is no gain.
        high: the upper end.
        why: what the range rests on, or why there is no gain.
        under_graph: the same range beside a graph of the call; None where it is no other.
        likely: the gain that is predicted, inside of the range; None where only a range is.
    """

    name: str
    low: float
    high: float
    why: str
    under_graph: tuple[float, float] | None = None
    likely: float | None = None

    @property
    def applies(self) -> bool:
        """Whether it may gain anything that shows."""
        return max(self.high, *(self.under_graph or (0.0,))) > 1.02

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Known:
    """What remedies are predicted from.

    Attributes:
        operations: of a call.
        seconds: of each on its device, by index.
        roofs: of the machine.
        trials: operations in other forms.
        queued_s: seconds of the device for all of the call's work back to back; None if the call
            waits for the device in between.
        inputs: bytes of each tensor among the arguments.
        outputs: how many tensors it returns.
        kernels: pieces of work on the device.
        reads: places where the host waits for a value.
    """

    operations: Sequence[Operation]
    seconds: Mapping[int, float]
    roofs: Roofs
    trials: Mapping[str, Trial]
    queued_s: float | None = None
    inputs: Sequence[int] = ()
    outputs: int = 1
    kernels: int = 0
    reads: int = 0


def for_gpu(figures: GpuFigures, known: Known) -> list[Remedy]:
    """Remedies for a call on a GPU."""
    graph, graphed_s = _graph(figures, known)
    return [
        graph,
        _fusion(figures.call_s, figures, graphed_s, known),
        *(_form(name, figures, graphed_s, known) for name in (CHANNELS_LAST, BF16, TF32)),
        _batch(figures.call_s, figures.device_s, figures.parts),
        _transfers(figures, known),
    ]


def for_cpu(figures: CpuFigures, known: Known) -> list[Remedy]:
    """Remedies for a call on a CPU."""
    work_s = sum(figures.parts.values())
    call_s = figures.call_s
    without = max(call_s - figures.python_s, 0.3 * call_s)
    graph = Remedy(
        GRAPH,
        1.0,
        max(1.0, call_s / without),
        "a tape of the operations runs none of the model's Python, and all of its operations",
    )
    fake = GpuFigures(call_s, 0.0, device_s=call_s, parts=figures.parts)
    return [
        graph,
        _fusion(call_s, fake, None, known),
        *(_form(name, fake, None, known) for name in (CHANNELS_LAST, BF16)),
        _batch(call_s, work_s, figures.parts),
        _threads(figures.threads),
    ]


def _graph(figures: GpuFigures, known: Known) -> tuple[Remedy, float]:
    """A plain graph, and the seconds that it is predicted to take."""
    roofs = known.roofs
    pieces = known.kernels
    # Back to back, as measured; else what the kernels take, and the gap between two of them.
    device_s = known.queued_s
    if device_s is None:
        device_s = figures.device_s + 0.4 * roofs.kernel_s * pieces
    copies_s = sum(map(roofs.copy_s, (2 * n for n in known.inputs)))
    results_s = known.outputs * roofs.copies[0][1]
    low_s = device_s + roofs.wait_s
    high_s = low_s + copies_s + results_s + roofs.operation_s * (len(known.inputs) + 1)
    likely_s = (low_s + high_s) / 2
    if known.reads:
        what = "place where" if known.reads == 1 else "places where"
        why = (
            f"not as one graph: {known.reads} {what} the host needs a value divide the call; "
            "gw.graph() divides it there"
        )
        return Remedy(GRAPH, 1.0, max(1.0, figures.call_s / low_s), why), likely_s
    how = "back to back" if known.queued_s is not None else "by CUPTI, with gaps"
    why = f"the device's work takes {device_s * 1e3:.3g} ms {how}; one launch in place of {pieces}"
    low, high = figures.call_s / high_s, figures.call_s / low_s
    return Remedy(GRAPH, low, high, why, likely=figures.call_s / likely_s), likely_s


def _without(figures: GpuFigures, saved_s: float) -> float:
    """The gain now of removing some of the device's time: the host may be what is waited for."""
    rest = max(figures.call_s - saved_s, figures.work_s, 0.05 * figures.call_s)
    return max(0.05, figures.call_s / max(rest, 1e-12))


def _range(
    figures: GpuFigures, graphed_s: float | None, saved: tuple[float, float]
) -> tuple[float, float, tuple[float, float] | None]:
    low, high = (_without(figures, s) for s in saved)
    under = None
    if graphed_s is not None:
        under = _narrowed(*(graphed_s / max(graphed_s - s, 0.1 * graphed_s) for s in saved))
    return *_narrowed(low, high), under


def _narrowed(low: float, high: float) -> tuple[float, float]:
    return max(low, high / _WIDEST), high


def _fusion(call_s: float, figures: GpuFigures, graphed_s: float | None, known: Known) -> Remedy:
    most = removable_by_fusion(known)
    if most <= 0.005 * call_s:
        return Remedy(FUSION, 1.0, 1.0, "no chains of elementwise operations that take time")
    # A chain cannot save more than the call's work takes.
    most = min(most, 0.9 * figures.device_s)
    low, high, under = _range(figures, graphed_s, (_LEAST_FUSED * most, most))
    why = f"elementwise chains and norms could take {most / call_s:.0%} of the call less"
    return Remedy(FUSION, low, high, why, under)


def removable_by_fusion(known: Known) -> float:
    """Seconds that chains of elementwise operations take beyond one kernel for each chain."""
    saved = 0.0
    chain: list[int] = []
    for index, operation in enumerate(known.operations):
        if operation.view:
            continue
        if operation.pointwise and not operation.copies:
            chain.append(index)
        else:
            saved += _saved_in(chain, known)
            chain = []
    return saved + _saved_in(chain, known)


def _saved_in(chain: Sequence[int], known: Known) -> float:
    times = [known.seconds.get(index, 0.0) for index in chain]
    if len(times) < 2:
        return 0.0
    return max(0.0, sum(times) - max(times))


def _form(name: str, figures: GpuFigures, graphed_s: float | None, known: Known) -> Remedy:
    """A remedy whose gain on products and convolutions was measured one by one."""
    trial = known.trials.get(name)
    if trial is None:
        reasons = {
            CHANNELS_LAST: "no convolutions that take time in the other layout",
            TF32: "no products in float32 without it",
            BF16: "no products in float32",
        }
        return Remedy(name, 1.0, 1.0, reasons[name])
    saved = trial.before_s - trial.after_s
    around = _APART * trial.after_s
    low, high = saved - around, saved + around
    how = f"products timed one by one: {trial.before_s * 1e3:.3g} → {trial.after_s * 1e3:.3g} ms"
    if name == BF16:
        elementwise = sum(
            known.seconds.get(i, 0.0)
            for i, each in enumerate(known.operations)
            if not each.flops and each.dtype == "float32" and known.seconds.get(i, 0.0)
        )
        memory = min(elementwise, figures.parts.get(Cause.MEMORY, 0.0))
        low, high = low + _HALF_LOW * memory, high + _HALF_HIGH * memory
        how += "; elementwise work by its bytes"
    if name == CHANNELS_LAST:
        how += "; without what changes of layout may cost"
    first, last, under = _range(figures, graphed_s, (low, high))
    return Remedy(name, first, last, how, under)


def _batch(call_s: float, device_s: float, parts: Mapping[Cause, float]) -> Remedy:
    """Items a second at twice the batch."""
    large = sum(
        parts.get(c, 0.0) for c in (Cause.MEMORY, Cause.ARITHMETIC, Cause.TRANSFERS, Cause.NEITHER)
    )
    whole = max(sum(parts.values()), 1e-12)
    idle = max(0.0, call_s - device_s)
    grows = device_s * large / whole
    high_s = max(call_s, device_s + grows + 0.1 * idle)
    low_s = max(call_s, device_s + 0.7 * grows)
    return Remedy(
        BATCH,
        2 * call_s / high_s,
        2 * call_s / low_s,
        f"items a second; {min(1.0, grows / call_s):.0%} of the call grows with the batch",
    )


def _transfers(figures: GpuFigures, known: Known) -> Remedy:
    spent = min(figures.parts.get(Cause.TRANSFERS, 0.0), figures.call_s)
    if spent <= 0.01 * figures.call_s:
        return Remedy(TRANSFERS, 1.0, 1.0, "no copies between host and device that take time")
    there = known.roofs.transfers
    pinned = there.get("to device pinned", 0.0) / max(there.get("to device", 1.0), 1.0)
    rest = figures.call_s - spent
    low = figures.call_s / (rest + spent / max(1.0, pinned))
    high = figures.call_s / max(rest, spent / max(1.0, pinned))
    why = (
        f"copies take {spent / figures.call_s:.0%} of the call; pinned ones are {pinned:.1f} times "
        "as fast here (copies that are pinned already gain the upper end at most by overlap)"
    )
    return Remedy(TRANSFERS, low, max(low, high), why)


def _threads(threads: ThreadTimes | None) -> Remedy:
    if threads is None:
        return Remedy(THREADS, 1.0, 1.0, "not measured: the call does not run on the CPU alone")
    listed = ", ".join(f"{s * 1e3:.3g} ms with {n}" for n, s in sorted(threads.seconds.items()))
    if threads.best == threads.current:
        return Remedy(THREADS, 1.0, 1.0, f"measured: {listed}; {threads.current} are set")
    why = f"measured: {listed}; {threads.current} are set"
    if threads.others > CROWDED:
        why += f"; other processes used {threads.others:.0%} of the processors meanwhile"
    low, high = max(1.0, threads.gain_low), max(1.0, threads.gain_high)
    return Remedy(THREADS, low, high, why, likely=threads.gain)
