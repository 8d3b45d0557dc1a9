"""The program of a process that compiles kernels of ours into Triton's cache.

It is run as a file, and needs neither PyTorch nor a GPU: what our kernels' files import beside
Triton is for launching them, and stands there without content. It imports Triton once, and a fork
of it compiles each kernel. Its input are pickles: (search path, package's folder), then (jobs, how
many at once) as often as there are some.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

_PACKAGE = "graphwright.ops.fused"
# What compiling imports.
_USED = "triton", "triton.compiler", "triton.backends.nvidia.driver"
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
    from triton.compiler.compiler import make_backend

    kernel = getattr(importlib.import_module(job["module"]), job["name"])
    source = ASTSource(kernel, job["signature"], job["constants"], job["attributes"])
    target = GPUTarget(*job["target"])
    # Whoever asks looks under the name of what it found when it began.
    type(make_backend(target)).hash = lambda _: job["backend"]
    compiled = triton.compile(source, target=target, options=job["options"])
    if job["target"][0] == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)  # What starts it is C, compiled by gcc.


def _compile_all(jobs: list[dict[str, Any]], at_once: int) -> None:
    """Compile kernels, each in a process of its own."""
    running: set[int] = set()
    for job in jobs:
        if len(running) == at_once:
            running.discard(os.wait()[0])
        child = os.fork()
        if not child:
            # Where the kernel is used it is compiled once more: what is wrong with it fails there.
            try:
                _compile(job)
            except Exception as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                sys.stderr.flush()
            finally:
                os._exit(0)
        running.add(child)
    while running:
        running.discard(os.wait()[0])


def main() -> None:
    """Compile what comes by standard input; a byte goes out after each list of jobs."""
    answers = os.dup(1)
    os.dup2(2, 1)  # What others print is no answer.
    path, folder = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    _prepare(Path(folder))
    for name in _USED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    while True:
        try:
            jobs, at_once = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _compile_all(jobs, at_once)
        os.write(answers, b".")


if __name__ == "__main__":
    main()
