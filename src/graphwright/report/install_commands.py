"""The commands that install what is missing, for the Python that runs this."""

from __future__ import annotations

import importlib.metadata
import shlex
import shutil
import sys
from pathlib import Path

PACKAGE = "graphwright"


def install_command(*packages: str) -> str:
    """The command that installs packages of the index."""
    python, wanted = _python(), " ".join(map(_quoted, packages))
    command = f"{python} -m pip install {wanted}"
    try:
        importlib.metadata.distribution("pip")  # To look for its module would change distutils.
    except importlib.metadata.PackageNotFoundError:
        return f"{python} -m ensurepip && {command}"
    return command


def install_extra(name: str) -> str:
    """The command that installs what an extra of graphwright's needs.

    pip looks no further than graphwright itself where that is installed, be it from a checkout.
    """
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # It runs from its source.
        return install_command("-e", f"{Path(__file__).parents[3]}[{name}]")
    return install_command(f"{PACKAGE}[{name}]")


def _python() -> str:
    """This Python as it is called here: the first of the path, or by its file."""
    if (first := shutil.which("python")) is not None and Path(first) == Path(sys.executable):
        return "python"
    own, here = Path(sys.executable), Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def _quoted(package: str) -> str:
    return package if shlex.quote(package) == package else f'"{package}"'
