"""Dispatch modes, which see the operations of a block one by one, and process-wide switches."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from . import forking

_Function = TypeVar("_Function", bound=Callable[..., Any])


class SharedSwitch:
    """A process-wide switch that several threads may need at the same time.

    The first one throws it, the last one puts it back.
    """

    def __init__(self, throw: Callable[[], Callable[[], object]]) -> None:
        """`throw` throws the switch and returns what puts it back."""
        self._throw = throw
        self._lock = forking.lock()
        self._users = 0
        self._back: Callable[[], object] = lambda: None
        os.register_at_fork(after_in_child=self._put_back_after_fork)

    def throw(self) -> None:
        """Throw the switch, or keep it thrown, until `put_back` is called."""
        with self._lock:
            if self._users == 0:
                self._back = self._throw()
            self._users += 1

    def put_back(self) -> None:
        """Put the switch back, unless another `throw` is still in effect."""
        with self._lock:
            if self._users == 0:  # A fork has put it back.
                return
            self._users -= 1
            if self._users == 0:
                self._back()

    def _put_back_after_fork(self) -> None:
        """Put it back in a forked child, which has none of the other threads."""
        if self._users:
            self._users = 0
            self._back()

    @contextlib.contextmanager
    def thrown(self) -> Iterator[None]:
        """Keep the switch thrown inside the block."""
        self.throw()
        try:
            yield
        finally:
            self.put_back()


@contextlib.contextmanager
def compilers_off() -> Iterator[None]:
    """Run torch.compile'd functions as plain Python inside the block, on all threads.

    Under a dispatch mode TorchDynamo neither compiles nor runs compiled code. It also marks the
    code that it meets there, and never compiles that again in this process.
    """
    with _COMPILERS_OFF.thrown():
        yield


class _ForcedEager:
    """Has TorchDynamo compile nothing, from its import on if that has not happened yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._stance: Any = None
        self._compile: Any = None
        if "torch._dynamo" in sys.modules:
            self._force_eager()
            return
        # Importing it takes more than a second, and most programs never need it.
        compile_ = self._compile = torch.compile

        @functools.wraps(compile_)
        def compile_later(*args: Any, **kwargs: Any) -> Any:
            importlib.import_module("torch._dynamo")  # Not while the lock is held.
            with self._lock:
                if self._stance is None and not self._over:
                    self._force_eager()
            return compile_(*args, **kwargs)

        torch.compile = compile_later

    def _force_eager(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")

    def end(self) -> None:
        """Put back what was there before."""
        with self._lock:
            self._over = True
            if self._compile is not None:
                torch.compile = self._compile
            if self._stance is not None:
                self._stance.__exit__(None, None, None)


_COMPILERS_OFF = SharedSwitch(lambda: _ForcedEager().end)


class _Recording(threading.local):
    """What this thread is inside of.

    Attributes:
        depth: how many blocks of `cached_weights_refused`.
    """

    depth = 0


_RECORDING = _Recording()


class _RefusingCache(dict[Any, Any]):
    """Stands for the cache of `parametrize.cached()`, which no recording may use."""

    def __init__(self, real: dict[Any, Any]) -> None:
        super().__init__()
        self.real = real

    def get(self, key: Any, default: Any = None) -> Any:
        if _RECORDING.depth:
            raise CaptureError(
                "The call uses a parametrized weight inside of "
                "torch.nn.utils.parametrize.cached(): a graph could not share it with the block's "
                "other calls.",
                remedy="Call it outside of the block, or open the block in what is captured: in "
                "the model's forward, or in the step.",
            )
        return self.real.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.real[key] = value


def _refuse_cached_weights() -> Callable[[], object]:
    ours = _RefusingCache(parametrize._cache)
    parametrize._cache = ours

    def put_back() -> None:
        if parametrize._cache is ours:  # Another thread may have left its block.
            parametrize._cache = ours.real

    return put_back


_NO_CACHED_WEIGHTS = SharedSwitch(_refuse_cached_weights)


@contextlib.contextmanager
def cached_weights_refused() -> Iterator[None]:
    """Refuse weights that an open block of `parametrize.cached()` shares, on this thread.

    Eager computes them at their first use in the block, and then no more. What is recorded inside
    would either compute them each time, or keep those of this block. A block that is opened inside
    of what is recorded is part of it.
    """
    if not parametrize._cache_enabled:
        yield
        return
    with _NO_CACHED_WEIGHTS.thrown():
        _RECORDING.depth += 1
        try:
            yield
        finally:
            _RECORDING.depth -= 1


class OperationMode(TorchDispatchMode):
    """A dispatch mode: inside its block it runs the operations in PyTorch's place.

    Functions compiled by torch.compile run as plain Python there: see `compilers_off`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations

    def __enter__(self) -> Any:
        _COMPILERS_OFF.throw()
        try:
            return super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            _COMPILERS_OFF.put_back()
            raise

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)  # type: ignore[no-untyped-call]
        finally:
            _COMPILERS_OFF.put_back()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch has to keep TorchDynamo away from this mode.

        For that it would import TorchDynamo, which takes more than a second.
        """
        return not hasattr(eval_frame, "set_code_exec_strategy")

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of ATen; `kwargs` may be changed."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.run(func, args, dict(kwargs or {}))


def opaque(function: _Function) -> _Function:
    """Mark a function that TorchDynamo must not trace: it breaks its graph there and calls it.

    This does what `torch.compiler.disable` does, also for all that the function calls, but at no
    cost per call. Functions that were compiled on their own still run compiled inside.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # by this TorchDynamo knows
    function._torchdynamo_disable_msg = "graphwright's own: compile what is inside of it"  # type: ignore[attr-defined]  # likewise
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


if not OperationMode._should_skip_dynamo():
    opaque(OperationMode.__torch_dispatch__)
