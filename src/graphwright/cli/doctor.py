"""What this machine has for graphwright, what is missing for what, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import torch

from .._version import __version__
from ..calls.plurals import counted
from ..ops import compiled_checks
from ..ops.custom.building import cpp_compiler, cuda_compiler, ninja_on_path
from ..report.environment import environment
from ..report.install_commands import PACKAGE, install_command, install_extra
from ..tuning.choice_cache import folder

# What each extra is for; those for its developers are left out.
_EXTRAS = {
    "report": "pages with plots: --html, --roofline, --timeline",
    "serve": "graphwright serve",
    "ray": "replicas on many machines, tune --ray",
    "onnx": "the strategy onnxruntime",
    "xla": "the strategy xla",
    "extension": "extension(): operators of your own in C++ and CUDA",
    "examples": "the examples, which embed real sentences",
}
_NEXT = "Next:  graphwright tune my_model.py:function"
_DRIVER = "/proc/driver/nvidia/version"
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")


class State(Enum):
    """How something is."""

    OK = "ok"
    MISSING = "missing"  # Something cannot be used; all else works.
    BROKEN = "broken"  # It is there, and does not work.


@dataclass(frozen=True)
class Item:
    """Something that was looked for.

    Attributes:
        name: what it is.
        state: how it is.
        found: what was found, or what is wrong.
        needed_for: what cannot be used without it; "" if it is there.
        fix: how to get it, or "".
    """

    name: str
    state: State
    found: str
    needed_for: str = ""
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self) | {"state": self.state.value}


def examined(*, build: bool = False) -> list[Item]:
    """Everything that graphwright can use, as it is on this machine.

    Args:
        build: whether what is built once for a machine is built first.
    """
    items: list[Item] = []
    for look in (_processor, _gpu, _compilers):
        items += look()
    items += _checks_in_cpp(build=build)
    for look in (_cache, _graphviz, _extras):
        items += look()
    return items


def title() -> str:
    """Versions of what everything runs on."""
    return (
        f"graphwright {__version__}, Python {platform.python_version()}, "
        f"PyTorch {torch.__version__}, {platform.system()} {platform.machine()}"
    )


def show(items: Sequence[Item]) -> None:
    """Print a table, how many things are missing and broken, and what to do next."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    colours = {State.OK: "green", State.MISSING: "yellow", State.BROKEN: "bold red"}
    for item in items:
        said = [item.found]
        if item.needed_for:
            said.append(f"needed for {item.needed_for}")
        if item.fix:
            said.append(f"fix: {item.fix}")
        state = Text(item.state.value, style=colours[item.state])
        table.add_row(state, Text(item.name), Text("\n".join(said)))
    console.print(Text(title()))
    console.print(table)
    console.print(Text(summary(items)))
    if all(item.state is not State.BROKEN for item in items):
        console.print(Text(_NEXT))


def summary(items: Sequence[Item]) -> str:
    """One sentence."""
    broken = [item.name for item in items if item.state is State.BROKEN]
    missing = [item.name for item in items if item.state is State.MISSING]
    if broken:
        return f"Broken: {', '.join(broken)}."
    if missing:
        return f"Missing for some uses: {', '.join(missing)}."
    return "Nothing is missing."


def _processor() -> Iterator[Item]:
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    name = environment(torch.device("cpu"))["processor"]
    found = f"{name}; {counted(cores, 'core')} and {counted(threads, 'thread')} for this process"
    if threads > cores:
        yield Item(
            "processor",
            State.BROKEN,
            f"{found}: the threads wait for each other",
            "calls on the CPU that are as fast as they can be",
            f"export OMP_NUM_THREADS={cores}",
        )
    else:
        yield Item("processor", State.OK, found)


