"""decode(): a step function of one's own, run token after token as a few graphs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.options import callable_problem, in_brief, names_checked, refuse
from ..errors import FallbackWarning, GraphwrightError, OptionError
from ..graphs.conditions import capturing_now
from ..graphs.memory import MemoryPool
from .launches import STEPS_PER_LAUNCH, StepGraphs, launches
from .steps import LoopTensors, decode_step, lasting

StepFunction = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]
Until = int | Sequence[int] | torch.Tensor | Callable[[torch.Tensor], torch.Tensor] | None

# Forms of calls (step function, shapes of token and state) whose graphs are kept.
_MOST_KEPT = 8
_KEPT: dict[Any, _Loop] = {}  # least recently used first
_KEPT_LOCK = threading.Lock()


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a loop has made.

    Attributes:
        tokens: shape (batch, steps, ...): the tokens of each step, up to the end of the longest
            sequence; what comes behind the end of a sequence is `pad`.
        lengths: shape (batch,), int64: tokens of each sequence, the one that ended it included.
        state: the state after `steps` steps.
        steps: steps that ran: as many as the longest sequence has tokens, or up to a launch and
            another one more, since the end is seen late.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    state: Any
    steps: int


@names_checked
def decode(
    step: StepFunction,
    state: Any,
    token: torch.Tensor,
    *,
    until: Until = None,
    max_steps: int,
    pad: float = 0,
    pool: MemoryPool | None = None,
    steps_per_launch: int | None = None,
) -> Decoded:
    """Run a step function over and over, each time on the token that it made, as a few graphs.

    The tensors of the state are copied to memory that stays where it is, the step is captured on
    them, and several steps run in one launch. A later call with the same step function and tensors
    of the same shapes runs by the same graphs. Inside of a capture (a step within a step, or within
    `capture()` and `graph()`) all `max_steps` steps become part of that capture.

    Args:
        step: from a token and a state to the next token and state; what it returns has the shapes
            and types of what it was given. It may change tensors of the state in place. It holds
            no token on the host.
        state: tensors in lists, tuples and dictionaries; other values stay what they are.
        token: the first token that the step is given, shape (batch, ...).
        until: what ends a sequence: a token or several, or a function from tokens, shape
            (batch, ...), to booleans, shape (batch,). By default nothing ends it early.
        max_steps: the most steps to run.
        pad: the token that a sequence has behind its end; the step itself is never given it.
        pool: the memory of the graphs; by default one for each step function.
        steps_per_launch: steps in one graph. By default 8.

    Returns:
        the tokens, their number, and the state after the last step.

    Raises:
        OptionError: an argument is wrong, or the step returns other shapes than it is given.
    """
    refuse(
        "decode",
        callable_problem("step", step),
        None if isinstance(token, torch.Tensor) and token.ndim else "token is no tensor of a batch",
        _count_problem("max_steps", max_steps),
        None if steps_per_launch is None else _count_problem("steps_per_launch", steps_per_launch),
    )
    leaves, form = pytree.tree_flatten(state)
    refuse("decode", *_leaves_problems(leaves))
    ends = _ends_of(until, token)
    if _captured_now(token.device):
        with torch.no_grad():
            return _in_capture(step, state, token, ends, max_steps, pad)
    at_once = STEPS_PER_LAUNCH if steps_per_launch is None else steps_per_launch
    key = (
        *(_identity(step), form, _forms_of([token, *leaves]), _doubled(max_steps)),
        *(_key_of(until), repr(pad), id(pool), at_once),
    )
    late: list[_Loop] = []
    with _KEPT_LOCK:
        loop = _KEPT.pop(key, None)
        if loop is None:
            with lasting():
                loop = _Loop(step, leaves, form, token, ends, _doubled(max_steps), pad, pool)
        while len(_KEPT) >= _MOST_KEPT:
            late.append(_KEPT.pop(next(iter(_KEPT))))
        _KEPT[key] = loop  # the one that was used last
    for each in late:
        each.close()
    with torch.no_grad():
        return loop.run(leaves, token, max_steps, at_once)


class _Loop:
    """The tensors and graphs of the calls of one form."""

    def __init__(
        self,
        step: StepFunction,
        leaves: Sequence[Any],
        form: pytree.TreeSpec,
        token: torch.Tensor,
        ends: Callable[[torch.Tensor], torch.Tensor] | None,
        room: int,
        pad: float,
        pool: MemoryPool | None,
    ) -> None:
        self._state = [
            torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        self._form, self._ends_early = form, ends is not None
        self._kept = _tensors_for(token, room)
        one = decode_step(step, self._state, form, self._kept, ends, pad)
        self._graphs = StepGraphs(one, MemoryPool() if pool is None else pool)
        self._lock = threading.Lock()
        self._closed = False
        # Keys name it by its identity.
        self._step = step

    def run(
        self, leaves: Sequence[Any], token: torch.Tensor, max_steps: int, at_once: int
    ) -> Decoded:
        """All steps of a call."""
        with self._lock:
            try:
                return self._run(leaves, token, max_steps, at_once)
            finally:
                if self._closed:
                    self._graphs.close()

    def _run(
        self, leaves: Sequence[Any], token: torch.Tensor, max_steps: int, at_once: int
    ) -> Decoded:
        kept = self._kept
        for mine, its in zip(self._state, leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(its)
        kept.token.copy_(token)
        kept.count.zero_()
        kept.lengths.zero_()
        kept.unfinished.fill_(True)
        kept.ended.fill_(False)
        ended = kept.ended if self._ends_early else None
        steps = sum(launches(lambda _: self._graphs, max_steps, at_once=at_once, ended=ended))
        if self._graphs.refused is not None:
            _tell(self._graphs.refused)
        lengths = kept.lengths.clone()
        made = int(lengths.max()) if self._ends_early and len(lengths) else steps
        state = [each.clone() if isinstance(each, torch.Tensor) else each for each in self._state]
        return Decoded(
            kept.tokens[:, :made].clone(),
            lengths,
            pytree.tree_unflatten(state, self._form),
            steps,
        )

    def close(self) -> None:
        """Close the graphs, now or when the call that runs them ends."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._graphs.close()
            finally:
                self._lock.release()


