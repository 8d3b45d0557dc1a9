"""The list of all strategies, the candidates tried by default, and candidates by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..calls.options import in_brief, items_problem, nearest, refuse
from ..errors import OptionError
from . import (
    aot_autograd,
    aot_inductor,
    eager,
    fused,
    inductor,
    regional,
    rewrites,
    runners,
    tensorrt,
    torchscript,
    xla,
)
from .base import Candidate, Compiler, Rewrite, Runner
from .onnxruntime import strategy

COMPILERS: tuple[Compiler, ...] = (
    eager.EAGER,
    eager.NO_GRAD,
    eager.INFERENCE_MODE,
    fused.FUSED,
    torchscript.SCRIPT,
    torchscript.FREEZE,
    torchscript.OPTIMIZE,
    torchscript.FUSER,
    strategy.ONNXRUNTIME,
    strategy.GRAPH,
    aot_autograd.AOT_AUTOGRAD,
    aot_inductor.AOT_INDUCTOR,
    aot_inductor.FREEZE,
    regional.REGIONAL,
    inductor.INDUCTOR,
    inductor.FREEZE,
    inductor.REDUCE_OVERHEAD,
    inductor.MAX_AUTOTUNE,
    xla.XLA,
    tensorrt.TENSORRT,
)
REWRITES: tuple[Rewrite, ...] = (
    rewrites.CHANNELS_LAST,
    rewrites.TF32,
    rewrites.BF16,
    rewrites.FP16,
)
RUNNERS: tuple[Runner, ...] = (runners.GRAPH, runners.GRAPH_STREAMS)
LOSSY = tuple(rewrite.name for rewrite in REWRITES if rewrite.lossy_ulp is not None)

# Not tried by default. The first takes minutes. The next two are as fast as inductor, and worth
# their time only if they are saved. The last imports torchax, which renames one of PyTorch's back
# ends.
_ON_REQUEST = {
    inductor.MAX_AUTOTUNE.name,
    aot_inductor.AOT_INDUCTOR.name,
    aot_inductor.FREEZE.name,
    xla.XLA.name,
}
# Compilers that call the kernels that eager calls.
_EAGER_KERNELS = {
    eager.NO_GRAD.name,
    eager.INFERENCE_MODE.name,
    torchscript.SCRIPT.name,
    aot_autograd.AOT_AUTOGRAD.name,
}
_BY_NAME = {compiler.name: compiler for compiler in COMPILERS}
# On a CPU, regions are as fast as the whole, and their set-up is not much shorter there.
_ON_GPUS = {strategy.GRAPH.name, tensorrt.TENSORRT.name, regional.REGIONAL.name}
# Compilers that are also tried with the runner `graph`, and with each rewrite.
_UNDER_GRAPH = (
    eager.EAGER,
    fused.FUSED,
    torchscript.FREEZE,
    torchscript.OPTIMIZE,
    regional.REGIONAL,
    inductor.INDUCTOR,
    inductor.FREEZE,
)
_REWRITTEN = (
    eager.EAGER,
    fused.FUSED,
    torchscript.OPTIMIZE,
    regional.REGIONAL,
    inductor.INDUCTOR,
)
_REWRITTEN_UNDER_GRAPH = (eager.EAGER, fused.FUSED, regional.REGIONAL, inductor.INDUCTOR)
# For each device, what a compiler usually gains over eager, and the seconds of its first set-up.
# The figures are from the benchmark's results; only the order of candidates depends on them, and
# which set-ups are waited for.
_USUAL = {
    "cuda": {
        "eager": (1.0, 0.0),
        "eager:no_grad": (1.06, 0.0),
        "eager:inference_mode": (1.08, 0.0),
        "fused": (1.2, 3.0),
        "torchscript": (1.15, 0.5),
        "torchscript:freeze": (1.2, 0.5),
        "torchscript:optimize": (1.4, 1.0),
        "torchscript:fuser": (1.15, 1.0),
        "onnxruntime": (1.3, 6.0),
        "onnxruntime:graph": (2.5, 6.0),
        "aot_autograd": (0.9, 4.0),
        "aot_inductor": (1.5, 25.0),
        "aot_inductor:freeze": (1.6, 27.0),
        "inductor:regional": (1.8, 4.0),
        "inductor": (1.5, 10.0),
        "inductor:freeze": (1.6, 12.0),
        "inductor:reduce-overhead": (3.0, 12.0),
        "inductor:max-autotune": (1.5, 120.0),
        "xla": (1.3, 15.0),
        "tensorrt": (2.0, 60.0),
    },
    "cpu": {
        "eager": (1.0, 0.0),
        "eager:no_grad": (1.03, 0.0),
        "eager:inference_mode": (1.05, 0.0),
        "fused": (1.3, 1.0),
        "torchscript": (1.05, 0.5),
        "torchscript:freeze": (1.15, 0.5),
        "torchscript:optimize": (1.3, 1.0),
        "torchscript:fuser": (1.05, 1.0),
        "onnxruntime": (1.3, 0.7),
        "onnxruntime:graph": (1.3, 0.7),
        "aot_autograd": (0.95, 3.0),
        "aot_inductor": (1.3, 25.0),
        "aot_inductor:freeze": (1.4, 27.0),
        "inductor:regional": (1.25, 7.0),
        "inductor": (1.3, 15.0),
        "inductor:freeze": (1.4, 16.0),
        "inductor:reduce-overhead": (1.3, 15.0),
        "inductor:max-autotune": (1.4, 120.0),
        "xla": (1.05, 10.0),
        "tensorrt": (1.0, 60.0),
    },
}
# The same for the runner `graph` and for rewrites.
_USUAL_OF_GRAPHS = (3.0, 0.2)
_USUAL_OF_REWRITES = (1.1, 0.1)
# Seconds that verifying and timing take in addition to set-up.
_BESIDE_S = 2.0
# On a GPU set-ups are longer where an eager call keeps the host busy longer: there are more
# operations. A fit to searches of 12 models on an H200: (host + 5 ms) / 7.5 ms times as long, but
# no more than 4 times: with a host of 46 ms, Inductor takes 36 to 39 s.
_HOST_BASE_S, _USUAL_HOST_S, _MOST_TIMES = 5e-3, 7.5e-3, 4.0
# On a CPU these set-ups take longer for a larger model: on two cores Inductor's 15 s for one of 13
# modules, 23 s for one of 120, ONNX Runtime's 0.7, 3.3 and 10 s for 6, 105 and 166 modules
# (bench/results/engines-cpu.json, first-run-cpu.json).
_SECONDS_A_MODULE = {"inductor": 0.07, "onnxruntime": 0.04}
# A model of middle size.
_USUAL_MODULES = 100
# What the first set-up by Inductor on a CPU pays for those that follow: imports, the look at the
# processor and the C++ compiler, headers. They took 1.4 to 2.1 s after 18 and 20 s.
FIRST_INDUCTOR_S = 13.0
# A set-up that usually takes so long is slow: where cores are to spare, nothing waits for it.
_SLOW_S = 3.0


def default_candidates(
    model: nn.Module, device: torch.device, allow: Sequence[str], *, also: Collection[str] = ()
) -> list[Candidate]:
    """The candidates that `tune` tries by default, the most promising first.

    `also` names strategies that otherwise are only tried on request.
    """
    left_out = _ON_REQUEST if device.type == "cuda" else _ON_REQUEST | _ON_GPUS
    left_out = left_out.difference(also)
    plain = [Candidate(c) for c in COMPILERS if c.name not in left_out]
    graphs = [Candidate(c, runner=runners.GRAPH) for c in _UNDER_GRAPH]
    if device.type != "cuda":
        # One row is enough to say that graphs need a GPU.
        graphs = graphs[:1]
    chosen = [r for r in REWRITES if r.name in allow]
    if rewrites.has_convolutions(model):
        chosen.insert(0, rewrites.CHANNELS_LAST)
    for rewrite in chosen:
        plain += [Candidate(c, rewrite) for c in _REWRITTEN if c.name not in left_out]
        if device.type == "cuda":
            graphs += [Candidate(c, rewrite, runners.GRAPH) for c in _REWRITTEN_UNDER_GRAPH]
    return sorted(plain + graphs, key=lambda c: _promise(c, device), reverse=True)


def _promise(candidate: Candidate, device: torch.device) -> float:
    """What a candidate usually gains per second of trying it."""
    gain, seconds = usual(candidate, device)
    return math.log(gain) / (seconds + _BESIDE_S)


def usual(
    candidate: Candidate, device: torch.device, host_s: float | None = None, modules: int = 0
) -> tuple[float, float]:
    """How many times as fast as eager a candidate usually is, and the seconds of its set-up.

    Args:
        candidate: the candidate.
        device: where the model is.
        host_s: seconds for which an eager call keeps the host busy; None if they are not known.
        modules: how many the model has; 0 if that is not known.
    """
    gain, seconds = _USUAL[device.type].get(candidate.compiler.name, (1.0, 1.0))
    if device.type == "cpu":
        name = "inductor" if is_whole_inductor(candidate) else candidate.compiler.name
        seconds += _SECONDS_A_MODULE.get(name, 0.0) * modules
    if candidate.runner is not None:
        gain, seconds = max(gain, 1.0) * _USUAL_OF_GRAPHS[0], seconds + _USUAL_OF_GRAPHS[1]
    if candidate.rewrite is not None:
        gain, seconds = gain * _USUAL_OF_REWRITES[0], seconds + _USUAL_OF_REWRITES[1]
    if host_s is not None and device.type == "cuda":
        seconds *= min(_MOST_TIMES, max(1.0, (host_s + _HOST_BASE_S) / _USUAL_HOST_S))
    return gain, seconds


def is_slow(candidate: Candidate, device: torch.device) -> bool:
    """Whether a set-up usually takes so long that others should not wait for it."""
    return usual(candidate, device, modules=_USUAL_MODULES)[1] >= _SLOW_S


def kernels_of(candidate: Candidate) -> str:
    """The candidate whose kernels another one runs, by its name without a runner."""
    compiler = candidate.compiler.name
    if compiler in _EAGER_KERNELS:
        compiler = eager.EAGER.name
    return Candidate(_BY_NAME.get(compiler, candidate.compiler), candidate.rewrite).name


def is_whole_inductor(candidate: Candidate) -> bool:
    """Whether PyTorch's compiler gets the whole model at once."""
    return isinstance(candidate.compiler, inductor.Inductor)


