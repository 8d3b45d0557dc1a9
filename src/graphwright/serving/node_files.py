"""NodeFile: a file of one node of Ray that others need; each fetches it once, for all replicas."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import ArtifactError
from ..processes.environment_variables import cache_folder


@dataclass(frozen=True)
class NodeFile:
    """A file, and the node where it lies.

    Attributes:
        path: absolute.
        node: the node's id; None if Ray did not run yet.
        size: in bytes; with `changed_ns` it tells this file from a later one of the same name.
        changed_ns: when it was written last, in nanoseconds.
    """

    path: Path
    node: str | None
    size: int
    changed_ns: int

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> NodeFile:
        """The file at a path of this machine.

        Raises:
            ArtifactError: there is none.
        """
        import ray

        file = Path(path).absolute()
        if not file.is_file():
            raise ArtifactError(f"There is no file {file}.", remedy="`save` writes one.")
        node = _node() if ray.is_initialized() else None
        status = file.stat()
        return cls(file, node, status.st_size, status.st_mtime_ns)

    def is_here(self) -> bool:
        """Whether its path leads to this very file, as on a shared file system."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.changed_ns)

    def on_this_node(self) -> Path:
        """Where it lies, or else a copy that all replicas of this node share.

        Raises:
            ArtifactError: it is no longer what it was when the application was built.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.is_here():
            return self.path
        if self.node in (None, _node()):
            raise self._changed()
        place = hashlib.sha256(f"{self.node}:{self.path}".encode()).hexdigest()[:32]
        folder = _cache() / place
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / f"{self.size}-{self.changed_ns}{self.path.suffix}"
        with FileLock(folder / "lock"):
            if not copy.exists():
                where = NodeAffinitySchedulingStrategy(self.node, soft=False)
                read = ray.remote(num_cpus=0, scheduling_strategy=where)(_content)
                content = ray.get(read.remote(self))
                if content is None:
                    raise self._changed()
                for older in folder.glob(f"*{self.path.suffix}"):
                    older.unlink()
                with tempfile.NamedTemporaryFile(dir=folder, delete=False) as beside:
                    content.tofile(beside)
                os.replace(beside.name, copy)
        return copy

    def _changed(self) -> ArtifactError:
        return ArtifactError(
            f"{self.path} is not the file that it was when the application was built.",
            remedy="Build the application again, and deploy it.",
        )


def _content(file: NodeFile) -> Any:
    """Its bytes as an array, which Ray hands to other nodes without copies; None if it changed."""
    import numpy as np

    return np.fromfile(file.path, np.uint8) if file.is_here() else None


def _node() -> str:
    """The id of this node."""
    import ray

    found: str = ray.get_runtime_context().get_node_id()
    return found


def _cache() -> Path:
    """Where copies lie."""
    return cache_folder("artifacts")
