"""The program of a process that compiles kernels of ours into Triton's cache.

It is run as a file, and needs neither PyTorch nor a GPU: what our kernels' files import beside
Triton is for launching them, and stands there without content. So it begins to compile within half
a second. Its input is a pickled (search path, package's folder, jobs).
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

_PACKAGE = "graphwright.ops.fused"
# What kernels' files import to launch them.
_EMPTY = ("torch", f"{_PACKAGE}.launch_cache", f"{_PACKAGE}.operands")


def _prepare(folder: Path) -> None:
    """Let the kernels' files be imported without the packages above them."""
    for name in _EMPTY:
        sys.modules[name] = MagicMock(__spec__=None)
    names = _PACKAGE.split(".")
    for depth in range(1, len(names) + 1):
        package = types.ModuleType(".".join(names[:depth]))
        package.__path__ = [str(folder.joinpath(*names[1:depth]))]
        sys.modules[package.__name__] = package


def _compile(job: dict[str, Any]) -> None:
    """Compile one kernel; Triton keeps the result for whoever asks for the same."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(job["module"]), job["name"])
    source = ASTSource(kernel, job["signature"], job["constants"], job["attributes"])
    compiled = triton.compile(source, target=GPUTarget(*job["target"]), options=job["options"])
    if job["target"][0] == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)  # What starts it is C, compiled by gcc.


def main() -> None:
    """Compile what standard input names."""
    path, folder, jobs = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    _prepare(Path(folder))
    for job in jobs:
        # What fails here fails again where the kernel is used, and is reported there.
        with contextlib.suppress(Exception):
            _compile(job)


if __name__ == "__main__":
    main()
