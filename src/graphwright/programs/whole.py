"""A program as a whole: whether its results are still right, and how long its calls take.

A program may amplify rounding, as ten steps of a diffusion do. So where its results differ by more
than other kernels usually make, they are compared with how much they differ if a part's own results
are off by as much as the part may be.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..calls.objects import flatten_result, map_tensors
from ..errors import VerificationError
from ..evaluation.accuracy import ErrorMeasure, difference, error_of, special_values, worse
from ..evaluation.clock import seconds_of
from .installation import Answer, install, twin_of, uninstall

# Rounds of both in turns, fewer where it is clear by then which is faster, and seconds after which
# no further round begins.
_ROUNDS, _CLEAR_ROUNDS, _TIMING_S = 7, 3, 5.0
_SEED = 0
# Runs with a part's results off, and how many times as much as in the worst of them is right.
_PERTURBED_RUNS, _TIMES_ROUNDING = 3, 2.0
# Of an image's values, this share may be off by one level: they were rounded to whole ones.
_OFF_BY_A_LEVEL = 0.01
# Bytes with no more values than this may be labels.
_LABELS = 32
# By call and by leaf of its result.
Errors = list[list[ErrorMeasure | None]]


class WholeProgram:
    """A program with its calls, and the results that these have before anything is changed.

    Args:
        program: what is run.
        calls: what it is called with, and timed.
        held_out: other calls: their results are compared, too.
        run: runs the program on a call.
        device: where it runs.
        precision: what its modules compute in: plain numbers in results are as exact as that.

    Raises:
        VerificationError: two runs of the same calls disagree, though random numbers are the same.
    """

    def __init__(
        self,
        program: Any,
        calls: Sequence[Any],
        held_out: Sequence[Any],
        run: Callable[[Any, Any], Any],
        device: torch.device,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self._program, self._run, self._device = program, run, device
        self._precision = precision
        self._calls = list(calls)
        self._names = [f"call {n}" for n in range(len(calls))]
        self._names += [f"held-out call {n}" for n in range(len(held_out))]
        self._compared = [*calls, *held_out]
        self._expected = [self._leaves(call) for call in self._compared]
        wrong = self.difference()
        if wrong is not None:
            raise VerificationError(
                f"Two runs of the program with the same calls disagree: {wrong}.",
                remedy="Pass run= with a function that makes a run repeatable, by a seed, say.",
            )

    def difference(self, allowed: Errors | None = None) -> str | None:
        """How the results differ from those from before, in words; None where they do not.

        Args:
            allowed: how far each may be off, if that is more than other kernels usually make.
        """
        for number, (call, expected) in enumerate(zip(self._compared, self._expected, strict=True)):
            found = self._leaves(call)
            if len(found) != len(expected):
                return f"{self._names[number]} returns another structure"
            for place, (mine, its) in enumerate(zip(found, expected, strict=True)):
                wrong = difference(mine, its, other_kernels=True)
                if wrong is None or _is_rounded_alike(mine, its):
                    continue
                if allowed and _is_within(mine, its, allowed[number][place]):
                    continue
                return f"the result of {self._names[number]} differs: {wrong}"
        return None

    def expect_what_it_is(self, module: nn.Module, method: str) -> None:
        """From now on, expect the results that there are where a module itself is called."""
        itself = {method: getattr(twin_of(module), method)}
        install(module, itself)
        try:
            self._expected = [self._leaves(call) for call in self._compared]
        finally:
            uninstall(module, itself)

    def errors_by_rounding(self, module: nn.Module, method: str, rms: float) -> Errors | None:
        """How far results may be off: as far as where a part's own results are off.

        Args:
            module: whose method the part is.
            method: its name.
            rms: how far its results are off, relative to their root mean square.

        Returns:
            None if they differ already where the module's twin answers, whatever its rounding.
        """
        found: Errors = [[None] * len(leaves) for leaves in self._expected]
        itself = {method: getattr(twin_of(module), method)}
        install(module, itself)
        try:
            if self.difference() is not None:
                return None
        finally:
            uninstall(module, itself)
        for seed in range(_PERTURBED_RUNS):
            answers = {method: _perturbed(getattr(twin_of(module), method), rms, seed)}
            install(module, answers)
            try:
                results = [self._leaves(call) for call in self._compared]
            finally:
                uninstall(module, answers)
            for errors, mine, expected in zip(found, results, self._expected, strict=True):
                for place, (one, its) in enumerate(zip(mine, expected, strict=False)):
                    if _is_like(one, its):
                        errors[place] = worse(errors[place], error_of(one, its, its)[0])
        return found

    def timed_in_turns(
        self, installed: Sequence[tuple[nn.Module, Mapping[str, Answer]]]
    ) -> tuple[float, float]:
        """Seconds of all calls without and with what is installed; it is installed at the end."""
        without, among = [], []
        began = time.monotonic()
        for _ in range(_ROUNDS):
            for module, answers in installed:
                uninstall(module, answers)
            without.append(self._seconds())
            for module, answers in installed:
                install(module, answers)
            among.append(self._seconds())
            clear = max(among) < min(without) or min(without) <= min(among)
            if (clear and len(among) >= _CLEAR_ROUNDS) or time.monotonic() - began > _TIMING_S:
                break
        return statistics.median(without), statistics.median(among)

    def why_wrong(self, module: nn.Module, method: str, rms: float) -> str | None:
        """What is wrong with the whole where a part's results may be off by so much, or None."""
        wrong = self.difference()
        if wrong is None:
            return None
        allowed = self.errors_by_rounding(module, method, rms)
        return wrong if allowed is None else self.difference(allowed)

    def _seconds(self) -> float:
        def calls() -> None:
            for call in self._calls:
                self._run(self._program, call)

        return seconds_of(calls, self._device)

    def _leaves(self, call: Any) -> list[Any]:
        """The leaves of a result, with tensors of their own."""
        with same_draws():
            result = self._run(self._program, call)
        leaves, _ = flatten_result(_as_tensors(result, self._precision))
        # Those of objects, too.
        leaves, _ = flatten_result([_as_tensors(leaf, self._precision) for leaf in leaves])
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _as_tensors(result: Any, precision: torch.dtype) -> Any:
    """A result with tensors in place of NumPy's arrays, of images and of floating-point numbers.

    Beside each stands what it was, since a list is no array.
    """
    if hasattr(result, "__array_interface__") and not isinstance(result, np.generic):
        array = np.array(result)
        made = torch.from_numpy(array) if array.dtype.kind in "fiubc" else array.tolist()
        return [type(result).__name__, made]
    if _holds_floats_alone(result):
        with contextlib.suppress(ValueError, TypeError):  # Lists of several lengths.
            return [type(result).__name__, _narrowed(result, precision)]
    if isinstance(result, (list, tuple)):
        return [_as_tensors(each, precision) for each in result]
    if isinstance(result, dict):
        return {key: _as_tensors(each, precision) for key, each in result.items()}
    return result


