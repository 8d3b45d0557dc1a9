"""The file format of artifacts: an uncompressed ZIP archive with a manifest of its members.

The manifest lists each member with its size and SHA-256, and holds a digest of itself. All of this
is checked before a member is used. That finds damage; it does not protect against files made to do
harm, for which there is `trust`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..calls.options import in_brief
from ..errors import ArtifactError

SCHEMA = "graphwright.artifact"
SCHEMA_VERSION = 2
# Version 1 had another list of switches.
_READABLE = (1, 2)
MANIFEST = "manifest.json"
_REMEDY = "Copy the file again, or save it anew."
_REMEDIES: dict[int | None, str] = {
    errno.EISDIR: "Name a file in that folder.",
    errno.EINVAL: "Name another file.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.ENOSPC: "Choose a folder with room for it.",
}
# Names of members: relative paths without '..'.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*")
# Large, since after each read, hash and write a thread waits for the GIL, which imports hold.
_CHUNK = 1 << 26
# The header in front of a member: its first bytes, its size, and where it holds the lengths of the
# two fields that follow it, the name and the extra field.
_LOCAL, _LOCAL_BYTES, _LENGTHS = b"PK\x03\x04", 30, slice(26, 30)
# What zipfile raises for a damaged archive.
_BROKEN = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error)


def path_of(given: Any) -> Path:
    """A caller's argument as a path.

    Raises:
        ArtifactError: it is no path.
    """
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArtifactError(
            f"{in_brief(given)} is no path of a file.", remedy="Pass a text or a pathlib.Path."
        )
    return Path(text)


def write(path: Path, folder: Path, facts: dict[str, Any]) -> None:
    """Write all files of a folder, and facts in the manifest, as one file.

    The file appears complete or not at all, even if the process is killed. It replaces an existing
    file and keeps that one's permissions. A symbolic link stays, and its target is replaced.

    Raises:
        ArtifactError: it cannot be written.
    """
    names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    members = {name: [(folder / name).stat().st_size, _sha256(folder / name)] for name in names}
    manifest = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **facts, "members": members}
    manifest["digest"] = _digest(manifest)
    temporary: Path | None = None
    try:
        target = Path(os.path.realpath(path))
        mode = _mode_of(target)
        # A name of its own: the target's name may leave no room for a suffix.
        unfinished = target.parent / f".graphwright-{secrets.token_hex(8)}.tmp"
        # The umask applies to a new file; one that replaces a private file is never open to others.
        descriptor = os.open(
            unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600
        )
        temporary = unfinished
        with open(descriptor, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
                for name in names:
                    archive.write(folder / name, name)
            file.flush()
            os.fsync(file.fileno())
            if mode is not None:
                os.fchmod(file.fileno(), mode)
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be written: {error}.",
            remedy=_REMEDIES.get(error.errno, "Choose a folder that can be."),
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _mode_of(path: Path) -> int | None:
    """The permissions of an existing file; None if there is none."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return stat.S_IMODE(mode)


@dataclass
class Members:
    """The members of an artifact, which threads check and unpack into a folder.

    Attributes:
        facts: the manifest.
        folder: where they are unpacked; it is removed at the end.
    """

    facts: dict[str, Any]
    folder: Path
    _jobs: dict[str, Future[None]]

    def ready(self, *names: str) -> Path:
        """Wait until the named members, or all, are checked and unpacked; returns the folder.

        Raises:
            ArtifactError: one of them is damaged.
        """
        for name in names or self._jobs:
            if name in self._jobs:
                self._jobs[name].result()
        return self.folder


