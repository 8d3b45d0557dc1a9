"""The most that each remedy can give, as a range, from what was measured.

A gain is the call's time now over its time then. Where a range has to do with the device's time
alone, `under_graph` holds it too for a call that a graph has freed of the host: the graph's time
over its time with the remedy as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .flops import holds_products
from .observation import ObservedOperation
from .roofs import Roofs
from .timing import CROWDED, ThreadTimes
from .trials import BF16, CHANNELS_LAST, FASTEST, TF32, FormTrial
from .verdict import Cause, CpuFigures, GpuFigures

# How far single operations that are timed by themselves may be from what they take in a call.
_APART = 0.1
# The upper end of a range of fusion and of bf16 over its lower end, at most.
_WIDEST = 1.45
# What a fused model takes at most in place of the model: passes that lose time are left out.
_NO_LOSS = 0.98
# The part of a chain's longest operation that goes into the product before it, which computes it as
# it writes its result: in convolutions and in other products. Seen on twenty models on an H100.
_INTO_CONVOLUTION, _INTO_PRODUCT = 0.5, 0.25
# Of a product, what merging it with others of the same input saves: for each kernel beyond the
# first, where several have a part of the sum each; and in any case.
_SPLIT, _MERGED = 0.1, 0.03
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
        launches: of each operation, by index.
        bf16_s: like `queued_s`, for the call in bfloat16; None if it was not measured.
        reads: places where the host waits for a value.
    """

    operations: Sequence[ObservedOperation]
    seconds: Mapping[int, float]
    roofs: Roofs
    trials: Mapping[str, FormTrial]
    queued_s: float | None = None
    inputs: Sequence[int] = ()
    outputs: int = 1
    kernels: int = 0
    launches: Mapping[int, int] = field(default_factory=dict)
    bf16_s: float | None = None
    reads: int = 0


