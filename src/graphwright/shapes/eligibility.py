"""What one run of a sample tells: whether its calls may be filled up at all, and what to heed.

Whether what a call returns depends on the random numbers that it draws.

Some models draw numbers that they use in training alone (layer drop), and can be filled up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.modes import OperationMode
from ..calls.operations import generator_of, tensors
from ..calls.signature import leaf_names
from ..calls.snapshots import clone_leaves, layout, same_bits, same_value
from ..evaluation.accuracy import difference
from ..graphs.journal import Journal
from ..graphs.segments.observation import reads_of_arguments
from .aliasing import Sharing, pattern_of
from .dynamic_signature import DynamicSignature
from .sampler import CallSampler

_A_COUNTER = 16  # bytes


@dataclass(frozen=True)
class Observation:
    """What a run of the sample has shown.

    Attributes:
        outputs: how many leaves the function returns.
        shared: those that share memory with others, which cutting must not tear apart.
        buffers: storages of buffers that it writes to, by identity.
        reason: why none of these calls may be filled up, or None.
    """

    outputs: int
    shared: frozenset[int]
    buffers: frozenset[int]
    reason: str | None


def observe(
    subject: CallSampler, form: DynamicSignature, as_given: Sequence[Any] | None
) -> Observation:
    """Run the sample, and look at what the function returns, writes to and draws.

    Args:
        subject: the function and the sample; it is run a few times.
        form: of the sample.
        as_given: the sample before it was brought into new tensors' layout, where that differs.
    """
    leaves = clone_leaves(subject.sample)
    journal = Journal()
    try:
        with journal:
            result = subject.result(leaves)
        journal.forget_what_stood_still()
        writes = any(isinstance(v, torch.Tensor) and journal.wrote_to(v) for v in leaves)
        random = bool(journal.generators)
    finally:
        journal.undo()
    sharing = Sharing.of(result, leaves, form.axes)
    reason = None
    if sharing.views:
        output, argument = sharing.views[0]
        name = leaf_names(result, "output")[output]
        reason = f"{name} is a view of the argument {form.names[argument]}"
    mine = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
    buffers = {b.untyped_storage()._cdata for b in subject.module.buffers()}
    written = {s._cdata: s.nbytes() for s in journal.written if s._cdata not in mine}
    if any(n > _A_COUNTER for storage, n in written.items() if storage not in buffers):
        reason = "it writes to memory that is neither an argument's nor a buffer's"
    read = reads_of_arguments(subject.result, subject.sample, subject.device)
    if read is not None:
        reason = (
            f"it goes by what {read.func} reads of the arguments, at {read.place}, and calls of "
            "other sizes may go another way"
        )
    elif random and (journal.wrote or depends_on_chance(lambda: _again(subject))):
        reason = "it draws random numbers, others for other sizes"
    elif writes and form.overlap:
        reason = "it writes to an argument that shares memory with another one"
    elif as_given is not None and _differs_with_gaps(subject, form, as_given):
        reason = "it depends on gaps between the rows of an argument"
    return Observation(
        len(sharing.pattern), sharing.shared, frozenset(buffers & set(written)), reason
    )


def _again(subject: CallSampler) -> Any:
    return subject.result(clone_leaves(subject.sample))


def _differs_with_gaps(
    subject: CallSampler, form: DynamicSignature, as_given: Sequence[Any]
) -> bool:
    """Whether a call does something else for tensors with gaps than for ones without."""
    one_leaves = clone_leaves(as_given)
    two_leaves = form.without_gaps(clone_leaves(as_given))
    one, two = subject.result(one_leaves), subject.result(two_leaves)
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


class _Loaded(OperationMode):
    """Gives every random number the same value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = generator_of(args, kwargs)
        before = generator.get_state()
        result = func(*args, **kwargs)
        if not torch.equal(before, generator.get_state()):  # Attention without dropout draws none.
            for tensor in tensors(result):
                tensor.fill_(self._value)
        return result


def depends_on_chance(call: Callable[[], Any]) -> bool:
    """Whether a call gives other results with other random numbers, or where all are 0 or all 1."""
    found = [pytree.tree_leaves(call()) for _ in range(2)]
    for value in (0.0, 1.0):
        with _Loaded(value):
            found.append(pytree.tree_leaves(call()))
    return not all(all(map(_same, found[0], other)) for other in found[1:])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return same_value(a, b)
