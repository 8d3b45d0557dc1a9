"""The choice cache: results of tuning, stored by model, inputs, machine and versions.

An entry is one JSON file with the report (the choice and its evidence) and the parts of its key. It
holds no model and no weights. The key covers everything that may change which candidate wins.
Entries are replaced as a whole, so processes may share the folder. An entry that cannot be read is
ignored with a warning, and tuning goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
import warnings
from pathlib import Path

from ..calls.fingerprint import Fingerprint, digest_of
from ..errors import GraphwrightError, first_line, levels_above
from ..processes.environment_variables import cache_folder
from ..report.report import Report

SCHEMA = "graphwright.choice"
SCHEMA_VERSION = 1
# Beyond this many entries the least recently used ones are removed.
MAX_ENTRIES = 500
# Seconds after which a temporary file was left by a writer that was killed.
_STALE_S = 3600
_OURS = re.compile(r"[0-9a-f]{64}\.(json|[^.]+\.tmp)")


def folder() -> Path:
    """The folder of the entries."""
    return cache_folder("choices")


def recall(key: Fingerprint) -> Report | None:
    """The report stored under a key; None if there is none, or (with a warning) a damaged one."""
    path: Path | None = None
    try:
        path = _path(key)
        report = _read(path, key)
    except FileNotFoundError:
        return None
    except Exception as error:  # A damaged file may raise anything.
        _warn(f"The cached choice {path or ''} is ignored, and tuning goes on", error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return report


def _read(path: Path, key: Fingerprint) -> Report:
    data = json.loads(path.read_bytes())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise GraphwrightError("This is not a choice that graphwright cached.")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise GraphwrightError(f"Its schema version is not {SCHEMA_VERSION}.")
    if data.get("key") != key.digest or digest_of(data.get("parts")) != key.digest:
        raise GraphwrightError("It belongs to another key.")
    report = Report.from_json(json.dumps(data.get("report")))
    if report.chosen is not None and report.chosen_row is None:
        raise GraphwrightError("The report is damaged: what it chose has no row.")
    return report


def remember(key: Fingerprint, report: Report) -> Path | None:
    """Store a report under a key, in place of an earlier one; None, with a warning, if that fails.

    The file appears complete or not at all, even if this process is killed or another one writes.
    """
    path: Path | None = None
    temporary: str | None = None
    try:
        path = _path(key)
        data = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "key": key.digest,
            "parts": key.parts,
            "report": json.loads(report.to_json()),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(".tmp", f"{key.digest}.", path.parent)
        with open(descriptor, "w", encoding="ascii") as handle:
            json.dump(data, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        temporary = None
    except Exception as error:  # Whatever it is, do not lose the result of tuning over it.
        _warn(f"The choice cannot be cached as {path or 'a file'}", error)
        return None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    _clean(path)
    return path


def forget(key: Fingerprint) -> None:
    """Remove the report stored under a key, if there is one."""
    with contextlib.suppress(Exception):
        _path(key).unlink()


def _path(key: Fingerprint) -> Path:
    return folder() / f"{key.digest}.json"


def _warn(what: str, error: Exception) -> None:
    why = error.what if isinstance(error, GraphwrightError) else first_line(error)
    warnings.warn(f"{what}: {why}", RuntimeWarning, stacklevel=levels_above())


def _clean(newest: Path) -> None:
    """Remove entries beyond MAX_ENTRIES and files of killed writers; other processes may too."""
    entries = []
    with contextlib.suppress(OSError):
        for file in filter(lambda file: _OURS.fullmatch(file.name), newest.parent.iterdir()):
            with contextlib.suppress(OSError):  # Another process was faster.
                changed = file.stat().st_mtime
                if file.suffix == ".json":
                    entries.append((file != newest, -changed, file))
                elif changed < time.time() - _STALE_S:
                    file.unlink()
    for _, _, file in sorted(entries)[MAX_ENTRIES:]:
        with contextlib.suppress(OSError):
            file.unlink()
