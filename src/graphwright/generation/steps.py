"""Functions that build a step from others; what they close over, a graph of the step watches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.options import in_brief
from ..errors import OptionError

Step = Callable[[], None]


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Make static tensors inside the block: those of inference mode can't be written outside it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def repeated(step: Step, times: int) -> Step:
    """The step, several times in a row."""
    if times == 1:
        return step

    def steps() -> None:
        for _ in range(times):
            step()

    return steps


def in_turn(first: Step, second: Step) -> Step:
    """One step of two."""

    def both() -> None:
        first()
        second()

    return both


@dataclass(frozen=True, eq=False)
class LoopTensors:
    """What a loop over a step function keeps on the device.

    Attributes:
        token: shape (batch, ...): the token that the step is given next.
        tokens: shape (batch, room, ...): those that were made.
        count: shape (), int64: steps that ran.
        lengths: shape (batch,), int64: tokens of each sequence.
        unfinished: shape (batch,), bool: the sequences that have not ended.
        ended: shape (), bool: whether all have.
    """

    token: torch.Tensor
    tokens: torch.Tensor
    count: torch.Tensor
    lengths: torch.Tensor
    unfinished: torch.Tensor
    ended: torch.Tensor


def decode_step(
    step: Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]],
    state: Sequence[Any],
    form: pytree.TreeSpec,
    kept: LoopTensors,
    ends: Callable[[torch.Tensor], torch.Tensor] | None,
    pad: float,
) -> Step:
    """One run of a step function, on tensors that stay where they are.

    Args:
        step: the function.
        state: the leaves of its state: static tensors, and plain values.
        form: how the state is built of these.
        kept: the rest of what the loop keeps.
        ends: which tokens end a sequence; None if none does.
        pad: the token of a sequence that has ended.
    """

    def one() -> None:
        made, following = step(kept.token, pytree.tree_unflatten(list(state), form))
        leaves = _checked(made, following, kept.token, state, form)
        if made is not kept.token and _shares(made, state):
            made = made.clone()  # The state is written before it.
        shown = made
        if ends is not None:
            # A step is given no padding, which may be no token that it knows.
            shown = _where(kept.unfinished, made, pad)
            made = _where(kept.unfinished, made, kept.token)
        kept.tokens.index_copy_(1, kept.count.view(1), shown.unsqueeze(1))
        kept.lengths.add_(kept.unfinished)
        kept.count.add_(1)
        for mine, its in leaves:
            mine.copy_(its)
        if made is not kept.token:
            kept.token.copy_(made)
        if ends is not None:
            kept.unfinished.logical_and_(ends(made).logical_not())
            kept.ended.copy_(kept.unfinished.any().logical_not())

    return one


def _where(rows: torch.Tensor, tokens: torch.Tensor, other: Any) -> torch.Tensor:
    """Tokens, shape (batch, ...), of some rows, and something else in the others."""
    return torch.where(rows.view(-1, *[1] * (tokens.ndim - 1)), tokens, other)


def _checked(
    made: Any, following: Any, token: torch.Tensor, state: Sequence[Any], form: pytree.TreeSpec
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a static tensor and its next value, none of which another pair overwrites."""
    leaves, its_form = pytree.tree_flatten(following)
    if its_form != form:
        raise OptionError(f"step returns a state of another form: {its_form}, and not {form}.")
    pairs = []
    for index, (mine, its) in enumerate(zip([token, *state], [made, *leaves], strict=True)):
        what = "the token" if index == 0 else f"leaf {index - 1} of the state"
        if not isinstance(mine, torch.Tensor):
            if type(its) is not type(mine) or its != mine:
                raise OptionError(
                    f"step changes {what} from {in_brief(mine)} to {in_brief(its)}: a graph would "
                    "freeze it.",
                    remedy="Keep it in a tensor.",
                )
        elif not isinstance(its, torch.Tensor) or _described(its) != _described(mine):
            raise OptionError(
                f"step returns {what} as {_described(its)}, and was given {_described(mine)}.",
                remedy="Keep shapes and types: write to a position of a larger tensor, say.",
            )
        elif index and its is not mine:
            # A view of another leaf would change while these are copied.
            pairs.append((mine, its.clone() if _shares(its, state) else its))
    return pairs


def _shares(tensor: torch.Tensor, state: Sequence[Any]) -> bool:
    place = tensor.untyped_storage().data_ptr()
    tensors = (each for each in state if isinstance(each, torch.Tensor))
    return any(place == each.untyped_storage().data_ptr() for each in tensors)


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return in_brief(value)
    return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')} on {value.device}"
