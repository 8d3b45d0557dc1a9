"""Eligibility: whether a family's calls may be padded at all, as a run of the sample shows.

`depends_on_chance` finds out whether the random numbers that a call draws matter. Some models draw
numbers that they use only in training (layer drop); their calls can be padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.modes import OperationMode
from ..calls.operations import generator_of, tensors
from ..calls.snapshots import clone_leaves, layout, same_bits, same_value
from ..calls.split import leaf_names
from ..evaluation.accuracy import difference
from ..graphs.host_draws import is_foreign
from ..graphs.journal import Journal
from ..graphs.segments.observing_tracer import reads_of_arguments
from ..graphs.taken_apart import holds_objects
from .aliasing import Sharing, pattern_of
from .dynamic_signature import DynamicSignature
from .sampler import CallSampler

# Memory from outside of at most this many bytes is taken for a counter, which may be written to.
_COUNTER_BYTES = 16
# Why calls that draw more where they are larger may not be padded.
OTHER_DRAWS = "it draws random numbers that depend on the input sizes"


@dataclass(frozen=True)
class Observation:
    """What a run of the sample has shown.

    Attributes:
        outputs: how many leaves the function returns.
        shared: outputs that share memory with others, which slicing must keep.
        buffers: storages of buffers that the function writes to, by identity.
        reason: why no call of the family may be padded, or None.
        draws: whether a graph of the call has to draw on the host beside its replay.
        objects: whether the function returns objects, which have to be taken apart.
    """

    outputs: int
    shared: frozenset[int]
    buffers: frozenset[int]
    reason: str | None
    draws: bool
    objects: bool


def observe(
    sampler: CallSampler, signature: DynamicSignature, as_given: Sequence[Any] | None
) -> Observation:
    """Run the sample, and see what the function returns, writes to and draws.

    Args:
        sampler: the function and the sample; it is run a few times.
        signature: of the sample.
        as_given: the sample with its gaps in memory, if it had any.
    """
    seen = _Run.of(sampler, signature)
    return Observation(
        len(seen.sharing.pattern),
        seen.sharing.shared,
        frozenset(seen.buffers & set(seen.written)),
        _reason(seen, sampler, signature, as_given),
        bool(seen.journal.draws.made) and is_foreign(torch.default_generator, sampler.device),
        holds_objects((seen.result,), {}),
    )


@dataclass(frozen=True)
class _Run:
    """A run of the sample.

    Attributes:
        result: what the function returned.
        sharing: which memory that shares.
        journal: of the operations.
        writes: whether it wrote to an argument.
        random: whether it drew random numbers.
        written: bytes of other storages that it wrote to, by identity.
        buffers: storages of buffers, by identity.
    """

    result: Any
    sharing: Sharing
    journal: Journal
    writes: bool
    random: bool
    written: Mapping[int, int]
    buffers: Set[int]

    @classmethod
    def of(cls, sampler: CallSampler, signature: DynamicSignature) -> _Run:
        """Run the sample, and undo what it writes."""
        leaves = clone_leaves(sampler.sample)
        given = tensors(leaves)
        journal = Journal()
        try:
            with journal:
                result = sampler.result(leaves)
            journal.drop_unused_generators()
            writes = any(map(journal.wrote_to, given))
            random = bool(journal.generators)
        finally:
            journal.undo()
        mine = {tensor.untyped_storage()._cdata for tensor in given}
        return cls(
            result,
            Sharing.of(result, leaves, signature.axes),
            journal,
            writes,
            random,
            {s._cdata: s.nbytes() for s in journal.written if s._cdata not in mine},
            {buffer.untyped_storage()._cdata for buffer in sampler.module.buffers()},
        )


def _reason(
    seen: _Run, sampler: CallSampler, signature: DynamicSignature, as_given: Sequence[Any] | None
) -> str | None:
    """Why no call of the family may be padded, or None."""
    read = reads_of_arguments(sampler.result, sampler.sample, sampler.device)
    if read is not None:
        return (
            f"it goes by what {read.func} reads of the arguments, at {read.place}, and calls of "
            "other sizes may go another way"
        )
    if seen.random and (seen.journal.wrote or depends_on_chance(lambda: _run_sample(sampler))):
        return OTHER_DRAWS
    if seen.writes and signature.overlap:
        return "it writes to an argument that shares memory with another one"
    if as_given is not None and _differs_with_gaps(sampler, signature, as_given):
        return "it depends on gaps between the rows of an argument"
    others = (n for storage, n in seen.written.items() if storage not in seen.buffers)
    if any(nbytes > _COUNTER_BYTES for nbytes in others):
        return "it writes to memory that is neither an argument's nor a buffer's"
    if seen.sharing.views:
        output, argument = seen.sharing.views[0]
        name = leaf_names(seen.result, "output")[output]
        return f"{name} is a view of the argument {signature.names[argument]}"
    return None


def _run_sample(sampler: CallSampler) -> Any:
    return sampler.result(clone_leaves(sampler.sample))


def _differs_with_gaps(
    sampler: CallSampler, signature: DynamicSignature, as_given: Sequence[Any]
) -> bool:
    """Whether a call does something else for tensors with gaps than for tensors without."""
    one_leaves = clone_leaves(as_given)
    two_leaves = signature.without_gaps(clone_leaves(as_given))
    one, two = sampler.result(one_leaves), sampler.result(two_leaves)
    pattern = pattern_of(one, one_leaves)
    if pattern != pattern_of(two, two_leaves):
        return True
    for index, (a, b) in enumerate(
        zip(pytree.tree_leaves(one), pytree.tree_leaves(two), strict=True)
    ):
        if difference(a, b, other_kernels=True) is not None:
            return True
        given = pattern[index][0] is not None
        if isinstance(a, torch.Tensor) and not given and layout(a) != layout(b):
            return True
    pairs = zip(one_leaves, two_leaves, strict=True)
    return any(difference(a, b, other_kernels=True) is not None for a, b in pairs)


class _FixedRandomNumbers(OperationMode):
    """Sets all random numbers to the same value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = generator_of(args, kwargs)
        before = generator.get_state()
        result = func(*args, **kwargs)
        # Attention without dropout draws none.
        if not torch.equal(before, generator.get_state()):
            for tensor in tensors(result):
                tensor.fill_(self._value)
        return result


def depends_on_chance(call: Callable[[], Any]) -> bool:
    """Whether results change with other random numbers, or if all of these are 0 or 1."""
    found = [pytree.tree_leaves(call()) for _ in range(2)]
    for value in (0.0, 1.0):
        with _FixedRandomNumbers(value):
            found.append(pytree.tree_leaves(call()))
    return not all(all(map(_same, found[0], other)) for other in found[1:])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return same_value(a, b)
