"""Saved launches of our kernels: a later process needs neither Triton nor a compiler for them.

A call of one of our operators is one kernel. Its binary, grid and arguments follow from the shapes,
strides, dtypes and alignment of its inputs. `noting` records them, and `answering` answers calls of
the same kind by the CUDA driver. That saves the import of Triton, which takes half a second, and
its compiler, which takes one or two if its cache is empty.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..._version import __version__
from ...errors import CaptureError
from ...graphs.cuda.driver import KernelFunction

# More shared memory would need an attribute of the kernel.
_SHARED = 48 * 1024
_ALIGNED = 16  # Triton compiles for pointers that this divides, or for any.
# Types of kernel arguments, by their names here.
_NUMBERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
_TYPES = _NUMBERS | {"input": ctypes.c_uint64, "result": ctypes.c_uint64}
_LOCK = threading.Lock()
_LOADED: dict[tuple[Any, ...], KernelFunction] = {}
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        symbol: its name.
        code: machine code.
        threads: of a block.
        shared: bytes of shared memory of a block.
    """

    symbol: str
    code: bytes
    threads: int
    shared: int


def _loaded(
    code: bytes, symbol: str, sizes: tuple[int, ...], device: torch.device
) -> KernelFunction | None:
    """A kernel on a device, loaded once; None if the driver refuses it."""
    key = code, symbol, sizes, device
    found = _LOADED.get(key)
    if found is None:
        try:
            with _LOCK:
                found = _LOADED.get(key) or KernelFunction(*key)
                _LOADED[key] = found
        except CaptureError:
            return None  # For example, it is for another GPU, or the driver is too old.
    return found


@dataclass(frozen=True)
class Launch:
    """A call of an operator: one kernel over `grid` blocks.

    Attributes:
        binary: the kernel.
        grid: blocks.
        arguments: of the kernel: ("input", n) and ("result", n) are tensors of the operator's;
            ("i32" | "i64" | "fp32", value) are numbers.
        results: (shape, strides, dtype) of what it returns.
        single: whether it returns a tensor, and no tuple.
    """

    binary: Binary
    grid: int
    arguments: tuple[tuple[str, Any], ...]
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    single: bool

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each argument."""
        return tuple(ctypes.sizeof(_TYPES[kind]) for kind, _ in self.arguments)

    def function(self, device: torch.device) -> KernelFunction | None:
        """The kernel on a device; None if the driver refuses it."""
        return _loaded(self.binary.code, self.binary.symbol, self.sizes, device)

    def __call__(self, function: KernelFunction, *args: Any) -> Any:
        """Launch `function`, the kernel on the device of the arguments; the operator's results."""
        device = args[0].device
        results = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype in self.results
        ]
        values = []
        for kind, value in self.arguments:
            if kind == "input":
                value = args[value].data_ptr()
            elif kind == "result":
                value = results[value].data_ptr()
            values.append(_TYPES[kind](value))
        function.launch(self.grid, self.binary.threads, self.binary.shared, values)
        return results[0] if self.single else tuple(results)


class _Here(threading.local):
    notes: dict[str, Launch | None] | None = None
    launched: list[tuple[Any, Sequence[int], Sequence[Any]]] | None = None
    answers: Mapping[str, Launch] = {}
    asking: _Asking | None = None


@dataclass
class _Asking:
    """The kinds of calls whose kernels were asked for, and whether this one's was."""

    seen: set[str] = field(default_factory=set)
    again: bool = False


_HERE = _Here()


