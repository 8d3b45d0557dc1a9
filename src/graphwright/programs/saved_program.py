"""save() and load() of accelerated programs: a zip file of what was tuned, part by part.

`program.json` names the methods; what tuning has made of one lies beside it, as `save` writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._version import __version__
from ..artifacts import container, loading, saving
from ..artifacts.tuned_module import TunedModule
from ..artifacts.untuned_calls import OnMiss
from ..calls.options import names_checked
from ..calls.serialization import digest_of, packed, unpacked
from ..calls.switches import applied, read
from ..calls.watch import Checks
from ..errors import ArtifactError, GraphwrightError
from .accelerated import BUDGET_S, Accelerated, AcceleratedPart, InstalledParts, PartLearner
from .inspection import ProgramInspection
from .inspector import name_of
from .installation import twin_of
from .observed_calls import FORWARD, ModuleMethod
from .part_answer import TunedAnswer
from .part_calls import calls_saved
from .part_tuning import GENERATE_BY, GenerateAnswer, generator_of
from .program_modules import modules_inside
from .sentence_batches import BatchSize

PROGRAM_FILE, _SCHEMA, _VERSION = "program.json", "graphwright.program", 1
# Of parts for which nothing was tuned: batch sizes, and generate().
_NO_SWITCHES: dict[str, Any] = {"dict": {}}
_AGAIN = "Accelerate the program again, and save it."
# Options of tune() under which what was loaded learns.
_LEARNS = {"budget_s": BUDGET_S}


@names_checked
def save(tuned: TunedModule | Accelerated, path: str | os.PathLike[str]) -> str:
    """Save what `tune` or `accelerate` has found: the choice, its evidence, what was built.

    Of a tuned module, `load` needs neither the model nor a new build for what `fused`, TorchScript,
    ONNX Runtime and AOTInductor have built. Everything else is built again from the model; for
    torch.compile its cache is saved. The file is written as a whole or not at all.

    A choice that cannot be saved, such as `inductor:freeze`, is replaced in the file by the best
    candidate that can be, which is built, verified and timed here for that; a warning names both
    with their times. `tuned` itself goes on as it is.

    Of an accelerated program all parts that are answered are saved; `load` installs them in another
    object of the same program.

    Args:
        tuned: what `tune` returned, not a copy of it; or what `accelerate` returned.
        path: of the file; an existing file is replaced, and its permissions are kept.

    Returns:
        the name of the strategy that the file holds; for a program the names of all, by commas.

    Raises:
        ArtifactError: nothing can be saved; the text says why.
    """
    if not isinstance(tuned, Accelerated):
        return saving.save(tuned, path)
    save_program(tuned, path)
    return ", ".join(part.chosen for part in tuned.parts if part.kept)


@names_checked
def load(
    path: str | os.PathLike[str],
    model: Callable[..., Any] | None = None,
    *,
    trust: bool = False,
    audit: int | None = None,
    on_miss: OnMiss = "eager",
    checks: Checks = "full",
) -> Any:
    """Load what `save` has written, and verify it on the inputs and results stored in the file.

    What was built may be bound to a GPU, or to a version of PyTorch or of a driver. Elsewhere it is
    built again from the model, and eager takes its place if that fails; `explain()` of the result
    says what was done and why.

    Args:
        path: of the file.
        model: the same architecture, in eval mode, on the device to run on; it gets the saved
            weights. It answers calls that differ from the samples. None if what was saved needs no
            model; then other calls raise SignatureError. For an accelerated program: the same
            program with the same weights, whose modules get what was saved.
        trust: whether code in the file may be executed, and modules that it names be imported. Such
            code is TorchScript, libraries of AOTInductor, caches of torch.compile, and compiled
            kernels (without these, `fused` compiles its own).
        audit: as `tune()` takes it.
        on_miss: as `tune()` takes it.
        checks: as `tune()` takes it.

    Returns:
        a `TunedModule`; for a program an `Accelerated`.

    Raises:
        ArtifactError: the file is damaged, belongs to another model, needs the model or trust, or
            cannot be run here.
        OptionError: an option makes no sense, such as a `trust` that is neither True nor False.
    """
    options: dict[str, Any] = {"audit": audit, "on_miss": on_miss, "checks": checks}
    if not is_program(path):
        return loading.load(path, model, trust=trust, **options)
    if model is None:
        raise ArtifactError(
            f"{os.fspath(path)!r} holds an accelerated program, and none was given.",
            remedy="Pass the program whose modules it is for: load(path, program).",
        )
    installed, learner = InstalledParts(), PartLearner(_LEARNS)
    return load_program(path, model, installed, learner, trust=trust, **options)


def is_program(path: str | os.PathLike[str]) -> bool:
    """Whether a file is that of an accelerated program."""
    try:
        file = container.path_of(path)
        if not stat.S_ISREG(os.stat(file).st_mode):  # Opening a pipe would block.
            return False
        with zipfile.ZipFile(file) as archive:
            return PROGRAM_FILE in archive.namelist()
    except (GraphwrightError, OSError, ValueError, zipfile.BadZipFile):
        return False  # The other loader says what is wrong with it.


def save_program(found: Accelerated, path: str | os.PathLike[str]) -> None:
    """Write an accelerated program to a file, as a whole or not at all.

    Raises:
        ArtifactError: a part cannot be saved, or the file cannot be written.
    """
    target = container.path_of(path)
    kept = [part for part in found.parts if part.kept]
    if not kept:
        raise ArtifactError(
            "Nothing of the program is answered by something else: there is nothing to save.",
            remedy="Save it before undo(); explain() says what was left, and why.",
        )
    with _temporary(target) as (folder, written):
        with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
            rows = [_row(part, number, folder) for number, part in enumerate(kept)]
            modules = {part.target.path: part.module for part in kept if part.module is not None}
            program = {
                "weights": {path: weights_digest(module) for path, module in modules.items()},
                "schema": _SCHEMA,
                "schema_version": _VERSION,
                "graphwright": __version__,
                "name": found.inspection.name,
                "before_s": found.before_s,
                "after_s": found.after_s,
                "parts": rows,
            }
            archive.writestr(PROGRAM_FILE, json.dumps(program, indent=1))
            for row in rows:
                if row["file"]:
                    archive.write(folder / row["file"], row["file"])
        os.replace(written, target)


@contextmanager
def _temporary(target: Path) -> Iterator[tuple[Path, Path]]:
    """A folder beside a file, and what is written there before it takes the file's place."""
    try:
        with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as folder:
            yield Path(folder), Path(folder) / "whole"
    except OSError as error:
        raise ArtifactError(f"{target} cannot be written: {error}") from error


