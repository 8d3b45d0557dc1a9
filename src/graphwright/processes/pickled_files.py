"""Hand a value that holds tensors to another process, in a file without a name."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from typing import IO, Any

import torch


def write_pickled(value: Any) -> IO[bytes]:
    """Pickle a value to a file that lasts as long as a process holds it open.

    Raises:
        OSError: the file cannot be written.
        Exception: what cannot be pickled raises.
    """
    import cloudpickle

    file = tempfile.TemporaryFile(prefix="graphwright-")  # noqa: SIM115  # handed out
    try:
        with pickling_by_value(), _without_checksums():
            torch.save(value, file, pickle_module=cloudpickle)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def read_pickled(handle: int) -> Any:
    """Read what `write_pickled` has written, in a process that has inherited the file.

    Args:
        handle: of the file. Its place in the file is shared with other processes, so it is opened
            once more by its name, or read as memory where handles have no names.
    """
    name = f"/proc/self/fd/{handle}"
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        # By a name PyTorch reads it itself: from an object of Python it takes ten times as long.
        file: Any = name
        if not os.path.exists(name):
            file = stack.enter_context(mmap.mmap(handle, 0, access=mmap.ACCESS_READ))
        return torch.load(file, weights_only=False)


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Let PyTorch write no checksums, which take most of the time: the file stays here."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextlib.contextmanager
def pickling_by_value() -> Iterator[None]:
    """Have cloudpickle store definitions, not just names, of modules that cannot be imported."""
    import cloudpickle

    known = cloudpickle.list_registry_pickle_by_value()
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            ours = getattr(module, "__name__", None) == name and getattr(module, "__file__", None)
            if not ours or "." in name or name in known or name == "__main__" or _importable(name):
                continue
            with contextlib.suppress(ValueError):
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _importable(name: str) -> bool:
    """Whether another process would find a module by its name."""
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):
            if finder.find_spec(name, None) is not None:
                return True
    return False


def publish_globals() -> None:
    """Put the globals of functions that were pickled by value into the modules they name.

    Dynamo looks there for what such a function calls. What a module has already stays.
    """
    for function in gc.get_objects():
        if type(function) is not types.FunctionType:
            continue
        seen = function.__globals__
        name = seen.get("__name__")
        if not isinstance(name, str):
            continue
        # A missing module could not be imported either: `pickling_by_value` has checked.
        module = sys.modules.setdefault(name, types.ModuleType(name))
        if vars(module) is seen:
            continue
        for key, value in seen.items():
            vars(module).setdefault(key, value)