@contextlib.contextmanager
def noting() -> Iterator[dict[str, Launch]]:
    """Record what our operators launch in this thread; complete when the block ends.

    It stays empty if the source files have changed since this process has read them.
    """
    notes: dict[str, Launch | None] = {}
    found: dict[str, Launch] = {}
    before, _HERE.notes = _HERE.notes, notes
    try:
        yield found
    finally:
        _HERE.notes = before
        if EDITION is not None and edition_of(_FOLDER) == EDITION:
            found |= {kind: launch for kind, launch in notes.items() if launch is not None}


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Let our operators ask Triton for their kernels in this thread, and return zeros."""
    before, _HERE.asking = _HERE.asking, _Asking()
    try:
        yield
    finally:
        _HERE.asking = before


def is_asking() -> bool:
    """Whether kernels are only asked for in this thread."""
    return _HERE.asking is not None


def asked(name: str, launch: Callable[..., Any], *args: Any) -> Any:
    """Ask for the kernel of an operator's call, once for a kind of call, inside of `asking`.

    Returns:
        Zeros that lie as the results do: PyTorch's own operations in the kernel's place may have to
        be set up as well, which takes longer.
    """
    asking = _HERE.asking
    assert asking is not None
    kind = kind_of(name, args)
    asking.again = kind in asking.seen
    asking.seen.add(kind)
    results = launch(*args)
    for each in results if isinstance(results, tuple) else (results,):
        each.zero_()
    return results


@contextlib.contextmanager
def answering(launches: Mapping[str, Launch]) -> Iterator[None]:
    """Let launches answer the calls that they fit, in this thread.

    Under torch.compile they are not used: it would have to guard on this thread's state.
    """
    if torch.compiler.is_dynamo_compiling():  # This frame: the other one is true of all threads.
        yield
        return
    before, _HERE.answers = _HERE.answers, launches
    try:
        yield
    finally:
        _HERE.answers = before


def known(name: str, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The saved launch that answers a call of an operator; None if there is none."""
    answers = _HERE.answers
    kind = kind_of(name, args) if answers else ""
    launch = answers.get(kind) if kind else None
    function = None if launch is None else launch.function(args[0].device)
    return None if launch is None or function is None else functools.partial(launch, function)


def kind_of(name: str, args: Sequence[Any]) -> str:
    """Everything in a call that its launch depends on, as text; empty if it cannot be saved."""
    parts = [name]
    places: list[int] = []
    devices = set()
    for arg in args:
        if isinstance(arg, torch.Tensor):
            place = arg.data_ptr()
            devices.add(arg.device)
            places.append(place)
            # `first` tells calls apart in which one tensor is several arguments.
            first, aligned = places.index(place), place % _ALIGNED == 0
            parts.append(f"{arg.dtype} {(*arg.shape,)} {arg.stride()} {aligned} {first}")
        else:
            parts.append(repr(arg))
    return "; ".join(parts) if len(devices) == 1 else ""


