"""What else holds a batch's tensors or their memory: a loader may fill those again.

Counted are references. What is counted once too often is copied without need; nothing that a loader
keeps is missed.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..calls.objects import PLAIN_TYPES, layout_of
from ..graphs.journal import users_of

_LEAVES = PLAIN_TYPES - {torch.Tensor, nn.Parameter}
# Iterators that run no code of a loader: what they hand out is not written to meanwhile.
_PASSIVE: tuple[type, ...] = (type(iter([])), type(iter(())))


def may_fill_again(batches: Iterable[Any]) -> bool:
    """Whether an iterator may write to what it has handed out."""
    return type(batches) not in _PASSIVE


@dataclass(slots=True, eq=False)
class _BatchPart:
    """A part of a batch, the number of its places there, and what it holds."""

    value: Any
    places: int = 0
    inside: list[_BatchPart] = field(default_factory=list)

    def references(self) -> int:
        """Those of others to the value."""
        return sys.getrefcount(self.value) - _OWN


_OWN = 0
_OWN = _BatchPart(object()).references()


def held_elsewhere(box: list[Any]) -> set[int]:
    """The identities of a batch's CPU tensors that may be filled again by who else holds them.

    These are tensors that something outside of the batch refers to, or a container or object that
    they are in, or their memory; and those whose memory is not PyTorch's, as NumPy's.

    Args:
        box: a list of the batch alone. The caller holds the batch in no other way.
    """
    parts = _parts(box)
    reached = _reached([part for part in parts if part.references() > part.places])
    tensors = [part for part in parts if isinstance(part.value, torch.Tensor)]
    # A copy of what requires gradients would be another variable.
    tensors = [
        part for part in tensors if part.value.device.type == "cpu" and not part.value.requires_grad
    ]
    memory = _memory_held(tensors)
    return {id(part.value) for part in tensors if id(part) in reached or id(part) in memory}


def _reached(parts: list[_BatchPart]) -> set[int]:
    """Parts with all that is inside of them, by identity."""
    every = list(parts)
    found = {id(part) for part in every}
    for part in every:  # It grows.
        new = [each for each in part.inside if id(each) not in found]
        found |= {id(each) for each in new}
        every += new
    return found


def _parts(box: list[Any]) -> list[_BatchPart]:
    """All that a batch consists of, each once."""
    parts = [_BatchPart(box)]
    known: dict[int, _BatchPart] = {}
    for part in parts:  # It grows.
        for value in _inside(part.value):
            if type(value) in _LEAVES:
                continue
            if id(value) not in known:
                known[id(value)] = _BatchPart(value)
                parts.append(known[id(value)])
            known[id(value)].places += 1
            part.inside.append(known[id(value)])
    return parts[1:]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return []
    found: list[Any] = []
    if isinstance(value, dict):
        found.extend(value.values())
    elif isinstance(value, list | tuple | collections.deque):
        found.extend(value)
    layout = layout_of(type(value))
    if layout is not None:
        found.extend(layout.attributes(value).values())
    return found


def _memory_held(parts: list[_BatchPart]) -> set[int]:
    """The parts whose tensors' memory others hold, or may hold."""
    held = set()
    together: dict[int, list[_BatchPart]] = {}
    for part in parts:
        if _has_plain_memory(part.value):
            together.setdefault(part.value.untyped_storage()._cdata, []).append(part)
        else:
            held.add(id(part))
    for sharing in together.values():
        if _is_held(sharing):
            held |= {id(part) for part in sharing}
    return held


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether all that a tensor holds is memory of PyTorch's, or that a worker has sent."""
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return False
    return tensor.untyped_storage().resizable() or tensor.is_shared()


def _is_held(sharing: list[_BatchPart]) -> bool:
    """Whether memory has other users than the tensors that share it here, and what they view."""
    of_one, of_base = _usual()
    mine = {id(part.value) for part in sharing}
    viewed = {id(base): _BatchPart(base) for base in (part.value._base for part in sharing)}
    bases = [part for key, part in viewed.items() if key not in mine and part.value is not None]
    users = users_of(sharing[0].value) - of_one
    return users > len(sharing) + len(bases) - 1 or any(
        part.references() > of_base for part in bases
    )


@functools.cache
def _usual() -> tuple[int, int]:
    """The users of memory of one tensor; references to what is only viewed."""
    with torch.inference_mode(False):
        users = users_of(torch.empty(1, device="cpu"))
        view = torch.empty(1, device="cpu").view(1)
        return users, _BatchPart(view._base).references()
