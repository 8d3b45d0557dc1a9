"""What a machine can do at most: copies, matrix products, launches; measured once and remembered.

The roofs are those of the roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009), with
the time of a copy in place of one bandwidth, as small copies lie in caches and cost a launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..evaluation.clock import fastest_s, seconds_of, synchronize
from ..graphs.capture import capturing
from ..processes.environment_variables import cache_folder
from ..report.environment import environment
from .observation import Stopwatch
from .timing import CROWDED, OtherWork, back_to_back

SCHEMA, SCHEMA_VERSION = "graphwright.roofs", 2
# Bytes that copies move, read and written ones together.
_CPU_COPIES = tuple(1 << n for n in (14, 17, 20, 22, 24, 26, 27))
_GPU_COPIES = tuple(1 << n for n in (14, 17, 20, 22, 24, 26, 28, 30))
# The size of the square matrices to multiply, by dtype.
_CPU_SIZES = {"float32": 1024, "float64": 768, "bfloat16": 512}
_GPU_SIZES = {"float32": 4096, "tf32": 8192, "float16": 8192, "bfloat16": 8192, "float64": 2048}
_TRANSFER_BYTES = 1 << 26
_FEW = 32
# Operations without work that are timed together.
_OPERATIONS = 200
# Parts of the environment that change what a machine can do.
_MACHINE = ("torch", "processor", "cores", "gpu", "driver", "cuda", "cudnn")


@dataclass(frozen=True)
class Roofs:
    """What one device can do at most.

    Attributes:
        device: its name.
        threads: of PyTorch, on a CPU.
        copies: bytes that a copy moves, read and written together, and its seconds.
        flops: floating-point operations a second of matrix products, by dtype; "tf32" is one.
        operation_s: seconds of the host for an operation without work, its launch included.
        observed_s: the same under the profiler's stopwatch, on a CPU.
        kernel_s: seconds of the shortest kernel among others, on a GPU; else 0.
        node_s: the same among the nodes of a graph.
        wait_s: seconds to launch one kernel and wait for it, on a GPU; else 0.
        transfers: bytes a second between host and GPU: "to device", "to host", each also "pinned".
        measured: the day, such as "2026-11-26".
        recalled: whether they were measured earlier.
        others: the share of the processors that other processes used meanwhile, on a CPU.
    """

    device: str
    threads: int
    copies: tuple[tuple[int, float], ...]
    flops: Mapping[str, float]
    operation_s: float
    observed_s: float = 0.0
    kernel_s: float = 0.0
    node_s: float = 0.0
    wait_s: float = 0.0
    transfers: Mapping[str, float] = field(default_factory=dict)
    measured: str = ""
    recalled: bool = False
    others: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the largest copy."""
        nbytes, seconds = self.copies[-1]
        return nbytes / seconds

    def copy_s(self, nbytes: float) -> float:
        """Seconds in which a copy moves so many bytes, interpolated between measured ones."""
        if nbytes <= 0:
            return 0.0
        first, last = self.copies[0], self.copies[-1]
        if nbytes <= first[0]:
            return first[1]
        if nbytes >= last[0]:
            return last[1] * nbytes / last[0]
        for (small, low_s), (large, high_s) in zip(self.copies, self.copies[1:], strict=False):
            if nbytes <= large:
                part = math.log(nbytes / small) / math.log(large / small)
                return float(low_s * (high_s / low_s) ** part)
        raise AssertionError("unreachable: the last copy is the largest")

    def compute_s(self, flops: float, precision: str) -> float | None:
        """Seconds of so many operations in matrix products; None if that dtype has no roof."""
        roof = self.flops.get(precision)
        return None if roof is None else flops / roof

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Roofs:
        """The inverse of `to_dict`."""
        copies = tuple((int(n), float(s)) for n, s in data["copies"])
        return cls(**{**data, "copies": copies})


def roofs_of(device: torch.device) -> Roofs:
    """The roofs of a device, remembered or measured now, which takes a second or two.

    They are kept in $GRAPHWRIGHT_CACHE_DIR, else in the user's cache directory, a file for each
    machine, version of PyTorch and number of threads.
    """
    about = environment(device)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    key = {name: about.get(name, "") for name in _MACHINE} | {"threads": str(threads)}
    key["usable"] = str(cores())
    file = folder() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["schema"] == SCHEMA and data["schema_version"] == SCHEMA_VERSION:
            return Roofs.from_dict({**data["roofs"], "recalled": True})
    name = about.get("gpu") or about["processor"]
    load = OtherWork()
    if device.type == "cuda":
        roofs = _measure_gpu(device, name)
    else:
        roofs = replace(_measure_cpu(name), others=load.share())
    if roofs.others <= CROWDED:  # Else they are lower than they should be: measure again next time.
        _write(file, {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "key": key}, roofs)
    return roofs


def raised(roofs: Roofs, reached: Mapping[str, float]) -> Roofs:
    """Roofs that are no lower than what operations have reached.

    Args:
        roofs: as measured.
        reached: floating-point operations a second by dtype.
    """
    flops = dict(roofs.flops)
    for dtype, rate in reached.items():
        if dtype in flops:
            flops[dtype] = max(flops[dtype], rate)
    return replace(roofs, flops=flops)