def _holds_floats_alone(result: Any) -> bool:
    """Whether something is a floating-point number, or lists of such and nothing else."""
    if type(result) is list:
        return bool(result) and all(map(_holds_floats_alone, result))
    return type(result) is float


def _narrowed(result: Any, precision: torch.dtype) -> torch.Tensor:
    """Numbers in the precision that they were computed in, unless they are too large for it."""
    wide = torch.tensor(result, dtype=torch.float64)
    narrow = wide.to(precision)
    return narrow if torch.equal(torch.isfinite(narrow), torch.isfinite(wide)) else wide


def _is_like(a: Any, b: Any) -> bool:
    """Whether both are tensors of floating-point numbers, or images, that can be compared."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.is_floating_point() or (_is_image(a) and _is_image(b))


def _is_image(pixels: torch.Tensor) -> bool:
    """Whether bytes are pixels in colour, and no labels or tokens: these have to be equal."""
    in_colour = pixels.dim() >= 3 and pixels.shape[-1] in (3, 4)
    return in_colour and pixels.dtype == torch.uint8 and len(pixels.unique()) > _LABELS


def _is_rounded_alike(mine: Any, its: Any) -> bool:
    """Whether two images differ by no more than what is rounded the other way here and there."""
    if not _is_like(mine, its) or mine.is_floating_point():
        return False
    off = (mine.int() - its.int()).abs()
    return bool(off.max() <= 1 and off.count_nonzero() <= _OFF_BY_A_LEVEL * off.numel())


def _is_within(mine: Any, its: Any, allowed: ErrorMeasure | None) -> bool:
    """Whether a result is not further off than what rounding makes of it."""
    if allowed is None or not _is_like(mine, its):
        return False
    error, _ = error_of(mine, its, its)
    near = error.rms <= _TIMES_ROUNDING * allowed.rms
    near = near and error.max <= _TIMES_ROUNDING * allowed.max
    return near and torch.equal(special_values(mine), special_values(its))


def _perturbed(original: Callable[..., Any], rms: float, seed: int) -> Answer:
    """The same method, its results off by so much of their root mean square."""
    generator = torch.Generator().manual_seed(seed)

    def off(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point() or not leaf.numel():
            return leaf
        noise = torch.randn(leaf.shape, generator=generator).to(leaf.device)
        size = torch.linalg.vector_norm(leaf.double()) / leaf.numel() ** 0.5
        made: torch.Tensor = (leaf.double() + rms * size * noise).to(leaf.dtype)
        return made

    def perturbed(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(off, original(*args, **kwargs))

    return perturbed


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """The same random numbers in each block, and none for what comes after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    state, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(_SEED)
            random.seed(_SEED)
            np.random.seed(_SEED)
            yield
    finally:
        random.setstate(state)
        np.random.set_state(of_numpy)