def savable_form(candidate: Candidate) -> Candidate | None:
    """What runs the same kernels as a candidate that cannot be saved, and can be; None for none."""
    if candidate.compiler is not inductor.FREEZE:
        return None
    return replace(candidate, compiler=aot_inductor.FREEZE)


def is_ours(candidate: Candidate) -> bool:
    """Whether all parts of a candidate are graphwright's own, so that its name identifies it."""
    parts = ((candidate.compiler, COMPILERS), (candidate.rewrite, REWRITES))
    every = (*parts, (candidate.runner, RUNNERS))
    return all(part is None or any(part is own for own in known) for part, known in every)


def parse_candidates(
    names: Iterable[str | Compiler | Candidate], allow: Sequence[str]
) -> list[Candidate]:
    """Candidates from names such as "channels_last+inductor+graph", or from objects.

    Raises:
        OptionError: a name is unknown, or names a lossy rewrite that is not allowed.
    """
    refuse("tune", items_problem("strategies", names, "names"))
    names, found = list(names), []
    _refuse_unknown(each for each in names if isinstance(each, str))
    for item in names:
        if isinstance(item, Candidate):
            found.append(item)
        elif isinstance(item, str):
            found.append(_parse(item, allow))
        elif all(hasattr(item, part) for part in ("name", "complexity", "probe", "build")):
            found.append(Candidate(item))
        else:
            raise OptionError(
                f"strategies holds {in_brief(item)}, which is no name and no strategy.",
                remedy="A strategy has name, complexity, probe() and build().",
            )
    return list({candidate.name: candidate for candidate in found}.values())


