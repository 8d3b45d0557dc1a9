"""Journal: sees a run operation by operation, and can undo what the run wrote.

Warm-up runs real code. The journal copies each storage from outside before the run first writes to
it, so that everything can be put back. It also notes what capture has to know: which tensors from
outside the work uses, which random generators it draws from, which operation was running when
something failed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..calls.modes import OperationMode
from ..calls.operations import (
    announced,
    default_generators,
    generator_of,
    is_kept,
    reads_values,
    tensors,
    written,
)
from ..errors import CaptureError
from .composition import packed
from .host_draws import HostDraws
from .random_state import draw_seed, put_state
from .reads import Reads

# How many of the largest tensors are kept for memory predictions.
_LARGEST = 3
# Bytes above which a copy is kept on the host, if memory is short.
_LARGE_COPY = 1 << 20
_MEMORY_CHANGES = ("set_", "resize_", "resize_as_")


class Copies:
    """Copies of storages, shared by several runs that all start from the same values.

    Args:
        relieve: called before each operation of a run that needs all of the device's memory. Large
            copies are kept on the host then.
    """

    def __init__(self, relieve: Callable[[], None] | None = None) -> None:
        self.relieve = relieve
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The copy of a storage, made now if there is none."""
        known = self._kept.get(storage._cdata)
        if known is None:
            on_host = (
                self.relieve is not None and storage.is_cuda and storage.nbytes() > _LARGE_COPY
            )
            known = storage, storage.cpu() if on_host else storage.clone()
            self._kept[storage._cdata] = known
        return known[1]


