"""What a strategy is, and how a candidate is put together and named.

A candidate is rewrite × compiler × runner: a rewrite changes the model (its memory layout or its
precision), a compiler makes a callable of it, a runner calls that. Its name is its parts joined by
'+', without those that do nothing: `eager`, `channels_last+graph`, `inductor:reduce-overhead`.
All but `eager` itself and `eager:inference_mode` run under no_grad.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..calls.modules import FunctionModule, innermost
from ..calls.split import Args, Kwargs
from ..calls.watch import Watched
from ..errors import StrategyFailed, first_line, user_frame


@dataclass(frozen=True)
class Availability:
    """Whether something can run on a device, why not, and what would change that."""

    available: bool
    reason: str = ""
    remedy: str = ""


AVAILABLE = Availability(True)


@dataclass(frozen=True)
class SavedTensors:
    """Tensors of what was built, by name, to be saved in addition to its files.

    `seen` names those that a caller may get as a result, and write to.
    """

    tensors: Mapping[str, torch.Tensor]
    seen: frozenset[str] = frozenset()


@dataclass
class Built:
    """A callable that a strategy built from a model, to be called like the model.

    Attributes:
        call: the callable.
        notes: what a reader of the report should know about it.
        holds_weights: whether it keeps weights of its own (copied, folded or frozen), so that later
            in-place changes of the model's parameters have no effect on it.
        launch: a faster way to call it, if there is one, with the arguments in a row: tensors and
            plain values, in the order of the sample's.
        plain: whether it runs the model's own Python and operations, which modes can see.
        save: writes files for the compiler's `load` to a folder, and returns tensors to save with
            them, which buckets share.
        ranged: whether it answers a whole range of sizes.
        capturable: whether a CUDA graph can hold what it runs; what is plain, any graph can.
        inner: what a runner calls.
        packed: constants in a library's layout.
        self_contained: whether it runs no Python of the model's, whatever becomes of that. Then it
            may be called before anyone looks whether the model has changed.
        depends: notices changes of what it reads and a watch of the model does not see.
    """

    call: Callable[..., Any]
    notes: list[str] = field(default_factory=list)
    holds_weights: bool = False
    launch: Callable[[Sequence[Any]], Any] | None = None
    plain: bool = False
    save: Callable[[Path], SavedTensors | None] | None = None
    ranged: bool = False
    capturable: bool = False
    inner: Built | None = None
    packed: Sequence[torch.Tensor] = ()
    self_contained: bool = False
    depends: Watched | None = None

    def inside_of_capture(self, device: torch.device) -> Built | None:
        """What a capture on a device runs in its place; None where no graph can hold it."""
        if self.inner is not None:
            return self.inner.inside_of_capture(device)
        holds = self.plain or (self.capturable and device.type == "cuda")
        return self if holds else None


class Compiler(Protocol):
    """Builds a callable from a model. One strategy is one compiler with one set of options."""

    @property
    def name(self) -> str:
        """Its name in candidates: a compiler, or `compiler:variant`."""

    @property
    def complexity(self) -> int:
        """Rank among compilers: of equally fast candidates the lowest is chosen."""

    def probe(self, device: torch.device) -> Availability:
        """Run a tiny model as this strategy would, and say whether that works."""

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Build a callable for these sample inputs; may raise any exception."""


@runtime_checkable
class Loader(Protocol):
    """A compiler whose results can be saved and loaded without the model.

    A loader may have an attribute `code`: names of files that are code and that it can do without.
    They are removed from an artifact that is not trusted.

    Attributes:
        holds_code: whether loading may execute code from the files.
        bound_to: names of the environment's facts that must be unchanged; else it is built again.
        portable: whether to try it in another environment if it cannot be built again.
    """

    holds_code: bool
    bound_to: tuple[str, ...]
    portable: bool

    def load(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], args: Args, kwargs: Kwargs
    ) -> Built:
        """The callable that was built for these arguments, from the files of its `save`."""


# Wraps a compiled model so that it can be called like the original.
Finish = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class Rewritten:
    """What a rewrite made: a model, sample inputs for it, and the wrapper around it.

    `finish` wraps the compiled model so that it can be called like the original.
    """

    model: nn.Module
    args: Args
    kwargs: Kwargs
    finish: Finish
    copies_weights: bool


