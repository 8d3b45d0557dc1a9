"""prefetch(): load batches ahead in a thread, and copy them to a GPU beside its work.

Batches for a GPU go through pinned buffers, which are used again, and over a stream of their own.
What is handed out is ready on the consumer's stream, and its memory is not used again before the
work that the consumer has queued by the time it drops it.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import operator
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..calls.objects import build, flatten_result
from ..calls.options import count_problem, in_brief, names_checked, refuse
from ..errors import OptionError, SignatureError
from .batch_reuse import held_elsewhere, may_fill_again

Batch = TypeVar("Batch")
# The types of devices whose autocast a loader may use.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "xla")


@names_checked
def prefetch(
    loader: Iterable[Batch], device: torch.device | str | int | None = None, *, depth: int = 2
) -> Prefetcher[Batch]:
    """Load batches ahead in a thread, and copy their tensors to a device meanwhile.

    The batches, their order and what the loader raises are those of a plain loop over it. The first
    batch is loaded by the loop itself, so that a sampler draws its seed there; all others by the
    thread, where a dataset that draws random numbers draws them at other moments than in a plain
    loop. Loading goes on in the modes of the loop: gradients, inference mode, autocast, default
    device; and with a copy of its context variables.

    Args:
        loader: any iterable of batches, such as torch.utils.data.DataLoader. A batch is a tensor,
            or lists, dictionaries, tuples and objects that hold tensors, to any depth. It may be
            iterated over as often as the loader may.
        device: where tensors go. Tensors that are there already, and values that hold no tensors,
            are handed out as they are. So are batches for None or "cpu", but tensors that the
            loader holds too, and could fill again, are copied before it goes on. An object with
            tensors is built anew, without its `__init__`; of a PackedSequence the batch sizes stay
            on the CPU. Tensors in sets, keys and read-only views of dictionaries are not followed.
        depth: batches that are at most loaded and not yet taken.

    Returns:
        an iterable; leaving a loop over it (`break`, an error, Ctrl-C) ends its thread.

    Raises:
        OptionError: the loader cannot be iterated over, the depth is no number above 0, or there is
            no such device.
    """
    problem = None if hasattr(loader, "__iter__") else f"loader is {in_brief(loader)}, no iterable"
    refuse("prefetch", problem, count_problem("depth", depth))
    return Prefetcher(loader, _device(device), depth)


def _device(given: torch.device | str | int | None) -> torch.device:
    try:
        device = torch.device("cpu" if given is None else given)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"prefetch() knows no device {in_brief(given)}.") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise OptionError(f"prefetch() is to load for {device}, and there is no GPU here.")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise OptionError(
                f"prefetch() is to load for {device}, and there are {torch.cuda.device_count()}."
            )
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise OptionError(f"prefetch() loads for CUDA and the CPU, not for {device}.")
    return device


class Prefetcher(Generic[Batch]):
    """What `prefetch` returns: the loader's batches, loaded ahead. Each loop has its own thread.

    Attributes:
        loader: what was given.
        device: where tensors go.
        depth: batches that are at most loaded and not yet taken.
    """

    def __init__(self, loader: Iterable[Batch], device: torch.device, depth: int) -> None:
        self.loader, self.device, self.depth = loader, device, depth

    def __iter__(self) -> Prefetched[Batch]:
        return Prefetched(self.loader, self.device, self.depth)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # it raises as the loader's own does

    def __repr__(self) -> str:
        return f"<Prefetcher of {type(self.loader).__name__} for {self.device}, {self.depth} ahead>"


class Prefetched(Iterator[Batch]):
    """One loop over batches that are loaded ahead; a context manager that ends its thread."""

    def __init__(self, loader: Iterable[Batch], device: torch.device, depth: int) -> None:
        batches = iter(loader)
        self._copies = _Copies(device, depth) if device.type == "cuda" else None
        self._ahead = _Ahead(batches, self._copies, depth)
        # The thread holds nothing of this object, so that dropping it is enough.
        self._end = weakref.finalize(self, self._ahead.close)

    def __next__(self) -> Batch:
        found = self._ahead.take()
        batch: Batch = found if self._copies is None else self._copies.received(found)
        return batch

    def close(self) -> None:
        """End the thread and what waits for it; it may have to load a batch to its end first."""
        self._end()

    def __enter__(self) -> Prefetched[Batch]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Ahead:
    """A thread that loads batches, at most some that are not yet taken."""

    def __init__(self, batches: Iterator[Any], copies: _Copies | None, depth: int) -> None:
        self._batches, self._copies = batches, copies
        self._fills_again = may_fill_again(batches)
        self._found: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._over = False

    def take(self) -> Any:
        """The next batch; StopIteration and what the loader raises are raised here."""
        thread = self._thread  # Read first: what is closed from here on puts an end in the queue.
        if self._over or self._closing.is_set():
            raise StopIteration
        if thread is None:
            try:
                first = self._loaded()
            except BaseException:
                self.close()
                raise
            self._thread = threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._load, _Modes()),
                name="graphwright prefetch",
                daemon=True,
            )
            self._thread.start()
            return first
        kind, value = self._found.get()
        if kind == "batch":
            self._room.release()
            return value
        self.close()
        if kind == "end":
            raise StopIteration
        raise value

    def close(self) -> None:
        """End the thread, and let go of what it iterates over."""
        self._over = True
        self._closing.set()
        self._room.release()
        thread, self._thread = self._thread, None
        if thread is threading.current_thread():
            return  # The last reference was dropped in the middle of loading: it ends after that.
        if thread is not None:
            thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._found.get_nowait()
        self._found.put(("end", None))  # For another thread that waits; it puts one for the next.
        # As after a plain loop, a generator ends here if nobody else holds it.
        self._batches = iter(())

    def _loaded(self) -> Any:
        box = [next(self._batches)]
        held = held_elsewhere(box) if self._fills_again else set()
        batch = box.pop()
        if self._copies is not None:
            return self._copies.sent(batch, held)
        return kept_from_the_loader(batch, held) if held else batch

    def _load(self, modes: _Modes) -> None:
        with modes:
            while True:
                self._room.acquire()
                if self._closing.is_set():
                    self._found.put(("end", None))
                    return
                try:
                    # No name is left here for a batch that the consumer may drop meanwhile.
                    self._found.put(("batch", self._loaded()))
                except StopIteration:
                    self._found.put(("end", None))
                    return
                except BaseException as error:
                    self._found.put(("error", error))
                    return


class _Modes(contextlib.ExitStack):
    """Enters the modes of one thread in another one."""

    def __init__(self) -> None:
        super().__init__()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST
        ]
        self._caches_casts = torch.is_autocast_cache_enabled()

    def __enter__(self) -> _Modes:
        super().__enter__()
        if self._inference:
            self.enter_context(torch.inference_mode())
        self.enter_context(torch.set_grad_enabled(self._grad))
        if self._device.type != "cpu":
            self.enter_context(self._device)
        # These end with the thread. torch.autocast would empty a cache that all threads share.
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches_casts)
        return self


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with other tensors in the places of its own."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if isinstance(leaf, PackedSequence):
            indices = [None if i is None else change(i) for i in leaf[2:]]
            return type(leaf)(change(leaf.data), leaf.batch_sizes, *indices)
        if isinstance(leaf, tuple):  # Of a class that PyTorch's trees do not know.
            parts = with_tensors(list(leaf), change)
            if all(map(operator.is_, parts, leaf)):
                return leaf
            made = tuple.__new__(type(leaf), parts)
            if attributes := getattr(leaf, "__dict__", None):
                vars(made).update(with_tensors(attributes, change))
            return made
        parts, spec = flatten_result(leaf)
        new = [part if part is leaf else changed(part) for part in parts]
        holds = any(isinstance(part, torch.Tensor) for part in parts)
        return build(new, spec) if holds or not all(map(operator.is_, new, parts)) else leaf

    return pytree.tree_map(changed, batch, is_leaf=lambda part: isinstance(part, PackedSequence))


def kept_from_the_loader(batch: Any, held: set[int]) -> Any:
    """A batch with copies of some tensors, which are told by their identities."""
    new: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in held and id(tensor) not in new:
            new[id(tensor)] = tensor.clone()
        return new.get(id(tensor), tensor)

    try:
        return with_tensors(batch, copied)
    except SignatureError:  # It holds itself.
        return batch


@dataclass
class _Sent:
    """A batch on its way to a GPU: its tree, its new tensors there, and when they are complete.

    `waits` says whether tensors are left that only the consumer's stream copies.
    """

    tree: Any
    tensors: list[torch.Tensor]
    done: torch.cuda.Event
    waits: bool


@dataclass
class _Source:
    """What a batch is copied from, until that is done: buffers of ours, and pinned tensors."""

    done: torch.cuda.Event
    buffers: list[torch.Tensor] = field(default_factory=list)
    theirs: list[torch.Tensor] = field(default_factory=list)


class _Copies:
    """Copies batches to a GPU, through pinned buffers and over a stream of its own."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Of the batches under way: our pinned buffers, and the loader's own pinned tensors.
        self._used: collections.deque[_Source] = collections.deque()
        self._free: list[torch.Tensor] = []
        self._depth = depth

    def sent(self, batch: Any, held: set[int]) -> _Sent:
        """Begin to copy a batch, and read to the end what the loader may fill again.

        Args:
            batch: what was loaded.
            held: the identities of tensors that the loader holds too.
        """
        self._collect()
        source = _Source(torch.cuda.Event())
        known: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = self._copied(tensor, source, id(tensor) in held)
            return known[id(tensor)]

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            tree = with_tensors(batch, copied)
            source.done.record(self._stream)
        self._used.append(source)
        if any(id(tensor) in held for tensor in source.theirs):
            source.done.synchronize()
        new = [tensor for tensor in known.values() if tensor.device == self._device]
        return _Sent(tree, new, source.done, waits=len(new) < len(known))

    def received(self, sent: _Sent) -> Any:
        """A batch for work on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(sent.done)
        for tensor in sent.tensors:
            if tensor.layout is torch.strided:
                # Its memory is not used again before what is queued when it is dropped is over.
                tensor.record_stream(stream)
        if not sent.waits:
            return sent.tree
        return with_tensors(sent.tree, lambda tensor: tensor.to(self._device))

    def _copied(self, tensor: torch.Tensor, source: _Source, held: bool) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        simple = plain and tensor.layout is torch.strided and not tensor.requires_grad
        if not simple or tensor.device.type != "cpu":
            if held:
                return tensor.clone()
            return tensor  # Of parts that lie elsewhere nobody could say who reads them.
        there = torch.empty_like(tensor, device=self._device)
        if tensor.is_pinned():
            source.theirs.append(tensor)
            return there.copy_(tensor, non_blocking=True)
        size = tensor.numel() * tensor.element_size()
        buffer = self._buffer(size)
        source.buffers.append(buffer)
        pinned = buffer[:size].view(tensor.dtype).as_strided(there.shape, there.stride())
        pinned.copy_(tensor)
        return there.copy_(pinned, non_blocking=True)

    def _buffer(self, size: int) -> torch.Tensor:
        """The smallest free pinned buffer that is large enough; a new one if there is none."""
        fitting = [each for each in self._free if size <= each.numel() <= 2 * size]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            self._free = [each for each in self._free if each is not best]
            return best
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def _collect(self) -> None:
        """Take back the buffers of what has been copied; wait for the oldest if many are used."""
        while self._used and (len(self._used) > self._depth or self._used[0].done.query()):
            source = self._used.popleft()
            source.done.synchronize()
            # No more are kept than batches like this one need.
            most = (self._depth + 1) * len(source.buffers)
            self._free = [*source.buffers, *self._free][:most]