def _row(part: AcceleratedPart, number: int, folder: Path) -> dict[str, Any]:
    """What is written of a part; what tuning has made goes to a file of its own."""
    row: dict[str, Any] = {
        "path": part.target.path,
        "method": part.target.method,
        "share": part.share,
        "chosen": part.chosen,
        "reason": part.reason,
        "file": "",
    }
    if isinstance(part.answer, TunedAnswer):
        row["file"] = f"part-{number}.gw"
        known, tuned = part.answer.known, part.answer.of_this_state() or part.answer.tuned
        own = dict(known.switches) if known else {}
        with applied(own):
            row["chosen"] = saving.save(tuned, folder / row["file"])
        row["switches"] = packed(own, {}, "")
    return row


def load_program(
    path: str | os.PathLike[str],
    program: Any,
    installed: InstalledParts,
    learner: PartLearner,
    *,
    trust: bool,
    **options: Any,
) -> Accelerated:
    """Install in a program what was saved of another object of it.

    Raises:
        ArtifactError: it is of another program, or a part cannot be loaded.
    """
    places = {
        f"{outer}.{inner}" if inner else outer: module
        for outer, root in modules_inside(program).items()
        for inner, module in root.named_modules()
    }
    with _opened(path) as archive, tempfile.TemporaryDirectory() as folder:
        known = _read(path, archive)
        inspection = ProgramInspection(known["name"], [], [])
        found = Accelerated(inspection, installed, learner)
        found.before_s, found.after_s = known["before_s"], known["after_s"]
        try:
            for row in known["parts"]:
                part = _part(row)
                module = places.get(part.target.path)
                if module is None:
                    raise ArtifactError(
                        f"{name_of(program)} has no module {part.target.path!r}, which was saved.",
                        remedy="Pass the program that was accelerated, made in the same way.",
                    )
                _refuse_other_weights(module, part.target.path, known["weights"])
                found.parts.append(part)
                file = _extracted(path, archive, row["file"], folder)
                switches = _switches_of(path, row)
                with applied(switches):
                    answer = _answer(part, module, file, trust, options, switches)
                installed.put_in(part, module, answer)
        except BaseException:
            found.undo()
            raise
    return found