def _gpu() -> Iterator[Item]:
    needed_for = "CUDA graphs; without a GPU, graphs are only recorded and replayed on the CPU"
    if not torch.cuda.is_available():
        driver = Path(_DRIVER).exists() or shutil.which("nvidia-smi")
        if torch.version.cuda is None:
            found = "PyTorch is a build without CUDA"
            fix = "Install PyTorch for CUDA: https://pytorch.org/get-started" if driver else ""
        else:
            found = f"PyTorch, built for CUDA {torch.version.cuda}, finds no GPU"
            fix = "See what nvidia-smi says: the driver may be too old." if driver else ""
        yield Item("GPU", State.BROKEN if driver else State.MISSING, found, needed_for, fix)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        name = "GPU" if torch.cuda.device_count() == 1 else f"GPU {index}"
        try:
            about = environment(device)
            free, _ = torch.cuda.mem_get_info(device)
            _replay(device)
        except Exception as error:  # The driver's errors are of many kinds.
            said = str(error).partition("\n")[0]
            fix = "See what nvidia-smi says; other processes may hold the GPU."
            yield Item(name, State.BROKEN, said, needed_for, fix)
            continue
        memory = f"{free / 2**30:.0f} of {about['gpu memory']} free"
        versions = f"driver {about['driver']}, CUDA {about['cuda']}"
        found = f"{about['gpu']}, {memory}; {versions}; a graph was replayed"
        yield Item(name, State.OK, found)
    if importlib.util.find_spec("triton") is None:
        fix = install_command("triton")
        yield Item("Triton", State.MISSING, "not installed", "fuse(), inductor", fix)
    else:
        yield Item("Triton", State.OK, importlib.metadata.version("triton"))


def _replay(device: torch.device) -> None:
    """Capture a graph and replay it."""
    with torch.cuda.device(device):
        one, made = torch.ones(8, device=device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            two = one + one
        made.replay()
        if two.tolist() != [2.0] * 8:
            raise RuntimeError("A graph was captured, and its replay computes something else.")


def _compilers() -> Iterator[Item]:
    name = cpp_compiler()
    yield _program(
        "C++ compiler",
        shutil.which(name),
        f"{name} is not found",
        "checks of modules in C++, inductor and fuse() on the CPU, extension()",
        "Install g++ (on Debian and Ubuntu: apt install g++), or name one in CXX.",
    )
    if torch.cuda.is_available():
        yield _program(
            "CUDA compiler",
            cuda_compiler(),
            "nvcc is not found",
            "operators of your own in CUDA",
            f"Install the CUDA toolkit {torch.version.cuda or ''}, or name it in CUDA_HOME.",
        )
    with ninja_on_path():
        ninja = shutil.which("ninja")
    yield _program("ninja", ninja, "not found", "extension()", install_extra("extension"))


def _program(name: str, path: str | None, wrong: str, needed_for: str, fix: str) -> Item:
    if path is None:
        return Item(name, State.MISSING, wrong, needed_for, fix)
    return Item(name, State.OK, path)


def _checks_in_cpp(*, build: bool) -> Iterator[Item]:
    name = "checks in C++"
    why = compiled_checks.provide(build=build, quiet=False)
    if why is None:
        yield Item(name, State.OK, "built")
    elif why == compiled_checks.NOT_BUILT:
        yield Item(name, State.OK, f"{why}: tune builds them, or graphwright doctor --build")
    else:
        yield Item(name, State.MISSING, why, "checks of large models that take microseconds")


def _cache() -> Iterator[Item]:
    place = folder().parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place):
            pass
    except OSError as error:
        yield Item(
            "cache",
            State.BROKEN,
            f"{place} cannot be written: {error.strerror or error}",
            "results and kernels that outlive their process",
            "Name another folder in GRAPHWRIGHT_CACHE_DIR.",
        )
        return
    size = sum(each.stat().st_size for each in place.rglob("*") if each.is_file())
    yield Item("cache", State.OK, f"{place}, {size / 2**20:.0f} MiB")


def _graphviz() -> Iterator[Item]:
    fix = "Install graphviz (on Debian and Ubuntu: apt install graphviz)."
    yield _program(
        "graphviz", shutil.which("dot"), "dot is not found", "pictures by inspect --svg", fix
    )


def _extras() -> Iterator[Item]:
    try:
        wanted = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        found = f"{PACKAGE} runs from its source, and says nothing of what it needs"
        fix = install_command("-e", str(Path(__file__).parents[3]))
        yield Item("extras", State.MISSING, found, fix=fix)
        return
    for extra, needed_for in _EXTRAS.items():
        of_extra = re.compile(rf"""extra\s*==\s*['"]{extra}['"]""")
        names = [_REQUIREMENT.match(text) for text in wanted if of_extra.search(text)]
        packages = [name[0] for name in names if name is not None and name[0] != PACKAGE]
        absent = [name for name in packages if not _is_installed(name)]
        if absent:
            said = f"without {', '.join(absent)}"
            yield Item(f"[{extra}]", State.MISSING, said, needed_for, install_extra(extra))
        else:
            yield Item(f"[{extra}]", State.OK, needed_for)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
