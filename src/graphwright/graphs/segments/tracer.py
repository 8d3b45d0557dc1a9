"""Tracer: runs a call's Python from the top, operation by operation.

Operations that are known from earlier runs are answered without being run again, once each is
checked to be the same. Operations after these are run: by an `ObservingTracer`, which finds the
breaks where the host learns something about the device, or by a `RecordingTracer`, which records.
Copies from the host are hoisted: the tensor is copied to the device before the call.

`HostAccess` handles functions of torch that move values between host and device without an
operation that a dispatch mode sees.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils import _pytree as pytree

from ...calls.leaves import SCALARS, describe
from ...calls.modes import compilers_off
from ...calls.operations import (
    FROM_DATA,
    HOST_READS,
    MASKS,
    has_fixed_shape,
    one_hot,
    tensors,
    written,
)
from ...errors import CaptureError, current_place
from ...evaluation.garbage_collection import garbage_collection_off
from ..conditions import pretend_capturing
from ..journal import Journal
from ..static_inputs import Geometry, StaticInputs
from .steps import (
    Given,
    Host,
    Kept,
    New,
    Outside,
    Placed,
    Step,
    Unused,
    bytes_of,
    describe_result,
    key_of_results,
)

_WRITES_BY_INDEX = ("index_put_", "index_put", "_index_put_impl_")
# These copy a one-number tensor on the host to the device; other operations take it as a number.
_COPY_NUMBERS = ("index", *_WRITES_BY_INDEX, "where", "copy_", "_to_copy", "cat", "stack")
_MEMORY_CHANGES = ("set_", "resize_", "resize_as_")
# Methods that hand out the tensor's own memory.
_EXPORTS = ("numpy", "__array__", "__dlpack__")


class Untraceable(CaptureError):
    """A call does something that the tracer cannot follow."""


class Differs(Untraceable):
    """A run did something else than an earlier run of the same call."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The call's operations differ from one run to the next: {what}.",
            where=current_place(),
            remedy="A graph cannot hold what depends on anything but the arguments, the module and "
            "the values that are read from the device: pass it as an argument.",
        )


