"""Notice whatever makes work that was built from a module out of date.

`ModuleWatch` describes what a module holds beside its parameters' values; a plain function is
watched as a module that holds what the function reaches.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .signature import SCALARS, describe, guard_of

_MAX_COMPILED = 200
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
# Every module has these, and no inference depends on them.
_OF_NO_CONSEQUENCE = {*vars(nn.Module()), "_is_hf_initialized"} - {"training"}


class ModuleWatch:
    """Notices whatever makes work that was built from a module out of date.

    Watched: parameters, buffers, submodules and attributes (`training` among them) by identity,
    tensors by address and shape too; forward hooks; for a plain function also the modules and
    tensors that it names. With `values=True` also in-place changes of tensors, for work that holds
    a copy of the weights or has folded them.

    Not watched: what is inside of attributes that are lists, dictionaries or other objects, what a
    Python function reaches by other ways, and, with `values=True`, writes that leave a tensor's
    version as it is (through `.data`, numpy or a pointer). The watch keeps the tensors' memory
    alive, so that what was built never reads memory that was given to others, and no address comes
    back.

    Attributes:
        memory: that of all tensors that it watches.
    """

    def __init__(self, module: nn.Module, *, values: bool, training: bool = False) -> None:
        """Begin to watch.

        Args:
            module: what is watched.
            values: also notice in-place changes of tensors.
            training: watch hooks for the backward too, and no hook of the module itself: for work
                that stands for its `forward`, around which they run.
        """
        self.values = values
        self._function = module if isinstance(module, FunctionModule) else None
        self._reached = self._reach()
        self._hooks: list[dict[Any, Any]] = []
        self._holders: list[dict[str, Any]] = []
        self._getters: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        for child in module.modules():
            attributes = child.__dict__
            if not training or child is not module:
                kinds = (*_FORWARD_HOOKS, *_BACKWARD_HOOKS) if training else _FORWARD_HOOKS
                self._hooks += [attributes[kind] for kind in kinds]
            self._holders += [child._parameters, child._buffers, child._modules]
            watched = _watched(attributes)
            if watched:
                # Twice the first name: for one alone itemgetter gives no tuple.
                get = operator.itemgetter(watched[0], *watched)
                self._getters.append((get, attributes))
        self._filled = [holder for holder in self._holders if holder]
        self._empty = [holder for holder in (*self._holders, *self._hooks) if not holder]
        self._hooks = [hooks for hooks in self._hooks if hooks]
        self._hooked = [dict(hooks) for hooks in self._hooks]
        # A method that was put in place of a class's own (LoRA, offloading) is a new attribute.
        self._sized = [*self._filled, *(attributes for _, attributes in self._getters)]
        self._sizes = list(map(len, self._sized))
        self._held = self._now()
        self._tensors = [
            v for v in self._held if isinstance(v, torch.Tensor) and v.layout is torch.strided
        ]
        self.memory = [tensor.untyped_storage() for tensor in self._tensors]
        self._addresses = list(map(_ADDRESS, self._tensors))
        self._unique = list({id(tensor): tensor for tensor in self._tensors}.values())
        self._geometries = list(map(_geometry, self._unique))
        self._trained = [t.requires_grad for t in self._unique] if training else None
        self._guard = guard_of(self._unique)
        self._versions = _versions(self._tensors) if values else []
        self.unchanged = self._compiled(module)

    def _unchanged(self) -> bool:
        return self.changed() is None

    def _compiled(self, module: nn.Module) -> Callable[[], bool]:
        """`changed() is None` as one expression, which is twice as fast, where it is short enough.

        It may say no where nothing has changed, to an equal value in another object.
        """
        if self._function is not None or self._hooked or len(self._held) > _MAX_COMPILED:
            return self._unchanged
        names: dict[str, Any] = {}

        def name(value: Any) -> str:
            names[f"x{len(names)}"] = value
            return f"x{len(names) - 1}"

        terms = [f"not {name(holder)}" for holder in self._empty]
        for holder in self._filled:
            it = name(holder)
            terms.append(f"len({it}) == {len(holder)}")
            terms += [f"{it}[{key!r}] is {name(value)}" for key, value in holder.items()]
        for child in module.modules():
            attributes = child.__dict__
            it = name(attributes)
            terms.append(f"len({it}) == {len(attributes)}")
            for key in _watched(attributes):
                terms.append(f"{it}[{key!r}] is {name(attributes[key])}")
        for tensor in self._tensors:
            terms.append(f"{name(tensor.data_ptr)}() == {tensor.data_ptr()}")
            if self.values and not tensor.is_inference():
                terms.append(f"{name(tensor)}._version == {tensor._version}")
        terms.append(f"not {name(self._reshaped)}()")
        if self._trained is not None:
            terms.append(f"not {name(self._thawed)}()")
        source = (
            f"def make({', '.join(names)}):\n"
            " def unchanged():\n"
            "  try:\n"
            f"   return {' and '.join(terms)}\n"
            "  except KeyError:\n"  # One name has gone and another has come.
            "   return False\n"
            " return unchanged\n"
        )
        namespace: dict[str, Any] = {}
        exec(source, namespace)  # of names and addresses made here
        made: Callable[[], bool] = namespace["make"](**names)
        return made

    def _reach(self) -> list[Any]:
        """What a plain function names, by identity."""
        return [] if self._function is None else self._function.reached()

    def _reaches_others(self) -> bool:
        now = self._reach()
        return len(now) != len(self._reached) or any(map(operator.is_not, now, self._reached))

    def _now(self) -> list[Any]:
        chain = itertools.chain.from_iterable
        values = [get(attributes) for get, attributes in self._getters]
        return [*chain(holder.values() for holder in self._filled), *chain(values)]

    def changed(self) -> str | None:
        """What has changed since the watch was made, in words, or None."""
        if any(self._empty) or list(map(len, self._sized)) != self._sizes:
            return "a parameter, buffer, submodule, attribute or forward hook was added or removed"
        try:
            now = self._now()
        except KeyError:
            return "an attribute of a module was deleted"
        if any(map(operator.is_not, now, self._held)):
            for index, (new, old) in enumerate(zip(now, self._held, strict=True)):
                if new is not old and not _same_scalar(new, old):
                    return _what_was_replaced(new, old)
                self._held[index] = new  # An equal value in another object: `x.eps = 1e-5`.
        if list(map(_ADDRESS, self._tensors)) != self._addresses:
            return "the memory of a parameter or buffer moved"
        if self._reshaped():
            return "the shape or strides of a parameter or buffer changed"
        if self.values and _versions(self._tensors) != self._versions:
            return "a parameter or buffer changed in place, and the chosen strategy holds a copy"
        if self._thawed():
            return "a parameter or buffer was frozen, or is trained by now"
        if self._hooked and self._hooks != self._hooked:
            return "a forward hook was added or removed"
        if self._function is not None and self._reaches_others():
            return "the function now names another module or tensor"
        return None

    def _thawed(self) -> bool:
        if self._trained is None:
            return False
        return [tensor.requires_grad for tensor in self._unique] != self._trained

    def _reshaped(self) -> bool:
        if self._guard is not None and self._guard(*self._unique):
            return False
        return list(map(_geometry, self._unique)) != self._geometries

    def rebound(self) -> bool:
        """Whether a tensor that was watched is held no longer, or has moved, for good."""
        if self._function is not None and self._reaches_others():
            return True
        held = {id(value) for value in self._now_or_nothing()}
        return any(id(tensor) not in held for tensor in self._tensors) or (
            list(map(_ADDRESS, self._tensors)) != self._addresses or self._reshaped()
        )

    def _now_or_nothing(self) -> list[Any]:
        try:
            return self._now()
        except KeyError:
            return []


def _watched(attributes: Mapping[str, Any]) -> list[str]:
    """Attributes of a module that are its class's own, not nn.Module's."""
    return [name for name in attributes if name not in _OF_NO_CONSEQUENCE]


def _same_scalar(a: Any, b: Any) -> bool:
    scalars = isinstance(a, SCALARS) and isinstance(b, SCALARS)
    return scalars and describe(a) == describe(b)


def _what_was_replaced(new: Any, old: Any) -> str:
    if isinstance(old, SCALARS):
        return f"an attribute of a module changed from {old!r} (train() or eval(), for example)"
    return "a parameter, buffer, submodule or tensor attribute was replaced"


_ADDRESS = torch.Tensor.data_ptr


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _versions(tensors: Sequence[Any]) -> list[int]:
    # Inference tensors keep no version counter; they cannot change outside inference mode.
    return [0 if t.is_inference() else t._version for t in tensors]


def in_training(module: nn.Module) -> bool:
    """Whether a module is in training mode; a frozen script has no mode."""
    return bool(getattr(module, "training", False))


class FunctionModule(nn.Module):
    """A plain function as a module, with the modules and tensors that it reaches as its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.training = False
        self._function = function
        for name, value in modules_behind(function):
            if isinstance(value, nn.Module):
                self._modules[name] = value
                self.training |= in_training(value)
            else:
                self._buffers[name] = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def reached(self) -> list[Any]:
        """What it reaches now: for another one in its place it would be another function."""
        return [value for _, value in modules_behind(self._function)]


