"""diagnose(): compare a graph's replay with eager, and name the operation where they part."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..calls.modes import OperationMode
from ..calls.options import (
    args_problem,
    flag_problem,
    in_brief,
    kwargs_problem,
    names_checked,
    positive_problem,
    refuse,
)
from ..calls.plurals import counted
from ..calls.split import flatten
from ..dispatch.graphed_callable import GraphedCallable
from ..dispatch.graphed_module import GraphedModule, graphs_of
from ..errors import CaptureError, OptionError, SignatureError, first_line
from ..evaluation.accuracy import difference
from ..graphs.captured_call import CapturedCall, RunResult
from ..graphs.graph import Graph
from ..graphs.inspection.origins import Operation, Origins
from ..graphs.memory import lock_of
from . import recapture
from .faults import Fault, look_for_fault
from .lockstep import Lockstep, Parting, more_telling, replay_of
from .result import Diagnosis, DifferenceCause


@names_checked
def diagnose(
    graphed: Graph | GraphedCallable | GraphedModule,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    isolate: bool | None = None,
    timeout_s: float = 120.0,
) -> Diagnosis:
    """Compare a graph's replay with eager, and name the first operation whose result differs.

    The call runs eagerly and by its graph. Where the results differ by more than the rounding of
    equal kernels, both are gone through operation by operation: on the CPU side by side, on a GPU
    by capturing the call again with each result kept. What the runs change is put back. A fault of
    the device (an illegal access, an assertion) would end the use of the GPU by this process, so a
    child process makes the call first.

    Args:
        graphed: what `capture` or `graph` returned. A call that `graph` has no graph for yet is
            captured.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        isolate: whether a child process looks for faults first; by default for graphs on a GPU.
            The call is pickled for it. It cannot show faults that come from this process's
            memory, such as that of a tensor that is gone.
        timeout_s: seconds that the child may take.

    Returns:
        a Diagnosis, whose `str()` names the operation, module and line.

    Raises:
        OptionError: an argument makes no sense, or the graph cannot be compared with eager.
        SignatureError: the graph was captured for another call.
        CaptureError: there is no graph for the call, and none can be captured.
    """
    refuse(
        "diagnose",
        _graphed_problem(graphed),
        args_problem("args", args),
        kwargs_problem("kwargs", kwargs),
        flag_problem("isolate", isolate, optional=True),
        positive_problem("timeout_s", timeout_s, "seconds"),
    )
    began = time.perf_counter()
    named = dict(kwargs or {})
    graph = _graph_of(graphed, tuple(args), named)
    ordered = graph.signature.in_order(named)
    leaves, _ = flatten(tuple(args), ordered, objects=graph.spec.takes_objects)
    found = _Diagnosing(graph, leaves, timeout_s).run(
        isolate=graph.device.type == "cuda" if isolate is None else isolate
    )
    return replace(found, seconds=time.perf_counter() - began)


def _graphed_problem(graphed: Any) -> str | None:
    if isinstance(graphed, CapturedCall | GraphedCallable | GraphedModule):
        return None
    if isinstance(graphed, Graph):
        return "a graph of a `with` block has no function to compare with: capture a function"
    return f"graphed is {in_brief(graphed)}: pass what capture() or graph() returned"


def _graph_of(
    graphed: Graph | GraphedCallable | GraphedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CapturedCall:
    """The graph that answers a call."""
    if isinstance(graphed, CapturedCall):
        if not graphed.signature.fits(args, kwargs):
            differs = graphed.signature.differences(args, kwargs, "captured")
            raise SignatureError(f"The graph was captured for another call: {differs}.")
        if graphed.spec.trained is not None:
            raise OptionError("The graph of a training step cannot be compared with eager.")
        _ = graphed.recorded  # Raises where it cannot be replayed.
        return graphed
    graphs = graphs_of(graphed)
    assert graphs is not None
    found = graphs.graph_for(args, kwargs)
    if found is None:
        graphs.prepare([(args, kwargs)])
        found = graphs.graph_for(args, kwargs)
    if found is None:
        raise CaptureError(
            "No graph answers this call by itself: it is padded, or runs in parts.",
            remedy="explain() says what answers it; diagnose a graph of capture() for this call.",
        )
    return found


class _Latest(OperationMode):
    """Runs operations, and knows which one has failed.

    Attributes:
        failed: it; None if none has.
        count: how many have run, the failed one among them.
    """

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self.failed: Operation | None = None
        self.count = 0
        self._origins = origins

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        if self.failed is None:
            self.count += 1
        try:
            return func(*args, **kwargs)
        except Exception:
            if self.failed is None:
                self.failed = self._origins.of(func, args, kwargs)
            raise


class _Diagnosing:
    """One diagnosis.

    Args:
        graph: the graph.
        arguments: leaves of the arguments.
        timeout_s: seconds that a child may take.
    """

    def __init__(self, graph: CapturedCall, arguments: Sequence[Any], timeout_s: float) -> None:
        self._graph = graph
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._notes: list[str] = []

    def run(self, *, isolate: bool) -> Diagnosis:
        """Look for a fault, compare results, and find where they part."""
        if isolate:
            fault, note = look_for_fault(self._graph, self._arguments, self._timeout_s)
            self._notes += [] if note is None else [note]
            if fault is not None and (fault.died or fault.phase == "eager"):
                return self._of_fault(fault)
        try:
            eager = self._graph.run_eagerly(self._arguments)
        except CaptureError as error:
            return self._of_error(error)
        outside = [storage for storage, _ in eager.outside]
        try:
            replayed = self._graph.run_replayed(self._arguments, outside)
        except RuntimeError as error:
            return self._say(
                DifferenceCause.FAULT,
                "the replay fails, and eager does not: the graph works in memory that is no longer "
                "what it was at the capture.",
                error=first_line(error),
            )
        error_ = self._difference(replayed, eager)
        if error_ is None:
            return self._say(DifferenceCause.NONE, "the replay and eager agree.")
        if self._graph.device.type == "cpu":
            return self._lockstep(error_)
        return self._recapture(error_, outside)

    def _difference(self, replayed: RunResult, eager: RunResult) -> str | None:
        """How the results of the call differ, if they do."""
        if len(replayed.results) != len(eager.results):
            return f"{counted(len(replayed.results), 'result')} instead of {len(eager.results)}"
        for number, (its, own) in enumerate(zip(replayed.results, eager.results, strict=True), 1):
            what = difference(its, own)
            if what is not None:
                return f"result {number} of the call is {_as_words(what)}"
        for slot, own in eager.arguments.items():
            what = difference(replayed.arguments[slot], own)
            if what is not None:
                return f"what is left in argument {slot + 1} is {_as_words(what)}"
        left = {storage._cdata: after for storage, after in replayed.outside}
        for storage, after in eager.outside:
            its = left.get(storage._cdata)
            if its is not None and not _same_bytes(its, after):
                return "what is left in a tensor from outside is not the same"
        return None

    def _lockstep(self, error: str) -> Diagnosis:
        graph = self._graph
        warmed = graph.warmed
        outside = set() if warmed is None else {s._cdata for s in warmed.external}
        if graph.tree is not None:
            outside |= set(graph.tree.external)
        found: Parting | None = None
        with lock_of(graph.pool):
            for pretend in (False, True):
                if found is None or found.cause is DifferenceCause.OPERATIONS:
                    replay = replay_of(graph, self._arguments)
                    steps = Lockstep(replay, Origins(graph.spec.module), outside)
                    graph.run_eagerly(self._arguments, steps, pretend=pretend)
                    found = more_telling(found, steps.parting or steps.unsteady.first)
        if found is None:
            return self._unknown(error, steps.compared)
        return self._of_parting(found, steps.compared)

    def _recapture(self, error: str, outside: Sequence[torch.UntypedStorage]) -> Diagnosis:
        graph = self._graph
        stale = recapture.stale_node(graph, self._arguments, outside)
        if stale is not None:
            by = stale.operation
            return self._say(
                stale.cause,
                "the graph is no longer what a capture of the call would give: "
                + ("a node differs." if by is None else f"{by.name} differs."),
                operation=None if by is None else by.name,
                module=None if by is None else by.module,
                line=None if by is None else by.line,
                index=stale.index,
                kernel=stale.node.name if stale.node.kind == "kernel" else None,
                error=f"{stale.what}; {error}",
            )
        if graph.tree is not None:
            self._notes.append(
                "The call is in segments, whose operations are not compared one by one on a GPU: "
                "capture a part of it, or diagnose it on the CPU."
            )
            return self._unknown(error, 0)
        parting, compared, kernel = recapture.first_wrong(graph, self._arguments)
        if parting is None:
            return self._unknown(error, compared)
        return self._of_parting(parting, compared, kernel)

    def _of_parting(self, parting: Parting, compared: int, kernel: str | None = None) -> Diagnosis:
        by = parting.operation
        return self._say(
            parting.cause,
            f"{by.name} {parting.what}.",
            operation=by.name,
            module=by.module,
            line=by.line,
            index=parting.index,
            kernel=kernel,
            error=parting.error,
            compared=compared,
        )

    def _of_fault(self, fault: Fault) -> Diagnosis:
        where = "in eager too" if fault.phase == "eager" else "in the replay, and not in eager"
        who = fault.operation or "The call"
        what = f"{who} faults {where}." if fault.died else f"{who} raises an error {where}."
        return self._say(
            DifferenceCause.FAULT if fault.died else DifferenceCause.ERROR,
            what,
            operation=fault.operation,
            module=fault.module,
            line=fault.line,
            index=fault.index,
            kernel=fault.kernel,
            error=fault.error,
        )

    def _of_error(self, error: CaptureError) -> Diagnosis:
        """Eager raises: run it again to see in which operation."""
        seen = _Latest(Origins(self._graph.spec.module))
        cause = error.__cause__
        try:
            self._graph.run_eagerly(self._arguments, seen)
        except CaptureError as again:
            cause = again.__cause__ or cause
        by = seen.failed
        return self._say(
            DifferenceCause.ERROR,
            f"eager raises an error{'' if by is None else f' in {by.name}'}.",
            operation=None if by is None else by.name,
            module=None if by is None else by.module,
            line=error.where if by is None else by.line,
            index=None if by is None else seen.count - 1,
            error=first_line(cause) if cause is not None else error.what,
        )

    def _unknown(self, error: str, compared: int) -> Diagnosis:
        return self._say(
            DifferenceCause.UNKNOWN,
            "the replay and eager differ, and no operation by itself does: the graph reads memory "
            "that was changed under it, or the call depends on something besides its arguments.",
            error=error,
            compared=compared,
        )

    def _say(self, cause: DifferenceCause, what: str, **more: Any) -> Diagnosis:
        return Diagnosis(self._graph.name, cause, what, notes=tuple(self._notes), **more)


def _as_words(what: str) -> str:
    return what if what.startswith("off") else f"wrong: {what}"


def _same_bytes(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    first, second = (
        torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in (a, b)
    )
    return torch.equal(first, second)
