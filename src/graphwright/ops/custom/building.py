"""Building libraries once: by their content, the flags, the compiler and PyTorch's version.

A library is built in a folder of its own, which gets its name when it is complete, under a lock
that ends with the process that holds it. So two processes do not build the same one twice, and a
process that is killed leaves nothing that another one would take for a library.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...errors import ExtensionError
from ...processes.environment_variables import cache_folder
from ...report.progress import SHORT_S, progress_shown
from .build_errors import diagnosed
from .sources import Unit

# Bumped when what is made of the same source changes.
_FORMAT = 1
_DIGESTS = "digests.json"
# What else may change what compilers and linkers make.
_VARIABLES = (
    *("CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
    *("LIBRARY_PATH", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"),
)


@dataclass(frozen=True)
class Flags:
    """What compilers and the linker are told beside what PyTorch itself needs.

    Attributes:
        cpp: for C++.
        cuda: for nvcc.
        link: for the linker.
    """

    cpp: Sequence[str] = field(default=("-O3",))
    cuda: Sequence[str] = field(default=("-O3",))
    link: Sequence[str] = field(default=())


def folder() -> Path:
    """Where libraries lie: under $GRAPHWRIGHT_CACHE_DIR, else the user's cache directory."""
    return cache_folder("extensions")


def library(
    unit: Unit,
    name: str,
    flags: Flags,
    *,
    verbose: bool = False,
    quiet: bool = False,
    alone: bool = False,
) -> Path:
    """The shared library of a unit, built if it was not before.

    Args:
        unit: the translation unit.
        name: of the extension, for messages.
        flags: of the compilers.
        verbose: whether the compiler's commands are shown.
        quiet: whether progress is not shown.
        alone: whether the C++ compiler does it alone, without ninja and setuptools.

    Raises:
        ExtensionError: there is no compiler, or the source does not compile.
    """
    from filelock import FileLock

    key = _key(unit, name, flags)
    place = folder() / key
    if is_current(place):  # Nothing has to be written: the folder may be read-only.
        return _library_in(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place.with_suffix(".lock"))
        with lock:
            if not is_current(place):
                shutil.rmtree(place, ignore_errors=True)
                for left in place.parent.glob(f"{key}.*.new"):  # of builds that were killed
                    shutil.rmtree(left, ignore_errors=True)
                with progress_shown(False if quiet else None, f"building {name}", after_s=SHORT_S):
                    compiles = _compile_alone if alone else _compile
                    _build(unit, name, flags, place, compiles, verbose=verbose)
    except OSError as error:
        raise ExtensionError(
            f"The library of {name} cannot be kept in {folder()}: {error.strerror or error}.",
            remedy="Let it be written to and have room, or name another one in "
            "GRAPHWRIGHT_CACHE_DIR.",
        ) from error
    return _library_in(place)


def existing(unit: Unit, name: str, flags: Flags) -> Path | None:
    """The shared library of a unit, if it was built before."""
    place = folder() / _key(unit, name, flags)
    return _library_in(place) if is_current(place) else None


def forget(path: Path) -> None:
    """Remove a library that cannot be used."""
    shutil.rmtree(path.parent, ignore_errors=True)


def _library_in(place: Path) -> Path:
    (path,) = place.glob("*.so")
    return path