@contextlib.contextmanager
def opened(path: Path, *, leave_out: str = "") -> Iterator[Members]:
    """Open an artifact and begin to check and unpack its members.

    Args:
        path: of the file.
        leave_out: a member that is checked and not unpacked.

    Raises:
        ArtifactError: it is no artifact, is damaged, or has another schema version.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(tempfile.mkdtemp(prefix="graphwright-"))
        except OSError as error:
            raise _no_room(path, error) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # Opening a pipe would block.
                raise ArtifactError(f"{path} is no file.")
            # Opened only once: another file may replace it meanwhile.
            file = stack.enter_context(open(path, "rb"))
            with zipfile.ZipFile(file) as archive:
                manifest = _manifest(path, archive)
                headers = {info.filename: info.header_offset for info in archive.infolist()}
        except FileNotFoundError as error:
            raise ArtifactError(
                f"There is no file {path}.", remedy="Check the path: it is what save() was given."
            ) from error
        except (*_BROKEN, ValueError) as error:
            raise ArtifactError(
                f"{path.name} is no artifact, or is cut short: {error}.", remedy=_REMEDY
            ) from error
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error}.") from error
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=4))
        # Small ones first: they are needed first.
        names = sorted(manifest["members"], key=lambda name: manifest["members"][name][0])
        jobs = {
            name: pool.submit(
                _checked,
                path,
                file.fileno(),
                name,
                headers[name],
                manifest["members"][name],
                None if name == leave_out else folder / name,
            )
            for name in names
        }
        yield Members(manifest, folder, jobs)


def _manifest(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    """What an archive says of itself, if its members are those that it lists."""
    infos = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in infos):
        raise ArtifactError(f"{path.name} was packed by something else, or is damaged.")
    try:
        found = json.loads(archive.read(MANIFEST))
    except KeyError as error:
        raise ArtifactError(
            f"{path.name} is a ZIP archive without a manifest: no artifact of graphwright's."
        ) from error
    except (ValueError, *_BROKEN) as error:
        raise ArtifactError(
            f"The manifest of {path.name} is damaged: {error}.", remedy=_REMEDY
        ) from error
    _check_schema(path, found)
    _check_members(path, found.get("members"), [info.filename for info in infos])
    manifest: dict[str, Any] = found
    return manifest


def _check_schema(path: Path, found: Any) -> None:
    """Refuse what is no manifest, or one that this version cannot read."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ArtifactError(f"{path.name} is no artifact of graphwright's.")
    if found.get("schema_version") not in _READABLE:
        raise ArtifactError(
            f"{path.name} has schema version {found.get('schema_version')}, and only "
            f"{' and '.join(map(str, _READABLE))} can be read.",
            remedy="Use the version of graphwright that saved it, or save it anew.",
        )
    if found.pop("digest", None) != _digest(found):
        raise ArtifactError(
            f"The manifest of {path.name} is damaged: its digest is another one.", remedy=_REMEDY
        )


def _check_members(path: Path, members: Any, there: Sequence[str]) -> None:
    """Refuse an archive whose members are others than it lists, or would lead elsewhere."""
    if not isinstance(members, dict) or not all(map(_is_listed, members.values())):
        raise ArtifactError(f"The manifest of {path.name} makes no sense: it lists no members.")
    folders = {str(parent) for name in members for parent in PurePosixPath(name).parents}
    if folders & set(members):
        raise ArtifactError(f"{path.name} has a member that is a folder of another one.")
    listed = [MANIFEST, *members]
    for name in listed:
        if name not in there:
            raise ArtifactError(f"{path.name} lacks its member {name}.", remedy=_REMEDY)
    if len(there) != len(listed):
        more = sorted(set(there) - set(listed)) or ["one of them twice"]
        raise ArtifactError(f"{path.name} has members that it does not list: {', '.join(more)}.")
    if not all(map(_NAME.fullmatch, there)):
        raise ArtifactError(f"{path.name} has members whose names lead elsewhere.")


def _is_listed(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and type(entry[0]) is int
        and entry[0] >= 0
        and isinstance(entry[1], str)
    )


def _checked(
    path: Path, file: int, name: str, header: int, listed: tuple[int, str], target: Path | None
) -> None:
    """Check a member's size and hash, and copy it to a file if `target` is given.

    The member is uncompressed, so its bytes are read directly; the hash says more than the
    archive's checksum.
    """
    size, expected = listed
    hashed, left = hashlib.sha256(), size
    with contextlib.ExitStack() as stack:
        out = None
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            out = stack.enter_context(open(target, "wb", buffering=0))
        try:
            local = os.pread(file, _LOCAL_BYTES, header)
            if not local.startswith(_LOCAL):
                raise _damaged(path, name, "it does not begin where it should")
            at = header + _LOCAL_BYTES + sum(struct.unpack("<HH", local[_LENGTHS]))
            buffer = memoryview(bytearray(min(size, _CHUNK)))
            while left and (count := os.preadv(file, [buffer[: min(left, _CHUNK)]], at)):
                chunk = buffer[:count]
                hashed.update(chunk)
                left, at = left - count, at + count
                while out is not None and chunk:
                    chunk = chunk[_written(out, chunk, path) :]
        except (OSError, struct.error) as error:
            raise _damaged(path, name, str(error)) from error
    if left or hashed.hexdigest() != expected:
        raise _damaged(path, name, "its hash is another one")


def _written(out: io.FileIO, chunk: memoryview, path: Path) -> int:
    try:
        return out.write(chunk)
    except OSError as error:
        raise _no_room(path, error) from error


def _no_room(path: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        f"{path.name} cannot be unpacked into {tempfile.gettempdir()}: {error}.",
        remedy="Set TMPDIR to a folder with room for it.",
    )


def _damaged(path: Path, name: str, why: str) -> ArtifactError:
    return ArtifactError(f"The member {name} of {path.name} is damaged: {why}.", remedy=_REMEDY)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
