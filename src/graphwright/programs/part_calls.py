"""The calls of one method in a program: those observed, those saved, and those learned since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..artifacts.tuned_module import TunedModule, choice_of
from ..calls.split import Args, Kwargs
from .inspection import SharedSize, varying_of
from .installation import twin_of
from .observed_calls import ModuleMethod, ObservedCall, described, positional_of

# So many kinds of calls that were tuned for are tuned for again beside those learned.
MOST_KNOWN = 8


@dataclass(frozen=True)
class PartCalls:
    """The calls of one method in a program.

    Attributes:
        target: the method.
        samples: its calls, one of each kind, the most frequent first.
        counts: how often there was one of each kind.
        sizes: the shapes of the tensors in each, by name.
        varying: dimensions that vary from call to call.
        switches: PyTorch's that the program sets around these calls, by name: its own autocast.
    """

    target: ModuleMethod
    samples: Sequence[tuple[Args, Kwargs]]
    counts: Sequence[float]
    sizes: Sequence[Mapping[str, tuple[int, ...]]]
    varying: Sequence[SharedSize]
    switches: Mapping[str, Any] = field(default_factory=dict)


def calls_of(
    target: ModuleMethod,
    calls: Sequence[ObservedCall],
    kinds: Sequence[tuple[Mapping[str, str], int]],
    varying: Sequence[SharedSize],
) -> PartCalls:
    """The calls of a method, from what was observed of it."""
    counts = {tuple(words.items()): count for words, count in kinds}
    often = sorted(calls, key=lambda call: counts.get(call.kind[2], 0), reverse=True)
    with_samples = [call for call in often if call.sample is not None]
    # Calls under other switches stay the module's own.
    switches = with_samples[0].switches if with_samples else {}
    with_samples = [call for call in with_samples if call.switches == switches]
    return PartCalls(
        target,
        [call.sample for call in with_samples if call.sample is not None],
        [counts.get(call.kind[2], 1) for call in with_samples],
        [call.sizes for call in with_samples],
        varying,
        switches,
    )


def calls_learned(
    target: ModuleMethod, module: nn.Module, known: PartCalls | None, missed: Sequence[Any]
) -> PartCalls:
    """The calls that a method was tuned for, and others that it got since."""
    samples = [*(known.samples[:MOST_KNOWN] if known else ()), *missed]
    counts = [*(known.counts[:MOST_KNOWN] if known else ()), *(1.0 for _ in missed)]
    positional = positional_of(getattr(twin_of(module), target.method))
    sizes = [described(positional, args, dict(kwargs))[1] for args, kwargs in samples]
    switches = known.switches if known else {}
    return PartCalls(target, samples, counts, sizes, varying_of(sizes), switches)


def calls_saved(target: ModuleMethod, module: nn.Module, tuned: TunedModule) -> PartCalls | None:
    """The calls that something loaded from a file was tuned for; None if objects are among them."""
    choice = choice_of(tuned)
    if choice.apart is not None or choice.origin is None:
        return None
    samples = [(sample.call.args, sample.call.kwargs) for sample in choice.origin.samples]
    found = calls_learned(target, module, None, samples)
    return replace(found, counts=[sample.weight for sample in choice.origin.samples])
