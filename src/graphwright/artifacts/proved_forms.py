"""Proofs that plain keyword arguments make no difference to a call.

Python shows that a keyword is its parameter's default only where nothing else binds the arguments.
The forwards of transformers' models are wrapped: what `return_dict=True` means is decided inside.
There the module itself runs on the caller's tensors, with the keywords and without: both runs must
do the same operations on the same tensors, return the same, and change nothing.

No proof is tried where anything is in doubt: see `is_same_call`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from ..calls.leaves import describe
from ..calls.modes import compilers_off
from ..calls.objects import layout_of
from ..calls.operations import HOST_READS, tensors
from ..calls.signature import CallSignature, RangedSignature
from ..calls.snapshots import same_bits
from ..calls.split import Args, Kwargs
from ..calls.threads import others_run
from ..graphs.capture_turns import Busy, turns_of
from ..graphs.conditions import as_captured, autocast_cache_apart, for_inference, pretend_capturing
from ..graphs.journal import Journal
from ..graphs.python_state import PythonState

# Forms of calls of one module for which a proof is tried.
_MAX_FORMS = 8
# Types of keyword arguments that may make no difference.
_PLAIN = (type(None), bool, int, float, str)
# Of PyTorch's, by their names: of each there is one object for a value.
_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device)
# What gets at a tensor's memory so that no operation shows it.
_UNSEEN = frozenset((*HOST_READS, "data_ptr", "storage", "untyped_storage", "_typed_storage"))
# Modules whose functions in C act on the outside world, or look at it.
_OUTSIDE = frozenset(("_io", "io", "posix", "nt", "time", "_socket", "_posixsubprocess", "mmap"))
_STREAM: Any = io.IOBase.__mro__[1]  # The base in C, which takes less time to ask for.
# Elements of a tensor made of Python's values up to which these are compared.
_MAX_DATA = 1 << 16
_MAX_DEPTH = 20


class _Doubt(BaseException):
    """There is no proof. Not an Exception: code that is being run must not take it for an error."""


class ProvedForms:
    """The forms of calls in which a module was called, and whether each equals a tuned one.

    Args:
        module: what was tuned.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Any, bool] = {}

    def in_form_of(
        self, signature: CallSignature | RangedSignature, args: Args, kwargs: Kwargs
    ) -> dict[str, Any] | None:
        """The keyword arguments of the tuned call that a call is the same as; None if of none.

        Args:
            signature: of the tuned call.
            args: of the call.
            kwargs: likewise.
        """
        base = signature.base if isinstance(signature, RangedSignature) else signature
        apart = kwargs.keys() ^ {*base.names}
        if not apart:
            return None
        values = base.plain_keywords() | dict(kwargs)
        if any(type(values.get(name, values)) not in _PLAIN for name in apart):
            return None
        mine = {name: values[name] for name in base.names}
        if not signature.fits(args, mine):
            return None
        # All else is as the signature has it, other than sizes in a range.
        differing = tuple((name, describe(values[name])) for name in sorted(apart))
        sizes = [x.shape for x in (*args, *mine.values()) if isinstance(x, torch.Tensor)]
        key = id(signature), (*kwargs,), differing, tuple(sizes)
        return mine if self._is_same(key, args, kwargs, mine) else None

    def _is_same(self, key: Any, args: Args, kwargs: Kwargs, mine: Kwargs) -> bool:
        """Whether a call is proved to be the same as with other keywords, now or before.

        Args:
            key: what such calls share.
            args: of both calls.
            kwargs: of the call.
            mine: of the other one.
        """
        if key in self._known:
            return self._known[key]
        if len(self._known) >= _MAX_FORMS or others_run() or sys.getprofile() is not None:
            return False
        try:
            known = self._known[key] = is_same_call(self._module, args, kwargs, mine)
        except Busy:
            return False
        return known


def is_same_call(module: nn.Module, args: Args, kwargs: Kwargs, other: Kwargs) -> bool:
    """Whether a call of a module is proved to be the same as with other keyword arguments.

    Both run, operation by operation. They must do the same operations, with equal numbers, on
    the same tensors; return the same trees of the same tensors and plain values; and change
    nothing, draw nothing, write nothing to files or to the console. No value of a tensor may
    decide what runs. If the host reads some that libraries leave alone in captures, the runs must
    be alike as eager code and also as in a capture, where nothing may be read.

    Args:
        module: it; nothing may be trained.
        args: of both calls.
        kwargs: of the call.
        other: of the other one.

    Raises:
        Busy: other threads take long in eager calls of the module.
    """
    if any(type(value) not in (torch.Tensor, *_PLAIN) for value in (*args, *kwargs.values())):
        return False
    turns = turns_of(module, getattr(module, "_function", None))
    with turns.alone(), for_inference(), as_captured():
        state = PythonState(module)
        changed = True
        try:
            pair = _Pair(module, args, (other, kwargs), state)
            same = pair.alike()
            if same and pair.reads:
                with pretend_capturing():
                    same = pair.alike() and not pair.reads
            changed = False
            return same
        except Busy:
            raise
        except (Exception, _Doubt):
            return False
        finally:
            state.restore(python=changed)