def folder() -> Path:
    """The folder of remembered roofs."""
    return cache_folder("roofs")


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _write(file: Path, head: dict[str, Any], roofs: Roofs) -> None:
    """Write them whole or not at all; a machine without a cache measures again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(".tmp", dir=file.parent)
        with open(descriptor, "w", encoding="utf-8") as handle:
            json.dump({**head, "roofs": roofs.to_dict()}, handle)
        os.replace(temporary, file)


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def _measure_cpu(name: str) -> Roofs:
    with torch.no_grad(), _in_float32():
        copies = []
        for nbytes in _CPU_COPIES:
            source = torch.ones(nbytes // 8)
            target = torch.ones(nbytes // 8)
            seconds = fastest_s(partial(target.copy_, source), limit_s=0.06, warmup=1)
            copies.append((nbytes, seconds))
        flops = {}
        for dtype, size in _CPU_SIZES.items():
            a = torch.ones(size, size, dtype=getattr(torch, dtype))
            seconds = fastest_s(partial(torch.matmul, a, a), limit_s=0.2, most=10, warmup=1)
            flops[dtype] = 2 * size**3 / seconds
        few = torch.ones(_FEW)

        def several() -> None:
            for _ in range(_OPERATIONS):
                few.relu()

        plain = fastest_s(several, limit_s=0.05, warmup=1) / _OPERATIONS
        watch = Stopwatch()
        with watch:
            several()
            several()
    seen = sorted(watch.seconds)
    return Roofs(
        device=name,
        threads=torch.get_num_threads(),
        copies=_rising(copies),
        flops=flops,
        operation_s=plain,
        observed_s=seen[len(seen) // 2],
        measured=_today(),
    )


def _measure_gpu(device: torch.device, name: str) -> Roofs:
    with torch.no_grad(), _in_float32(), torch.cuda.device(device):
        free, _ = torch.cuda.mem_get_info(device)
        copies = []
        for nbytes in _GPU_COPIES:
            if 2 * nbytes > free:
                break
            source = torch.ones(nbytes // 8, device=device)
            target = torch.ones(nbytes // 8, device=device)
            times = 100 if nbytes < 1 << 24 else 20 if nbytes < 1 << 28 else 5
            seconds = back_to_back(partial(target.copy_, source), device, times=times)
            copies.append((nbytes, seconds))
            del source, target
        flops = {}
        for dtype, size in _GPU_SIZES.items():
            with contextlib.suppress(RuntimeError):  # Not every GPU has every dtype.
                flops[dtype] = _products(device, dtype, size)
        few = torch.ones(_FEW, device=device)
        kernel_s = back_to_back(lambda: few.relu_(), device, times=_OPERATIONS)
        node_s = _node_s(few, device)
        operation_s = _launch_s(few, device)
        wait_s = _wait_s(few, device)
        transfers = _transfers(device)
    return Roofs(
        device=name,
        threads=0,
        copies=_rising(copies),
        flops=flops,
        operation_s=operation_s,
        kernel_s=kernel_s,
        node_s=min(node_s, kernel_s),
        wait_s=wait_s,
        transfers=transfers,
        measured=_today(),
    )


def _rising(copies: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Copies of which none takes longer than a larger one: what disturbed a small one goes."""
    least_so_far = math.inf
    found = []
    for nbytes, seconds in reversed(copies):
        least_so_far = min(least_so_far, seconds)
        found.append((nbytes, least_so_far))
    return tuple(reversed(found))


def _products(device: torch.device, dtype: str, size: int) -> float:
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    # Random values: products of equal ones take less power, and a GPU then clocks higher.
    a = torch.randn(size, size, dtype=kind, device=device)
    precision = "tf32" if dtype == "tf32" else "ieee"
    with fp32_precision(precision) if kind is torch.float32 else contextlib.nullcontext():
        seconds = back_to_back(lambda: a @ a, device, times=3, repeats=2)
    return float(2 * size**3 / seconds)


@contextlib.contextmanager
def fp32_precision(value: str) -> Iterator[None]:
    """Set what float32 products and convolutions on a GPU are computed in: "tf32" or "ieee".

    What is so already is not touched: PyTorch's older flags cannot be read once the newer settings
    differ from each other.
    """
    before = []
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    # Of convolutions TF32 is the default, of products it is not.
    for owner, is_tf32 in (
        (matmul, matmul.fp32_precision == "tf32"),
        (conv, conv.fp32_precision != "ieee"),
    ):
        if is_tf32 != (value == "tf32"):
            before.append((owner, owner.fp32_precision))
    try:
        for owner, _ in before:
            owner.fp32_precision = value
        yield
    finally:
        for owner, old in before:
            owner.fp32_precision = old


def _node_s(few: torch.Tensor, device: torch.device) -> float:
    """Seconds of a node of a graph of operations without work: nothing of a model is captured."""
    with capturing(device=device) as graph:
        for _ in range(_OPERATIONS):
            few.relu_()
    try:
        return back_to_back(graph.replay, device, times=5) / _OPERATIONS
    finally:
        graph.close()


def _launch_s(few: torch.Tensor, device: torch.device) -> float:
    def several() -> None:
        for _ in range(_OPERATIONS):
            few.relu()

    ready = partial(synchronize, device)
    found_s = fastest_s(several, limit_s=0.0, least=5, ready=ready)
    synchronize(device)
    return found_s / _OPERATIONS


def _wait_s(few: torch.Tensor, device: torch.device) -> float:
    return statistics.median(seconds_of(few.relu_, device) for _ in range(30))


def _transfers(device: torch.device) -> dict[str, float]:
    there = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, device=device)
    found = {}
    for label, pinned in (("", False), (" pinned", True)):
        here = torch.ones(_TRANSFER_BYTES, dtype=torch.uint8)
        if pinned:
            here = here.pin_memory()
        for name, target, source in (("to device", there, here), ("to host", here, there)):
            copy = partial(target.copy_, source)
            spent_s = min(seconds_of(copy, device) for _ in range(3))
            found[name + label] = _TRANSFER_BYTES / spent_s
    return found


@contextlib.contextmanager
def _in_float32() -> Iterator[None]:
    """Make float32 tensors inside the block, whatever the default dtype of the caller is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