class Tracer(Journal):
    """One run of a call's Python.

    Args:
        known: the steps that are answered without being run.
        memory: memory that they made and that is still alive, by number.
        inputs: the call's static inputs.
        device: where the call runs.
        unrecordable: operations that could not be recorded before.

    Attributes:
        numbers: numbers of memory that the call made, by its identity.
        content: whether the next operation is run for its result's content.
        frozen: tensors on the host, from outside, that the host computes with, and their content.
    """

    supports_higher_order_operators = True  # torch's own switch

    def __init__(
        self,
        known: Iterable[Step],
        memory: Mapping[int, torch.UntypedStorage],
        inputs: StaticInputs,
        device: torch.device,
        unrecordable: set[Any],
    ) -> None:
        super().__init__()
        self.device = device
        self.numbers: dict[int, int] = {}
        self.content = False
        self.frozen: dict[int, tuple[torch.Tensor, bytes]] = {}
        self._known = deque(known)
        self._memory = dict(memory)
        self._unrecordable = unrecordable
        self._count = 0
        self._living: dict[int, StorageWeakRef] = {}
        self._references: list[StorageWeakRef] = []
        self._lost: set[int] = set()
        self._paused = False
        self._pretence = contextlib.ExitStack()
        self._inputs: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        for slot in inputs.slots:
            storage = inputs.tensor(slot).untyped_storage()
            if storage._cdata not in self._inputs:
                self._inputs[storage._cdata] = len(self._storages)
                self._storages.append(storage)

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Have operations inside the block go through this tracer."""
        with self._pretence:
            self._pretence.enter_context(pretend_capturing())
            with garbage_collection_off(), compilers_off(), HostAccess(self), self:
                yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations inside the block run without being traced."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def on_cuda(self) -> bool:
        """Whether the device is another one than the host."""
        return self.device.type != "cpu"

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer an operation if it is known, else run it."""
        if self._paused or _is_view_only(func):
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            self.refuse(CaptureError(f"{func.name()} cannot be divided into segments."))
            return func(*args, **kwargs)
        constant = func is torch.ops.aten.lift_fresh.default
        if constant:
            func = torch.ops.aten.clone.default  # A constant: the call may write to its own copy.
            if self.reads_of is not None:
                self.reads_of.constant(args[0])
        given = tensors((args, kwargs))
        if self._is_on_host(given, kwargs):
            return self._run_on_host(func, args, kwargs, constant=constant)
        self.before(func, args, kwargs)
        arguments = self.identify(args, kwargs, constant=constant)
        if not self._known:
            return self.run_new(func, args, kwargs, arguments)
        step = self._known.popleft()
        if not step.same(func, arguments):
            raise Differs(f"{func} where {step.func} was, or with other arguments")
        answer = self.answered(step, given)
        if not self._known:
            self.known_steps_done()
        return answer

    def known_steps_done(self) -> None:
        """Called when the last known step was answered."""

    def run_new(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: tuple[Any, ...]
    ) -> Any:
        """Run an operation that comes after the known steps."""
        raise NotImplementedError

    def all_known(self) -> bool:
        """Whether all known steps were answered."""
        return not self._known

    def answered(self, step: Step, given: list[torch.Tensor]) -> Any:
        """The results of a known step, without running it."""
        leaves = []
        for made in step.made:
            if isinstance(made, Given):
                leaf: Any = given[made.index]
            elif isinstance(made, New):
                leaf = self._restored(made)
            elif isinstance(made, Kept):
                leaf = made.tensor.detach()
            elif isinstance(made, Placed):
                leaf = made.geometry.at_element(self._storages[made.place], made.offset)
            elif isinstance(made, Unused):
                leaf = torch.empty((), dtype=torch.long)
            elif isinstance(made, Host):
                leaf = made.tensor.clone() if made.into is None else given[made.into]
                if made.into is not None:
                    leaf.copy_(made.tensor)
                self.made(leaf)
            else:
                leaf = made
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, step.spec)

    def _restored(self, made: New) -> torch.Tensor:
        """A tensor that an earlier run made, in its memory."""
        storage = self._memory.get(made.number)
        if storage is None:
            # It died before the break: nothing that follows can need its values.
            storage = torch.UntypedStorage(made.nbytes, device=self.device)
            self._memory[made.number] = storage
            self._lost.add(made.number)
        tensor = made.at(storage)
        self._adopt(storage, made.number)
        if made.number in self._lost:
            del self._memory[made.number]
        return tensor

    def _adopt(self, storage: torch.UntypedStorage, number: int) -> None:
        """Take over memory of the call under its number."""
        self.numbers[storage._cdata] = number
        self._living[number] = StorageWeakRef(storage)
        # While the weak reference lives, the identity is not reused.
        self._references.append(self._living[number])
        self._count = max(self._count, number + 1)

    def export(self, tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        """What code from outside gets for a tensor that it exports: here a copy of its content."""
        return content

    def living(self) -> dict[int, torch.UntypedStorage]:
        """Memory that the call made and that is still alive, by number."""
        return {
            number: torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            for number, reference in self._living.items()
            if not reference.expired() and number not in self._lost
        }

    def is_known(self, tensor: torch.Tensor) -> bool:
        """As `Journal.is_known`: earlier runs have made memory, too."""
        return tensor.untyped_storage()._cdata in self.numbers or self.is_made(tensor)

    def read(self, tensor: torch.Tensor) -> None:
        """As `Journal.read`, for memory that the call did not make."""
        if tensor.untyped_storage()._cdata not in self.numbers:
            super().read(tensor)

    def step_of(
        self,
        func: Any,
        arguments: tuple[Any, ...],
        given: list[torch.Tensor],
        result: Any,
        *,
        breaks: bool = False,
    ) -> Step:
        """Describe an operation that was run as a step.

        Args:
            func: the operation.
            arguments: what identifies its arguments.
            given: the tensors among them.
            result: what it returned.
            breaks: whether it is a break.
        """
        leaves, spec = pytree.tree_flatten(result)
        made = tuple(self._described(leaf, given, breaks=breaks) for leaf in leaves)
        values = [m for m in made if not isinstance(m, Given | New | Placed | Kept | Unused | None)]
        # The numbers that attention returns are lengths, known from shapes.
        if not (breaks or (values and not _is_attention(func))):
            return Step(func, arguments, made, spec)
        real = [
            leaf.detach().clone() if isinstance(what, New) else None
            for leaf, what in zip(leaves, made, strict=True)
        ]
        kept = [each for each in real if each is not None]
        key = key_of_results(leaves, made)
        return Step(func, arguments, made, spec, key=key, real=kept, place=current_place())

    def _described(self, leaf: Any, given: list[torch.Tensor], *, breaks: bool) -> Any:
        host = isinstance(leaf, torch.Tensor) and self.is_seen_by_host(leaf)
        if host and not self.content and _is_attention(self.operation):
            self.made(leaf)
            return Unused()
        made = describe_result(leaf, given, host=host)
        if host:
            self.made(leaf)
        if made is not None or leaf is None:
            return made
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            raise CaptureError(f"{self.operation} gives a tensor that is not a plain dense one.")
        return self._placed(leaf, breaks=breaks)

    def _placed(self, leaf: Any, *, breaks: bool) -> Any:
        """Where the memory of a tensor is that an operation gave."""
        storage = leaf.untyped_storage()
        number = self.numbers.get(storage._cdata)
        place = self._inputs.get(storage._cdata)
        known = place is not None or storage._cdata in self.external
        if breaks and (known or number is not None) and storage.nbytes():
            raise CaptureError(f"{self.operation} gives a view of what it was given.")
        if number is None:
            if place is not None and storage.nbytes():
                return Placed(place, leaf.storage_offset(), Geometry.of(leaf))
            if known and storage.nbytes():
                return Kept(leaf.detach())
            number = self._count
            self.made(leaf)
        self._adopt(storage, number)
        return New(number, storage.nbytes(), leaf.storage_offset(), Geometry.of(leaf))

    def is_seen_by_host(self, leaf: torch.Tensor) -> bool:
        """Whether the host can see the content of a result."""
        return self.content or (self.on_cuda and leaf.device.type == "cpu")

    def identify(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, constant: bool
    ) -> tuple[Any, ...]:
        """What identifies an operation's arguments.

        Args:
            args: of the operation.
            kwargs: likewise.
            constant: whether tensors among them are constants of Python's.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return (*[self._identified(leaf, constant) for leaf in leaves], spec)

    def _identified(self, leaf: Any, constant: bool) -> Any:
        if isinstance(leaf, torch.UntypedStorage):  # All weights of cuDNN's recurrent layers.
            known: Any = self.numbers.get(leaf._cdata, f"input {self._inputs.get(leaf._cdata)}")
            if known == "input None":  # What is from outside is kept alive.
                known = "at", leaf.data_ptr()
            return type(leaf), known, leaf.nbytes(), leaf.device
        if not isinstance(leaf, torch.Tensor):
            return describe(leaf) if isinstance(leaf, SCALARS) else (type(leaf), str(leaf))
        identity = leaf.untyped_storage()._cdata
        what: Any = self.numbers.get(identity)
        if what in self._lost and leaf.numel() and not self._known:
            raise Differs(f"{self.operation} uses a tensor that was gone before")
        if what is None:
            place = self._inputs.get(identity)
            # A tensor on the host is copied to the device: its content identifies it.
            constant = constant or (self.on_cuda and leaf.device.type == "cpu")
            made = self.is_made(leaf)  # Then it may be written to later.
            what = f"input {place}"
            if place is None:
                what = Outside(leaf.clone() if made else leaf, constant=constant)
        return what, leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.is_conj()

    def finish(self, tree: Any) -> None:
        """Note what the results use, and check that their memory is still there."""
        for tensor in tensors(tree):
            if tensor.layout is torch.strided and not tensor.is_nested:
                self.read(tensor)  # It may be a buffer that no operation has touched.
            if self.numbers.get(tensor.untyped_storage()._cdata) in self._lost:
                raise Differs("it returns a tensor that was gone before")

    # Operations and tensors on the host, where the device is another one.

    def _is_on_host(self, given: list[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation runs on the host alone."""
        if not self.on_cuda or any(tensor.device.type != "cpu" for tensor in given):
            return False
        return torch.device(kwargs.get("device") or "cpu").type == "cpu"

    def _run_on_host(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, constant: bool
    ) -> Any:
        self.draws.use((args, kwargs))
        for tensor in () if constant else tensors((args, kwargs)):
            if not self.is_made(tensor):
                self.frozen.setdefault(
                    tensor.untyped_storage()._cdata, (tensor.detach(), bytes_of(tensor))
                )
        for tensor in written(func, args, kwargs):
            if not self.is_made(tensor):
                self.refuse(
                    CaptureError(
                        f"{func} writes to a tensor on the host, which a graph would not repeat.",
                        where=current_place(),
                        remedy="Do this outside the captured call.",
                    )
                )
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            super().before(func, args, kwargs)  # Where the generator is.
        result = func(*args, **kwargs)
        if draws:
            self.drew(func, args, kwargs, result)
        for tensor in tensors(result):
            self.made(tensor)
        return result

    def host_tensors(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Arguments on the host that an operation copies to the device."""
        if not self.on_cuda or (func._opname == "copy_" and args[0].device.type == "cpu"):
            return []
        given = tensors((args, kwargs))
        copied = func._opname in _COPY_NUMBERS
        if func._opname in _WRITES_BY_INDEX and _has_masks(args[1]):
            given, copied = tensors(args[1]), True
        hosts = [t for t in given if t.device.type == "cpu"]
        return [t for t in hosts if copied or t.dim() or not self.is_made(t)]

    def is_break(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation tells the host a value or a shape, or cannot be recorded."""
        if self.content or func in self._unrecordable:
            return True
        if torch.Tag.data_dependent_output in func.tags:
            return True
        if torch.Tag.dynamic_output_shape in func.tags and not has_fixed_shape(func, args, kwargs):
            return True
        if not self.on_cuda:
            return False
        if func._opname in _WRITES_BY_INDEX and _has_masks(args[1]):
            return not _fills_by_mask(args)
        return bool(func._opname == "copy_" and args[0].device.type == "cpu")


def _fills_by_mask(args: tuple[Any, ...]) -> bool:
    """Whether a write by index puts one number of the host's where a single mask says so."""
    value, accumulates = args[2], len(args) > 3 and args[3]
    number = value.dim() == 0 and value.device.type == "cpu"
    return number and not accumulates and len([i for i in args[1] if i is not None]) <= 1


def _has_masks(indices: Iterable[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in MASKS for index in indices)


def _is_attention(func: Any) -> bool:
    """Whether it is an attention operation, which returns its random state, mostly on the host."""
    return "attention" in func._opname and getattr(func, "namespace", "") == "aten"


def _is_view_only(func: Any) -> bool:
    """Whether an operation only gives another view of the same memory."""
    if isinstance(func, HigherOrderOperator) or func is torch.ops.aten.lift_fresh.default:
        return False
    if torch.Tag.inplace_view in func.tags:
        return func._opname not in _MEMORY_CHANGES
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def replaced(tree: Any, old: list[torch.Tensor], new: Iterable[torch.Tensor]) -> Any:
    """Arguments with some tensors replaced by others."""
    by_identity = {id(a): b for a, b in zip(old, new, strict=True)}
    return pytree.tree_map_only(torch.Tensor, lambda t: by_identity.get(id(t), t), tree)


class HostAccess(TorchFunctionMode):
    """Makes functions of torch that a dispatch mode does not see visible to a tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        self._tracer.draws.use((args, named))
        name = getattr(func, "__name__", "")
        if name in FROM_DATA:
            return self._from_data(func, name, args, named)
        if self._tracer.on_cuda:
            if name in ("__getitem__", "__setitem__"):
                args = (args[0], _indices(args[1]), *args[2:])
            return func(*args, **named)
        if func is F.one_hot and int(named.get("num_classes", args[1] if args[1:] else -1)) >= 0:
            # On the CPU it reads its input to check it; on CUDA it does not.
            return one_hot(args[0], int(named.get("num_classes", args[-1])))
        if name == "tensor_split" and any(isinstance(a, torch.Tensor) for a in args[1:2]):
            args = (args[0], self._content(args[1]), *args[2:])
        elif name in HOST_READS and args and isinstance(args[0], torch.Tensor):
            content = self._content(args[0])
            if name in _EXPORTS:
                content = self._tracer.export(args[0], content)
            with self._tracer.paused():
                return func(content, *args[1:], **named)
        return func(*args, **named)

    def _content(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor on the host, as a break: the host sees its content."""
        tracer, plain = self._tracer, tensor.detach()
        if tracer.on_cuda:
            return plain.cpu()
        tracer.content = True
        try:
            return plain.clone()
        finally:
            tracer.content = False

    def _from_data(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a tensor from Python values and tensors, first on the host."""
        place = 1 if name == "new_tensor" else 0
        data = args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))
        if isinstance(data, torch.Tensor):
            return func(*args, **kwargs)
        if tensors(data):
            # Dummies on the CPU give the dtype without a read of the values.
            like = pytree.tree_map_only(
                torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), data
            )
            if kwargs.get("dtype") is None and name != "new_tensor":
                with self._tracer.paused():
                    kwargs["dtype"] = torch.tensor(like).dtype
            data = pytree.tree_map_only(torch.Tensor, self._value, data)
            args = (*args[:place], data, *args[place + 1 :])
        if not self._tracer.on_cuda:
            return func(*args, **kwargs)
        wanted = kwargs.pop("device", None)
        wanted = _device.CURRENT_DEVICE if wanted is None else wanted
        if name == "new_tensor":
            wanted = args[0].device if wanted is None else wanted
            kwargs.setdefault("dtype", args[0].dtype)
            func, args = torch.tensor, (data,)
        made = func(*args, **kwargs, device="cpu")
        if wanted is None or torch.device(wanted).type == "cpu":
            return made
        return made.to(wanted)

    def _value(self, tensor: torch.Tensor) -> Any:
        return tensor.item() if tensor.dim() == 0 else self._content(tensor).tolist()


def _indices(index: Any) -> Any:
    """Turn lists among indices into tensors on the host, else no operation shows their copy."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    numbers = isinstance(index, list) and all(isinstance(i, bool | int) for i in index)
    if (numbers and index) or type(index).__name__ == "ndarray":
        return torch.as_tensor(index)
    return index