def for_gpu(figures: GpuFigures, known: Known) -> list[Remedy]:
    """Remedies for a call on a GPU."""
    graph, graphed_s = _graph(figures, known)
    return [
        graph,
        _fusion(figures.call_s, figures, graphed_s, known),
        _form(CHANNELS_LAST, figures, graphed_s, known),
        _bf16(figures, graphed_s, known),
        _form(TF32, figures, graphed_s, known),
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
    # Nodes of a graph follow each other faster than kernels of a stream: by as much as the shortest
    # ones at most.
    sooner_s = min(pieces * (roofs.kernel_s - roofs.node_s), 0.5 * device_s) if roofs.node_s else 0
    low_s = device_s - sooner_s + roofs.wait_s
    high_s = device_s + roofs.wait_s + copies_s + results_s
    high_s += roofs.operation_s * (len(known.inputs) + 1)
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
    saved, removed = removable_by_fusion(known)
    # Kernels that are gone leave no gaps between them either.
    work_s = sum(known.seconds.values())
    if graphed_s is not None and known.kernels:
        saved += removed * max(0.0, graphed_s - work_s) / known.kernels
    if (trial := known.trials.get(FASTEST)) is not None:
        saved += max(0.0, trial.before_s - trial.after_s)
    if saved <= 0.005 * call_s:
        return Remedy(FUSION, 1.0, 1.0, "no chains of elementwise operations that take time")
    # Nothing saves more than the call's work takes.
    saved = min(saved, 0.9 * figures.device_s)
    why = f"chains, norms and products could take {saved / call_s:.0%} of the call less"
    if graphed_s is None:
        low, high, _ = _range(figures, None, (0.5 * saved, saved))
        return Remedy(FUSION, low, high, why)
    gain = _without(figures, saved)
    under = _around(graphed_s / max(graphed_s - saved, 0.1 * graphed_s))
    low, high = (min(max(_NO_LOSS, end), gain) for end in _around(gain))
    return Remedy(FUSION, low, max(low, high), why, (max(_NO_LOSS, under[0]), under[1]))


def _around(gain: float) -> tuple[float, float]:
    """A range about a gain that is likely, as wide as ranges may be."""
    return gain / _WIDEST**0.5, gain * _WIDEST**0.5


def removable_by_fusion(known: Known) -> tuple[float, float]:
    """Seconds that fusion is likely to save, and how many kernels.

    A chain of elementwise operations becomes one kernel, which takes as long as the longest; behind
    a product, a part of it goes into that. A batch norm behind a convolution is folded into it.
    """
    saved = removed = 0.0
    chain: list[int] = []
    before: ObservedOperation | None = None
    for index, operation in enumerate(known.operations):
        if operation.view:
            continue
        if operation.pointwise and not operation.copies:
            chain.append(index)
            continue
        less, fewer = _saved_in(chain, before, known)
        saved, removed = saved + less, removed + fewer
        chain, before = [], operation
        if _is_product(operation) and "convolution" not in operation.name:
            split = known.launches.get(index, 1) - 1
            saved += known.seconds.get(index, 0.0) * min(0.5, _MERGED + _SPLIT * split)
    less, fewer = _saved_in(chain, before, known)
    return saved + less, removed + fewer


def _is_product(operation: ObservedOperation) -> bool:
    """Whether it is a product that others can be merged with, and what follows it."""
    return bool(operation.flops) and not holds_products(operation.name)


def _saved_in(
    chain: Sequence[int], before: ObservedOperation | None, known: Known
) -> tuple[float, float]:
    """Seconds and kernels that fusing a chain behind some operation saves."""
    if not chain:
        return 0.0, 0.0
    saved, removed = 0.0, 0.0
    if before is not None and "convolution" in before.name:
        if "batch_norm" in known.operations[chain[0]].name:
            saved, removed = known.seconds.get(chain[0], 0.0), known.launches.get(chain[0], 1)
            chain = chain[1:]
        into = _INTO_CONVOLUTION
    else:
        into = _INTO_PRODUCT if before is not None and _is_product(before) else 0.0
    times = [known.seconds.get(index, 0.0) for index in chain]
    if times:
        saved += sum(times) - (1 - into) * max(times)
        removed += sum(known.launches.get(index, 1) for index in chain) - (1 - into)
    return saved, removed


def _bf16(figures: GpuFigures, graphed_s: float | None, known: Known) -> Remedy:
    if known.bf16_s is None or graphed_s is None or known.queued_s is None:
        found = _form(BF16, figures, graphed_s, known)
        if found.under_graph is None:
            return found
        low, high = found.under_graph
        return replace(found, under_graph=_around((low * high) ** 0.5))
    # What a graph takes beside the device's work back to back is the same in both.
    there_s = max(graphed_s - known.queued_s + known.bf16_s, 0.05 * graphed_s)
    low, high = _around(_without(figures, known.queued_s - known.bf16_s))
    most = _without(figures, figures.call_s)  # The host is no faster in it.
    low, high = min(low, most), min(high, most)
    why = (
        f"the call in bfloat16, measured: {known.queued_s * 1e3:.3g} → {known.bf16_s * 1e3:.3g} ms "
        "of the device"
    )
    return Remedy(BF16, low, high, why, _around(graphed_s / there_s))


def _form(name: str, figures: GpuFigures, graphed_s: float | None, known: Known) -> Remedy:
    """A remedy whose gain on products and convolutions was measured one by one."""
    trial = known.trials.get(name)
    if trial is None:
        return Remedy(name, 1.0, 1.0, _why_not_tried(name, known.operations))
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


def _why_not_tried(name: str, operations: Sequence[ObservedOperation]) -> str:
    if name == CHANNELS_LAST:
        return "no convolutions that take time in the other layout"
    products = [each for each in operations if each.flops and each.dtype == "float32"]
    if name == TF32:
        products = [each for each in products if each.precision != "tf32"]
    if not products:
        return "no products in float32" + " without it" * (name == TF32)
    names = ", ".join(sorted({each.name for each in products}))
    return f"products in float32 that do not run by themselves in {name}: {names}"


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
