"""Static inputs: how a call's tensors get into a graph's memory, and back where it writes to them.

Static inputs have the strides, overlaps and aliases of the sample's tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .recorder import Allocate, Recording
from .staging import Staging

# Tensors that span more than this many times their own bytes are copied element by element.
_GAP_FACTOR = 2
_ALIGNMENT = 16
# So many tensors that a call writes to, as those of a cache, are copied by one kernel: a copy of
# its own takes a graph 2.4 µs each time (H200). As words of eight bytes they are copied fastest.
_LEAST_TOGETHER, _WORD = 6, torch.int64


def span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill its span without gaps or overlaps."""
    return span(tensor) == tensor.numel() * tensor.element_size() and not _overlaps(tensor)


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(n > 1 and st == 0 for n, st in zip(tensor.shape, tensor.stride(), strict=True))


class Geometry(NamedTuple):
    """Shape, strides and dtype of a tensor, without its memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(tensor.size(), tensor.stride(), tensor.dtype)

    def at(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """Such a tensor in the memory of another, `start` bytes after the other's first element."""
        offset = memory.storage_offset() * memory.element_size() + start
        result = torch.empty(0, dtype=self.dtype, device=memory.device)
        return result.set_(
            memory.untyped_storage(), offset // self.dtype.itemsize, self.size, self.stride
        )

    def at_element(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """Such a tensor in a storage, `offset` elements from its beginning."""
        with torch.inference_mode(False):
            made = torch.empty(0, dtype=self.dtype, device=storage.device)
            return made.set_(storage, offset, self.size, self.stride)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's span as a 1-D uint8 view."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * tensor.element_size(),
        (span(tensor),),
        (1,),
    )


def by_storage(leaves: Sequence[Any]) -> list[list[int]]:
    """Indices of the tensors among some leaves, grouped by storage."""
    groups: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            # By address: two storages may share one NumPy array.
            storage = leaf.untyped_storage()
            groups.setdefault(storage.data_ptr() or -storage._cdata, []).append(index)
    return list(groups.values())


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[int, list[int]]:
    """Bytes that some tensors of one storage span together, and the offset of each in them."""
    starts = [t.data_ptr() for t in tensors if t.numel()]
    low = min(starts, default=0)
    if len(tensors) > 1:
        low -= low % _ALIGNMENT  # so that each tensor stays aligned to its dtype
    places = [t.data_ptr() - low if t.numel() else 0 for t in tensors]
    end = max(place + span(t) for place, t in zip(places, tensors, strict=True))
    return end, places


