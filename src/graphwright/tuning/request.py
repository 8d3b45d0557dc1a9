"""What tune() was asked to do: the checked arguments, and their description in words."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from ..artifacts.tuned_module import TunedModule
from ..artifacts.untuned_calls import OnMiss
from ..calls.leaves import SCALARS
from ..calls.modules import FunctionModule, should_be_in_eval_mode
from ..calls.options import (
    args_problem,
    callable_problem,
    choice_problem,
    count_problem,
    flag_problem,
    in_brief,
    is_positive,
    items_problem,
    kwargs_problem,
    nearest,
    positive_problem,
    refuse,
    texts_problem,
)
from ..calls.plurals import counted
from ..calls.signature import CallSignature, arguments_of
from ..calls.snapshots import Call
from ..calls.split import Args, Kwargs
from ..calls.watch import Checks
from ..calls.weights import refuse_weights
from ..errors import OptionError, SignatureError
from ..graphs.memory import parse_bytes
from ..graphs.taken_apart import ApartCall, TakenApart, holds_objects, kind_of
from ..processes.environment_variables import CANDIDATE
from ..report.result import Shape
from ..shapes.dimensions import portable
from ..strategies.base import Candidate, Compiler
from ..strategies.eager import EAGER
from ..strategies.registry import (
    LOSSY,
    default_candidates,
    is_ours,
    parse_candidates,
    without,
)

if TYPE_CHECKING:
    from ..shapes.buckets import Buckets
    from .bucketed_request import BucketedRequest

OBJECTIVES = ("latency", "throughput", "memory", "cold_start")
# Seconds of a search that nobody has given a budget, for each sample: the tutorial and the
# command's help name them.
BUDGET_S = {"cpu": 60.0, "cuda": 50.0}
# Tried by default only for the objective cold_start: it pays off where it is loaded from a file.
_FOR_COLD_START = ("aot_inductor",)
# Tensors in the name of a sample that holds objects: a cache may hold hundreds.
_NAMED_TENSORS = 2


@dataclass(frozen=True)
class SearchLimits:
    """What tuning may take.

    Attributes:
        budget_s: seconds for all of it; None for no limit.
        budgeted: whether the caller has given them.
        timeout_s: seconds for a candidate.
        memory_limit: bytes for a candidate; None for no limit.
    """

    budget_s: float | None
    budgeted: bool
    timeout_s: float
    memory_limit: int | None


@dataclass(frozen=True)
class Answering:
    """How the tuned module is to answer calls; the options are those of `tune`."""

    audit: int | None
    on_miss: OnMiss
    checks: Checks


@dataclass(frozen=True)
class Request:
    """A model, the calls to tune it for, the candidates, and the options of `tune`.

    Attributes:
        name: of the model: its class or the function's name.
        module: the model, or the module that wraps a function.
        calls: the calls to tune for, with their weights.
        signatures: of these calls.
        buckets: the buckets that the calls belong to; None without buckets.
        dynamic_shapes: which dimensions vary; None without buckets or if it was not given.
        device: where the model and its inputs are.
        candidates: what to try, eager first.
        named: whether the caller has named them.
        limits: of time and memory.
        answering: how the tuned module answers.
        apart: where a call holds objects, the calls taken apart; the module is a TakenApart then.
    """

    name: str
    module: nn.Module
    calls: list[tuple[float, Call]]
    signatures: list[CallSignature]
    buckets: BucketedRequest | None
    dynamic_shapes: Any
    device: torch.device
    candidates: list[Candidate]
    named: bool
    exhaustive: bool
    objective: str
    tolerance: float | None
    allow: tuple[str, ...]
    limits: SearchLimits
    isolate: bool | None
    remember: bool
    fresh: bool
    answering: Answering
    apart: Sequence[ApartCall] = ()

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        args: Args,
        kwargs: Kwargs | None,
        *,
        samples: Sequence[Any] | None = None,
        weights: Sequence[float] | Mapping[Any, float] | None = None,
        dynamic_shapes: Any = None,
        buckets: Buckets | None = None,
        pad: Any = None,
        strategies: Iterable[str | Compiler | Candidate] | None = None,
        exclude: Iterable[str] = (),
        exhaustive: bool = False,
        objective: str = "latency",
        tolerance: float | None = None,
        allow: Sequence[str] = (),
        budget_s: float | None = None,
        timeout_s: float = 600.0,
        memory_limit: int | str | None = None,
        isolate: bool | None = None,
        remember: bool = True,
        fresh: bool = False,
        audit: int | None = None,
        on_miss: OnMiss = "eager",
        checks: Checks = "full",
    ) -> Request:
        """Check what `tune` was given; the arguments are its own.

        Raises:
            OptionError: an option is unknown or makes no sense.
            SignatureError: the arguments cannot be compared.
        """
        refuse(
            "tune",
            callable_problem("model", model),
            args_problem("args", args),
            kwargs_problem("kwargs", kwargs),
            choice_problem("objective", objective, OBJECTIVES),
            positive_problem("tolerance", tolerance, "relative error", optional=True),
            _lossy_problem(allow),
            positive_problem("budget_s", budget_s, "number of seconds", optional=True),
            positive_problem("timeout_s", timeout_s, "number of seconds"),
            flag_problem("exhaustive", exhaustive),
            flag_problem("isolate", isolate, optional=True),
            flag_problem("remember", remember),
            flag_problem("fresh", fresh),
            count_problem("audit", audit, optional=True),
            choice_problem("on_miss", on_miss, get_args(OnMiss)),
            choice_problem("checks", checks, get_args(Checks)),
        )
        if CANDIDATE in os.environ:
            raise OptionError(
                "tune() was called inside a worker process of another tune().",
                remedy="Call it in a function or under `if __name__ == '__main__':`, not where a "
                "module of the model's is imported.",
            )
        if isinstance(model, TunedModule):
            model = model.module
        module = _as_module(model)
        refuse_weights(module, subclasses=True)
        bucketed, names = None, list[str]()
        kwargs = kwargs or {}
        if buckets is None:
            _refuse_padding(dynamic_shapes, pad)
        else:
            _refuse_beside_buckets(args, kwargs, samples)
            # Imported late: symbolic shapes take a second to import.
            from .bucketed_request import BucketedRequest

            bucketed = BucketedRequest(model, args, kwargs, buckets, dynamic_shapes, pad)
            made = bucketed.samples()
            names, samples, args, kwargs = list(made), list(made.values()), (), {}
            weights = bucketed.weights(weights)
        calls = samples_of(args, kwargs, samples, weights, names)
        module, calls, apart = _taken_apart(module, calls)
        device = device_of(module, [call for _, call in calls])
        signatures = [CallSignature.of(call.args, call.kwargs) for _, call in calls]
        if len({each.signature for each in apart} or set(signatures)) < len(calls):
            raise OptionError(
                "Two of the samples are of the same kind: shapes, dtypes and plain values agree.",
                remedy="Leave one out, and add its weight to the other's.",
            )
        also = _FOR_COLD_START if objective == "cold_start" else ()
        everything = exhaustive or strategies is not None or objective == "cold_start"
        return cls(
            name_of(model),
            module,
            calls,
            signatures,
            bucketed,
            portable(dynamic_shapes),
            device,
            _candidates(strategies, exclude, allow, module, device, also=also),
            strategies is not None,
            exhaustive,
            objective,
            tolerance,
            tuple(allow),
            SearchLimits(
                _budget(budget_s, None if everything else BUDGET_S[device.type] * len(calls)),
                budget_s is not None,
                float(timeout_s),
                None if memory_limit is None else parse_bytes(memory_limit),
            ),
            isolate,
            remember,
            fresh,
            Answering(audit, on_miss, checks),
            apart,
        )

    @property
    def inputs(self) -> list[list[str]]:
        """The inputs of each call, in words."""
        if self.apart:
            return [_tensors_in_words(each) for each in self.apart]
        return [
            [input_in_words(name, leaf) for name, leaf in call.leaves().items()]
            for _, call in self.calls
        ]

    def repeat_call(self, strategy: str) -> str:
        """The call of `tune` that tries one strategy again, with the same options."""
        own = not any(c.name == strategy and is_ours(c) for c in self.candidates)
        given = ["model", "args", "kwargs" if self.calls[0][1].kwargs else ""]
        if self.buckets is not None:
            given += [f"buckets=graphwright.{self.buckets.sizes!r}"]
            given += [f"{name}={name}" for name in self.buckets.options]
        elif len(self.calls) > 1:
            given = ["model", "samples=samples"]
        options = {
            "objective": (self.objective, "latency"),
            "tolerance": (self.tolerance, None),
            "allow": (self.allow, ()),
            "timeout_s": (self.limits.timeout_s, 600.0),
            "memory_limit": (self.limits.memory_limit, None),
        }
        given += [f"{name}={value!r}" for name, (value, usual) in options.items() if value != usual]
        named = f"your {strategy!r}" if own else repr(strategy)
        text = ", ".join(filter(None, [*given, f"strategies=[{named}]", "remember=False"]))
        return f"graphwright.tune({text})"

    @property
    def shapes(self) -> list[Shape]:
        """The calls by name, with their shares; empty if there is only one call."""
        total = sum(weight for weight, _ in self.calls)
        return [
            Shape(call.name, weight / total, words)
            for (weight, call), words in zip(self.calls, self.inputs, strict=True)
            if len(self.calls) > 1
        ]


def _budget(given: float | None, default: float | None) -> float | None:
    """Seconds that tuning may take; None for no limit."""
    if given is None:
        return default
    return None if math.isinf(given) else float(given)


def _candidates(
    strategies: Iterable[str | Compiler | Candidate] | None,
    exclude: Iterable[str],
    allow: Sequence[str],
    module: nn.Module,
    device: torch.device,
    *,
    also: Sequence[str],
) -> list[Candidate]:
    """What to try: eager first, since all others are measured against it."""
    found = (
        default_candidates(module, device, allow, also=also)
        if strategies is None
        else parse_candidates(_listed(strategies), allow)
    )
    by_name = {candidate.name: candidate for candidate in without(found, _listed(exclude))}
    return [by_name.pop(EAGER.name, Candidate(EAGER)), *by_name.values()]


def _listed(names: Any) -> Any:
    """Names that may be one text, separated by commas."""
    return names.split(",") if isinstance(names, str) else names


def _refuse_padding(dynamic_shapes: Any, pad: Any) -> None:
    """Refuse what says how calls are padded to buckets, where there are none."""
    if dynamic_shapes is not None or pad is not None:
        raise OptionError(
            "dynamic_shapes and pad say how calls are padded, and there are no buckets.",
            remedy="Pass buckets too, for example Buckets(batch=[1, 4, 16]).",
        )


def _refuse_beside_buckets(args: Args, kwargs: Kwargs, samples: Any) -> None:
    """Refuse calls that cannot have buckets."""
    if samples is not None:
        raise OptionError("tune() takes samples or buckets, not both.")
    if holds_objects(args, kwargs):
        raise SignatureError(
            "tune() takes buckets for calls whose arguments are tensors, and this one has "
            "objects among them.",
            remedy="Pass a call of each size as samples=[…], or use graph(buckets=…).",
        )


def _taken_apart(
    module: nn.Module, calls: list[tuple[float, Call]]
) -> tuple[nn.Module, list[tuple[float, Call]], list[ApartCall]]:
    """Where calls hold objects, a module and calls of their tensors, and the calls taken apart."""
    if not any(holds_objects(call.args, call.kwargs) for _, call in calls):
        return module, calls, []
    apart = [ApartCall.of(call.args, call.kwargs) for _, call in calls]
    module = TakenApart(module, [each.template for each in apart])
    return module, _named_by_tensors(calls, apart), apart


def _as_module(model: Callable[..., Any]) -> nn.Module:
    """The model as a module that can be tuned.

    Raises:
        OptionError: it is in training mode, or a parameter has no shape yet.
    """
    module = model if isinstance(model, nn.Module) else FunctionModule(model)
    lazy = [n for n, p in module.named_parameters() if torch.nn.parameter.is_lazy(p)]
    if lazy:
        raise OptionError(
            f"Parameter {lazy[0]} of the model has no shape yet.",
            remedy="Call the model once on real inputs first.",
        )
    if should_be_in_eval_mode(module):
        raise OptionError(
            "The model is in training mode, and tune() is for inference.",
            remedy="Call model.eval() first.",
        )
    return module


def _lossy_problem(allow: Any) -> str | None:
    """What is wrong with the lossy rewrites that may be tried."""
    problem = texts_problem("allow", allow)
    unknown = [] if problem else [name for name in allow if name not in LOSSY]
    if unknown:
        hint = " ".join(filter(None, (nearest(each, LOSSY) for each in unknown)))
        return f"allow names {unknown}, but knows only {', '.join(LOSSY)}{hint and f' ({hint})'}"
    return problem


def samples_of(
    args: Args, kwargs: Kwargs | None, samples: Any, weights: Any, names: Sequence[str] = ()
) -> list[tuple[float, Call]]:
    """The calls to tune for, with their weights; `names` replace descriptions as their names.

    Raises:
        OptionError: there are no samples, or samples or weights make no sense.
    """
    if samples is None:
        if weights is not None:
            raise OptionError(
                "weights needs several samples, and there is only one call.",
                remedy="Leave weights out, or pass the calls as samples=[…].",
            )
        return [(1.0, Call("the sample inputs", tuple(args), dict(kwargs or {})))]
    if len(args) or kwargs:
        raise OptionError(
            "There are samples as well as args or kwargs.", remedy="Make these one of the samples."
        )
    if (
        isinstance(samples, Mapping | str | bytes)
        or not isinstance(samples, Sequence)
        or not samples
    ):
        raise OptionError(
            f"samples is {in_brief(samples)}, not a list of calls.",
            remedy="For example samples=[(x1,), (x8,)], or [{'x': x1}, ((x8,), {'flag': True})].",
        )
    shares = _shares(weights, len(samples))
    calls: dict[str, tuple[float, Call]] = {}
    for index, (share, sample) in enumerate(zip(shares, samples, strict=True)):
        mine, named = arguments_of(sample)
        call = Call("", tuple(mine), dict(named))
        words = "; ".join(input_in_words(n, leaf) for n, leaf in call.leaves().items())
        name = words = names[index] if names else words
        while name in calls:
            name = f"{words} (another)" if name == words else f"{name}'"
        calls[name] = share, replace(call, name=name)
    return list(calls.values())


def _shares(weights: Any, samples: int) -> list[float]:
    """The weights of a number of samples, or one for each where none are given."""
    if weights is None:
        return [1.0] * samples
    if isinstance(weights, Mapping):
        raise OptionError(
            "weights by size needs buckets, and there are none.",
            remedy="Pass a list with a weight for each sample, or buckets.",
        )
    refuse("tune", items_problem("weights", weights, "numbers"))
    given = list(weights)
    if len(given) != samples or not all(map(is_positive, given)):
        raise OptionError(
            f"weights is {weights!r:.60}, not a positive number for each of "
            f"{counted(samples, 'sample')}."
        )
    return list(map(float, given))


def _named_by_tensors(
    calls: Sequence[tuple[float, Call]], apart: Sequence[ApartCall]
) -> list[tuple[float, Call]]:
    """Calls with objects as calls of a `TakenApart`."""
    found: dict[str, tuple[float, Call]] = {}
    for number, ((weight, call), mine) in enumerate(zip(calls, apart, strict=True)):
        words = _tensors_in_words(mine)
        some = [*words[:_NAMED_TENSORS], *["…"] * (len(words) > _NAMED_TENSORS)]
        name = "; ".join(some) if len(calls) > 1 else call.name
        while name in found:
            name = f"{name} (another)"
        found[name] = weight, Call(name, mine.tensors, kind_of(number, len(calls)))
    return list(found.values())


def _tensors_in_words(call: ApartCall) -> list[str]:
    return [input_in_words(*pair) for pair in zip(call.names, call.tensors, strict=True)]


def device_of(module: nn.Module, calls: Iterable[Call]) -> torch.device:
    """The one device that the model and its inputs are on.

    Raises:
        SignatureError: there are several, or one on which nothing can be measured.
    """
    places: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        places.setdefault(parameter.device, f"parameter {name}")
    for name, leaf in (pair for call in calls for pair in call.leaves().items()):
        if isinstance(leaf, torch.Tensor):
            places.setdefault(leaf.device, name)
    on_gpu = {device: name for device, name in places.items() if device.type != "cpu"}
    if on_gpu and all(p.device.type != "cpu" for p in module.parameters()):
        places = on_gpu  # Inputs may be on the host: time steps, lengths.
    if len(places) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in places.items())
        raise SignatureError(
            f"The model and its inputs are on several devices: {where}.",
            remedy="Move them to one device, with model.to(device) and x.to(device).",
        )
    device = next(iter(places), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise SignatureError(
            f"The model is on {device}; only the CPU and CUDA devices can be measured.",
            remedy="Move model and inputs to the CPU or to a CUDA device.",
        )
    return device


def name_of(model: Callable[..., Any]) -> str:
    """Class of a module, name of a function."""
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "__qualname__", type(model).__qualname__)


def input_in_words(name: str, leaf: Any) -> str:
    """One input by name, shape and dtype, or by value."""
    if isinstance(leaf, torch.Tensor):
        shape = "×".join(map(str, leaf.shape)) or "scalar"
        return f"{name}: {shape} {str(leaf.dtype).removeprefix('torch.')}"
    return f"{name}: {leaf!r}" if isinstance(leaf, SCALARS) else f"{name}: {type(leaf).__name__}"