class _Pair:
    """Two calls of a module that may be the same.

    Args:
        module: it.
        args: of both.
        keywords: of either.
        state: of the module before them.

    Attributes:
        reads: whether the host had to see values of tensors in the last runs.
    """

    def __init__(
        self, module: nn.Module, args: Args, keywords: tuple[Kwargs, Kwargs], state: PythonState
    ) -> None:
        self.reads = False
        self._module = module
        self._args = args
        self._keywords = keywords
        self._state = state
        # What is known by its identity, which nothing else gets meanwhile.
        self._kept: list[Any] = []

    def alike(self) -> bool:
        """Run both; whether both do and return the same.

        Raises:
            _Doubt: one does what no operation shows.
            Exception: one cannot be run, or changes something.
        """
        first, second = (self._run(kwargs) for kwargs in self._keywords)
        self.reads = first.reads or second.reads
        return (
            first.steps == second.steps
            and first.returned == second.returned
            # What no operation has made shows in the values, if at all.
            and all(map(same_bits, first.results, second.results))
        )

    def _run(self, kwargs: Kwargs) -> _Trace:
        trace = _Trace(self._kept, self._state)
        try:
            with (
                autocast_cache_apart(),
                compilers_off(),
                trace,
                _RefuseUnseen(),
                self._state.refusing_advances(),
                _outside_refused(),
            ):
                result = self._module(*self._args, **kwargs)
            trace.end(result)
            if trace.wrote or self._state.changed() is not None:
                raise _Doubt
            trace.drop_unused_generators()
            self._state.refuse_host_randomness(torch.device("cpu"), ())
            if trace.generators:
                raise _Doubt
        finally:
            trace.undo()
        return trace


class _Trace(Journal):
    """What a run does and returns, in such words that the same run has the same.

    Args:
        kept: keeps alive what is known by its identity.
        state: of the module before the run.

    Attributes:
        steps: the operations with their arguments.
        returned: the run's result.
        results: the tensors in it.
    """

    def __init__(self, kept: list[Any], state: PythonState) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.returned: Any = None
        self.results: list[torch.Tensor] = []
        self._kept = kept
        self._state = state
        self._over = False
        # By tensor: which result of which operation it is.
        self._from: Any = WeakTensorKeyDictionary()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the operation, and run it."""
        with torch._C.DisableTorchFunction():
            if func is torch.ops.aten.lift_fresh.default:  # What was made of Python's values.
                given: Any = _data(args[0])
            else:
                given = self._told((args, kwargs), {})
            self.steps.append((func, given))
            result = super().run(func, args, kwargs)
            for number, tensor in enumerate(tensors(result)):
                if tensor not in self._from and id(tensor) not in map(id, tensors(args)):
                    self._from[tensor] = len(self.steps), number
            return result

    def end(self, result: Any) -> None:
        """Note what the run returns."""
        self._over = True
        self.returned = self._told(result, {})

    def _told(self, value: Any, seen: dict[int, int], depth: int = 0) -> Any:
        """A value in words; `seen` are the objects around and before it, by identity.

        What holds the value keeps them alive meanwhile.
        """
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if self._over:
                self.results.append(value)
            origin = self._from.get(value)
            if origin is not None:
                return "made", origin
            return self._itself(value)
        if kind in _PLAIN or kind is complex:
            return describe(value)
        if isinstance(value, _NAMED):
            return kind, value
        if self._state.reaches(value) or isinstance(value, type):
            return self._itself(value)
        if id(value) in seen:
            return "again", seen[id(value)]
        if depth > _MAX_DEPTH:
            raise _Doubt
        seen[id(value)] = len(seen)
        attributes, content = _inside(value)
        return (
            kind,
            tuple((name, self._told(each, seen, depth + 1)) for name, each in attributes.items()),
            tuple(
                (self._told(key, seen, depth + 1), self._told(each, seen, depth + 1))
                for key, each in content
            ),
        )

    def _itself(self, value: Any) -> Any:
        self._kept.append(value)
        return "itself", id(value)


class _RefuseUnseen(TorchFunctionMode):
    """Refuses functions of tensors that get at their memory unseen."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _UNSEEN:
            raise _Doubt
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _outside_refused() -> Iterator[None]:
    """Refuse functions that write to the console or to files, or look at the outside world.

    They are stopped before they run.
    """

    def look(frame: Any, event: str, called: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(called, "__self__", None)
        module = owner.__name__ if isinstance(owner, types.ModuleType) else None
        if called is print or called is input or module in _OUTSIDE or isinstance(owner, _STREAM):
            sys.setprofile(None)
            raise _Doubt

    # What garbage collection calls is nothing that the run does.
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


def _inside(value: Any) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """The attributes of an object, and what it holds as a container, with keys.

    Raises:
        _Doubt: it may be more than these.
    """
    kind = type(value)
    if isinstance(value, OrderedDict) and not any("__slots__" in vars(c) for c in kind.__mro__):
        return vars(value), [*value.items()]  # As transformers' results are.
    if kind is dict:
        return {}, [*value.items()]
    if kind is list or (isinstance(value, tuple) and not hasattr(value, "__dict__")):
        return {}, [*enumerate(value)]
    layout = layout_of(kind)
    if layout is None:
        raise _Doubt
    content = layout.content(value)
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    return layout.attributes(value), [*pairs]


def _data(tensor: torch.Tensor) -> Any:
    """The values of a tensor that was made of Python's."""
    if tensor.numel() > _MAX_DATA or tensor.layout is not torch.strided:
        raise _Doubt
    with _disable_current_modes():
        held = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return tensor.dtype, tensor.shape, tensor.device, bytes(held.tolist())
