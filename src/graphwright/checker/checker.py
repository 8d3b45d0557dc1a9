"""check(): what keeps a call from being captured as a graph, where, and the mend.

The call is run while every operation of ATen and every function of torch passes by; nothing is
captured, so that it needs no GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.modes import compilers_off
from ..calls.modules import FunctionModule
from ..calls.signature import argument_names, flatten, refuse_weights
from ..errors import CaptureError, ModelFailed, OptionError, SignatureError, first_line, user_frame
from ..graphs.conditions import capturing_seems_on, collection_off
from ..graphs.python_state import PythonState
from ..graphs.warmup import same_when_told
from . import obstacles
from .finding import Finding as Finding
from .finding import Place as Place
from .finding import Severity as Severity
from .finding import place_of_error
from .functions import Calls
from .obstacles import Found
from .operations import Observer
from .placement import Origin, Side, Sides
from .side_effects import clear_what_grew, cuda_watched, hooks_of, python_watched, sizes_of_caches

_FEW_KERNELS = 2
# What makes the results of two runs differ.
_CHANCE = {
    k.name
    for k in (obstacles.HOST_RANDOM, obstacles.CLOCK, obstacles.STATE, obstacles.CHANGING_COPY)
}


def check(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    runs: int = 2,
) -> list[Finding]:
    """Find what keeps a call from being captured as a graph, or would make its replays wrong.

    The call runs `runs` times under `torch.no_grad()`, while
    `torch.cuda.is_current_stream_capturing()` answers True; what it changes is put back. A model on
    the CPU is judged as if its parameters, buffers and arguments were on a GPU.

    Args:
        fn: a module or function, for inference.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        runs: how often to run it: what differs between two runs of one call is no work that a graph
            can repeat.

    Returns:
        the obstacles in the order in which they are met, each once; empty where there is none.

    Raises:
        OptionError: an option makes no sense.
        ModelFailed: the call raises by itself.
    """
    if not callable(fn):
        raise OptionError(f"check() takes a module or a function, not a {type(fn).__name__}.")
    if not isinstance(runs, int) or isinstance(runs, bool) or runs < 2:
        raise OptionError(f"runs is a number above 1, not {runs!r}.")
    named = dict(kwargs or {})
    module = fn if isinstance(fn, nn.Module) else FunctionModule(fn)
    return _Checker(fn, module, args, named).run(runs)


class _Checker:
    """One check of one call."""

    def __init__(
        self, fn: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self._fn = fn
        self._module = module
        self._args = args
        self._kwargs = kwargs
        self._leaves = list(flatten(args, kwargs)[0])
        held = [*module.parameters(), *module.buffers()]
        given = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        self._pretend = not any(t.is_cuda for t in (*held, *given))
        # Whether tensors say that they are on a GPU, where that is pretended.
        self._lies = self._pretend
        self._found = Found()
        self._runs: list[Observer] = []
        # One for all runs: what the first keeps, such as a table of positions, later ones find.
        self._sides: Sides | None = None
        self._results: list[Any] = []
        self._expected: list[Any] = []

    def run(self, runs: int) -> list[Finding]:
        """Run the call and compare."""
        try:
            refuse_weights(self._module)
        except SignatureError as error:
            raise ModelFailed(error.what, remedy=error.remedy) from error
        undo = PythonState(self._module)
        caches = sizes_of_caches() if self._pretend else {}
        seeded = torch.random.get_rng_state()
        try:
            self._alone()
            for _ in range(runs):
                if not self._once():
                    return self._found.all()
                try:
                    undo.check()
                except CaptureError as error:
                    self._found.add(obstacles.STATE, Place(), "", error.what)
            self._randomness(undo)
            self._compare()
        finally:
            undo.restore(python=True)
            torch.random.set_rng_state(seeded)
            # They may hold tensors that were said to be on a GPU.
            clear_what_grew(caches)
        for hook in hooks_of(self._module):
            self._found.add(*hook)
        kernels = self._runs[0].kernels
        if kernels <= _FEW_KERNELS:
            what = ("nothing", "one operation", f"{kernels} operations")[min(kernels, 2)]
            self._found.add(obstacles.SMALL, Place(), "", f"{what} on the GPU")
        return self._found.all()

    def _alone(self) -> None:
        """Run the call without telling it of a capture; it may import and fill caches.

        Raises:
            ModelFailed: it raises.
        """
        try:
            self._expected = [
                leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                for leaf in pytree.tree_leaves(self._seen(self._observer(), told=False))
            ]
        except Exception as error:
            if self._lies:
                # It asks where it is, and takes a way that only a GPU has.
                self._lies = False
                self._alone()
                return
            raise ModelFailed(
                f"The call raises by itself: {first_line(error)}", where=user_frame(error)
            ) from error

    def _once(self) -> bool:
        """Run the call as if it were captured; False where it fails for no other reason."""
        observer = self._observer()
        try:
            self._results.append(self._seen(observer, told=True))
        except Exception as error:
            if self._lies:
                self._lies = False
                self._runs.clear()
                self._results.clear()
                self._alone()
                return self._once()
            self._found.merge(observer.found)
            self._found.add(obstacles.FAILS, place_of_error(error), "", first_line(error))
            return False
        self._found.merge(observer.found)
        self._runs.append(observer)
        return True

    def _seen(self, observer: Observer, *, told: bool) -> Any:
        """What the call returns while an observer looks on; what it writes to is put back."""
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                warnings.catch_warnings(),
                compilers_off(),
                collection_off(),  # What it calls back is no part of the call.
                capturing_seems_on() if told else contextlib.nullcontext(),
                cuda_watched(observer.found, pretend=self._pretend),
                python_watched(observer.found),
                Calls(observer),
                observer,
            ):
                warnings.simplefilter("ignore")
                return self._fn(*self._args, **self._kwargs)
        finally:
            observer.undo()

    def _observer(self) -> Observer:
        if self._sides is None or self._sides.lies is not self._lies:
            self._sides = Sides(self._pretend, lies=self._lies)
        sides = self._sides
        names: dict[int, str] = {}
        of_module = [
            *((f"the parameter {n}", t) for n, t in self._module.named_parameters()),
            *((f"the buffer {n}", t) for n, t in self._module.named_buffers()),
        ]
        arguments = zip(argument_names(self._args, self._kwargs), self._leaves, strict=True)
        of_call = [(f"the argument {n}", t) for n, t in arguments if isinstance(t, torch.Tensor)]
        for name, tensor in (*of_module, *of_call):
            if tensor.layout is torch.strided:
                names[tensor.untyped_storage()._cdata] = name
                sides.put(tensor, Side.DEVICE)
        for _, tensor in of_call:
            sides.put(tensor, None, Origin.INPUT)
        return Observer(sides, names)

    def _compare(self) -> None:
        """What differs between runs of one call, and from one that is not told of a capture."""
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
        """Whether runs return the same, and the same as one that is not told of a capture."""
        if any(f.kind in _CHANCE for f in self._found.all()):
            return
        first, *others = self._results
        try:
            for other in others:
                same_when_told(other, pytree.tree_leaves(first))
        except CaptureError:
            self._found.add(obstacles.VARIES, Place(), "")
            return
        try:
            same_when_told(first, self._expected)
        except CaptureError as error:
            self._found.add(obstacles.OTHERWISE, Place(), "", error.what)

    def _randomness(self, undo: PythonState) -> None:
        """Python's and NumPy's random numbers whose draw was not seen."""
        if any(f.kind == obstacles.HOST_RANDOM.name for f in self._found.all()):
            return
        try:
            undo.refuse_host_randomness(torch.device("cpu"), [])
        except CaptureError as error:
            source = error.what.partition(" from ")[2].partition(";")[0]
            self._found.add(obstacles.HOST_RANDOM, Place(), source)
