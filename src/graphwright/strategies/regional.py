"""Regional compilation: a part that a model repeats is compiled once, for all its repetitions.

Deep models repeat one part, a layer of a transformer, say, a dozen times and more; compiled as a
whole, each repetition is traced, lowered and generated anew. What is between the parts stays eager.

The caller's modules are not touched: the parts are compiled in a twin of the model, a tree of
modules of its own that shares parameters, buffers and all other attributes.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ..calls.dependencies import FORWARD_HOOKS
from ..errors import StrategyFailed

# What is repeated less often, or is smaller, is not worth a compilation of its own.
_LEAST_REPETITIONS, _LEAST_LEAVES = 4, 2
# Modules that hold others and are never called.
_HOLDERS = (nn.ModuleList, nn.ModuleDict)
# Layers that do nothing in eval mode, by the end of their class's name, and their probability. It
# differs from one repetition to the next, and TorchDynamo would compile for each value.
_IDLE = {"DropPath": "drop_prob", "StochasticDepth": "p"}
# Values of attributes for which TorchDynamo compiles anew. It does so for integers, too, but a
# number that only counts the layers is often one that no call reads.
_TELLING = (float, bool, str)


class Twin:
    """A tree of modules like a model's, of the same classes, that shares all but the tree.

    Args:
        model: in eval mode.

    Attributes:
        module: the tree.
        parts: those that the model repeats, the outermost ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pairs: dict[int, tuple[nn.Module, nn.Module]] = {}
        self.module = self._of(model)
        self.parts = _repeated(self.module)

    def _of(self, module: nn.Module) -> nn.Module:
        if id(module) in self._pairs:
            return self._pairs[id(module)][1]
        idle = "" if module.training else _probability(module)
        if isinstance(module, torch.jit.ScriptModule) or not (module._modules or idle):
            return module
        made: nn.Module = object.__new__(type(module))
        self._pairs[id(module)] = module, made
        children = {
            name: None if child is None else self._of(child)
            for name, child in module._modules.items()
        }
        vars(made).update(vars(module), _modules=children)
        if idle:
            vars(made)[idle] = 0.0
        return made

    @property
    def counts(self) -> dict[str, int]:
        """How many parts there are, by the names of their classes."""
        return dict(Counter(type(part).__name__ for part in self.parts))

    def compile(self, compile_: Callable[[], Callable[..., Any]]) -> None:
        """Have the parts run what `compile_` makes of them.

        Args:
            compile_: makes a function that is called with a part and its arguments, and compiles
                it; it is called once for each class of part.

        Raises:
            StrategyFailed: nothing is repeated.
        """
        if not self.parts:
            raise StrategyFailed(
                f"{type(self.module).__name__} repeats no part {_LEAST_REPETITIONS} times or more",
                remedy="Use inductor, which compiles the model as a whole.",
            )
        compiled: dict[type, Callable[..., Any]] = {}
        for part in self.parts:
            if type(part) not in compiled:
                compiled[type(part)] = compile_()
            # As nn.Module.compile() does: whatever a class adds around a call stays around it.
            part._compiled_call_impl = functools.partial(compiled[type(part)], part)

    def refuse_changes(self) -> None:
        """Refuse a model that sets attributes when it is called: the twin's are others by then.

        Raises:
            StrategyFailed: an attribute of the twin is no longer the model's.
        """
        for module, made in self._pairs.values():
            own = {"_modules", "_compiled_call_impl", _probability(module)}
            for name in sorted(vars(made).keys() | vars(module).keys()):
                if name not in own and vars(made).get(name) is not vars(module).get(name):
                    raise StrategyFailed(
                        f"a call sets the attribute {name} of {type(module).__name__}, and here "
                        "that of a copy",
                        remedy="Use inductor.",
                    )


def refuse_hooks(model: nn.Module) -> None:
    """Refuse a model with hooks, which would be given the modules of a twin.

    Raises:
        StrategyFailed: it has forward hooks, or all modules have.
    """
    everywhere = any(vars(nn_module)[f"_global{kind}"] for kind in FORWARD_HOOKS)
    if everywhere or any(getattr(m, kind) for m in model.modules() for kind in FORWARD_HOOKS):
        raise StrategyFailed(
            "the model has forward hooks, which would be given copies of its modules",
            remedy="Remove them, or use inductor.",
        )


def _probability(module: nn.Module) -> str:
    """The name of the attribute that a layer need not have in eval mode; empty for other layers."""
    if module._modules or module._parameters or module._buffers:
        return ""
    ending = next((name for name in _IDLE if type(module).__name__.endswith(name)), "")
    attribute = _IDLE.get(ending, "")
    return attribute if attribute in vars(module) else ""


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The outermost parts of those classes that are repeated often, and half of them alike."""
    kinds: dict[type, Counter[object]] = defaultdict(Counter)
    for part in model.modules():
        if part is not model and part._modules and not isinstance(part, _HOLDERS):
            kinds[type(part)][_kind(part)] += 1
    wanted = {
        cls
        for cls, found in kinds.items()
        if cls is not nn.Sequential
        and found.total() >= _LEAST_REPETITIONS
        and 2 * len(found) <= found.total()
    }
    return list({id(part): part for part in _outermost(model, wanted)}.values())


def _outermost(module: nn.Module, wanted: set[type]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) in wanted and _is_large(child):
            yield child
        else:
            yield from _outermost(child, wanted)


def _is_large(part: nn.Module) -> bool:
    leaves = (each for each in part.modules() if not each._modules and each._parameters)
    return sum(1 for _ in leaves) >= _LEAST_LEAVES


def _kind(part: nn.Module) -> object:
    """What is equal for parts that one compilation serves, as far as it can be told beforehand."""
    tensors = [*part.named_parameters(), *part.named_buffers()]
    values = [
        (name, key, value)
        for name, each in part.named_modules()
        for key, value in vars(each).items()
        if isinstance(value, _TELLING)
    ]
    classes = tuple(type(each) for each in part.modules())
    shapes = tuple((name, tuple(t.shape), t.stride(), t.dtype) for name, t in tensors)
    return classes, shapes, repr(values)


def call_of(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A part's call, as it is without a compiler: what is compiled."""
    return part._call_impl(*args, **kwargs)
