"""The memory of choices: what tuning found, kept for the same model, inputs and machine.

An entry is one JSON file: the report, which is the choice and its evidence, and the parts of the
key. It holds no model and no weights. The key is of all that may change which candidate wins; a
change of any part is another entry. Entries are replaced as a whole, so that processes may share
the folder; one that cannot be read is ignored with a warning, and tuning goes on.
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

from ..calls.fingerprint import Fingerprint as Fingerprint
from ..calls.fingerprint import digest_of
from ..calls.fingerprint import key_of as key_of
from ..errors import GraphwrightError, first_line, levels_above
from ..report.report import Report

SCHEMA = "graphwright.choice"
SCHEMA_VERSION = 1
# Past this many entries, those that were not used for the longest time are removed.
MAX_ENTRIES = 500
# Seconds after which a temporary file belongs to a writer that is no more.
_STALE_S = 3600
_OURS = re.compile(r"[0-9a-f]{64}\.(json|[^.]+\.tmp)")


def folder() -> Path:
    """Where entries lie: under $GRAPHWRIGHT_CACHE_DIR, else the user's cache directory."""
    if chosen := os.environ.get("GRAPHWRIGHT_CACHE_DIR"):
        return Path(chosen).expanduser() / "choices"
    import platformdirs  # Only once something is tuned.

    return platformdirs.user_cache_path("graphwright") / "choices"


def recall(key: Fingerprint) -> Report | None:
    """The report that was remembered under a key; None, with a warning, if it cannot be read."""
    path: Path | None = None
    try:
        path = _path(key)
        report = _read(path, key)
    except FileNotFoundError:
        return None
    except Exception as error:  # A damaged file may raise anything.
        _warn(f"The remembered choice {path or ''} is ignored, and tuning goes on", error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return report


def _read(path: Path, key: Fingerprint) -> Report:
    data = json.loads(path.read_bytes())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise GraphwrightError("This is no choice that graphwright remembered.")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise GraphwrightError(f"Its schema version is not {SCHEMA_VERSION}.")
    if data.get("key") != key.digest or digest_of(data.get("parts")) != key.digest:
        raise GraphwrightError("It belongs to another key.")
    report = Report.from_json(json.dumps(data.get("report")))
    if report.chosen is not None and report.chosen_row is None:
        raise GraphwrightError("The report is damaged: what it chose has no row.")
    return report


def remember(key: Fingerprint, report: Report) -> Path | None:
    """Keep a report under a key, in place of an earlier one; None, with a warning, if it cannot be.

    The file is complete or not there at all, whenever a process ends and whoever else writes.
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
    except Exception as error:  # Nothing here is worth the loss of what was tuned.
        _warn(f"The choice cannot be remembered as {path or 'a file'}", error)
        return None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    _clean(path)
    return path


def forget(key: Fingerprint) -> None:
    """Remove what was remembered under a key, if anything was."""
    with contextlib.suppress(Exception):
        _path(key).unlink()


def _path(key: Fingerprint) -> Path:
    return folder() / f"{key.digest}.json"


def _warn(what: str, error: Exception) -> None:
    why = error.what if isinstance(error, GraphwrightError) else first_line(error)
    warnings.warn(f"{what}: {why}", RuntimeWarning, stacklevel=levels_above())


def _clean(newest: Path) -> None:
    """Remove the entries beyond the bound and what killed writers left; others may do it too."""
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
