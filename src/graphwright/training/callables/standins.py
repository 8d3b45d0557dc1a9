"""The tensors that a call's gradients go to, and what stands in for them while it is recorded.

A gradient is accumulated by a node of autograd that belongs to the tensor, remembers the stream of
its first use, and runs the tensor's hooks. A capture must do none of that: it works on stand-ins,
which share the tensors' memory and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...errors import CaptureError

# What belongs to the tensor itself, not to its memory.
_OF_ITS_OWN = ("__hash__", "register_hook", "register_post_accumulate_grad_hook")
_DESCRIPTOR: Any = torch.Tensor.grad
_GRAD = _DESCRIPTOR.__get__


class StandIns(TorchFunctionMode):
    """Inside its block, what a module computes goes by stand-ins of some tensors.

    They take the place of the modules' parameters and, where that is not enough, of arguments of
    PyTorch's functions. (torch.compile would compile anew for each mode that sees functions.)

    Attributes:
        tensors: the stand-ins, in the order of the tensors.
    """

    def __init__(
        self, module: nn.Module, originals: Sequence[torch.Tensor], *, everywhere: bool
    ) -> None:
        """`everywhere` is for modules that hold parameters in other places too."""
        super().__init__()
        self.tensors = [_stand_in(tensor) for tensor in originals]
        self._originals = originals
        self._of = {id(t): s for t, s in zip(originals, self.tensors, strict=True)}
        # nn.RNN and its kind hold them in a list, too, and would make that list anew.
        self._holders: list[Any] = [
            m._parameters for m in module.modules() if not isinstance(m, nn.RNNBase)
        ]
        held = {id(p) for h in self._holders if isinstance(h, dict) for p in h.values()}
        self._seeing = everywhere or any(id(tensor) not in held for tensor in originals)
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> StandIns:
        for holder in self._holders:
            if isinstance(holder, dict) and any(id(p) in self._of for p in holder.values()):
                self._held.append((holder, dict(holder)))
                for name, parameter in holder.items():
                    if id(parameter) in self._of:
                        holder[name] = self._of[id(parameter)]
        if self._seeing:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._seeing:
            super().__exit__(*exc)  # type: ignore[no-untyped-call]
        replaced = False
        mine = {id(s) for s in self.tensors}
        for holder, held in self._held:
            for name, parameter in held.items():
                if id(parameter) in self._of:
                    replaced |= id(holder.get(name)) not in mine
                    holder[name] = parameter
        self._held = []
        moved = any(
            s.data_ptr() != t.data_ptr() for s, t in zip(self.tensors, self._originals, strict=True)
        )
        if (moved or replaced) and exc[0] is None:
            raise CaptureError(
                "The call gives a parameter other memory, which a graph cannot repeat.",
                remedy="Write to the parameter in place, under torch.no_grad().",
            )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _OF_ITS_OWN or func == _GRAD:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._for, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def _for(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._of.get(id(tensor), tensor)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise CaptureError(
            f"A parameter is a {type(tensor).__qualname__} of layout {tensor.layout}, which a "
            "graph cannot hold.",
            remedy="Use dense parameters of PyTorch's own class; run a lazy module once before.",
        )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach())
    return tensor.detach().requires_grad_()


def next_node() -> int:
    """The number that the next node of autograd on this thread gets."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def leaves_behind(outputs: Sequence[torch.Tensor], since: int) -> list[torch.Tensor]:
    """The leaves that gradients of some outputs go to.

    Args:
        outputs: what a call has returned, as far as it requires grad.
        since: the number of the first node that the call can have made.

    Raises:
        CaptureError: a gradient goes on into what was computed before the call.
    """
    found: list[torch.Tensor] = []
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()  # Holds the nodes, which have no identity of their own otherwise.
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor) and node.name().endswith("AccumulateGrad"):
            found.append(variable)
            continue
        if node._sequence_nr() < since:
            raise CaptureError(
                "The call uses a tensor that was computed before it and requires grad; its "
                f"gradient would be lost ({node.name()}).",
                remedy="Pass that tensor as an argument, or compute it in the call.",
            )
        waiting += [after for after, _ in reversed(node.next_functions) if after is not None]
    return found
