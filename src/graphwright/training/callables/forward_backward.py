"""A call's forward and backward on static inputs, run in the way that they will be recorded.

Autograd accumulates a gradient in a node that belongs to the tensor, remembers the stream of its
first use, and runs the tensor's hooks. A capture must do none of that. So the passes work on
stand-ins for the trained tensors, which share their memory and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...calls.dependencies import Dependencies
from ...calls.modes import OperationMode
from ...calls.modules import FunctionModule
from ...calls.objects import apart, has_objects
from ...calls.operations import tensors
from ...calls.split import Args, Kwargs, argument_names, flatten, unflatten
from ...errors import CaptureError, first_line
from ...graphs.conditions import autocast_cache_apart
from ...graphs.static_inputs import Geometry, StaticInputs, is_dense

# Functions that act on the tensor object, not on its memory: they must not go to a stand-in.
_ON_OBJECT = ("__hash__", "register_hook", "register_post_accumulate_grad_hook")
_DESCRIPTOR: Any = torch.Tensor.grad
_GRAD = _DESCRIPTOR.__get__


class Passes:
    """The two passes of a call.

    Attributes:
        names: of the leaves of the arguments.
        wanted: positions of the arguments that get gradients.
        trained: parameters, and other tensors that the call reaches, that get gradients.
        outputs: the differentiable results of the last forward, each tensor once.
        differentiable: whether there were any.
        on_this_thread: whether backwards run on the thread that calls them, also those on a GPU,
            for which autograd has a thread that all share.
        read: parameters and buffers that the backward reads in place.
        no_backward: why the backward failed although there were; None if it did not.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        owner: nn.Module,
        args: Args,
        kwargs: Kwargs,
        *,
        grad: bool,
        strict: bool,
    ) -> None:
        """Nothing runs yet.

        Args:
            call: the forward.
            owner: its module; a FunctionModule for a plain function.
            args: sample arguments.
            kwargs: sample keyword arguments.
            grad: whether gradients are on.
            strict: refuse tensors that require grad and get no gradient.
        """
        sample, self._spec = flatten(args, kwargs)
        self._call = call
        self._owner = owner
        self._grad = grad
        self._strict = strict
        slots: dict[int, int] = {}
        for index, leaf in enumerate(sample):
            if grad and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                slots.setdefault(id(leaf), index)
        self.wanted = list(slots.values())
        names = argument_names(args, kwargs)
        self._names = [names[slot] for slot in self.wanted]
        self.names = names
        self.trained: list[torch.Tensor] = []
        if grad and not isinstance(owner, FunctionModule):
            for name, parameter in owner.named_parameters():
                if parameter.requires_grad:
                    self.trained.append(parameter)
                    self._names.append(f"parameter {name}")
        self.outputs: list[torch.Tensor] = []
        self.differentiable = False
        self.on_this_thread = False
        self.read: list[torch.Tensor] = []
        self.no_backward: str | None = None
        self._asked: list[torch.Tensor] = []
        self._places: list[int] = []
        self._runs = 0
        self._everywhere = False
        # Objects that the module holds, once a result has one.
        self._owned: list[Any] | None = None

    def both(self, inputs: StaticInputs) -> Any:
        """Run forward and backward: the results, and gradients for output gradients of 1."""
        self._runs += 1
        try:
            tree = self.forward(inputs)
            grads: Sequence[torch.Tensor | None] = ()
            if self.outputs and self.no_backward is None:
                ones = [torch.ones_like(output) for output in self.outputs]
                memory = MemoryObserver()
                try:
                    with memory if self._runs == 1 else contextlib.nullcontext():
                        grads = self.backward(ones)
                except (RuntimeError, NotImplementedError) as error:
                    # The first run is eager: without graphs the call has no backward either.
                    if self._runs > 1 or isinstance(error, torch.OutOfMemoryError):
                        raise
                    self.no_backward = first_line(error)
                if self._runs == 1:
                    own = [*self._owner.parameters(), *self._owner.buffers(), *self.trained]
                    used = {id(t): t for t in own if t.untyped_storage()._cdata in memory.used}
                    self.read = list(used.values())
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree), grads
        finally:
            self.forget()

    def forward(self, inputs: StaticInputs) -> Any:
        """Run the forward; what its backward needs is kept until `forget`."""
        given = {id(inputs.tensor(slot)): inputs.tensor(slot) for slot in self.wanted}
        given = {key: tensor.detach().requires_grad_() for key, tensor in given.items()}
        leaves = [given.get(id(leaf), leaf) for leaf in inputs.leaves]
        args, kwargs = unflatten(leaves, self._spec)
        stand_ins = StandIns(self._owner, self.trained, everywhere=self._everywhere)
        with torch.set_grad_enabled(self._grad), autocast_cache_apart():
            since = next_node()
            with stand_ins:
                tree = self._apart(self._call(*args, **kwargs))
            tree = pytree.tree_map_only(torch.Tensor, _resolved, tree)
        self._check_arguments(args, kwargs, leaves, inputs)
        results = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        unique = {id(leaf): leaf for leaf in results if leaf.requires_grad}
        self.outputs = list(unique.values())
        if any(output.grad_fn is None for output in self.outputs):
            raise CaptureError(
                "The call returns an argument or a parameter itself, which requires grad.",
                remedy="Return a clone() of it.",
            )
        self.differentiable = bool(self.outputs)
        own = [*given.values(), *stand_ins.tensors]
        self._ask(own, leaves_behind(self.outputs, since))
        return tree

    def _apart(self, result: Any) -> Any:
        """What the call returned, with its objects taken apart; those of the module's own stay."""
        if not has_objects(pytree.tree_leaves(result)):
            return result
        if self._owned is None:
            found = Dependencies(self._owner, whole=True).objects
            self._owned = [e for e in found if not isinstance(e, torch.Tensor | nn.Module)]
        return apart(result, kept=self._owned)

    def backward(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of the wanted arguments and of trained tensors, given those of the outputs."""
        found: list[torch.Tensor | None] = [None] * (len(self.wanted) + len(self.trained))
        # The forward's own nodes undo its casts, so a backward runs outside of autocast.
        several_threads = torch.autograd.set_multithreading_enabled(not self.on_this_thread)
        with torch._C._DisableAutocast(), several_threads:
            grads = torch.autograd.grad(
                self.outputs, self._asked, given, allow_unused=True, retain_graph=True
            )
            for place, grad in zip(self._places, grads, strict=True):
                if grad is not None:
                    other = found[place]
                    found[place] = grad if other is None else other + grad
            found = [None if grad is None else _dense(grad) for grad in found]
        unused = [name for name, grad in zip(self._names, found, strict=True) if grad is None]
        if unused and self._strict:
            raise CaptureError(
                f"No output depends on {', '.join(unused)}, which requires grad.",
                remedy="Pass allow_unused_input=True to leave it without a gradient, as eager "
                "does, or set requires_grad=False.",
            )
        return found

    def reach(self) -> list[frozenset[int]]:
        """For each output, positions of the gradients that depend on its own gradient."""
        places = {id(leaf): place for leaf, place in zip(self._asked, self._places, strict=True)}
        return [
            frozenset(places[id(leaf)] for leaf in leaves_behind([output], 0))
            for output in self.outputs
        ]

    def forget(self) -> None:
        """Release what the backward needs."""
        self.outputs, self._asked, self._places = [], [], []

    def refuse_others_than(self, trained: int) -> None:
        """Refuse later runs that have reached more tensors that require grad than those before.

        Args:
            trained: how many it were.

        Raises:
            CaptureError: there are more; they are forgotten.
        """
        if len(self.trained) > trained:
            del self._names[trained - len(self.trained) :], self.trained[trained:]
            raise CaptureError(
                "The call reaches a tensor that requires grad and that it has not reached before.",
                remedy="Pass it as an argument, or make it a parameter of the module.",
            )

    def check_writes(self, mutated: Sequence[int]) -> None:
        """Refuse a forward that writes to an argument that requires grad.

        Args:
            mutated: positions of the arguments that it writes to.
        """
        if written := [self.names[slot] for slot in mutated if slot in self.wanted]:
            raise CaptureError(
                f"The call writes to {', '.join(written)}, which requires grad.",
                remedy="Make a new tensor instead, or pass a detached one.",
            )

    def _ask(self, own: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        """Find the positions of the leaves' gradients; a new leaf becomes a trained tensor."""
        places = {id(tensor): place for place, tensor in enumerate(own)}
        real = {id(t): len(self.wanted) + n for n, t in enumerate(self.trained)}
        self._asked, self._places = [], []
        for leaf in leaves:
            place = places.get(id(leaf), real.get(id(leaf)))
            # A trained tensor itself was reached: from the next run on, replace arguments too.
            self._everywhere = self._everywhere or id(leaf) in real
            if place is None:
                place = len(self._names)
                self.trained.append(leaf)
                self._names.append("a tensor that the call reaches")
                real[id(leaf)] = place
            if id(leaf) not in places and leaf._backward_hooks and self._runs > 1:
                # Its hooks would run in the graph, and again outside of it.
                raise CaptureError(
                    "A tensor with hooks is used where nothing can stand in for it.",
                    remedy="Pass it as an argument, or make it a parameter of the module.",
                )
            self._asked.append(leaf)
            self._places.append(place)

    def _check_arguments(
        self, args: Args, kwargs: Kwargs, leaves: Sequence[Any], inputs: StaticInputs
    ) -> None:
        after, spec = flatten(args, kwargs)
        if spec != self._spec or any(
            a is not b or (isinstance(b, torch.Tensor) and Geometry.of(b) != geometry)
            for a, b, geometry in zip(after, leaves, inputs.geometries, strict=True)
        ):
            raise CaptureError(
                "The call changes the containers that it is given, or the shape of a tensor in "
                "them; a graph would not.",
                remedy="Return what is new instead.",
            )
        for name, leaf in zip(self.names, inputs.leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise CaptureError(
                    f"The call writes something that requires grad to {name}.",
                    remedy="Make a new tensor instead.",
                )


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.resolve_conj().resolve_neg() if lazy else tensor


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as a dense strided tensor."""
    if grad.layout is not torch.strided:
        raise CaptureError(
            f"A gradient is a {grad.layout} tensor, whose memory a graph cannot hold.",
            remedy="Use dense gradients: sparse=False for embeddings.",
        )
    grad = _resolved(grad)
    return grad if is_dense(grad) else grad.contiguous()


class MemoryObserver(OperationMode):
    """A dispatch mode that notes which memory operations use and which they make.

    It keeps nothing alive that is made inside its block.

    Attributes:
        used: by identity, memory that was used and not made in the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, StorageWeakRef] = {}
        self._users: dict[int, Any] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and note the memory of its tensors."""
        constant = func is torch.ops.aten.lift_fresh.default
        for tensor in _dense_tensors(args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and not constant:
                self.used.setdefault(storage._cdata, storage)
                self._users.setdefault(storage._cdata, func)
        result = func(*args, **kwargs)
        for tensor in _dense_tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.used:
                # While the weak reference lives, the handle's address is not reused.
                self._made.setdefault(storage._cdata, StorageWeakRef(storage))
        return result

    def still_alive(self) -> list[torch.UntypedStorage]:
        """Memory that was made in the block and is still in use."""
        found = [
            torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            for reference in self._made.values()
        ]
        return [storage for storage in found if storage is not None]

    def refuse_unknown(self, known: Container[int]) -> None:
        """Refuse memory that is neither known nor made by an operation.

        Raises:
            CaptureError: there is some; every replay would use the memory of the capture.
        """
        for key, storage in self.used.items():
            if key not in known and storage.nbytes():
                raise CaptureError(
                    f"{self._users[key]} uses a tensor that is made anew in every call by code "
                    "that runs no PyTorch operation; a replay would use the first one for ever.",
                    remedy="Make it an argument, or make it with PyTorch's own operations.",
                )


def _dense_tensors(*trees: Any) -> list[torch.Tensor]:
    return [t for t in tensors(trees) if t.layout is torch.strided and not t.is_nested]


class StandIns(TorchFunctionMode):
    """Inside its block a module computes with stand-ins in place of some tensors.

    Stand-ins replace the modules' parameters and, if that is not enough, arguments of PyTorch's
    functions. (The latter only if needed: torch.compile compiles again under a function mode.)

    Attributes:
        tensors: the stand-ins, in the order of the tensors.
    """

    def __init__(
        self, module: nn.Module, originals: Sequence[torch.Tensor], *, everywhere: bool
    ) -> None:
        """`everywhere` replaces arguments too: for modules that hold parameters in other places."""
        super().__init__()
        self.tensors = [_stand_in(tensor) for tensor in originals]
        self._originals = originals
        self._stand_in_for = {id(t): s for t, s in zip(originals, self.tensors, strict=True)}
        # nn.RNN and the like also hold them in a list, which they would make again.
        self._holders: list[Any] = [
            m._parameters for m in module.modules() if not isinstance(m, nn.RNNBase)
        ]
        held = {id(p) for h in self._holders if isinstance(h, dict) for p in h.values()}
        self._replaces_arguments = everywhere or any(id(tensor) not in held for tensor in originals)
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> StandIns:
        for holder in self._holders:
            if isinstance(holder, dict) and any(
                id(p) in self._stand_in_for for p in holder.values()
            ):
                self._held.append((holder, dict(holder)))
                for name, parameter in holder.items():
                    if id(parameter) in self._stand_in_for:
                        holder[name] = self._stand_in_for[id(parameter)]
        if self._replaces_arguments:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._replaces_arguments:
            super().__exit__(*exc)  # type: ignore[no-untyped-call]
        replaced = False
        mine = {id(s) for s in self.tensors}
        for holder, held in self._held:
            for name, parameter in held.items():
                if id(parameter) in self._stand_in_for:
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
        if getattr(func, "__name__", "") in _ON_OBJECT or func == _GRAD:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._replace, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def _replace(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._stand_in_for.get(id(tensor), tensor)


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
    """The sequence number that the next autograd node on this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def leaves_behind(outputs: Sequence[torch.Tensor], since: int) -> list[torch.Tensor]:
    """The leaves that the gradients of some outputs reach.

    Args:
        outputs: the results of a call that require grad.
        since: the sequence number of the first node that the call can have made.

    Raises:
        CaptureError: a gradient flows on into what was computed before the call.
    """
    found: list[torch.Tensor] = []
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()  # Holds the nodes themselves: while unheld they have no identity.
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