def without(candidates: Sequence[Candidate], exclude: Iterable[str]) -> list[Candidate]:
    """The candidates that have not all parts of any of these names; plain eager always stays.

    Raises:
        OptionError: a name is unknown, or is that of plain eager.
    """
    if not isinstance(exclude, Iterable):
        raise OptionError(f"exclude is a {type(exclude).__name__}: write a list of names.")
    exclude, left_out = list(exclude), []
    _refuse_unknown(each for each in exclude if isinstance(each, str))
    for name in exclude:
        if not isinstance(name, str):
            raise OptionError(f"exclude holds a {type(name).__name__}, which is no name.")
        if _parse(name, LOSSY).name == eager.EAGER.name:
            raise OptionError("eager cannot be left out: all others are measured against it.")
        left_out.append({*name.split("+")})
    return [c for c in candidates if not any(parts <= _parts(c) for parts in left_out)]


def _parts(candidate: Candidate) -> set[str]:
    parts = (candidate.rewrite, candidate.compiler, candidate.runner)
    return {part.name for part in parts if part is not None}


def _refuse_unknown(names: Iterable[str]) -> None:
    """Raise for all names that have unknown parts, at once."""
    known = [each.name for kind in (REWRITES, COMPILERS, RUNNERS) for each in kind]
    unknown = {(n, part): nearest(part, known) for n in names for part in n.split("+")}
    unknown = {(n, part): hint for (n, part), hint in unknown.items() if part not in known}
    if unknown:
        found = [
            f"Unknown strategy {name!r}: {part!r} is no rewrite, compiler or runner."
            for name, part in unknown
        ]
        hints = [*dict.fromkeys(filter(None, unknown.values()))]
        if not all(unknown.values()):
            hints.append(f"Known parts: {', '.join(known)}. Join them with '+'.")
        raise OptionError(" ".join(found), remedy=" ".join(hints))


def _parse(name: str, allow: Sequence[str]) -> Candidate:
    compilers = {c.name: c for c in COMPILERS}
    rewrites_by_name = {r.name: r for r in REWRITES}
    runners_by_name = {r.name: r for r in RUNNERS}
    compiler: Compiler | None = None
    rewrite: Rewrite | None = None
    runner: Runner | None = None
    for part in name.split("+"):
        if part in compilers and compiler is None:
            compiler = compilers[part]
        elif part in rewrites_by_name and rewrite is None:
            rewrite = rewrites_by_name[part]
        elif part in runners_by_name and runner is None:
            runner = runners_by_name[part]
        else:
            raise OptionError(
                f"Strategy {name!r} has two compilers, rewrites or runners: {part!r} is one "
                "too many.",
                remedy="Join one of each with '+', such as 'channels_last+inductor+graph'.",
            )
    if rewrite is not None and rewrite.lossy_ulp is not None and rewrite.name not in allow:
        raise OptionError(
            f"{name!r} loses precision, which has to be allowed by name.",
            remedy=f"Pass allow=({rewrite.name!r},), or --allow {rewrite.name}.",
        )
    return Candidate(compiler or eager.EAGER, rewrite, runner)
