"""Strategies with a planted defect, and models that are awkward on purpose."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphwright.calls import switches
from graphwright.calls.host_generators import HostGenerators
from graphwright.calls.iterators import Iterators
from graphwright.processes.environment_variables import CANDIDATE
from graphwright.strategies.base import Availability, Built
from graphwright.tuning.workers.pool import TrialLimits, WorkerPool


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, function, tree)


def in_a_candidate() -> bool:
    """Whether this is a process of a candidate's, not the caller's."""
    return CANDIDATE in os.environ


@dataclass(frozen=True)
class Planted:
    """A strategy whose callable is `make(model)`."""

    name: str
    make: Callable[[nn.Module], Callable[..., Any]]
    complexity: int = 3

    def probe(self, device: torch.device) -> Availability:
        return Availability(True)

    def build(self, model: nn.Module, args: Any, kwargs: Any) -> Built:
        return Built(self.make(model))


@contextlib.contextmanager
def short_for(*names: str, timeout_s: float = 4.0) -> Iterator[None]:
    """Workers have a short time-out for some candidates, which hang.

    That of the others can be long, for a slow host, and costs no time.
    """
    start = WorkerPool._start

    def started(pool: WorkerPool, job: Any, limits: TrialLimits) -> Any:
        if job.candidates[0].name in names:
            limits = replace(limits, timeout_s=timeout_s)
        return start(pool, job, limits)

    with mock.patch.object(WorkerPool, "_start", started):
        yield


def leaves_files(model: nn.Module) -> Callable[..., Any]:
    """Keeps a temporary folder, and says so."""
    where = Path(tempfile.mkdtemp())
    (where / "weights").write_bytes(bytes(1000))
    print(f"in {where}", flush=True)
    os._exit(3)


def previous_output(model: nn.Module) -> Callable[..., Any]:
    """Answers each call with the answer to the call before."""
    last: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            last.append(model(*args, **kwargs))
        return last[-2] if len(last) > 1 else last[-1]

    return call


def cached_by_address(model: nn.Module) -> Callable[..., Any]:
    """Remembers answers by the address of the input, whatever its values are by now."""
    seen: dict[int, tuple[Any, Any]] = {}

    def call(x: torch.Tensor) -> Any:
        if x.data_ptr() not in seen:
            with torch.no_grad():
                seen[x.data_ptr()] = (x, model(x))
        return map_tensors(torch.clone, seen[x.data_ptr()][1])

    return call


def aliases_input(model: nn.Module) -> Callable[..., Any]:
    """Writes its answer into the memory of the input."""

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = model(x)
            return x.view(-1)[: y.numel()].view(y.shape).copy_(y)

    return call


def views_input(model: nn.Module) -> Callable[..., Any]:
    """For the identity: returns the input itself where eager returns a copy."""
    return lambda x: x


def static_output(model: nn.Module) -> Callable[..., Any]:
    """Returns the same memory from every call, as a bare graph replay does."""
    kept: list[torch.Tensor] = []

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            y = model(*args, **kwargs)
            if not kept:
                kept.append(y.clone())
            return kept[0].copy_(y)

    return call


def off_by_one_per_cent(model: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return map_tensors(lambda t: t * 1.01, model(*args, **kwargs))

    return call


def one_element_zeroed(model: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            y = model(*args, **kwargs).clone()
            y.view(-1)[y.numel() // 2] = 0
            return y

    return call


def raises(model: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("planted failure")

    return call


def raises_later(model: nn.Module) -> Callable[..., Any]:
    """Works when it is built and fails afterwards."""
    count = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > 2:
            raise RuntimeError("planted failure of a later call")
        with torch.no_grad():
            return model(*args, **kwargs)

    return call


def right_but_slower(model: nn.Module, seconds: float = 2e-3) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        end = time.perf_counter() + seconds
        with torch.no_grad():
            y = model(*args, **kwargs)
        while time.perf_counter() < end:
            pass
        return y

    return call


def far_slower(model: nn.Module) -> Callable[..., Any]:
    """Beyond eager on a GPU that others use, too."""
    return right_but_slower(model, 2e-2)


def corrupts_weights(model: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            y = model(*args, **kwargs)
            first = next(model.parameters()).view(-1)[:1]
            first.copy_(first.nextafter(first + 1))
        return y

    return call


def float64_output(model: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return model(*args, **kwargs).double()

    return call


def frozen_branch(model: nn.Module) -> Callable[..., Any]:
    """What a trace makes of `if mask.all()`: the branch that the sample took, for ever."""
    frozen: list[bool] = []

    def call(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not frozen:
            frozen.append(bool(mask.all()))
        with torch.no_grad():
            return x * 2 if frozen[0] else x * mask

    return call


class Branching(nn.Module):
    """Reads a value of its input to decide what to do."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * 2 if mask.all() else x * mask