def launched(kernel: Any, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel of Triton's.

    Args:
        kernel: of triton.jit.
        grid: blocks.
        arguments: those that are no constants, in order.
        constants: the others by name, and options.
    """
    if _HERE.asking is not None:
        if not _HERE.asking.again:
            # It is for time alone: what fails here is compiled, and reported, where it is used.
            with contextlib.suppress(Exception):
                kernel.warmup(*arguments, grid=grid, **constants)
        return
    compiled = kernel[grid](*arguments, **constants)
    if _HERE.launched is not None:
        _HERE.launched.append((compiled, grid, arguments))


def noted(name: str, launch: Callable[..., Any], *args: Any) -> Any:
    """Run an operator's launch; record it inside of `noting`."""
    notes = _HERE.notes
    if notes is None:
        return launch(*args)
    _HERE.launched = []
    try:
        result = launch(*args)
        kind = kind_of(name, args)
        if kind and kind not in notes:
            try:
                notes[kind] = _launch_of(args, result, _HERE.launched)
            except (AttributeError, KeyError, TypeError):  # Another version of Triton.
                notes[kind] = None
        return result
    finally:
        _HERE.launched = None


def _launch_of(
    args: Sequence[Any], result: Any, launches: Sequence[tuple[Any, Sequence[int], Sequence[Any]]]
) -> Launch | None:
    """A call as a launch to repeat; None if it is more than one simple kernel."""
    results = result if isinstance(result, tuple) else (result,)
    if len(launches) != 1 or not all(isinstance(each, torch.Tensor) for each in results):
        return None
    compiled, grid, given = launches[0]
    binary, places = _binary(compiled), _places(args, results)
    if binary is None or places is None or len(grid) != 1:
        return None
    arguments = _repeatable(compiled.src, given, places)
    if arguments is None:
        return None
    layouts = tuple((tuple(each.shape), each.stride(), each.dtype) for each in results)
    single = not isinstance(result, tuple)
    launch = Launch(binary, grid[0], arguments, layouts, single)
    return launch if launch.function(results[0].device) else None


def _binary(compiled: Any) -> Binary | None:
    """What Triton has compiled, if the driver alone can launch it."""
    facts = getattr(compiled, "metadata", None)  # The interpreter compiles nothing.
    code = getattr(compiled, "asm", {}).get("cubin")
    if facts is None or code is None or facts.shared > _SHARED:
        return None
    special = "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"
    if facts.num_ctas != 1 or any(getattr(facts, name, 0) for name in special):
        return None
    return Binary(facts.name, code, facts.num_warps * 32, facts.shared)


def _places(
    args: Sequence[Any], results: Sequence[torch.Tensor]
) -> dict[int, tuple[str, int]] | None:
    """Where the memory of a call's tensors comes from; None if results have none of their own."""
    found = {arg.data_ptr(): ("input", n) for n, arg in _tensors(args)}
    for n, each in enumerate(results):
        size = each.untyped_storage().nbytes()
        whole = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        if each.data_ptr() in found or size != whole.untyped_storage().nbytes():
            return None
        found[each.data_ptr()] = ("result", n)
    return found


def _repeatable(
    source: Any, given: Sequence[Any], places: Mapping[int, tuple[str, int]]
) -> tuple[tuple[str, Any], ...] | None:
    """A kernel's arguments as places of tensors and as numbers; None if there are others."""
    found: list[tuple[str, Any]] = []
    for name, value in zip(source.fn.arg_names, given, strict=False):
        kind = source.signature[name]
        if kind == "constexpr":
            continue  # Triton has compiled it for this value.
        if isinstance(value, torch.Tensor):
            if value.data_ptr() not in places:
                return None
            found.append(places[value.data_ptr()])
        elif kind in _NUMBERS:
            found.append((kind, value))
        else:
            return None
    return tuple(found)


def _tensors(args: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    return ((n, arg) for n, arg in enumerate(args) if isinstance(arg, torch.Tensor))


def edition_of(folder: Path) -> str | None:
    """A digest of our operators' sources, since launches of other sources may differ.

    None if there are no files to read, as in a ZIP archive.
    """
    digest = hashlib.sha256(__version__.encode())
    files = sorted(file for file in folder.rglob("*.py") if file.is_file())
    try:
        for file in files:
            digest.update(f"\0{file.relative_to(folder).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    except OSError:
        return None
    return digest.hexdigest() if files else None


EDITION = edition_of(_FOLDER)  # Now: files may change while a process lives.


def written(launches: Mapping[str, Launch]) -> str:
    """Launches as JSON, each kernel once."""
    binaries: dict[str, Any] = {}
    calls = {}
    for kind, launch in launches.items():
        binary = launch.binary
        name = hashlib.sha256(binary.symbol.encode() + binary.code).hexdigest()
        code = base64.b64encode(zlib.compress(binary.code)).decode("ascii")
        binaries[name] = [binary.symbol, code, binary.threads, binary.shared]
        layouts = [[shape, stride, str(dtype)[6:]] for shape, stride, dtype in launch.results]
        calls[kind] = [name, launch.grid, launch.arguments, layouts, launch.single]
    return json.dumps({"edition": EDITION, "binaries": binaries, "launches": calls})


def read(text: str) -> dict[str, Launch]:
    """Read what `written` gave; it is GPU code, so read it only if its author is trusted.

    The result is empty if it belongs to other sources than these.

    Raises:
        Exception: the text makes no sense; any exception of Python's, or zlib.error.
    """
    given = json.loads(text)
    if EDITION is None or given.get("edition") != EDITION:
        return {}
    binaries = {
        name: Binary(
            str(symbol),
            zlib.decompress(base64.b64decode(code)),
            _number(threads, 1, 1024),
            _number(shared, 0, _SHARED),
        )
        for name, (symbol, code, threads, shared) in given["binaries"].items()
    }
    found = {}
    for kind, (name, grid, arguments, layouts, single) in given["launches"].items():
        results = tuple(
            (_numbers(shape), _numbers(stride), _dtype(dtype)) for shape, stride, dtype in layouts
        )
        pairs = tuple((what, _argument(what, value, len(results))) for what, value in arguments)
        grid = _number(grid, 1, 2**31 - 1)
        found[kind] = Launch(binaries[name], grid, pairs, results, bool(single))
    return found


def _argument(what: str, value: Any, results: int) -> float:
    """A number or the place of a tensor."""
    if what == "fp32":
        return float(value)
    bits = {"i32": 31, "i64": 63}.get(what)
    low, high = (0, 64) if bits is None else (-(2**bits), 2**bits - 1)
    if what not in _TYPES:
        raise ValueError(f"kernels take no {what!r}")
    return _number(value, low, results - 1 if what == "result" else high)


def _number(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r} is no number from {low} to {high}")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_number(value, 0, 2**63 - 1) for value in values)


def _dtype(name: Any) -> torch.dtype:
    found = vars(torch).get(str(name))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