def is_current(place: Path) -> bool:
    """Whether a library is there as it was built, of files that are what they were then.

    Loading half of one may end the process.
    """
    try:
        known = json.loads((place / _DIGESTS).read_text(encoding="utf-8"))
        return all(_digest(place / file) == digest for file, digest in known.items())
    except (OSError, ValueError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(
    unit: Unit,
    name: str,
    flags: Flags,
    place: Path,
    compiles: Callable[..., None],
    *,
    verbose: bool,
) -> None:
    """Build into a folder beside it, and rename that."""
    new = Path(tempfile.mkdtemp(prefix=f"{place.name}.", suffix=".new", dir=place.parent))
    try:
        ending = ".cpp" if unit.language == "C++" else ".cu"
        source = new / f"source{ending}"
        source.write_text(unit.text, encoding="utf-8")
        compiles(unit, name, flags, source, verbose=verbose)
        (made,) = new.glob(f"{_module(place.name)}*.so")
        # Under a name of its own: a path that is loaded already is not looked at again.
        built = made.rename(new / f"{_digest(made)[:16]}.so")
        used = {str(path): _digest(path) for path in (*_headers(source), *_linked(flags))}
        used[built.name] = _digest(built)
        (new / _DIGESTS).write_text(json.dumps(used), encoding="utf-8")
        for rest in new.iterdir():
            if rest.name not in (built.name, _DIGESTS, source.name):
                rest.unlink()
        new.chmod(0o755)  # for others, where the folder is shared
        new.rename(place)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _headers(source: Path) -> list[Path]:
    """What the compiler has read, but for system headers: those of the user's own."""
    if not (source.parent / "build.ninja").exists():
        return []
    with ninja_on_path():
        said = subprocess.run(
            ["ninja", "-t", "deps"], cwd=source.parent, capture_output=True, text=True, check=True
        )
    named = [line.strip() for line in said.stdout.splitlines() if line.startswith("    ")]
    # nvcc names these too; versions stand for them.
    others = (str(Path(torch.__file__).parent), "/usr/include", "/usr/lib", "/usr/local/cuda")
    paths = [Path(file) for file in named if not file.startswith(others)]
    return [path for path in paths if path.is_absolute() and path != source and path.is_file()]


def _linked(flags: Flags) -> list[Path]:
    """Libraries that the linker is given by name."""
    folders = [flag[2:] for flag in flags.link if flag.startswith("-L")]
    found = [Path(flag) for flag in flags.link]
    for flag in flags.link:
        if flag.startswith("-l"):
            found += [Path(f, f"lib{flag[2:]}{end}") for f in folders for end in (".so", ".a")]
    return [path.absolute() for path in found if path.is_file()]


def _module(key: str) -> str:
    return f"graphwright_{key[:16]}"


def _compile(unit: Unit, name: str, flags: Flags, source: Path, *, verbose: bool) -> None:
    _require_compiler(unit, name)
    with ninja_on_path(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of architectures and of compilers that were not tested
        from torch.utils import cpp_extension

        key = source.parent.name.split(".")[0]
        try:
            cpp_extension.load(
                _module(key),
                [str(source)],
                extra_cflags=["-fvisibility=hidden", *flags.cpp],
                extra_cuda_cflags=["-Xcompiler=-fvisibility=hidden", *flags.cuda],
                extra_ldflags=list(flags.link),
                extra_include_paths=list(unit.folders),
                build_directory=str(source.parent),
                is_python_module=False,
                with_cuda=unit.language == "CUDA",
                verbose=verbose,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise diagnosed(error, unit, name) from error


def _compile_alone(unit: Unit, name: str, flags: Flags, source: Path, *, verbose: bool) -> None:
    """Compile C++ that includes no header of the user's, by one command."""
    _require_cpp_compiler(name)
    here = Path(torch.__file__).parent
    command = [
        *(cpp_compiler(), "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", *flags.cpp),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(here / "include"), "-isystem", sysconfig.get_path("include")),
        str(source),
        *(f"-L{here / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", *flags.link),
        *("-o", str(source.with_name(f"{_module(source.parent.name)}.so"))),
    ]
    done = subprocess.run(command, capture_output=not verbose, text=True, check=False)
    if done.returncode:
        raise diagnosed(RuntimeError(done.stderr or "it failed"), unit, name)


def _require_cpp_compiler(name: str) -> None:
    """Raise if there is none.

    Raises:
        ExtensionError: the compiler is missing, or cannot be called.
    """
    if len(shlex.split(cpp_compiler())) > 1:
        raise ExtensionError(
            f"CXX is {cpp_compiler()!r}, of several words, which PyTorch takes for one.",
            remedy="Name the compiler alone, and pass its options in cflags.",
        )
    if shutil.which(cpp_compiler()) is None:
        raise ExtensionError(
            f"There is no C++ compiler to build {name} with: {cpp_compiler()} is not found.",
            remedy="Install g++ (on Debian and Ubuntu: apt install g++), or name one in CXX.",
        )


def _require_compiler(unit: Unit, name: str) -> None:
    """Raise if something that builds is not there.

    Raises:
        ExtensionError: a compiler, ninja or setuptools is missing.
    """
    _require_cpp_compiler(name)
    if unit.language == "CUDA" and cuda_compiler() is None:
        raise ExtensionError(
            f"There is no CUDA compiler to build {name} with: nvcc is not found.",
            remedy=f"Install the CUDA toolkit {torch.version.cuda or ''} and put nvcc on the PATH, "
            "or name its folder in CUDA_HOME.",
        )
    with ninja_on_path():
        if shutil.which("ninja") is None:
            raise ExtensionError(
                f"Ninja, which builds {name}, is not installed.",
                remedy="pip install ninja",
            )
    if importlib.util.find_spec("setuptools") is None:  # torch.utils.cpp_extension imports it
        raise ExtensionError(
            f"setuptools, which helps to build {name}, is not installed.",
            remedy="pip install setuptools",
        )


def cpp_compiler() -> str:
    """The C++ compiler's name or path, be it there or not."""
    return os.environ.get("CXX") or "c++"


def cuda_compiler() -> str | None:
    """Where nvcc is; None if it is not found."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (path := shutil.which("nvcc", path=str(Path(home) / "bin"))):
        return path
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@contextlib.contextmanager
def ninja_on_path() -> Iterator[None]:
    """Find ninja beside Python: an environment need not be activated to be used."""
    before = os.environ.get("PATH", "")
    scripts = sysconfig.get_path("scripts")
    os.environ["PATH"] = os.pathsep.join([before, scripts, str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _key(unit: Unit, name: str, flags: Flags) -> str:
    """What decides what a library is."""
    parts = [
        _FORMAT,
        name,
        unit.text,
        unit.digests,
        unit.folders,
        [list(flags.cpp), list(flags.cuda), list(flags.link)],
        torch.__version__,
        torch.version.git_version,
        torch.compiled_with_cxx11_abi(),
        sys.version_info[:2],
        platform.machine(),
        [os.environ.get(variable) for variable in _VARIABLES],
        _version(cpp_compiler()),
        _processor() if any("native" in flag for flag in (*flags.cpp, *flags.cuda)) else None,
    ]
    if unit.language == "CUDA":
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST")
        parts += [_version(cuda_compiler()), architectures or capability]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:40]


def _processor() -> list[str]:
    """What this machine's processor can do: folders are shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})


def _version(compiler: str | None) -> list[str]:
    """A compiler's path and what it says that it is."""
    path = compiler and shutil.which(compiler)
    if not path:
        return []
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return [path]
    return [path, said.stdout]
