"""The strategies that exist, and which candidates are tried by default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..errors import OptionError
from . import aot_autograd, eager, inductor, rewrites, runners, torchscript
from .base import Availability as Availability
from .base import Built as Built
from .base import Candidate as Candidate
from .base import Compiler as Compiler
from .base import Rewrite as Rewrite
from .base import Rewritten as Rewritten
from .base import Runner as Runner
from .base import probe as probe

COMPILERS: tuple[Compiler, ...] = (
    eager.EAGER,
    eager.NO_GRAD,
    eager.INFERENCE_MODE,
    torchscript.SCRIPT,
    torchscript.FREEZE,
    torchscript.OPTIMIZE,
    torchscript.FUSER,
    aot_autograd.AOT_AUTOGRAD,
    inductor.INDUCTOR,
    inductor.REDUCE_OVERHEAD,
    inductor.MAX_AUTOTUNE,
)
REWRITES: tuple[Rewrite, ...] = (
    rewrites.CHANNELS_LAST,
    rewrites.TF32,
    rewrites.BF16,
    rewrites.FP16,
)
RUNNERS: tuple[Runner, ...] = (runners.GRAPH,)
LOSSY = tuple(rewrite.name for rewrite in REWRITES if rewrite.lossy_ulp is not None)

_ON_REQUEST = {inductor.MAX_AUTOTUNE.name}
_UNDER_GRAPH = (eager.EAGER, torchscript.FREEZE, aot_autograd.AOT_AUTOGRAD, inductor.INDUCTOR)
_REWRITTEN = (eager.EAGER, torchscript.OPTIMIZE, inductor.INDUCTOR)


def default_candidates(
    model: nn.Module, device: torch.device, allow: Sequence[str]
) -> list[Candidate]:
    """What `tune` tries when it is not told, cheapest set-up first within each group."""
    plain = [Candidate(c) for c in COMPILERS if c.name not in _ON_REQUEST]
    graphs = [Candidate(c, runner=runners.GRAPH) for c in _UNDER_GRAPH]
    if device.type != "cuda":
        # One row says why graphs are out; four would say the same.
        graphs = graphs[:1]
    chosen = [r for r in REWRITES if r.name in allow]
    if rewrites.has_convolutions(model):
        chosen.insert(0, rewrites.CHANNELS_LAST)
    for rewrite in chosen:
        plain += [Candidate(c, rewrite) for c in _REWRITTEN]
        if device.type == "cuda":
            graphs += [
                Candidate(c, rewrite, runners.GRAPH) for c in (eager.EAGER, inductor.INDUCTOR)
            ]
    return plain + graphs


def parse_candidates(
    names: Iterable[str | Compiler | Candidate], allow: Sequence[str]
) -> list[Candidate]:
    """Candidates from names such as "channels_last+inductor+graph", or from objects.

    Raises:
        OptionError: a name is unknown, or names a lossy rewrite that is not allowed.
    """
    if not isinstance(names, Iterable):
        raise OptionError(f"strategies is a {type(names).__name__}: write a list of names.")
    found = []
    for item in names:
        if isinstance(item, Candidate):
            found.append(item)
        elif isinstance(item, str):
            found.append(_parse(item, allow))
        elif all(hasattr(item, part) for part in ("name", "complexity", "probe", "build")):
            found.append(Candidate(item))
        else:
            raise OptionError(
                f"strategies holds a {type(item).__name__}, which is no name and no strategy.",
                remedy="A strategy has name, complexity, probe() and build().",
            )
    return list({candidate.name: candidate for candidate in found}.values())


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
            known = ", ".join([*rewrites_by_name, *compilers, *runners_by_name])
            raise OptionError(
                f"Unknown strategy {name!r}: {part!r} is no rewrite, compiler or runner here.",
                remedy=f"Known parts: {known}. Join them with '+'.",
            )
    if rewrite is not None and rewrite.lossy_ulp is not None and rewrite.name not in allow:
        raise OptionError(
            f"{name!r} loses precision, which has to be allowed by name.",
            remedy=f"Pass allow=({rewrite.name!r},), or --allow {rewrite.name}.",
        )
    return Candidate(compiler or eager.EAGER, rewrite, runner)