def modules_behind(function: Callable[..., Any]) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """Modules and tensors that a plain function reaches: by closure, default, global or method.

    One level deep: containers and helper functions are not searched.
    """
    for name, value in values_behind(function):
        if isinstance(value, nn.Module | torch.Tensor):
            yield name, value


def values_behind(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Whatever a plain function reaches by closure, default, global or method, by name.

    What a decorator or torch.compile has wrapped counts as the function too.
    """
    inner = getattr(function, "_torchdynamo_orig_callable", None)
    inner = getattr(function, "__wrapped__", None) if inner is None else inner
    if inner is not None and not isinstance(function, nn.Module):
        if isinstance(inner, nn.Module):
            yield "wrapped", inner
        else:
            for name, value in values_behind(inner):
                yield f"wrapped_{name}", value
    while isinstance(function, functools.partial):
        for index, value in enumerate((*function.args, *function.keywords.values())):
            yield f"partial_{index}", value
        function = function.func
    owner = getattr(function, "__self__", None)
    if not isinstance(function, types.FunctionType | types.MethodType | nn.Module):
        owner = function  # An object with __call__.
    if isinstance(owner, nn.Module):
        yield "self", owner
    elif hasattr(owner, "__dict__") and not isinstance(owner, types.ModuleType):
        for name, value in vars(owner).items():
            yield f"self_{name}", value
        function = getattr(function, "__call__", function)  # noqa: B004  # fetched, not asked for
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return
    code = function.__code__
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # The cell is still empty.
            continue
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default_{index}", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"default_{name}", value
