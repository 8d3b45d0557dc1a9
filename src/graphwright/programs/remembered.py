"""What an earlier process has found for the same program, calls and machine, kept in a folder.

It is what `save` writes. The key covers the modules' code and structure, their weights, the calls,
the options, the machine and versions. What is recalled is compared and timed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..calls.fingerprint import key_of as key_of_module
from ..calls.objects import flatten_result
from ..calls.serialization import digest_of
from ..processes.environment_variables import cache_folder
from ..report.environment import environment
from .accelerated import Accelerated, InstalledParts, PartLearner
from .saved_program import load_program, save_program, weights_digest
from .whole import WholeProgram

# A larger file is not kept; and so many are.
_MOST_BYTES, _MOST_FILES = 1 << 30, 4


def folder() -> Path:
    """The folder of what is remembered, beside that of tune's choices."""
    return cache_folder("programs")


def key_of(
    modules: Mapping[str, nn.Module],
    calls: Sequence[Any],
    run: Callable[..., Any] | None,
    device: torch.device,
    options: Mapping[str, Any],
) -> str | None:
    """What a program's choices depend on, as a digest; None if it cannot be told."""
    found = hashlib.sha256()
    known = environment(device)
    try:
        for path, module in modules.items():
            own = key_of_module(module, [], device, known, {}).digest
            found.update(f"{path} {own} {weights_digest(module)}".encode())
        found.update(repr([_told(leaf) for leaf in flatten_result([*calls])[0]]).encode())
        found.update(repr(sorted(options.items())).encode())
        code = getattr(run, "__code__", None)
        found.update(_code(code) if code is not None else repr(type(run)).encode())
    except Exception:  # Whatever the program holds may refuse to be described.
        return None
    return found.hexdigest()


def _told(leaf: Any) -> Any:
    """A leaf of a call, in words that are the same in every process."""
    if isinstance(leaf, torch.Tensor):
        return digest_of(leaf)
    if isinstance(leaf, torch.Generator):
        return str(leaf.device), digest_of(leaf.get_state())
    if isinstance(leaf, str | int | float | bool | bytes | None):
        return leaf
    return type(leaf).__qualname__, hashlib.sha256(pickle.dumps(leaf)).hexdigest()


def _code(code: types.CodeType) -> bytes:
    """A function's code, the same in every process."""
    inner = b"".join(_code(c) for c in code.co_consts if isinstance(c, types.CodeType))
    plain = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
    return code.co_code + repr((code.co_names, plain)).encode() + inner


def recall(key: str, program: Any, whole: WholeProgram, learner: PartLearner) -> Accelerated | None:
    """What was found for a program before, if it is still right and still pays."""
    path = _path(key)
    if not path.exists():
        return None
    installed = InstalledParts()
    try:
        # This user's own process wrote it.
        found = load_program(path, program, installed, learner, trust=True)
        if whole.difference() is None:
            found.before_s, found.after_s = whole.timed_in_turns(installed.answers)
            if found.after_s < found.before_s:
                with contextlib.suppress(OSError):
                    os.utime(path)
                return found
    except Exception:  # Whatever a damaged file, or the program with it, raises.
        with contextlib.suppress(OSError):
            path.unlink()
    except BaseException:
        installed.take_all_out()
        raise
    installed.take_all_out()  # It is found again.
    return None


def remember(key: str, found: Accelerated) -> None:
    """Keep what was found, unless nothing was kept of it, or it is too large."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_program(found, path)
        if path.stat().st_size > _MOST_BYTES:
            path.unlink()
        kept = sorted(path.parent.glob("*.gw"), key=lambda each: each.stat().st_mtime)
        for old in kept[:-_MOST_FILES]:
            old.unlink()
    except Exception:
        return  # What was found is there; the next process finds it again.


def _path(key: str) -> Path:
    return folder() / f"{key}.gw"
