"""TakenApart: a model as it is called with objects, as a module of tensors alone.

Compilers and rewrites know tensors. Caches, dataclasses and other objects among the arguments are
taken apart; the model is called with objects that are built of the tensors, and what it returns and
does to these is taken apart again. Whoever calls what was made of this module builds the result,
and does to the caller's own objects what the model did to those.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.dependencies import Dependencies
from ..calls.modes import opaque
from ..calls.objects import giving, has_objects, objects_key
from ..calls.serialization import TreeTemplate
from ..calls.signature import CallSignature
from ..calls.snapshots import ModuleState, clone_leaves
from ..calls.split import Args, Kwargs, argument_names, flatten, objects_tree
from ..errors import SignatureError
from ..evaluation.clock import medians_in_turns
from .effects import GivenObjects, Outcome, Unrepeatable


@dataclass(frozen=True)
class ApartCall:
    """A call whose objects were taken apart.

    Attributes:
        template: its arguments without their tensors.
        tensors: those of the sample.
        names: of the tensors.
        signature: of such calls.
    """

    template: TreeTemplate
    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    signature: CallSignature

    @classmethod
    def of(cls, args: Args, kwargs: Kwargs, *, any_order: bool = False) -> ApartCall:
        """Take the arguments of a sample call apart.

        Args:
            args: of the call.
            kwargs: likewise.
            any_order: as for `CallSignature.of`.

        Raises:
            SignatureError: one cannot be looked into.
        """
        signature = CallSignature.of(args, kwargs, objects=True, any_order=any_order, lasts=True)
        leaves, spec = flatten(args, kwargs, objects=True)
        names = argument_names(args, kwargs, objects=True)
        template = TreeTemplate.of(leaves, spec)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return cls(template, tensors, tuple(names[slot] for slot in template.slots), signature)

    @functools.cached_property
    def kind(self) -> Any:
        """What calls share that differ in their tensors alone."""
        plain = tuple(leaf if len(leaf) != 5 else None for leaf in self.signature.leaves)
        return self.signature.spec, plain

    def anew(self) -> tuple[Args, Kwargs]:
        """The sample's arguments, with tensors and objects of their own."""
        args, kwargs = self.template.fill(clone_leaves(self.tensors))
        return args, kwargs


@dataclass
class _Known:
    """What is known of a model once it has run.

    Attributes:
        owned: what it holds, which stays the same.
        made: what it returns and does, without tensors, for each kind of call.
    """

    owned: list[Any]
    made: dict[str, TreeTemplate] = field(default_factory=dict)


# Not as an attribute, which would be watched.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


class _ThisCall(threading.local):
    """The call of this thread.

    Attributes:
        made: what the model has made, if its Python has run.
        eager: whether it may make anything, whatever has to be alike.
    """

    made: TreeTemplate | None = None
    eager = False


_THIS_CALL = _ThisCall()


