"""What a candidate leaves behind in a worker: whether the next one finds it as after loading."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...calls.switches import differences
from ...evaluation.peak_memory import MemoryMeter
from ...processes.linux import children_of, resident_bytes
from ...report.table import memory
from ..trial import CandidateEvaluator
from .settings import ProcessSettings

# Bytes that may stay: compilers keep modules and caches, and cuBLAS a workspace for each stream.
HOST_TOLERANCE = 512 << 20
DEVICE_TOLERANCE = 256 << 20
# A pause, how often to repeat it, and the share of a core at which a thread is at work in it: on a
# busy machine it may get little. Threads of OpenMP spin for some milliseconds after they were used.
_PAUSE_S, _PAUSES, _AT_WORK = 0.02, 10, 0.1
# Compilers set environment variables for themselves, which name their caches and tools.
_COMPILERS_VARIABLES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
# Threads that compilers leave, and that sleep: two of Inductor's wait for its compiling processes;
# PyTorch's progress bars have one that looks around every ten seconds.
_COMPILERS_THREADS = ("InductorSubproc", "subproc_worker_timer", "tqdm_monitor")
_MUTATION_GUARD = "torch._dynamo.mutation_guard"


class Baseline:
    """A worker after it has loaded the model, to compare it with after each candidate.

    Compared are:

    - every bit of the model's weights and buffers, whether weights require gradients, and what
      eager makes of the samples, which also shows that the device can be used;
    - settings: those of `ProcessSettings` (gradients, inference mode, every switch of
      `switches.TABLE`, options of compilers), modes on PyTorch's stacks, hooks of all modules,
      fusers of TorchScript, the CUDA device and stream, the garbage collector, the working
      directory, and environment variables but for those of compilers;
    - the functions of torch, torch.Tensor, torch.nn.functional and nn.Module, and each layer's
      `forward`, by identity: what replaces one is found;
    - threads of Python, whether any thread is at work, and child processes. Inductor's threads and
      processes that compile stay: they know nothing of the model, wait while nothing is compiled,
      and the next candidate would have to start them again;
    - memory, of the host up to `HOST_TOLERANCE` and of the GPU up to `DEVICE_TOLERANCE` bytes.

    Not seen are changes of other modules, flags that are not listed here, and the state of C++
    libraries. Graphwright's own strategies are not known to leave any; those of others may, and so
    never share a worker.

    Args:
        evaluator: of this process, with the model loaded and run once.
    """

    def __init__(self, evaluator: CandidateEvaluator) -> None:
        self._evaluator = evaluator
        self._settings = ProcessSettings.current()
        self._state = _state(evaluator)
        self._options = _options()
        self._functions = _functions()
        self._threads = set(threading.enumerate())
        self._children = set(children_of(os.getpid()))
        self._device_bytes = MemoryMeter(evaluator.device).kept()
        self._host_bytes = resident_bytes(os.getpid())

    def difference(self, *, holds_build: bool = False) -> str | None:
        """What differs from the worker as it was, in words; None if the next candidate may come.

        Args:
            holds_build: what was built is still held, so that its memory is left out.
        """
        try:
            found = next(self._differences(holds_build), None)
        except Exception as error:
            return f"looking at it raises {error!r}"
        if found is None and not holds_build:
            # What compilers keep is as lasting as their modules: collections can pass over it.
            gc.freeze()
        return found

    def _differences(self, holds_build: bool) -> Iterator[str]:
        if not holds_build:
            _let_compilers_forget()
        in_use = MemoryMeter(self._evaluator.device).kept()  # It collects garbage first.
        if not holds_build:
            yield from self._kept_memory(in_use)
        yield from self._changed()
        yield from self._left_running()
        weight = self._evaluator.samples[0].reference.state.changed()
        if weight is not None:
            yield f"{weight} was changed"
        why = self._evaluator.disagreement()
        if why is not None:
            yield f"eager differs: {why}"
        if _is_at_work():
            yield "a thread is at work"

    def _kept_memory(self, in_use: int) -> Iterator[str]:
        kept = resident_bytes(os.getpid()) - self._host_bytes
        if kept > HOST_TOLERANCE:
            yield f"{memory(kept)} of host memory are kept"
        kept = in_use - self._device_bytes
        if self._evaluator.device.type == "cuda" and kept > DEVICE_TOLERANCE:
            yield f"{memory(kept)} of the GPU's memory are kept"

    def _changed(self) -> Iterator[str]:
        """Settings, options and functions that are not as they were."""
        names = _other(self._settings, ProcessSettings.current())
        if names:
            yield f"settings were changed: {', '.join(names)}"
        state = _state(self._evaluator)
        yield from (f"changed: {name}" for name, was in self._state.items() if state[name] != was)
        for name, options in self._options.items():
            now = _options()[name]
            yield from (f"{name}.{n} was set" for n, was in options.items() if now[n] != was)
        functions = _functions()
        for name, function in self._functions.items():
            other = functions.get(name)
            # TorchDynamo counts the modules that are made, from its first use on.
            if other is not function and getattr(other, "__module__", "") != _MUTATION_GUARD:
                yield f"{name} was replaced"

    def _left_running(self) -> Iterator[str]:
        threads = set(threading.enumerate()) - self._threads - _compilers_threads()
        for thread in threads:
            if thread.name not in _COMPILERS_THREADS:
                yield f"the thread {thread.name} is left"
        if set(children_of(os.getpid())) - self._children - _compilers_processes():
            yield "a process is left"


def _state(evaluator: CandidateEvaluator) -> dict[str, object]:
    """What can be compared by equality."""
    found: dict[str, object] = {
        "modes of operations": [*map(id, _get_current_dispatch_mode_stack())],
        "modes of functions": torch._C._len_torch_function_stack(),
        "hooks of all modules": [
            (name, sorted(map(id, value.values())))
            for name, value in vars(hooks).items()
            if name.startswith("_global_") and isinstance(value, dict)
        ],
        "TorchScript's fusers": (
            torch._C._jit_texpr_fuser_enabled(),
            torch._C._jit_can_fuse_on_cpu(),
            torch._C._jit_can_fuse_on_gpu(),
        ),
        "a back end's name": torch._C._get_privateuse1_backend_name(),
        "gradients of weights": [weight.requires_grad for weight in evaluator.module.parameters()],
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        "the working directory": os.getcwd(),
        "environment variables": {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_COMPILERS_VARIABLES)
        },
    }
    if evaluator.device.type == "cuda":
        found["the CUDA device and stream"] = (
            torch.cuda.current_device(),
            torch.cuda.current_stream().cuda_stream,
        )
    return found


def _options() -> dict[str, dict[str, Any]]:
    """The options of compilers that are imported, as they are in effect."""
    names = ("torch._dynamo.config", "torch._inductor.config")
    return {name: sys.modules[name].get_config_copy() for name in names if name in sys.modules}


def _functions() -> dict[str, Any]:
    """PyTorch's functions and methods by name, those of its layers included."""
    found = {}
    for owner in (torch, torch.nn.functional):
        for name, value in list(vars(owner).items()):
            if callable(value):
                found[f"{owner.__name__}.{name}"] = value
    for kind in (torch.Tensor, nn.Module):
        for name in dir(kind):
            found[f"{kind.__name__}.{name}"] = inspect.getattr_static(kind, name)
    for layer in list(vars(nn).values()):
        if isinstance(layer, type) and "forward" in vars(layer):
            found[f"{layer.__name__}.forward"] = vars(layer)["forward"]
    return found