class Small(nn.Module):
    """Two layers, quick to run and to compile."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.register_buffer("offset", torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) + self.offset


class Roundabout(Small):
    """Does the work of Small the long way."""

    steps = 50

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.steps):
            x = x + 0
        return super().forward(x)


def directly(model: nn.Module) -> Callable[..., Any]:
    """What Roundabout computes, without the way round."""
    return torch.no_grad()(lambda x: Small.forward(model, x))  # type: ignore[arg-type]  # a Small


class Counting(nn.Module):
    """Changes a buffer in every call, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


# ---------------------------------------------------------------- harms to a whole process


def segfaults(model: nn.Module) -> Callable[..., Any]:
    ctypes.string_at(0)
    raise AssertionError("not reached")


def leaves(model: nn.Module) -> Callable[..., Any]:
    os._exit(0)


def interrupts(model: nn.Module) -> Callable[..., Any]:
    raise KeyboardInterrupt


def hangs(model: nn.Module) -> Callable[..., Any]:
    """Holds the interpreter's lock meanwhile, as an extension may."""
    ctypes.PyDLL(None).sleep(1000)
    raise AssertionError("not reached")


def hangs_later(model: nn.Module) -> Callable[..., Any]:
    """Works until it is timed."""
    count = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > 50:
            time.sleep(1000)
        with torch.no_grad():
            return model(*args, **kwargs)

    return call


def leaks(model: nn.Module) -> Callable[..., Any]:
    """Keeps 32 MiB of every call, 2 GiB in all."""
    kept: list[torch.Tensor] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(kept) < 64:
            kept.append(torch.ones(8 << 20, device=args[0].device))
        with torch.no_grad():
            return model(*args, **kwargs)

    return call


def exhausts_the_gpu(model: nn.Module) -> Callable[..., Any]:
    kept: list[torch.Tensor] = []
    while True:
        kept.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))


def writes_astray(model: nn.Module) -> Callable[..., Any]:
    """Writes far outside of a tensor's memory on the GPU."""
    from stray import stray

    stray[(1,)](torch.zeros(8, device="cuda"))
    torch.cuda.synchronize()
    raise AssertionError("not reached")


def vandalises(model: nn.Module) -> Callable[..., Any]:
    """Changes what all of a process shares, but for the caller's."""
    if in_a_candidate():
        os.environ["VANDAL"] = "1"
        os.chdir("/")
        torch.set_num_threads(1)
    return torch.no_grad()(model)


@dataclass(frozen=True)
class Spawns:
    """Starts a process that outlives it, and writes down the numbers of both."""

    file: str
    hang: bool = False

    def __call__(self, model: nn.Module) -> Callable[..., Any]:
        if not in_a_candidate():
            return torch.no_grad()(model)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(self.file, "a", encoding="ascii") as handle:
            handle.write(f"{child.pid}\n{os.getpid()}\n")
        if self.hang:
            time.sleep(1000)
        return torch.no_grad()(model)


@dataclass(frozen=True)
class Logs:
    """Writes down the time at which it sets up, and that of every call.

    Its set-up waits until some files are there, but half a minute at most.
    """

    file: str
    beside: tuple[str, ...]

    def __call__(self, model: nn.Module) -> Callable[..., Any]:
        def note() -> None:
            if elsewhere:  # Not in the caller's process, where finalists are built.
                with open(self.file, "a", encoding="ascii") as handle:
                    handle.write(f"{time.monotonic()}\n")

        elsewhere = in_a_candidate()
        note()
        end = time.monotonic() + (30 if elsewhere else 0)
        while not all(map(os.path.exists, self.beside)) and time.monotonic() < end:
            time.sleep(0.02)
        note()

        def call(x: torch.Tensor) -> Any:
            note()
            with torch.no_grad():
                return model(x)

        return call


