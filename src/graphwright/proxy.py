"""A module that stands in for another one: same attributes, another way to be called."""

from __future__ import annotations

from typing import Any

from torch import nn

from .dependencies import StandIn
from .modes import opaque
from .watch import FunctionModule

# What torch.compile keeps on the module that it returns concerns that one alone: with it, another
# torch.compile would take what stands for that module for compiled, or refuse it.
_OF_COMPILED = ("_torchdynamo_orig_callable", "_torchdynamo_wrapper_id", "get_compiler_config")


class _Hidden:
    """An attribute that the module may have, and its stand-in has not."""

    def __get__(self, owner: object, of: type | None = None) -> Any:
        raise AttributeError

    def __set__(self, owner: object, value: Any) -> None:
        raise AttributeError


class ModuleProxy(nn.Module, StandIn):
    """Shares a module's attributes; subclasses say how it is called.

    parameters(), state_dict(), to(), train(), hooks and all else read and change the one module.
    What a subclass keeps for itself goes into slots, set by `object.__setattr__`.
    """

    __slots__ = ("_original",)

    _original: nn.Module

    def __init__(self, module: nn.Module) -> None:
        # One dictionary for both: whatever is set on the one is set on the other.
        object.__setattr__(self, "__dict__", module.__dict__)
        object.__setattr__(self, "_original", module)

    @property
    def _graphwright_stands_for(self) -> Any:
        return self._original

    @property
    def module(self) -> Any:
        """What this stands in for: a module, or a plain function."""
        original = self._original
        return original._function if isinstance(original, FunctionModule) else original

    @opaque
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling."""
        original = self._original
        if "forward" in vars(original):  # It is what somebody has wrapped this in.
            return type(original).forward(original, *args, **kwargs)
        return self(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module itself in place, as `torch.nn.Module.compile` does."""
        self._original.compile(*args, **kwargs)

    # Subclasses of nn.Module may override any of these; their own version has to run.

    def train(self, mode: bool = True) -> ModuleProxy:
        """Set the module's mode, as `torch.nn.Module.train` does."""
        self._original.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ModuleProxy:
        self._original._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state_dict, without a prefix."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module; weights that were copied are noticed."""
        return self._original.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # The first is asked for before it is set, by copying or unpickling.
        if name == "_original" or name in _OF_COMPILED:
            raise AttributeError(name)
        # Methods of the module's class; what they call is the module, not this object.
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Through the module's own class, which may have a property of that name.
        setattr(self._original, name, value)

    def __len__(self) -> int:
        return len(self._original)  # type: ignore[arg-type]  # a Sequential has a length

    _torchdynamo_orig_callable = _torchdynamo_wrapper_id = get_compiler_config = _Hidden()

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: Any) -> Any:
        return self._original[index]  # type: ignore[index]  # a Sequential has items
