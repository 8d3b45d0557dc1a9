"""load(): read a tuned model from a file, and verify it before it answers any call.

CUDA starts in a thread while the file is read and while modules are imported that define a model's
results. That saves about half a second of a BERT's first answer on an H200, and nothing of a
ResNet's, in three noisy rounds. Loading cuBLAS and cuDNN in that thread too gained nothing more.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from ..calls.modules import FunctionModule, should_be_in_eval_mode
from ..calls.options import (
    callable_problem,
    choice_problem,
    count_problem,
    flag_problem,
    names_checked,
    refuse,
)
from ..calls.serialization import read_tensors
from ..calls.signature import CallSignature
from ..calls.snapshots import run, same_bits
from ..calls.watch import Checks
from ..calls.written_trees import one_file
from ..errors import ArtifactError, GraphwrightError, in_words
from ..evaluation.garbage_collection import garbage_collection_off
from ..evaluation.reference import Sample
from ..evaluation.verification import compare, verify
from ..graphs.cuda.driver import primary_context
from ..graphs.taken_apart import TakenApart
from ..report.environment import environment
from ..report.result import EAGER
from ..strategies.base import Built, Candidate, Loader
from ..strategies.registry import parse_candidates
from . import container, evidence, object_calls, padding_plans
from .contents import Contents
from .padded_calls import PaddedCalls, StoredPaddedCalls, Tuned
from .saving import CONSTANTS, REPORT, STRATEGY, WEIGHTS, prefix_of, weights_of
from .tuned_module import Apart, Origin, TunedModule, assemble, put_together
from .untuned_calls import Absent, OnMiss

_AS_SAVED = "as it was saved"
# Builds or loads what answers the samples.
_Attempt = Callable[[Sequence[Sample]], tuple[Candidate, list[Built]]]


@names_checked
def load(
    path: str | os.PathLike[str],
    model: Callable[..., Any] | None = None,
    *,
    trust: bool = False,
    audit: int | None = None,
    on_miss: OnMiss = "eager",
    checks: Checks = "full",
) -> TunedModule:
    """Load a tuned module, and verify it on the inputs and results stored in the file.

    Args:
        path: of the file.
        model: as for `graphwright.load`.
        trust: likewise.
        audit: as `tune()` takes it.
        on_miss: as `tune()` takes it.
        checks: as `tune()` takes it.

    Raises:
        ArtifactError: the file is damaged, belongs to another model, needs the model or trust, or
            cannot be run here.
        OptionError: an option makes no sense, such as a `trust` that is neither True nor False.
    """
    refuse(
        "load",
        None if model is None else callable_problem("model", model),
        flag_problem("trust", trust),  # Any text, even "no", would count as True.
        count_problem("audit", audit, optional=True),
        choice_problem("on_miss", on_miss, get_args(OnMiss)),
        choice_problem("checks", checks, get_args(Checks)),
    )
    file = container.path_of(path)
    with container.opened(file, leave_out="" if model is not None else WEIGHTS) as members:
        loading = _Loading(file, members, model, trust, audit, on_miss, checks)
        try:
            with one_file():
                return loading.load()
        finally:
            loading.wait_for_device()  # If loading failed, leave no thread behind.


def load_beside_others(path: str | os.PathLike[str]) -> TunedModule:
    """Load what a child of this process has saved, without the model, while other threads go on.

    Garbage collection stays as it is, since it is the whole process's.

    Args:
        path: of the file, whose code is executed.

    Raises:
        ArtifactError: it cannot be used here, or needs the model.
    """
    file = container.path_of(path)
    with container.opened(file, leave_out=WEIGHTS) as members:
        loading = _Loading(file, members, None, True, None, "eager", "full")
        try:
            with one_file():
                return loading.load_alone()
        finally:
            loading.wait_for_device()


def _packages_of(module: nn.Module) -> set[str]:
    """The packages that define a model, and PyTorch: its results are made of their classes."""
    kinds = {type(part) for part in module.modules()}
    if isinstance(module, FunctionModule):
        kinds.add(module.function_of())  # type: ignore[arg-type]  # it has a module's name, too
    names = {getattr(base, "__module__", None) or "" for kind in kinds for base in _bases_of(kind)}
    return {name.partition(".")[0] for name in names} - {"builtins", ""} | {"torch"}


def _bases_of(kind: Any) -> tuple[Any, ...]:
    return kind.__mro__ if isinstance(kind, type) else (kind,)


class _Loading:
    """One call of `load`, step by step."""

    def __init__(
        self,
        file: Path,
        members: container.Members,
        model: Callable[..., Any] | None,
        trust: bool,
        audit: int | None,
        on_miss: OnMiss,
        checks: Checks,
    ) -> None:
        self.file, self.members, self.model, self.trust = file, members, model, trust
        self.audit, self.on_miss = audit, on_miss
        self.checks: Checks = checks
        self.folder = members.ready(REPORT, *evidence.FILES)
        contents = self.contents = Contents.of(file, members)
        if not trust:
            contents.refuse_code()
        absent = Absent(contents.argument_names, sees_order=contents.sees_order)
        self.module = self.called = absent if model is None else _module_for(model)
        self.object_calls: list[object_calls.StoredCall] = []
        self.device = self._device()
        # How machine and versions differ from those that saved it, in words.
        self.changes: list[str] = []
        self.notes: list[str] = []
        # Names of stored files that are code and can be left out.
        self.code: tuple[str, ...] = getattr(contents.candidate.compiler, "code", ())
        kept = trust and any(Path(name).name in self.code for name in contents.members)
        prepare = getattr(contents.candidate.compiler, "prepare", None)
        if prepare is not None and self.device.type == "cuda" and not kept:
            prepare()
        self.ahead: dict[str, torch.Tensor] | None = None
        # If only what was saved can be used, constants go to the device in that thread too.
        alone = model is None and contents.loader is not None
        self.wait_for_device = start_device(self.device, *[self._read_ahead] * alone)

    def _device(self) -> torch.device:
        saved = evidence.device_type(self.folder)
        tensors = [*weights_of(self.module).values()] if self.model is not None else []
        if tensors:
            return tensors[0].device
        if saved == "cuda":
            # Asking for the current device would start CUDA, which a thread does later.
            started = torch.cuda.is_initialized()
            return torch.device("cuda", torch.cuda.current_device() if started else 0)
        return torch.device("cpu")

    def load(self) -> TunedModule:
        """Use what was saved, else build it again, else use eager."""
        if self.model is None:
            with garbage_collection_off():  # Imports and reads make no garbage.
                return self.load_alone()
        self._take_apart()
        before: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            self._give_weights(before)
            samples = self._samples()
            eager, builts = self._eager(samples)
            problem = _problem(eager, builts, samples, thorough=False)
            if problem is not None:
                raise ArtifactError(
                    "With the weights that were saved the model that was passed computes something "
                    f"else than the one that was tuned: {problem}.",
                    remedy="Pass the model that was tuned, in eval mode.",
                )
            return self._first_verified(samples)
        except BaseException:
            with torch.no_grad():
                for tensor, values in reversed(before):  # In reverse, since they may share memory.
                    _put(tensor, values)
            raise

    def load_alone(self) -> TunedModule:
        """Use what was saved, without the model."""
        self._take_apart()
        return self._first_verified(self._samples())

    def _take_apart(self) -> None:
        """If calls with objects were tuned for, go on with the model that takes their tensors."""
        if object_calls.FILE not in self.contents.members:
            return
        self.members.ready(object_calls.FILE)
        self.object_calls = object_calls.read(
            self.folder, imports=self.trust, objects=self._packages()
        )
        if self.model is not None:
            templates = [each.template for each in self.object_calls]
            self.module = TakenApart(self.called, templates)

    def _packages(self) -> set[str] | None:
        """The packages that may define classes of objects."""
        return None if self.model is None else _packages_of(self.called)

    def _samples(self) -> list[Sample]:
        return evidence.read(
            self.folder,
            self.module,
            self._available_device,
            imports=self.trust,
            objects=self._packages(),
        )

    def _available_device(self) -> torch.device:
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ArtifactError(
                f"{self.file.name} was saved on a GPU, and there is none here.",
                remedy="Pass the model, on the CPU, to run it there.",
            )
        return self.device

    def _first_verified(self, samples: list[Sample]) -> TunedModule:
        """The first way of running it whose results are those that were saved."""
        self.members.ready()
        self.wait_for_device()
        self.changes = self._changes()
        problems: list[str] = []
        for how, attempt in self._tries():
            try:
                candidate, builts = attempt(samples)
                known = how == _AS_SAVED and not self.changes
                problem = _problem(candidate, builts, samples, thorough=not known)
            except GraphwrightError as error:
                problem = ": ".join(filter(None, in_words(error)[:1]))
            if problem is None:
                why = "; ".join(problems) or self._why_rebuilt().removeprefix(", since ")
                self.contents.report.chosen = candidate.name
                if how != _AS_SAVED or self.changes:
                    self.notes.append(f"{how}: {why}" if why else how)
                return self._tuned(candidate, builts, samples)
            problems.append(f"{how} it is wrong: {problem}" if how else problem)
        raise ArtifactError(
            f"{self.file.name} cannot be used here: {'; '.join(problems)}.",
            remedy="Save it anew on this machine." if self.model is not None else "Pass the model.",
        )

    def _tries(self) -> list[tuple[str, _Attempt]]:
        """The ways to run it that there are here, in words and the best first.

        Raises:
            ArtifactError: there is none without the model.
        """
        contents, saved = self.contents, (_AS_SAVED, self._as_saved)
        here = contents.loader is not None and not self._belongs_elsewhere(contents.loader)
        if self.model is not None:
            others: list[tuple[str, _Attempt]] = [("built again", self._rebuilt)]
            if contents.candidate.name != EAGER:
                others.append(("eager in its place", self._eager))
            return [saved, *others] if here else others
        if here or (contents.loader is not None and contents.loader.portable):
            return [saved]
        raise ArtifactError(
            f"{self.file.name} holds nothing that runs here without the model: "
            f"{contents.candidate.name} is built from the model{self._why_rebuilt()}.",
            remedy="Pass the model: load(path, model), or graphwright run ARTIFACT --model TARGET.",
        )

    def _changes(self) -> list[str]:
        """How machine and versions differ from those that saved it, in words."""
        now = environment(self.device)
        left_out = ("threads", "cores", "python")
        return [
            f"{name} was {self.contents.saved_on.get(name, 'none')} and is {now.get(name, 'none')}"
            for name in sorted({*now, *self.contents.saved_on})
            if name not in left_out and now.get(name) != self.contents.saved_on.get(name)
        ]

    def _belongs_elsewhere(self, loader: Loader) -> bool:
        now = environment(self.device)
        return any(now.get(name) != self.contents.saved_on.get(name) for name in loader.bound_to)

    def _why_rebuilt(self) -> str:
        return f", since {', '.join(self.changes)}" if self.changes else ""

    def _give_weights(self, before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the saved weights into the model, which must have the same architecture.

        `before` gets each tensor that is changed, with its old values.
        """
        if not self.contents.model_there:
            raise ArtifactError(
                f"{self.file.name} was saved by a process that had loaded it without the model: "
                "it has no weights for the one that was passed.",
                remedy="Load it without the model, or save it where the model was passed.",
            )
        mine, saved = weights_of(self.module), self._saved_weights()
        wrong = [f"it has no {name}" for name in saved if name not in mine]
        wrong += [f"{name} was not saved" for name in mine if name not in saved]
        wrong += [
            f"{name} is {_kind(mine[name])}, and was {_kind(saved[name])}"
            for name in mine
            if name in saved and _kind(mine[name]) != _kind(saved[name])
        ]
        if wrong:
            raise ArtifactError(
                f"{self.file.name} belongs to another model than the one that was passed: "
                f"{'; '.join(wrong[:4])}{'; …' * (len(wrong) > 4)}.",
                remedy="Pass the model that was tuned, in its dtype.",
            )
        with torch.no_grad():
            for name, tensor in mine.items():
                values = saved[name].to(tensor.device)
                if not same_bits(tensor, values):
                    before.append((tensor, tensor.clone()))
                    _put(tensor, values)

    def _saved_weights(self) -> dict[str, torch.Tensor]:
        """All weights; those that are also constants of the strategy are stored only there."""
        self.members.ready(WEIGHTS, CONSTANTS)
        constants = self._constants("cpu") if self.contents.shared_weights else {}
        lost = [
            name for name, other in self.contents.shared_weights.items() if other not in constants
        ]
        if lost:
            raise ArtifactError(f"{self.file.name} makes no sense: it lacks {', '.join(lost)}.")
        weights = read_tensors(self.folder / WEIGHTS)
        return weights | {
            name: constants[other] for name, other in self.contents.shared_weights.items()
        }

    def _constants(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """The constants of what was built, for all buckets; equal ones are one tensor."""
        file = self.folder / CONSTANTS
        return read_tensors(file, device) if CONSTANTS in self.contents.members else {}

    def _read_ahead(self) -> None:
        self.members.ready(CONSTANTS)
        self.ahead = self._constants(self.device)

    def _as_saved(self, samples: Sequence[Sample]) -> tuple[Candidate, list[Built]]:
        # For a range of sizes it was built once, for the last sample, which is the largest.
        one = bool(self.contents.ranges)
        builts: list[Built] = []
        constants = self._constants(self.device) if self.ahead is None else self.ahead
        for index, sample in enumerate(samples[-1:] if one else samples):
            call, outcome = sample.call.clone(), sample.reference.cases[0].eager
            results = [*outcome.outputs.values()]
            place, prefix = self.folder / STRATEGY / str(index), prefix_of(index)
            if not self.trust:
                self._remove_code(place)
            tensors = {
                name.removeprefix(prefix): tensor
                for name, tensor in constants.items()
                if name.startswith(prefix)
            }
            builts.append(
                self.contents.candidate.load(place, tensors, call.args, call.kwargs, results)
            )
        return self.contents.candidate, builts * len(samples) if one else builts

    def _remove_code(self, place: Path) -> None:
        """Remove files that are code, by the paths that would be opened.

        The names in the archive prove nothing: file systems may ignore case.
        """
        for name in self.code:
            try:
                (place / name).unlink(missing_ok=True)
            except OSError as error:
                raise ArtifactError(f"{self.file.name} makes no sense: {error}.") from error

    def _rebuilt(self, samples: Sequence[Sample]) -> tuple[Candidate, list[Built]]:
        warm = getattr(self.contents.candidate.compiler, "warm", None)
        builts = []
        for index, sample in enumerate(samples):
            place = self.folder / STRATEGY / str(index)
            warmed = warm is not None and place.exists() and not self.changes
            if warm is not None and warmed:
                warm(place)
            call, before = sample.call.clone(), _cache_misses()
            builts.append(self.contents.candidate.build(self.module, call.args, call.kwargs))
            if warmed and _cache_misses() > before:
                self.notes.append(
                    "torch.compile did not take the cache that was saved, and compiled again"
                )
        return self.contents.candidate, builts

    def _eager(self, samples: Sequence[Sample]) -> tuple[Candidate, list[Built]]:
        (eager,) = parse_candidates([EAGER], ())
        calls = [sample.call for sample in samples]
        return eager, [eager.build(self.module, call.args, call.kwargs) for call in calls]

    def _pad_with(self, samples: Sequence[Sample]) -> Callable[[list[Tuned]], PaddedCalls] | None:
        """Makes a PaddedCalls from what was built, if padding plans were saved."""
        if padding_plans.FILE not in self.contents.members:
            return None
        if self.changes:
            self.notes.append("calls between the buckets are not padded: that was proved there")
            return None
        plans = padding_plans.read(self.folder, samples)
        return functools.partial(StoredPaddedCalls, plans, module=self.module)

    def _tuned(
        self, candidate: Candidate, builts: list[Built], samples: list[Sample]
    ) -> TunedModule:
        pad_with = self._pad_with(samples)
        self.contents.report.notes += [
            f"Loaded from {self.file.name}: {note}." for note in self.notes
        ]
        calls = [sample.call for sample in samples]
        ranges = self.contents.ranges if builts[0] is builts[-1] else ()
        signatures = [CallSignature.of(call.args, call.kwargs, lasts=True) for call in calls]
        tuned = assemble(
            self.module,
            self.contents.report,
            signatures,
            Origin(candidate, builts, samples, self.device, ranges),
            pure=self.contents.pure,
            same_under_no_grad=self.contents.same_under_no_grad,
            pad_with=pad_with,
            loaded=self.notes or [_AS_SAVED],
            audit=self.audit,
            on_miss=self.on_miss,
            checks=self.checks,
        )
        return self._put_together(tuned, samples) if self.object_calls else tuned

    def _put_together(self, tuned: TunedModule, samples: Sequence[Sample]) -> TunedModule:
        """What answers calls with objects, by what answers their tensors."""
        calls = object_calls.calls_of(self.object_calls, samples)
        if isinstance(self.module, TakenApart):
            made = [self.module.made(n, call.tensors) for n, call in enumerate(calls)]
        else:
            made = object_calls.made_of(self.object_calls, calls, samples)
        return put_together(self.called, Apart(tuned, calls, made))


def _problem(
    candidate: Candidate, builts: Sequence[Built], samples: Sequence[Sample], *, thorough: bool
) -> str | None:
    """How results for the stored inputs differ from the stored ones, in words; None if they agree.

    `thorough` also repeats and interleaves calls, and holds on to their results.
    """
    ulp = candidate.lossy_ulp
    for sample, built in zip(samples, builts, strict=True):
        ref = sample.reference
        try:
            if thorough:
                verdict = verify(built.call, ref, ulp=ulp)
            else:
                for case in ref.cases:
                    verdict = compare(run(built.call, case.call, ref.state), case, ref, ulp)
                    if not verdict.ok:
                        break
                ref.state.restore()
        except Exception as error:
            return in_words(error)[0]
        if not verdict.ok:
            return verdict.reason
    return None


def _put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor; expanded dimensions are written once."""
    for dim, step in enumerate(tensor.stride()):
        if not step:
            some = min(1, tensor.shape[dim])
            tensor, values = tensor.narrow(dim, 0, some), values.narrow(dim, 0, some)
    tensor.copy_(values)


def _cache_misses() -> int:
    """How many graphs Inductor has compiled in this process since its cache had none."""
    known = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(known["inductor"]["fxgraph_cache_miss"]) if known else 0


def _module_for(model: Callable[..., Any]) -> nn.Module:
    if isinstance(model, TunedModule):
        model = model.module
    module = model if isinstance(model, nn.Module) else FunctionModule(model)
    if should_be_in_eval_mode(module):
        raise ArtifactError("The model is in training mode.", remedy="Call model.eval() first.")
    if any(tensor.is_meta for tensor in weights_of(module).values()):
        raise ArtifactError(
            "The model is on the meta device, where nothing has values.",
            remedy='Give it memory first: model.to_empty(device="cuda").',
        )
    return module


def _kind(tensor: torch.Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype)[6:]}"


def start_device(device: torch.device, *others: Callable[[], object]) -> Callable[[], None]:
    """Start CUDA in a thread, then call the others there; returns a function that waits for it.

    By its return, work that the others have issued to the device is done and safe on any stream.
    """

    def start() -> None:
        works = [*others]
        if device.type == "cuda":
            works[:0] = [
                functools.partial(primary_context, device),
                lambda: torch.zeros(1, device=device),
            ]
            works.append(lambda: torch.cuda.current_stream(device).synchronize())
        for each in works:
            # A failure here shows again, with its reason, where the result is used.
            with contextlib.suppress(Exception):
                each()

    thread = threading.Thread(target=start, name="graphwright: start of a device")
    thread.start()
    return thread.join