def _captured_now(device: torch.device) -> bool:
    """Whether a capture or its warm-up is under way: steps are a part of its work then."""
    return capturing_now() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _in_capture(
    step: StepFunction,
    state: Any,
    token: torch.Tensor,
    ends: Callable[[torch.Tensor], torch.Tensor] | None,
    max_steps: int,
    pad: float,
) -> Decoded:
    """All steps as a part of what is captured: nothing is read on the host, so none is left out."""
    leaves, form = pytree.tree_flatten(state)
    mine = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    kept = _tensors_for(token, max_steps)
    kept.token.copy_(token)
    kept.unfinished.fill_(True)
    one = decode_step(step, mine, form, kept, ends, pad)
    for _ in range(max_steps):
        one()
    return Decoded(kept.tokens, kept.lengths, pytree.tree_unflatten(mine, form), max_steps)


def _tensors_for(token: torch.Tensor, room: int) -> LoopTensors:
    batch, device = token.shape[0], token.device
    return LoopTensors(
        torch.empty_like(token),
        token.new_zeros((batch, room, *token.shape[1:])),
        torch.zeros((), dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
        torch.ones(batch, dtype=torch.bool, device=device),
        torch.zeros((), dtype=torch.bool, device=device),
    )


def _ends_of(until: Until, token: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that says which sequences a token ends."""
    if until is None or callable(until):
        return until
    if token.ndim != 1:
        raise OptionError(
            f"until names tokens, but a token has shape {tuple(token.shape)}, and not (batch,).",
            remedy="Pass a function from tokens to booleans, shape (batch,).",
        )
    wanted = torch.as_tensor(until, dtype=token.dtype, device=token.device).reshape(-1)
    return lambda tokens: (tokens[:, None] == wanted).any(dim=1)


def _key_of(until: Until) -> Any:
    if isinstance(until, torch.Tensor):
        return tuple(until.reshape(-1).tolist())
    return tuple(until) if isinstance(until, Sequence) else until


def _identity(step: Any) -> tuple[Any, ...]:
    """A step function itself, whatever it is equal to; a method by its object."""
    owner = getattr(step, "__self__", None)
    return (id(step),) if owner is None else (id(owner), getattr(step, "__func__", step))


def _leaves_problems(leaves: Sequence[Any]) -> list[str | None]:
    """What is wrong with the leaves of a state."""
    found: list[str | None] = []
    seen: list[tuple[int, int, int]] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if not leaf.numel():
                continue
            begin = leaf.data_ptr()
            span = sum((n - 1) * abs(s) for n, s in zip(leaf.shape, leaf.stride(), strict=True))
            end = begin + (span + 1) * leaf.element_size()
            other = next((i for i, lo, hi in seen if begin < hi and lo < end), None)
            if other is not None:
                found.append(
                    f"leaves {other} and {index} of the state share memory: pass one of them, and "
                    "take the other from it inside of step, or pass a clone"
                )
            seen.append((index, begin, end))
        elif not isinstance(leaf, bool | int | float | complex | str | bytes | None | torch.dtype):
            found.append(f"leaf {index} of the state is {in_brief(leaf)}: pass a tensor")
    return found


def _forms_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride())
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf))
        for leaf in leaves
    )


def _doubled(steps: int) -> int:
    return 1 << (steps - 1).bit_length()


def _tell(error: GraphwrightError) -> None:
    warnings.warn(f"The step of decode() runs eagerly: {error.what}", FallbackWarning, stacklevel=4)


def _count_problem(name: str, value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return None
    return f"{name} is {in_brief(value)}, and not a positive number"