def _refuse_other_weights(module: nn.Module, path: str, weights: Mapping[str, str]) -> None:
    if weights.get(path) != weights_digest(module):
        raise ArtifactError(
            f"{path} has other weights than the one that was saved.",
            remedy="Load the saved program's weights first, or accelerate this one.",
        )


def _extracted(
    path: str | os.PathLike[str], archive: zipfile.ZipFile, member: str, folder: str
) -> Path | None:
    """What tuning has made of a part, as a file; None for a part without."""
    try:
        return Path(archive.extract(member, folder)) if member else None
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(path, error) from error


def weights_digest(module: nn.Module) -> str:
    """A digest of a module's parameters and of all its buffers."""
    found = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.update(f"{name} {digest_of(tensor)}".encode())
    return found.hexdigest()


def _opened(path: str | os.PathLike[str]) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from error


def _damaged(path: str | os.PathLike[str], error: Exception) -> ArtifactError:
    return ArtifactError(f"{os.fspath(path)!r} is damaged: {error}.", remedy=_AGAIN)


def _read(path: str | os.PathLike[str], archive: zipfile.ZipFile) -> dict[str, Any]:
    """What a file says of its program.

    Raises:
        ArtifactError: it is damaged, or of another version.
    """
    try:
        known = json.loads(archive.read(PROGRAM_FILE))
        version = known["schema"], known["schema_version"]
        for row in known["parts"]:
            _part(row)
            if row["file"]:
                archive.getinfo(row["file"])
        complete = {"name", "before_s", "after_s", "weights"} <= known.keys()
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from error
    if version != (_SCHEMA, _VERSION) or not complete:
        raise ArtifactError(
            f"{os.fspath(path)!r} was written by another version of graphwright.", remedy=_AGAIN
        )
    found: dict[str, Any] = known
    return found


def _switches_of(path: str | os.PathLike[str], row: Mapping[str, Any]) -> dict[str, Any]:
    """The switches that the program sets around a part's calls: autocast, and what is on or off.

    Raises:
        ArtifactError: the file names others, or gives them values that they cannot have.
    """
    try:
        found = unpacked(row.get("switches", _NO_SWITCHES), {})
        known = read()
        for name, value in found.items():
            kind = torch.dtype if name.startswith("autocast on") else type(known[name])
            if not isinstance(value, bool | kind) or kind not in (bool, torch.dtype):
                raise ValueError(f"{name} cannot be {value!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    return dict(found)


def _part(row: Mapping[str, Any]) -> AcceleratedPart:
    target = ModuleMethod(row["path"], row["method"])
    return AcceleratedPart(target, row["share"], chosen=row["chosen"], reason=row["reason"])


def _answer(
    part: AcceleratedPart,
    module: nn.Module,
    file: Path | None,
    trust: bool,
    options: Mapping[str, Any],
    switches: Mapping[str, Any],
) -> Any:
    """What answers a part, made again from what was saved."""
    if file is not None:
        twin: Any = twin_of(module)
        called = twin if part.target.method == FORWARD else getattr(twin, part.target.method)
        tuned = loading.load(file, called, trust=trust, **options)
        calls = calls_saved(part.target, module, tuned)
        calls = calls and replace(calls, switches=switches)
        return TunedAnswer(module, part.target.method, tuned, calls)
    if part.chosen == GENERATE_BY:
        return GenerateAnswer(generator_of(module))
    return BatchSize(module, int(part.chosen.partition("=")[2]))