def _other(before: ProcessSettings, now: ProcessSettings) -> list[str]:
    """Names of settings that differ; options of compilers are compared elsewhere.

    What `ProcessSettings` has of them tells an option that was set to its default from one that
    was never set.
    """
    modes = [name for name in ("grad", "inference") if getattr(before, name) != getattr(now, name)]
    return modes + differences(before.switches, now.switches)


def _let_compilers_forget() -> None:
    """Drop what TorchDynamo keeps of code that it has compiled, which holds weights."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    # Where it has compiled nothing there is nothing to drop; and on a GPU the first reset imports
    # Inductor, which takes seconds.
    if frames is not None and getattr(frames, "FRAME_COUNTER", True):
        torch._dynamo.reset()


def _compilers_threads() -> set[threading.Thread]:
    """Threads that start Inductor's compilers."""
    pool = _pool_of_inductor("pool")
    return set(getattr(pool, "_threads", ()))


def _compilers_processes() -> set[int]:
    """Process numbers of Inductor's children that compile."""
    process = getattr(_pool_of_inductor("process_pool"), "process", None)
    return set() if process is None else {process.pid}


def _pool_of_inductor(name: str) -> Any:
    """A pool that Inductor has made, or None: asking it for one makes it."""
    module = sys.modules.get("torch._inductor.async_compile")
    made = None if module is None else getattr(module.AsyncCompile, name, None)
    if made is None or not hasattr(made, "cache_info") or not made.cache_info().currsize:
        return None
    return made()


def _is_at_work() -> bool:
    """Whether a thread of this process goes on working: it would disturb what is timed."""
    for _ in range(_PAUSES):
        began, used = time.perf_counter(), time.process_time()
        time.sleep(_PAUSE_S)
        if time.process_time() - used < _AT_WORK * (time.perf_counter() - began):
            return False
    return True
