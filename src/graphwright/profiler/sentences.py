"""A verdict in words."""

from __future__ import annotations

from collections.abc import Sequence

from ..calls.plurals import counted
from ..report.table import duration
from .observation import ObservedOperation
from .trace import TracedCall
from .verdict import Cause, CpuFigures, GpuFigures, Verdict

_NAMES = {
    Cause.LAUNCHES: "launch-bound",
    Cause.PYTHON: "host-bound in Python",
    Cause.WAITS: "bound by synchronisation",
    Cause.TRANSFERS: "bound by transfers",
    Cause.MEMORY: "bound by memory bandwidth",
    Cause.ARITHMETIC: "bound by arithmetic",
    Cause.CHAIN: "bound by a serial chain of small kernels",
    Cause.NEITHER: "bound by operations that reach neither roof",
    Cause.DISPATCH: "bound by dispatch",
    Cause.TOO_FEW_THREADS: "bound by too few threads",
    Cause.TOO_MANY_THREADS: "bound by too many threads",
}


def told(
    verdict: Verdict,
    figures: GpuFigures | CpuFigures,
    operations: Sequence[ObservedOperation],
    trace: TracedCall,
) -> str:
    """The verdict as a sentence or two, with the figures that decide it."""
    if len(verdict.causes) == 1:
        head = f"The call is {_NAMES[verdict.cause]}."
    else:
        one, other = verdict.causes
        head = f"The verdict is between {one} and {other}, which are too close to tell."
    why = _on_gpu(figures, trace) if isinstance(figures, GpuFigures) else _on_cpu(figures)
    starts = sum(not operation.view for operation in operations)
    if isinstance(figures, CpuFigures) and Cause.DISPATCH in verdict.causes:
        why += f" It runs {counted(starts, 'operation')}."
    return f"{head} {why}"


def _on_gpu(figures: GpuFigures, trace: TracedCall) -> str:
    parts = [
        f"Of {duration(figures.call_s)}, the device works {duration(figures.device_s)}",
        f"the host {duration(figures.work_s)}",
    ]
    if figures.python_s:
        parts[-1] += f", {duration(min(figures.python_s, figures.work_s))} of it in Python"
    if figures.waiting_s > 0.02 * figures.call_s:
        parts.append(f"and waits {duration(figures.waiting_s)} for values")
    return f"{', '.join(parts)}; {counted(trace.launches, 'launch', 'launches')}."


def _on_cpu(figures: CpuFigures) -> str:
    call_s = max(figures.call_s, 1e-12)
    parts = sum(figures.parts.values()), figures.dispatch_s, figures.python_s
    work, starting, python = (f"{part / call_s:.0%}" for part in parts)
    text = (
        f"Operations compute and move data for {work} of it, starting them takes {starting}, "
        f"Python between them {python}."
    )
    threads = figures.threads
    if threads is not None and threads.best != threads.current:
        text += (
            f" With {counted(threads.best, 'thread')} in place of "
            f"{threads.current} it is {threads.gain:.2f} times as fast."
        )
    return text
