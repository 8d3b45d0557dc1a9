"""Seeing a run operation by operation: what it reads from outside, what it writes there.

A warm-up runs real code. The journal keeps a copy of each storage before the run first writes to
it, so that everything can be put back, and learns on the way what capture has to know: which
tensors from outside the work depends on, which random generators it draws from, which operation
was under way when something failed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from ..calls.modes import OperationMode
from ..calls.modes import Shared as Shared
from ..calls.modes import compilers_off as compilers_off
from ..calls.operations import announced, generator_of, tensors, written
from ..errors import CaptureError

_LARGEST = 3
_LARGE_COPY = 1 << 20
_MEMORY_CHANGES = ("set_", "resize_", "resize_as_")


class Copies:
    """What storages held before runs that all begin with the same, one copy for all of them.

    Args:
        relieve: called before each operation of a run that needs all of the device's memory for
            itself. Large copies are kept on the host then.
    """

    def __init__(self, relieve: Callable[[], None] | None = None) -> None:
        self.relieve = relieve
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The copy of a storage, made now if there is none."""
        known = self._kept.get(storage._cdata)
        if known is None:
            aside = self.relieve is not None and storage.is_cuda and storage.nbytes() > _LARGE_COPY
            known = storage, storage.cpu() if aside else storage.clone()
            self._kept[storage._cdata] = known
        return known[1]