def is_on_host(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on the host, for a call that runs on a device."""
    return tensor.device.type == "cpu" and device.type != "cpu"


def hosts_among(leaves: Sequence[Any], device: torch.device) -> list[int]:
    """Positions of the tensors on the host, for a call that runs on a device."""
    return [
        i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and is_on_host(x, device)
    ]


def left_in_place(
    sample: Sequence[Any], mutated: Sequence[int], device: torch.device
) -> tuple[int, ...]:
    """Positions of the arguments that a graph may work on where they are, without copies.

    They are many that a call writes to, as those of a cache, which each call is given again; with
    all that share memory with them.

    Args:
        sample: leaves of a call's arguments.
        mutated: positions of those that the call writes to.
        device: where it runs.
    """
    written, found = set(mutated), []
    for group in by_storage(sample):
        tensors = [sample[index] for index in group]
        if written.isdisjoint(group) or any(is_on_host(tensor, device) for tensor in tensors):
            continue
        # Of a part of a buffer, others may use the rest meanwhile.
        most = _GAP_FACTOR * sum(span(tensor) for tensor in tensors)
        dense = all(tensor.numel() and is_dense(tensor) for tensor in tensors)
        if dense and tensors[0].untyped_storage().nbytes() <= most:
            found += group
    return tuple(sorted(found)) if len(written.intersection(found)) >= _LEAST_TOGETHER else ()


class StaticInputs:
    """The static inputs of a graph: the sample's leaves with their tensors in other memory.

    All are on the device. Arguments on the host are sent there before each replay (`send`).

    Attributes:
        leaves: the sample's leaves, tensors replaced by the static ones.
        slots: positions of the tensors among the leaves, each tensor once.
        hosts: those of them whose tensors the caller has on the host.
        in_place: those of them that are in the sample's own memory.
        geometries: of the leaves that are tensors, None for others.
    """

    def __init__(
        self,
        sample: Sequence[Any],
        allocate: Allocate,
        *,
        hosts: Sequence[int] = (),
        in_place: Sequence[int] = (),
        as_given: bool = False,
    ) -> None:
        """Allocate memory for a sample's tensors and copy their values.

        Args:
            sample: leaves of a call's arguments.
            allocate: gives bytes on the device.
            hosts: positions of those that callers have on the host, although the sample does not.
            in_place: of those that stay in the sample's memory, with all that share it.
            as_given: whether tensors on the host stay there, as in an eager call.
        """
        self.leaves = list(sample)
        self.slots: list[int] = []
        self.hosts: list[int] = []
        self.in_place = [index for index, leaf in enumerate(sample) if index in in_place]
        self._staged: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []
        self._staging: Staging | None = None
        for group in by_storage(sample):
            if group[0] in in_place:
                self._leave(sample, group)
            else:
                self._move(sample, group, allocate, hosts, as_given)
        self.slots.sort()
        self.hosts.sort()
        self.geometries = [
            Geometry.of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in self.leaves
        ]
        for slot in self.slots:
            if slot not in self.in_place:
                copy(sample[slot], self.tensor(slot))

    def _move(
        self,
        sample: Sequence[Any],
        group: Sequence[int],
        allocate: Allocate,
        hosts: Sequence[int],
        as_given: bool,
    ) -> None:
        """Make static tensors for those of one storage, in other memory."""
        made: dict[int, torch.Tensor] = {}
        nbytes, places = places_of([sample[index] for index in group])
        memory = allocate(nbytes)
        first = sample[group[0]]
        from_host = is_on_host(first, memory.device) or any(i in hosts for i in group)
        if from_host and as_given:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=first.device)
        staged = []
        for index, place in zip(group, places, strict=True):
            leaf = sample[index]
            if id(leaf) not in made:
                made[id(leaf)] = Geometry.of(leaf).at(memory, place)
                self.slots.append(index)
                staged.append((index, place))
            self.leaves[index] = made[id(leaf)]
        if from_host:
            self.hosts += [index for index, _ in staged]
            self._staged.append((memory, staged))

    def _leave(self, sample: Sequence[Any], group: Sequence[int]) -> None:
        """Take the tensors of one storage as they are, in the sample's memory."""
        made: dict[int, torch.Tensor] = {}
        for index in group:
            leaf = sample[index]
            if id(leaf) not in made:
                shape, offset = Geometry.of(leaf), leaf.storage_offset()
                made[id(leaf)] = shape.at_element(leaf.untyped_storage(), offset)
                self.slots.append(index)
            self.leaves[index] = made[id(leaf)]

    def given(self) -> list[tuple[int, torch.Tensor]]:
        """Positions of the leaves in the sample's memory, and their tensors."""
        return [(slot, self.tensor(slot)) for slot in self.in_place]

    def apart(self) -> list[int]:
        """Positions of the other leaves that are tensors."""
        tensors = (i for i, shape in enumerate(self.geometries) if shape is not None)
        return [index for index in tensors if index not in self.in_place]

    def tensor(self, slot: int) -> torch.Tensor:
        """The static tensor of a slot."""
        leaf = self.leaves[slot]
        assert isinstance(leaf, torch.Tensor)
        return leaf

    def fill(self, leaves: Sequence[Any]) -> None:
        """Copy a call's values in; its tensors have the sample's shapes, strides and overlaps."""
        for slot in self.slots:
            copy(leaves[slot], self.tensor(slot))

    def send(self, leaves: Sequence[Any]) -> None:
        """Send a call's arguments on the host to the device; the caller may change them then.

        The current stream must wait for the last replay first.
        """
        if not self._staged:
            return
        if self._staging is None:
            self._staging = Staging([memory for memory, _ in self._staged], self._views_in, copy)
        with torch.no_grad():
            self._staging.send(leaves)

    def _views_in(self, parts: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """The arguments on the host in other memory, a part for each of their storages."""
        return [
            (slot, Geometry.of(self.tensor(slot)).at(part, place))
            for part, (_, staged) in zip(parts, self._staged, strict=True)
            for slot, place in staged
        ]

    @property
    def sources(self) -> list[int]:
        """Slots on the device that are copied in as one range of bytes: without large gaps."""
        return [s for s in self._copied if self._in_one_range(s)]

    @property
    def by_element(self) -> list[int]:
        """Slots on the device that are copied in element by element."""
        return [s for s in self._copied if not self._in_one_range(s)]

    def back(self, mutated: Sequence[int]) -> list[int]:
        """Those of some slots that are copied back as one range of bytes."""
        copied = set(self._copied)
        return [s for s in mutated if s in copied and is_dense(self.tensor(s))]

    @property
    def _copied(self) -> list[int]:
        """Slots on the device whose tensors are copied in."""
        return [s for s in self.slots if s not in self.hosts and s not in self.in_place]

    def _in_one_range(self, slot: int) -> bool:
        tensor = self.tensor(slot)
        return span(tensor) <= _GAP_FACTOR * tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class CopyPlan:
    """How arguments are copied into static inputs, and back if the call writes to them.

    Attributes:
        sources: positions of the arguments that are copied in as bytes.
        by_element: of those that are copied in element by element.
        back: of those that are copied back as bytes.
        back_by_element: of those that are copied back element by element.
        fresh: whether the caller gets new tensors, not the graph's own.
        together: positions of arguments that one kernel copies in, and one back: none of those.
        words: the static tensors of these, as words.
        in_place: positions of arguments that the call writes to where they are.
    """

    sources: Sequence[int]
    by_element: Sequence[int]
    back: Sequence[int]
    back_by_element: Sequence[int]
    fresh: bool
    together: Sequence[int] = ()
    words: list[torch.Tensor] = field(default_factory=list)
    in_place: Sequence[int] = ()

    @classmethod
    def of(
        cls, inputs: StaticInputs, mutated: Sequence[int], *, fresh: bool, together: bool = False
    ) -> CopyPlan:
        """The copies of a call that writes to the arguments at some positions.

        Args:
            inputs: the static inputs.
            mutated: positions of the arguments that the call writes to.
            fresh: whether the caller gets new tensors.
            together: whether several arguments may be copied by one kernel.
        """
        back = inputs.back(mutated) if fresh else []
        in_place = [slot for slot in mutated if slot in inputs.in_place]
        by_element = sorted({*mutated} - {*back, *in_place})
        grouped = [slot for slot in back if _words([inputs.tensor(slot)])] if together else []
        grouped = grouped if len(grouped) >= _LEAST_TOGETHER else []
        return cls(
            [slot for slot in inputs.sources if slot not in grouped],
            inputs.by_element,
            [slot for slot in back if slot not in grouped],
            by_element,
            fresh,
            grouped,
            _words([inputs.tensor(slot) for slot in grouped]) or [],
            in_place,
        )

    @functools.cached_property
    def is_simple(self) -> bool:
        """Whether nothing is copied but sources, and what the caller gets."""
        if self.by_element or self.back or self.back_by_element or self.together:
            return False
        return not self.in_place

    def run(
        self,
        recording: Recording,
        inputs: StaticInputs,
        leaves: Sequence[Any],
        targets: list[torch.Tensor],
    ) -> None:
        """Replay for the leaves of a call's arguments, with copies that are no simple ones."""
        many = [leaves[slot] for slot in self.together]
        with torch.no_grad():
            for slot in self.by_element:
                copy(leaves[slot], inputs.tensor(slot))
            words, static = _words(many), self.words
            if words is None:  # The caller's do not lie on words: PyTorch copies each by itself.
                words, static = many, [inputs.tensor(slot) for slot in self.together]
            if many:
                with torch.inference_mode():  # They may be inference tensors.
                    torch._foreach_copy_(static, words)
            recording.run(
                [leaves[slot] for slot in self.sources],
                [*targets, *(leaves[slot] for slot in self.back)],
            )
            if many:
                with torch.inference_mode():
                    torch._foreach_copy_(words, static)
            # Autograd has not seen these writes: what it saved for a backward is stale.
            written = [leaves[slot] for slot in (*self.back, *self.in_place)]
            torch.autograd.graph.increment_version([*many, *written])
            for slot in self.back_by_element:
                copy(inputs.tensor(slot), leaves[slot])


def _words(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The same memory as words; None where a tensor does not consist of them, or lie on them."""
    if any(tensor.data_ptr() % _WORD.itemsize for tensor in tensors):
        return None
    try:
        return [tensor.view(_WORD) for tensor in tensors]
    except RuntimeError:
        return None


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between tensors of the same shape and strides; elements that overlap are copied once."""
    if _overlaps(target):
        byte_view(target).copy_(byte_view(source))
    else:
        target.copy_(source)