class Journal(OperationMode):
    """A dispatch mode that runs every operation and keeps what is needed to undo it.

    Args:
        copies: shared with other runs that started from the same state.

    Attributes:
        external: storages that the run used and did not make, by identity.
        operation: the current operation, or the last one.
        draws: what it drew from the host's default generator.
        dtypes: of the tensors that operations made.
        announced: storages that operations write to according to their schema, by identity;
            autograd counts a new version of their tensors.
        sequence: a number for the operations and their order.
        count: of the operations.
        reads: whether the host had to see values of tensors.
        waits: whether it had to wait for another device for that.
        caught: an operation whose error went by values, and which the work may have caught.
        reads_of: notes what operations take from outside, one by one; None where nobody asks.
    """

    reads_of: Reads | None = None

    def __init__(self, copies: Copies | None = None) -> None:
        super().__init__()
        self.external: dict[int, torch.UntypedStorage] = {}
        self.operation: Any = None
        self.draws = HostDraws()
        self.dtypes: set[torch.dtype] = set()
        self.announced: set[int] = set()
        self.sequence = 0
        self.count = 0
        self.reads = False
        self.waits = False
        self.caught: Any = None
        self._copies = copies
        self._made: dict[int, StorageWeakRef] = {}
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._seeds: list[torch.Generator] = []  # that gave a seed to state that stays
        # States of random generators, which of them were drawn from, and whether nothing but
        # operations may move them.
        self._positions: dict[int, torch.Tensor] = {}
        self._drawn_from: set[int] = set()
        self._strict = False
        self._largest: list[tuple[int, str]] = []

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators that operations drew from."""
        return [generator for generator, _ in self._generators.values()]

    def drop_unused_generators(self) -> None:
        """Forget generators that nothing was drawn from, as by attention without dropout."""
        self._generators = {k: v for k, v in self._generators.items() if k in self._drawn_from}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the operation, run it, and note what it made."""
        self.before(func, args, kwargs)
        if self._copies is not None and self._copies.relieve is not None:
            self._copies.relieve()
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if self.caught is None and _went_by_values(error, func, args, kwargs):
                self.caught = func
            raise
        self.drew(func, args, kwargs, result)
        for tensor in tensors(result):
            if is_kept(func):
                self.read(tensor)
                self._seeds.append(default_generators(tensor.device)[-1])
            else:
                self.made(tensor)
        if self.reads_of is not None:
            self.reads_of.after(result, self.is_known)
        return result

    def expect(self, generators: Iterable[torch.Generator]) -> None:
        """From now on, refuse that anything but operations moves these random generators."""
        self._strict = True
        self._positions |= {id(g): g.get_state() for g in generators}

    def check_end(self) -> None:
        """At the end: refuse generators that are not where operations have left them."""
        with _disable_current_modes():
            for key, (generator, _) in self._generators.items():
                if self._strict and not generator.get_state().equal(self._positions[key]):
                    self.refuse(_seeding_error())

    def check_moved(self, generator: torch.Generator, start: torch.Tensor) -> None:
        """At the end of a CUDA capture: refuse a generator that was drawn from and has not moved.

        PyTorch gives no seed to a graph that sets its generator back to the start.
        """
        if id(generator) in self._drawn_from and generator.get_state().equal(start):
            self.refuse(_seeding_error())

    def drew(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """After an operation: note whether it drew from its random generator."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = generator_of(args, kwargs)
            before, now = self._positions[id(generator)], generator.get_state()
            if not now.equal(before):
                self._drawn_from.add(id(generator))
                self._positions[id(generator)] = now
                if generator is torch.default_generator:
                    self.draws.note(func, args, kwargs, result)

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what an operation is about to read and write.

        Raises:
            CaptureError: it works on memory that cannot be seen or put back.
        """
        self.operation = func
        self.sequence = hash((self.sequence, func))
        self.count += 1
        if reads_values(func, args, kwargs):
            self.reads = True
            self.waits = self.waits or any(t.device.type != "cpu" for t in tensors((args, kwargs)))
        self.draws.use((args, kwargs))
        if self.reads_of is not None:
            self.reads_of.before(func, (args, kwargs), self.is_known)
        for tensor in tensors((args, kwargs)):
            if tensor.layout is torch.strided and not tensor.is_nested:
                self.read(tensor)
                continue
            if packed(tensor):
                continue
            self._refuse_layout(func, tensor)
        if func._opname == "set_":
            for value in args:
                # cuDNN's RNNs take the memory of all their weights as one storage.
                if isinstance(value, torch.UntypedStorage) and value._cdata not in self._made:
                    self.external.setdefault(value._cdata, value)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._before_draw(generator_of(args, kwargs))
        self.announced |= {t.untyped_storage()._cdata for t in announced(func, args, kwargs)}
        self._before_writes(func, written(func, args, kwargs))

    def _refuse_layout(self, func: Any, tensor: torch.Tensor) -> None:
        """Refuse a tensor whose memory is not one range of bytes."""
        nested = ", a nested one," if tensor.is_nested else ""
        self.refuse(
            CaptureError(
                f"{func} works on a {tensor.layout} tensor{nested} whose memory a graph cannot "
                "hold.",
                remedy="Use dense tensors, or leave this part out of the capture.",
            )
        )

    def _before_draw(self, generator: torch.Generator) -> None:
        """Note where a random generator is that is about to be drawn from."""
        key, state = id(generator), generator.get_state()
        expected = self._positions.get(key, state)
        self._generators.setdefault(key, (generator, state))
        self._positions[key] = state
        if self._strict and not state.equal(expected):
            self.refuse(_seeding_error())

    def _before_writes(self, func: Any, targets: Iterable[torch.Tensor]) -> None:
        """Note what an operation is about to write to."""
        for tensor in targets:
            if tensor.layout is not torch.strided or tensor.is_nested:
                continue
            if func._opname in _MEMORY_CHANGES and not self.is_made(tensor):
                self.refuse(
                    CaptureError(
                        f"{func} gives a tensor from outside other memory, which cannot be put "
                        "back.",
                        remedy="Make a new tensor instead.",
                    )
                )
            self.writes(tensor)

    def refuse(self, error: CaptureError) -> None:
        """Refuse what an operation does; subclasses may go on instead."""
        raise error

    def read(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is used; keep its storage if the run did not make it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made:
            self.external.setdefault(storage._cdata, storage)

    def writes(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is about to be written to; copy its storage if it is from outside."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made and storage._cdata not in self._saved:
            copies = self._copies
            kept = storage.clone() if copies is None else copies.of(storage)
            self._saved[storage._cdata] = (storage, kept)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the run made a tensor's memory."""
        return tensor.untyped_storage()._cdata in self._made

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the run, or what it goes on from, made a tensor's memory."""
        return self.is_made(tensor)

    def made(self, tensor: torch.Tensor) -> None:
        """Note a tensor that an operation returned; it is new unless it is a view of another."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return
        storage = tensor.untyped_storage()
        self.dtypes.add(tensor.dtype)
        if storage._cdata not in self.external and storage._cdata not in self._made:
            # While the weak reference lives, the address of the storage's handle is not reused.
            self._made[storage._cdata] = StorageWeakRef(storage)
            self._rank(tensor, storage.nbytes())

    def _rank(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Note a tensor if it is one of the largest so far."""
        if len(self._largest) < _LARGEST or nbytes > self._largest[-1][0]:
            shape = "×".join(map(str, tensor.shape))
            entry = nbytes, f"{self.operation} {shape} {str(tensor.dtype).removeprefix('torch.')}"
            self._largest = sorted([*self._largest, entry], reverse=True)[:_LARGEST]

    def largest(self) -> tuple[tuple[str, int], ...]:
        """The largest tensors that operations made, as (what, bytes)."""
        return tuple((what, nbytes) for nbytes, what in self._largest)

    def wrote_to(self, tensor: torch.Tensor) -> bool:
        """Whether the run wrote to the memory of a tensor from outside."""
        return tensor.untyped_storage()._cdata in self._saved

    @property
    def wrote(self) -> bool:
        """Whether the run wrote to anything from outside."""
        return bool(self._saved)

    @property
    def written(self) -> list[torch.UntypedStorage]:
        """Memory from outside that the run wrote to."""
        return [storage for storage, _ in self._saved.values()]

    @property
    def made_storages(self) -> dict[int, StorageWeakRef]:
        """Storages that the run made, by identity."""
        return self._made

    def continues_from(self, made: Mapping[int, StorageWeakRef]) -> bool:
        """Whether the run changed memory that an earlier run had made.

        Both runs started from the same state, so this memory carries state from run to run.

        Args:
            made: storages that the earlier run made.
        """
        for key, (storage, kept) in self._saved.items():
            if key in made and not made[key].expired() and not _same_bytes(storage, kept):
                return True
        return False

    def changed(self, storage: torch.UntypedStorage) -> bool:
        """Whether memory that the run wrote to now holds something else than before."""
        return not _same_bytes(*self._saved[storage._cdata])

    def undo(self) -> None:
        """Put back everything that the run, and later runs of the same work, wrote to."""
        for storage, kept in self._saved.values():
            storage.copy_(kept)
        for generator, state in self._generators.values():
            put_state(generator, state)
        for generator in self._seeds:
            draw_seed(generator)

    def exchange(self) -> None:
        """Swap what the run left with what was there before; another exchange swaps back."""
        for key, (storage, kept) in list(self._saved.items()):
            now = storage.clone()
            storage.copy_(kept)
            self._saved[key] = storage, now
        for key, (generator, state) in list(self._generators.items()):
            self._generators[key] = generator, generator.get_state()
            put_state(generator, state)


def _went_by_values(
    error: Exception, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether an operation failed for the values of its tensors, not for their shapes or kinds."""
    if isinstance(error, CaptureError | NotImplementedError | TypeError | torch.OutOfMemoryError):
        return False
    if torch.Tag.data_dependent_output in func.tags or not func._schema.returns:
        return True
    try:
        with _disable_current_modes(), torch.no_grad():
            shapes = pytree.tree_map_only(torch.Tensor, _without_values, (args, dict(kwargs)))
            func(*shapes[0], **shapes[1])
    except Exception:
        return False
    return True


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _same_bytes(storage: torch.UntypedStorage, kept: torch.UntypedStorage) -> bool:
    now = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    before = torch.empty(0, dtype=torch.uint8, device=kept.device).set_(kept)
    return torch.equal(now, before.to(now.device))


def _seeding_error() -> CaptureError:
    """The error for a call that sets the state of its random numbers."""
    if _in_checkpoint():
        return CaptureError(
            "torch.utils.checkpoint sets the random numbers back to compute a part with dropout "
            "again; a replay could not, would drop other elements there than in the forward, and "
            "its gradients would be wrong.",
            remedy="Do not checkpoint what draws random numbers: move the dropout out of it, set "
            "it to 0, or leave the checkpoint out. (preserve_rng_state=False is for parts that "
            "draw none; with dropout, gradients are wrong without a graph too.)",
        )
    return CaptureError(
        "The call seeds its random numbers, or sets their state; a graph would go on with others.",
        remedy="Seed outside the captured call, or make the numbers once and pass them in.",
    )


def seeded_on_gpu(error: BaseException) -> str | None:
    """The remedy if an error is PyTorch's refusal to move a GPU's random state, else None."""
    # During a capture `set_state`, `set_current_seed` and others raise with their own name.
    if "CUDAGeneratorImpl::" not in str(error):
        return None
    return (
        "A capture cannot read or set the state of a GPU's random numbers: seed outside of it. "
        "torch.utils.checkpoint does both: pass preserve_rng_state=False where what it computes "
        "again draws no random numbers, and leave the checkpoint out where it does."
    )


def _in_checkpoint() -> bool:
    """Whether torch.utils.checkpoint is among the callers."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def users_of(tensor: torch.Tensor) -> int:
    """How many references there are to a tensor's storage, with those that asking adds."""
    storage = tensor.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users + sys.getrefcount(storage)  # Python has one object for it, whoever holds it.
