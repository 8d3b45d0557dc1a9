"""TakenApart: a model as it is called with objects, as a module of tensors alone.

Compilers and rewrites know tensors. Caches, dataclasses and other objects among the arguments are
taken apart; the model is called with objects that are built of the tensors, and what it returns and
does to these is taken apart again. Whoever calls what was made of this module builds the result,
and does to the caller's own objects what the model did to those.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.dependencies import Dependencies
from ..calls.modes import opaque
from ..calls.objects import giving, has_objects
from ..calls.serialization import TreeTemplate
from ..calls.signature import Args, CallSignature, Kwargs, argument_names, flatten
from ..calls.snapshots import ModuleState, clone_leaves
from ..errors import SignatureError
from .effects import GivenObjects, Outcome, Unrepeatable, objects_of, objects_tree


@dataclass
class _Known:
    """What is known of a model once it has run.

    Attributes:
        owned: what it holds, which stays the same.
        made: what it returns and does, without tensors.
    """

    owned: list[Any]
    made: TreeTemplate | None = None


# Not as an attribute, which would be watched.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


class _ThisCall(threading.local):
    """What the model has made in the call of this thread, if its Python has run."""

    made: TreeTemplate | None = None


_THIS_CALL = _ThisCall()


class TakenApart(nn.Module):
    """A model for calls of one kind, whose tensors are its arguments and results.

    Attributes:
        model: the model.
        signature: of the calls.
        tensors: those of the sample's arguments.
        names: of these.
    """

    def __init__(self, model: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Take the arguments of a sample call apart; nothing runs yet.

        Raises:
            SignatureError: one cannot be looked into.
        """
        super().__init__()
        self.training = model.training
        self.model = model
        self.signature = CallSignature.of(args, kwargs, objects=True)
        leaves, spec = flatten(args, kwargs, objects=True)
        names = argument_names(args, kwargs, objects=True)
        self._call = TreeTemplate.of(leaves, spec)
        self.names = tuple(names[slot] for slot in self._call.slots)
        self.tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of what the model returns, and of what it does to its objects."""
        args, kwargs, given = self._built(tensors)
        return self._taken(given, self.model(*args, **kwargs))

    # Compilers see through neither of these, and take what stands between them.

    @opaque
    def _built(self, tensors: Sequence[torch.Tensor]) -> tuple[Args, Kwargs, GivenObjects]:
        """The arguments of a call of the model, and the objects among them as they are now."""
        args, kwargs = self._call.fill(tensors)
        return args, kwargs, GivenObjects(objects_tree(args, kwargs))

    @opaque
    def _taken(self, given: GivenObjects, result: Any) -> list[torch.Tensor]:
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
        _THIS_CALL.made = TreeTemplate.of(leaves, spec)
        known.made = known.made or _THIS_CALL.made
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def new_call(self) -> tuple[Args, Kwargs]:
        """The sample's arguments anew."""
        args, kwargs = self._call.fill(clone_leaves(self.tensors))
        return args, kwargs

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What answers calls of the model by something that was made of this module.

        It runs once, where that is not known, for what results are beside tensors.
        """
        made = self._made()

        def answer(*args: Any, **kwargs: Any) -> Any:
            leaves, _ = flatten(args, kwargs, objects=True)
            objects = objects_of(args, kwargs)
            _THIS_CALL.made = None
            found = call(*[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
            # Where the model's Python has run, this call may be another than the first.
            with giving(objects):
                result = (_THIS_CALL.made or made).fill(found)
            return result.happen(objects) if isinstance(result, Outcome) else result

        return answer

    def _made(self) -> TreeTemplate:
        if self not in _KNOWN:
            state = ModuleState(self)
            try:
                with torch.no_grad():
                    self(*clone_leaves(self.tensors))
            finally:
                state.restore()
        made = _KNOWN[self].made
        assert made is not None
        return made


def holds_objects(args: Args, kwargs: Kwargs) -> bool:
    """Whether there is an object among the arguments of a call."""
    if not has_objects(pytree.tree_leaves((args, kwargs))):
        return False
    try:
        return CallSignature.of(args, kwargs, objects=True).has_objects
    except SignatureError:
        return False  # It is refused by name, as other calls are.
