"""check(): what keeps a call from being captured as a graph, where it is, and how to fix it.

The call runs under modes that see every ATen operation and every function of torch. What no
operation shows (state, arguments, results) is asked of `capture` itself, which warms the call up.
No GPU is needed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.iterators import AdvancesIterator
from ..calls.modes import compilers_off
from ..calls.modules import FunctionModule
from ..calls.objects import apart
from ..calls.options import (
    args_problem,
    callable_problem,
    count_problem,
    kwargs_problem,
    names_checked,
    refuse,
)
from ..calls.split import argument_names, flatten, unflatten
from ..calls.weights import refuse_weights
from ..dispatch.graphed_callable import name_of
from ..errors import (
    CaptureError,
    GraphwrightError,
    ModelFailed,
    SignatureError,
    first_line,
    user_frame,
)
from ..evaluation.garbage_collection import garbage_collection_off
from ..graphs.call_spec import signature_of
from ..graphs.call_work import resolved
from ..graphs.capture import refusal_of
from ..graphs.comparison import check_same_result, rounding_of
from ..graphs.conditions import (
    as_captured,
    for_inference,
    pretend_capturing,
)
from ..graphs.host_draws import Draw
from ..graphs.python_state import PythonState, StateChanges, place_of
from ..graphs.static_outputs import refuse_results
from . import obstacles
from .finding import Finding, Place, place_of_code, place_of_error, place_of_line
from .functions import FunctionObserver
from .obstacles import Findings
from .operations import OperationObserver
from .placement import Side, Sides, ValueOrigin
from .report import CheckReport
from .side_effects import clear_grown_caches, hooks_of, sizes_of_caches, watch_cuda, watch_python

# A call with at most this many kernels is too small for a graph.
_FEW_KERNELS = 2
# Kinds of obstacles that explain why the results of two runs differ.
_CHANGES_RESULTS = {
    k.name
    for k in (obstacles.HOST_RANDOM, obstacles.CLOCK, obstacles.STATE, obstacles.CHANGING_COPY)
}
# Kinds that explain why the warm-up of a capture refuses the call.
_REFUSED_BY_WARM_UP = _CHANGES_RESULTS | {
    k.name
    for k in (
        obstacles.OTHERWISE,
        obstacles.SEED,
        obstacles.SEQUENCE,
        obstacles.LAYOUT,
        obstacles.INPUT_COPY,
        obstacles.NESTED,
    )
}


@names_checked
def check(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    runs: int = 2,
) -> CheckReport:
    """Find what keeps a call from being captured as a graph, or would make its replays wrong.

    The call runs `runs` times under `torch.no_grad()`, while
    `torch.cuda.is_current_stream_capturing()` returns True; then `capture` warms it up, and says
    what it refuses. What the call changes is put back. A model on the CPU is checked as if its
    parameters, buffers and arguments were on a GPU.

    Args:
        fn: a module or function, for inference.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        runs: how often to run it. What differs between two runs of the same call is nothing that a
            graph could repeat.

    Returns:
        The obstacles in the order in which they are met, each once: a list, which is empty if there
        are none. A notebook shows it as a table, and its `save` writes a page.

    Raises:
        OptionError: an option makes no sense.
        ModelFailed: the call raises even without a capture.
    """
    refuse(
        "check",
        callable_problem("fn", fn),
        args_problem("args", args),
        kwargs_problem("kwargs", kwargs),
        count_problem("runs", runs, 2),
    )
    named = dict(kwargs or {})
    module = fn if isinstance(fn, nn.Module) else FunctionModule(fn)
    return CheckReport(name_of(fn), _Checker(fn, module, tuple(args), named).run(runs))


class _Checker:
    """One check of one call."""

    def __init__(
        self, fn: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self._fn = fn
        self._module = module
        self._args = args
        self._kwargs = kwargs
        self._leaves, self._spec = flatten(args, kwargs, objects=True)
        held = [*module.parameters(), *module.buffers()]
        given = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        self._pretend = not any(t.is_cuda for t in (*held, *given))
        # For arguments that the call gives another shape or other memory.
        self._given = [(t, t.detach()) for t in given if t.layout is torch.strided]
        # Whether tensors that are pretended to be on a GPU also say so when asked.
        self._claims_gpu = self._pretend
        self._found = Findings()
        self._runs: list[OperationObserver] = []
        # Shared by all runs: later ones use what the first keeps, such as a table of positions.
        self._sides: Sides | None = None
        self._results: list[Any] = []
        # What it draws on the host without a capture.
        self._draws: list[Draw] = []
        self._expected: list[Any] = []

    def run(self, runs: int) -> list[Finding]:
        """Run the call, compare the runs, ask `capture`, and return the findings."""
        try:
            refuse_weights(self._module)
        except SignatureError as error:
            self._add_refusal(error)
            return self._found.all()
        try:
            signature_of(self._args, self._kwargs, self._module, objects=True)
        except CaptureError as error:
            self._add_refusal(error)
        undo = PythonState(self._module)
        caches = sizes_of_caches() if self._pretend else {}
        seeded = torch.random.get_rng_state()
        try:
            try:
                with undo.refusing_advances():
                    self._run_without_capture()
            except CaptureError as error:  # By something of graphwright's that the call uses.
                self._add_refusal(error)
                return self._found.all()
            change: CaptureError | None = None
            for _ in range(runs):
                if not self._run_as_captured():
                    return self._found.all()
                try:
                    undo.check()
                except CaptureError as error:
                    change = error
            self._find_host_randomness(undo)
            undo.restore(python=True)
            refusal = self._ask_capture()
            if refusal is not None and self._pretend and _is_foreign(refusal):
                refusal = change
            if isinstance(refusal, StateChanges):
                self._found.add(obstacles.STATE, self._definition(), "", refusal.what)
            self._compare()
            if refusal is not None:
                self._add_refusal(refusal)
        finally:
            undo.restore(python=True)
            torch.random.set_rng_state(seeded)
            # Caches may hold tensors that have said that they are on a GPU.
            clear_grown_caches(caches)
        for hook in hooks_of(self._module):
            self._found.add(*hook)
        kernels = self._runs[0].kernels
        if kernels <= _FEW_KERNELS:
            what = ("nothing", "one operation", f"{kernels} operations")[min(kernels, 2)]
            self._found.add(obstacles.SMALL, Place(), "", f"{what} on the GPU")
        return self._found.all()

    def _ask_capture(self) -> CaptureError | None:
        """What `capture` refuses, if it is not that the caller wants gradients.

        A model on the CPU is not recorded: what can be recorded depends on the device.
        """
        found = self._found.all()
        rehearse = not (self._pretend or any(finding.severity.stops for finding in found))
        # Without gradients, some modules of PyTorch take another path.
        refused = any(finding.kind == obstacles.REFUSED.name for finding in found)
        mode = torch.no_grad() if refused else contextlib.nullcontext()
        with mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return refusal_of(self._fn, self._args, self._kwargs, rehearse=rehearse)

    def _add_refusal(self, error: GraphwrightError) -> None:
        """Note what `capture` refuses, unless the findings tell the reason already."""
        for finding in self._found.all():
            explains = finding.severity.stops and finding.kind in _REFUSED_BY_WARM_UP
            if explains or finding.what == error.what:
                return
        place = self._definition() if error.where is None else place_of_line(error.where)
        if isinstance(error, AdvancesIterator):
            self._found.add(obstacles.STATE, place, "", error.what)
            return
        self._found.add(obstacles.REFUSED, place, "", error.what, error.remedy or "")

    def _definition(self) -> Place:
        """Where the function, or the module's forward, is defined."""
        return place_of_code(self._fn.forward if isinstance(self._fn, nn.Module) else self._fn)

    def _run_without_capture(self) -> None:
        """Run the call without pretending a capture; it may import modules and fill caches.

        Raises:
            ModelFailed: the call raises.
            CaptureError: a part of it refuses to run inside a capture.
        """
        observer = self._new_observer()
        try:
            self._expected = [
                leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                for leaf in pytree.tree_leaves(self._observe(observer, capturing=False))
            ]
            self._draws = observer.draws.made
        except CaptureError:
            raise
        except Exception as error:
            if self._claims_gpu:
                # It may have asked for the device, and used what only a GPU can do.
                self._claims_gpu = False
                self._run_without_capture()
                return
            raise ModelFailed(
                f"The call raises by itself: {first_line(error)}", where=user_frame(error)
            ) from error

    def _run_as_captured(self) -> bool:
        """Run the call as if it were captured; False if it then fails."""
        observer = self._new_observer()
        try:
            result = self._observe(observer, capturing=True)
        except Exception as error:
            if self._claims_gpu:
                self._claims_gpu = False
                self._runs.clear()
                self._results.clear()
                self._run_without_capture()
                return self._run_as_captured()
            self._found.merge(observer.found)
            self._found.add(obstacles.FAILS, place_of_error(error), "", first_line(error))
            return False
        if observer.draws.made == self._draws:  # Else they cannot be made again.
            observer.allow_unused_draws()
        self._found.merge(observer.found)
        self._runs.append(observer)
        self._results.append(pytree.tree_map_only(torch.Tensor, resolved, result))
        return True

    def _observe(self, observer: OperationObserver, *, capturing: bool) -> Any:
        """Run the call under an observer; what it writes to is put back."""
        try:
            with (
                for_inference(),
                as_captured(),
                warnings.catch_warnings(),
                compilers_off(),
                garbage_collection_off(),  # Finalizers are no part of the call.
                pretend_capturing() if capturing else contextlib.nullcontext(),
                watch_cuda(observer.found, pretend=self._pretend),
                watch_python(observer.found),
                FunctionObserver(observer),
                observer,
            ):
                warnings.simplefilter("ignore")
                # In containers of its own, which it may change.
                args, kwargs = unflatten(self._leaves, self._spec)
                result = self._fn(*args, **kwargs)
            with contextlib.suppress(SignatureError):  # What capture refuses, and says.
                return apart(result)
            return result
        finally:
            observer.undo()
            for tensor, alias in self._given:
                if place_of(tensor) != place_of(alias):
                    tensor.data = alias

    def _new_observer(self) -> OperationObserver:
        if self._sides is None or self._sides.claims_gpu is not self._claims_gpu:
            self._sides = Sides(self._pretend, claims_gpu=self._claims_gpu)
        sides = self._sides
        names: dict[int, str] = {}
        of_module = [
            *((f"the parameter {n}", t) for n, t in self._module.named_parameters()),
            *((f"the buffer {n}", t) for n, t in self._module.named_buffers()),
        ]
        arguments = zip(
            argument_names(self._args, self._kwargs, objects=True), self._leaves, strict=True
        )
        of_call = [(f"the argument {n}", t) for n, t in arguments if isinstance(t, torch.Tensor)]
        for name, tensor in (*of_module, *of_call):
            if tensor.layout is torch.strided:
                names[tensor.untyped_storage()._cdata] = name
                sides.put(tensor, Side.DEVICE)
        for _, tensor in of_call:
            sides.put(tensor, None, ValueOrigin.INPUT)
        return OperationObserver(sides, names)

    def _compare(self) -> None:
        """Note what differs between runs, and from the run without a capture."""
        first = self._runs[0]
        self._compare_results()
        for other in self._runs[1:]:
            for (place, operation, digest), copy in zip(first.copies, other.copies, strict=False):
                if copy[0] == place and copy[2] != digest:
                    self._found.change(
                        place, operation, obstacles.CONSTANT_COPY, obstacles.CHANGING_COPY
                    )
            for mine, theirs in zip(first.steps, other.steps, strict=False):
                if (mine.name, mine.shapes) != (theirs.name, theirs.shapes):
                    detail = f"in one run it is {mine.name}, in another {theirs.name}"
                    if mine.name == theirs.name:
                        detail = f"it has shapes {mine.shapes}, then {theirs.shapes}"
                    self._found.add(obstacles.SEQUENCE, mine.place, mine.name, detail)
                    break
                if repr(mine.numbers) == repr(theirs.numbers):
                    continue
                line = mine.place.file, mine.place.line
                if not any((f.place.file, f.place.line) == line for f in self._found.all()):
                    detail = f"{mine.numbers}, then {theirs.numbers}"
                    self._found.add(obstacles.SCALAR, mine.place, mine.name, detail)
            else:
                if len(first.steps) != len(other.steps):
                    longer = max(first.steps, other.steps, key=len)
                    step = longer[min(len(first.steps), len(other.steps))]
                    self._found.add(
                        obstacles.SEQUENCE, step.place, step.name, "one run has no such operation"
                    )

    def _compare_results(self) -> None:
        """Note if runs return different results, or others than the run without a capture."""
        if any(f.kind in _CHANGES_RESULTS and f.severity.stops for f in self._found.all()):
            return
        first, *others = self._results
        rounding = rounding_of(self._runs[0].dtypes)
        try:
            refuse_results(first)
        except CaptureError as error:
            self._add_refusal(error)
            return
        obstacle = obstacles.VARIES
        try:
            for other in others:
                check_same_result(other, pytree.tree_leaves(first), rounding)
            obstacle = obstacles.OTHERWISE
            check_same_result(first, self._expected, rounding)
        except CaptureError as error:
            if not self._found.block(_CHANGES_RESULTS):
                self._found.add(obstacle, self._definition(), "", error.what)

    def _find_host_randomness(self, undo: PythonState) -> None:
        """Note that Python's or NumPy's random generators were drawn from."""
        try:
            undo.refuse_host_randomness(torch.device("cpu"), [])
        except CaptureError as error:
            if not self._found.block({obstacles.HOST_RANDOM.name}):
                source = error.what.partition(" from ")[2].partition(";")[0]
                self._found.add(obstacles.DRAWN_ON_HOST, self._definition(), source)


def _is_foreign(error: CaptureError) -> bool:
    """Whether an error is not graphwright's own refusal: the call itself raised it.

    A model on the CPU may only run where tensors seem to be on a GPU.
    """
    cause = error.__cause__
    if isinstance(error, StateChanges) and isinstance(cause, AttributeError | KeyError):
        return False  # What it has kept was not there.
    return cause is not None and not isinstance(cause, GraphwrightError)