class TakenApart(nn.Module):
    """A model whose tensors are its arguments and results, for calls of some kinds.

    Attributes:
        model: the model.
        templates: of the arguments, for each kind of call.

    With `alike`, calls of a kind raise SignatureError where results and effects differ in more than
    their tensors, as those of calls of several sizes may; not in a block of `eager_results`.
    """

    def __init__(
        self, model: nn.Module, templates: Sequence[TreeTemplate], *, alike: bool = False
    ) -> None:
        super().__init__()
        self._alike = alike
        self.training = model.training
        self.model = model
        # By text, which compilers take for what it is; an integer might become a symbol.
        self.templates = {str(number): each for number, each in enumerate(templates)}

    def forward(self, *tensors: torch.Tensor, kind: str = "0") -> list[torch.Tensor]:
        """The tensors of what the model returns, and of what it does to its objects."""
        args, kwargs, given = self._built(tensors, kind)
        return self._taken(given, self.model(*args, **kwargs), kind)

    # Compilers see through neither of these, and take what stands between them.

    @opaque
    def _built(
        self, tensors: Sequence[torch.Tensor], kind: str
    ) -> tuple[Args, Kwargs, GivenObjects]:
        """The arguments of a call of the model, and the objects among them as they are now."""
        args, kwargs = self.templates[kind].fill(tensors)
        return args, kwargs, GivenObjects(objects_tree(args, kwargs))

    @opaque
    def _taken(self, given: GivenObjects, result: Any, kind: str) -> list[torch.Tensor]:
        known = _KNOWN.get(self)
        if known is None:
            known = _KNOWN[self] = _Known(Dependencies(self.model, whole=True).objects)
        try:
            tree, _ = given.outcome(result, owned=known.owned)
        except Unrepeatable as error:
            raise SignatureError(
                f"The call changes a container that it is given, {error}.",
                remedy="Return what is new instead, or use graphwright.graph().",
            ) from error
        leaves, spec = pytree.tree_flatten(tree)
        made = TreeTemplate.of(leaves, spec)
        first = known.made.setdefault(kind, made)
        if not self._alike or _THIS_CALL.eager:
            _THIS_CALL.made = made
        elif made != first:
            raise SignatureError(
                "What the call returns, or does to its objects, depends on the sizes beside the "
                "tensors.",
                remedy="Leave numbers that are computed of sizes out of the objects.",
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def made(self, number: int, tensors: Sequence[torch.Tensor]) -> TreeTemplate:
        """What the model returns and does in calls of a kind, without tensors.

        It runs once, where that is not known, on copies of these tensors.
        """
        kind = str(number)
        if self not in _KNOWN or kind not in _KNOWN[self].made:
            state = ModuleState(self)
            try:
                with torch.no_grad():
                    self(*clone_leaves(tensors), kind=kind)
            finally:
                state.restore()
        return _KNOWN[self].made[kind]


@contextlib.contextmanager
def eager_results() -> Iterator[None]:
    """Inside the block, eager calls of a `TakenApart` give whatever the model gives."""
    before, _THIS_CALL.eager = _THIS_CALL.eager, True
    try:
        yield
    finally:
        _THIS_CALL.eager = before


def kind_of(number: int, count: int) -> dict[str, str]:
    """The keyword arguments of a `TakenApart` for a kind of call, of this many."""
    return {"kind": str(number)} if count > 1 else {}


def with_objects(
    call: Callable[..., Any],
    signature: CallSignature,
    made: TreeTemplate,
    kind: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """What answers calls of a model by something that was made of it taken apart.

    Args:
        call: what was made; it takes the tensors of the arguments, and gives those of the results.
        signature: of calls of the model.
        made: what results are beside tensors.
        kind: keyword arguments that `call` takes beside the tensors.
    """
    named = kind or {}

    def answer(*args: Any, **kwargs: Any) -> Any:
        leaves, objects = signature.taken_apart(args, kwargs)
        _THIS_CALL.made = None
        found = call(*[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], **named)
        # Where the model's Python has run, this call may be another than the first.
        with giving(objects):
            result = (_THIS_CALL.made or made).fill(found)
        return result.happen(objects) if isinstance(result, Outcome) else result

    return answer


def seconds_with_objects(
    answer: Callable[..., Any], model: nn.Module, call: ApartCall, rounds: int
) -> tuple[float, float]:
    """The median seconds of a call with objects: of what answers it, and of the model itself.

    To take objects apart takes time, too.
    """
    devices = (tensor.device for tensor in call.tensors if tensor.device.type != "cpu")
    device = next(devices, torch.device("cpu"))
    state = ModuleState(model)

    def prepared(function: Callable[..., Any]) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            args, kwargs = call.anew()
            return functools.partial(function, *args, **kwargs)

        return prepare

    try:
        with torch.no_grad():
            both = [prepared(answer), prepared(model)]
            mine, its = medians_in_turns(both, device, rounds=rounds)
    finally:
        state.restore()
    return mine, its


def key_with_objects(args: Args, kwargs: Kwargs) -> Any:
    """What calls share whose objects have the same shapes; other calls may share it too."""
    return objects_key((*args, *(value for _, value in sorted(kwargs.items()))))


def holds_objects(args: Args, kwargs: Kwargs) -> bool:
    """Whether there is an object among the arguments of a call."""
    try:
        if not has_objects(pytree.tree_leaves((args, kwargs))):
            return False
        return CallSignature.of(args, kwargs, objects=True).has_objects
    except (SignatureError, RecursionError):
        return False  # It is refused by name, as other calls are.