class Journal(OperationMode):
    """A dispatch mode that runs every operation as it is and keeps what is needed to undo it.

    Args:
        copies: those of other runs that began with the same state.

    Attributes:
        external: storages that the run used and did not make, by their identity.
        operation: the operation under way, or the last one.
        dtypes: of the tensors that operations made.
        announced: storages that operations have said to write to, by identity: autograd notices.
    """

    def __init__(self, copies: Copies | None = None) -> None:
        super().__init__()
        self.external: dict[int, torch.UntypedStorage] = {}
        self.operation: Any = None
        self.dtypes: set[torch.dtype] = set()
        self.announced: set[int] = set()
        self._copies = copies
        self._made: dict[int, StorageWeakRef] = {}
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        # Where random generators stand, those that were drawn from, and whether they may be moved
        # by others.
        self._stand: dict[int, torch.Tensor] = {}
        self._drawn_from: set[int] = set()
        self._strict = False
        self._largest: list[tuple[int, str]] = []

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators that operations drew from."""
        return [generator for generator, _ in self._generators.values()]

    def forget_what_stood_still(self) -> None:
        """Leave out generators that nothing was drawn from: attention without dropout, say."""
        self._generators = {k: v for k, v in self._generators.items() if k in self._drawn_from}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the operation, run it, note what it made."""
        self.before(func, args, kwargs)
        if self._copies is not None and self._copies.relieve is not None:
            self._copies.relieve()
        result = func(*args, **kwargs)
        self.drew(func, args, kwargs)
        for tensor in tensors(result):
            self.made(tensor)
        return result

    def expect(self, generators: Iterable[torch.Generator]) -> None:
        """Refuse that anything but operations moves these random generators, from now on."""
        self._strict = True
        self._stand |= {id(g): g.get_state() for g in generators}

    def check_end(self) -> None:
        """At the end: whether random generators stand where operations have left them."""
        with _disable_current_modes():
            for key, (generator, _) in self._generators.items():
                if self._strict and not generator.get_state().equal(self._stand[key]):
                    self.refuse(_seeded())

    def check_moved(self, generator: torch.Generator, start: torch.Tensor) -> None:
        """At the end of a CUDA capture: whether what was drawn has moved the generator.

        PyTorch gives no seed to a graph that sets it back to where it was at the start.
        """
        if id(generator) in self._generators and generator.get_state().equal(start):
            self.refuse(_seeded())

    def drew(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """After an operation: where its random generator stands."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = generator_of(args, kwargs)
            before, now = self._stand[id(generator)], generator.get_state()
            if not now.equal(before):
                self._drawn_from.add(id(generator))
                self._stand[id(generator)] = now

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what an operation is about to read and write.

        Raises:
            CaptureError: it works on memory that can be neither seen nor put back.
        """
        self.operation = func
        for tensor in tensors((args, kwargs)):
            if tensor.layout is torch.strided and not tensor.is_nested:
                self.read(tensor)
                continue
            self.refuse(
                CaptureError(
                    f"{func} works on a {tensor.layout} tensor"
                    + (", a nested one," if tensor.is_nested else "")
                    + " whose memory a graph cannot hold.",
                    remedy="Use dense tensors, or leave this part out of the capture.",
                )
            )
        if func._opname == "set_":
            for value in args:
                # cuDNN's RNNs take the memory of their weights as a whole.
                if isinstance(value, torch.UntypedStorage) and value._cdata not in self._made:
                    self.external.setdefault(value._cdata, value)
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = generator_of(args, kwargs)
            key, state = id(generator), generator.get_state()
            expected = self._stand.get(key, state)
            self._generators.setdefault(key, (generator, state))
            self._stand[key] = state
            if self._strict and not state.equal(expected):
                self.refuse(_seeded())
        self.announced |= {t.untyped_storage()._cdata for t in announced(func, args, kwargs)}
        for tensor in written(func, args, kwargs):
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
        """What an operation does cannot be captured: raise."""
        raise error

    def read(self, tensor: torch.Tensor) -> None:
        """A tensor is used; keep its storage if the run did not make it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made:
            self.external.setdefault(storage._cdata, storage)

    def writes(self, tensor: torch.Tensor) -> None:
        """A tensor is about to be written to; keep what an outside storage holds."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made and storage._cdata not in self._saved:
            copies = self._copies
            kept = storage.clone() if copies is None else copies.of(storage)
            self._saved[storage._cdata] = (storage, kept)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the run itself made a tensor's memory."""
        return tensor.untyped_storage()._cdata in self._made

    def made(self, tensor: torch.Tensor) -> None:
        """An operation returned a tensor; unless it is a view of one from outside, it is new."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return
        storage = tensor.untyped_storage()
        self.dtypes.add(tensor.dtype)
        if storage._cdata not in self.external and storage._cdata not in self._made:
            # While the weak reference lives, the address of the storage's handle is not reused.
            self._made[storage._cdata] = StorageWeakRef(storage)
            self._rank(tensor, storage.nbytes())

    def _rank(self, tensor: torch.Tensor, nbytes: int) -> None:
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
    def made_by_it(self) -> dict[int, StorageWeakRef]:
        """Memory that the run made, by identity."""
        return self._made

    def goes_on_from(self, made: Mapping[int, StorageWeakRef]) -> bool:
        """Whether the run has left another content in memory that an earlier run had made.

        Both did the same, from the same state; so it is one that goes on from run to run.
        """
        for key, (storage, kept) in self._saved.items():
            if key in made and not made[key].expired() and not _same_bytes(storage, kept):
                return True
        return False

    def changed(self, storage: torch.UntypedStorage) -> bool:
        """Whether memory that the run wrote to holds something else by now."""
        return not _same_bytes(*self._saved[storage._cdata])

    def undo(self) -> None:
        """Put back all that the run, and later ones of the same work, wrote to."""
        for storage, kept in self._saved.values():
            storage.copy_(kept)
        for generator, state in self._generators.values():
            generator.set_state(state)

    def exchange(self) -> None:
        """Put it back, and keep what was there: another exchange brings that back."""
        for key, (storage, kept) in list(self._saved.items()):
            now = storage.clone()
            storage.copy_(kept)
            self._saved[key] = storage, now
        for key, (generator, state) in list(self._generators.items()):
            self._generators[key] = generator, generator.get_state()
            generator.set_state(state)


def _same_bytes(storage: torch.UntypedStorage, kept: torch.UntypedStorage) -> bool:
    now = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    before = torch.empty(0, dtype=torch.uint8, device=kept.device).set_(kept)
    return torch.equal(now, before.to(now.device))


def _seeded() -> CaptureError:
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
    """The remedy for an error of PyTorch's that forbids moving a GPU's random state, or None."""
    # `set_state`, `set_current_seed` and others say their own name when a capture is under way.
    if "CUDAGeneratorImpl::" not in str(error):
        return None
    return (
        "A capture cannot read or set the state of a GPU's random numbers: seed outside of it. "
        "torch.utils.checkpoint does both: pass preserve_rng_state=False where what it computes "
        "again draws no random numbers, and leave the checkpoint out where it does."
    )


def _in_checkpoint() -> bool:
    """Whether what runs now was called by torch.utils.checkpoint."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def users_of(tensor: torch.Tensor) -> int:
    """How many tensors there are in its memory, with what the question itself adds."""
    users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return users