@dataclass(frozen=True)
class Rewrite:
    """A change of the model before it is compiled.

    `lossy_ulp` is the unit in the last place of a reduced precision, which the caller must allow by
    the rewrite's name; None for a change that keeps the numbers. `finish` makes the wrapper for a
    compiled model that was saved, from the leaves of eager's results.
    """

    name: str
    complexity: int
    probe: Callable[[torch.device], Availability]
    apply: Callable[[nn.Module, Args, Kwargs], Rewritten]
    lossy_ulp: float | None = None
    finish: Callable[[Sequence[Any]], Finish] = lambda results: lambda inner: inner


@dataclass(frozen=True)
class Runner:
    """A way to call what a compiler built."""

    name: str
    complexity: int
    probe: Callable[[torch.device], Availability]
    wrap: Callable[[Built, Args, Kwargs], Built]


@dataclass(frozen=True)
class Candidate:
    """One row of the table: rewrite × compiler × runner."""

    compiler: Compiler
    rewrite: Rewrite | None = None
    runner: Runner | None = None

    @property
    def name(self) -> str:
        """Parts joined by '+'; plain eager is left out beside a rewrite."""
        parts = []
        if self.rewrite is not None:
            parts.append(self.rewrite.name)
        if self.rewrite is None or self.compiler.name != "eager":
            parts.append(self.compiler.name)
        if self.runner is not None:
            parts.append(self.runner.name)
        return "+".join(parts)

    @property
    def complexity(self) -> int:
        """Sum of its parts' ranks."""
        parts = (self.rewrite, self.compiler, self.runner)
        return sum(part.complexity for part in parts if part is not None)

    @property
    def compiles(self) -> bool:
        """Whether its set-up goes through torch.compile."""
        return hasattr(self.compiler, "probes_late")

    @property
    def is_plain_eager(self) -> bool:
        """Whether it runs the model as it is, maybe under a runner."""
        return self.rewrite is None and self.compiler.name.split(":")[0] == "eager"

    @property
    def lossy_ulp(self) -> float | None:
        """Unit in the last place of the reduced precision; None for full precision."""
        return None if self.rewrite is None else self.rewrite.lossy_ulp

    def availability(self, device: torch.device, *, late: bool = False) -> Availability:
        """Available if all its parts are; else the reason of the first part that is not.

        A part whose `probes_late(device)` is true is probed only if `late`, after a build has
        failed: its probe compiles, and takes as long as a build.
        """
        for part in (self.rewrite, self.compiler, self.runner):
            if part is not None:
                postponed = getattr(part, "probes_late", None)
                if not late and postponed is not None and postponed(device):
                    continue
                found = probe(part, device)
                if not found.available:
                    return found
        return AVAILABLE

    @property
    def without_runner(self) -> Candidate:
        """The candidate whose build it runs: candidates that differ in the runner share that."""
        return replace(self, runner=None)

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Rewrite, compile and wrap.

        Raises:
            StrategyFailed: whatever went wrong, with the original error as its cause.
        """
        return self.wrap(self.compile(model, args, kwargs), model, args, kwargs)

    def compile(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Rewrite and compile: what candidates with other runners can `wrap` too.

        Raises:
            StrategyFailed: whatever went wrong, with the original error as its cause.
        """
        with self._translated() as notes:
            built = self._compile(model, args, kwargs)
        built.notes += notes
        self._refuse_unwatched_weights(built, model)
        return built

    def wrap(self, compiled: Built, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Put the runner around what `compile` made, which stays as it is; the same without one.

        Raises:
            StrategyFailed: whatever went wrong, with the original error as its cause.
        """
        if self.runner is None:
            return compiled
        with self._translated() as notes:
            built = self.runner.wrap(compiled, args, kwargs)
        built.notes += notes
        self._refuse_unwatched_weights(built, model)
        return built

    def _refuse_unwatched_weights(self, built: Built, model: nn.Module) -> None:
        if built.holds_weights and any(p.is_inference() for p in model.parameters()):
            raise StrategyFailed(
                f"{self.name} keeps a copy of weights that were made under inference_mode, whose "
                "changes leave no trace.",
                remedy="Make or load the model outside inference_mode.",
            )

    @contextlib.contextmanager
    def _translated(self) -> Iterator[list[str]]:
        """The one place where foreign errors are translated, and warnings become notes.

        Warnings of compilers are not about the user's call. The list gets them when the block ends.
        """
        notes: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield notes
            except StrategyFailed:
                raise
            except Exception as error:
                raise StrategyFailed(
                    f"{self.name} could not build this model: {first_line(error)}",
                    where=user_frame(error),
                ) from error
        notes += _notes(caught)

    def ranged(self, dynamic_shapes: Any) -> Candidate | None:
        """The same candidate for all sizes of some dimensions at once; None if it cannot do that.

        `dynamic_shapes` is torch.export's.
        """
        alone = self.runner is None and self.rewrite is None
        if not alone or not hasattr(self.compiler, "dynamic_shapes"):
            return None
        compiler: Any = self.compiler
        return replace(self, compiler=replace(compiler, dynamic_shapes=dynamic_shapes))

    @property
    def loader(self) -> Loader | None:
        """What loads it from a file without the model; None if nothing can."""
        return self.compiler if isinstance(self.compiler, Loader) else None

    def load(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        args: Args,
        kwargs: Kwargs,
        results: Sequence[Any],
    ) -> Built:
        """Load what `Built.save` has saved.

        Args:
            folder: the folder with its files.
            tensors: those that `save` returned, on the device of the call.
            args: arguments of the call that it was built for.
            kwargs: keyword arguments of that call.
            results: the leaves of eager's results.

        Raises:
            StrategyFailed: whatever went wrong, with the original error as its cause.
        """
        try:
            assert self.loader is not None
            built = self.loader.load(folder, tensors, args, kwargs)
            built.holds_weights = True  # They are those of the file.
            if self.rewrite is not None:
                built.call = self.rewrite.finish(results)(without_grad(built.call))
            if self.runner is not None:
                built = self.runner.wrap(built, args, kwargs)
            return built
        except Exception as error:
            raise StrategyFailed(
                f"{self.name} could not be loaded: {first_line(error)}", where=user_frame(error)
            ) from error

    def _compile(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        if not self.is_plain_eager:
            # A compiler sees nothing of what stands for a model.
            model = innermost(model)
        if self.rewrite is None:
            return self.compiler.build(model, args, kwargs)
        if isinstance(model, FunctionModule):
            raise StrategyFailed(
                f"{self.name} needs a copy of the model, and a plain function has none.",
                remedy="Pass a torch.nn.Module.",
            )
        rewritten = self.rewrite.apply(model, args, kwargs)
        built = self.compiler.build(rewritten.model, rewritten.args, rewritten.kwargs)
        built.call = rewritten.finish(without_grad(built.call))
        built.holds_weights |= rewritten.copies_weights
        return built


def _notes(caught: list[warnings.WarningMessage]) -> list[str]:
    """The first lines of some warnings, each once, without deprecations."""
    lines = [
        str(warning.message).strip().splitlines()[0]
        for warning in caught
        if issubclass(warning.category, UserWarning | RuntimeWarning)
        and not issubclass(warning.category, torch.jit._trace.TracerWarning)
    ]
    return list(dict.fromkeys(lines))[:3]


_probed: dict[tuple[int, str], tuple[object, Availability]] = {}


def probe(part: Rewrite | Compiler | Runner, device: torch.device) -> Availability:
    """A part's availability on a type of device; probed once per process."""
    key = (id(part), device.type)
    if key not in _probed:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = part.probe(device)
        except Exception as error:
            found = Availability(False, f"its trial run failed: {first_line(error)}")
        # The part is stored too, so that no other object can get its id.
        _probed[key] = (part, found)
    return _probed[key][1]


def without_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function under `torch.no_grad`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def tiny_model(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """A model of two layers, and its input, for probes."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        model = nn.Sequential(nn.Linear(8, 8, device=device), nn.ReLU()).eval()
        return model, torch.randn(2, 8, device=device)