@dataclass(frozen=True)
class OnlyElsewhere:
    """Works in any process but one."""

    not_in: int

    def __call__(self, model: nn.Module) -> Callable[..., Any]:
        if os.getpid() == self.not_in:
            raise RuntimeError("not here")
        return torch.no_grad()(lambda x: Small.forward(model, x))  # type: ignore[arg-type]  # a Small


@dataclass(frozen=True)
class Tells:
    """Writes down the settings that it finds in another process."""

    file: str

    def __call__(self, model: nn.Module) -> Callable[..., Any]:
        if in_a_candidate():
            found = (switches.read(), torch.is_grad_enabled())
            with open(self.file, "w", encoding="ascii") as handle:
                handle.write(repr(found))
        return torch.no_grad()(model)


# ---------------------------------------------------------------- harms to what watches it


def kills_its_parent(model: nn.Module) -> Callable[..., Any]:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
    raise AssertionError("not reached")


def closes_everything(model: nn.Module) -> Callable[..., Any]:
    os.closerange(3, 1024)
    time.sleep(1000)
    raise AssertionError("not reached")


def babbles(model: nn.Module) -> Callable[..., Any]:
    """Says nonsense where its process talks, and goes silent."""
    for handle in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(handle).st_mode):
                os.write(handle, b'{"say": "row"}')
                os.write(handle, b"\x80\x04nonsense")
    time.sleep(1000)
    raise AssertionError("not reached")


def forks_and_dies(model: nn.Module) -> Callable[..., Any]:
    """Leaves a process behind that holds all its files."""
    if os.fork() == 0:
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("not reached")


def takes_half_a_gib(model: nn.Module) -> Callable[..., Any]:
    kept = torch.ones(128 << 20)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return model(*args, **kwargs) * kept[0]

    return call


def prints_without_end(model: nn.Module) -> Callable[..., Any]:
    while True:
        print("x" * (1 << 20))


@dataclass(frozen=True)
class Beats:
    """Does not get done within a minute, and writes down the time all the while."""

    file: str

    def __call__(self, model: nn.Module) -> Callable[..., Any]:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with open(self.file + ".new", "w", encoding="ascii") as handle:
                handle.write(str(time.monotonic()))
            os.replace(handle.name, self.file)
            time.sleep(0.02)
        raise RuntimeError("nobody has stopped it")


@dataclass(frozen=True)
class Daemonises:
    """Leaves a process in a session apart, and writes down its number."""

    file: str

    def __call__(self, model: nn.Module) -> Callable[..., Any]:
        if in_a_candidate():
            command = [sys.executable, "-c", "import time; time.sleep(1000)"]
            child = subprocess.Popen(command, start_new_session=True)
            with open(self.file, "w", encoding="ascii") as handle:
                handle.write(str(child.pid))
        return torch.no_grad()(model)


# ---------------------------------------------------------------- what the next one would meet


@dataclass(frozen=True)
class Noted:
    """Another strategy's callable, and a line with the number of the worker that builds it."""

    file: str
    make: Callable[[nn.Module], Callable[..., Any]]

    def __call__(self, model: nn.Module) -> Callable[..., Any]:
        if in_a_candidate():
            with open(self.file, "a", encoding="ascii") as handle:
                handle.write(f"{os.getpid()}\n")
        return self.make(model)


class CorruptsAtItsEnd:
    """Is right, and changes a weight when it is dropped."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def __del__(self) -> None:
        if in_a_candidate():
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[:1].add_(1)


def keeps_a_gib(model: nn.Module) -> Callable[..., Any]:
    """Leaves memory behind that nothing frees."""
    if in_a_candidate():
        torch.kept_by_a_candidate = torch.ones(256 << 20)  # type: ignore[attr-defined]  # on purpose
    return torch.no_grad()(model)


def leaves_a_flag(model: nn.Module) -> Callable[..., Any]:
    """Is right, and leaves a flag of torch.backends changed."""
    if in_a_candidate():
        torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
    return torch.no_grad()(model)


# ---------------------------------------------------------------- protections switched off


def generators_stay_moved(patch: Any) -> None:
    """What runs draw from the host's random generators stays drawn."""
    patch.setattr(HostGenerators, "put_back", lambda self, own=True: None)


def iterators_are_advanced(patch: Any) -> None:
    """Nothing is refused for the iterators that it advances."""
    patch.setattr(Iterators, "guarded", lambda self: contextlib.nullcontext())
    patch.setattr(Iterators, "check", lambda self: None)
