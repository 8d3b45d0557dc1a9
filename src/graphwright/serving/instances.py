"""Instances: copies of a model on the CPU that compute batches side by side.

Each has its share of PyTorch's threads. A call of a small model gains little from the last threads,
and while all of them compute one batch, every other request waits.
"""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import OptionError, first_line

# Side by side they have to answer so many times as many calls as fewer of them, and a single call
# may take so many times as long as with all threads: under a low load, that is all there is.
WORTH, LONGER = 1.15, 1.25
_TIMED = 5

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Instance:
    """What computes one batch at a time.

    Attributes:
        call: the model, or a copy of it.
        lock: held while it is called.
        threads: of PyTorch, for its calls; None to leave them as they are.
    """

    call: Callable[..., Any]
    lock: Any = field(default_factory=threading.RLock)
    threads: int | None = None

    def run(self, work: Callable[[Callable[..., Any]], _Result]) -> _Result:
        """Do something with the model, without gradients and with its threads."""
        # PyTorch keeps the number by thread and MKL by process: it is said before each call.
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with torch.no_grad():
            return work(self.call)


def problem(model: Any, device: torch.device) -> str | None:
    """Why a model cannot have several instances; None if it can."""
    if device.type != "cpu":
        return "on a GPU, batches are computed one after the other"
    if not isinstance(model, nn.Module) or type(model).__module__.startswith("graphwright."):
        return "only plain modules are copied"
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "its hooks would be shared by all copies"
    return None


def instances(first: Instance, count: int, threads: int) -> list[Instance]:
    """The model and copies of it, which have its parameters and whatever else is their own.

    Raises:
        OptionError: the model cannot be copied.
    """
    model = first.call
    assert isinstance(model, nn.Module)
    shared = {id(parameter): parameter for parameter in model.parameters()}
    try:
        with first.lock:  # Another server may be calling it.
            copies = [copy.deepcopy(model, dict(shared)) for _ in range(count - 1)]
    except Exception as error:
        raise OptionError(
            f"instances={count}: the model cannot be copied: {first_line(error)}.",
            remedy="Leave instances out, or make copy.deepcopy(model) work.",
        ) from error
    each = max(1, threads // count)
    own = [Instance(call, threads=each) for call in copies]
    return [Instance(model, first.lock, each), *own]


def best_count(
    first: Instance, works: Sequence[Callable[[Callable[..., Any]], Any]], threads: int
) -> int:
    """How many instances pay, by time: each number is timed with all its instances busy.

    Args:
        first: the model as it is.
        works: calls of it, for example of the shortest and the longest request.
        threads: that PyTorch has in all.
    """
    alone = _seconds([Instance(first.call, first.lock, threads)], works)
    found, most, count = 1, 1 / alone, 2
    while count <= threads:
        try:
            seconds = _seconds(instances(first, count, threads), works)
        except Exception:  # It cannot be copied, or its copies cannot be called beside each other.
            break
        if seconds > LONGER * alone or count / seconds < WORTH * most:
            break
        found, most = count, count / seconds
        count *= 2
    return found


def _seconds(
    copies: Sequence[Instance], works: Sequence[Callable[[Callable[..., Any]], Any]]
) -> float:
    """The median time of all works, one after the other, while each instance does the same."""
    begin = threading.Barrier(len(copies))

    def times(instance: Instance) -> list[float]:
        found = []
        try:
            for number in range(_TIMED + 1):
                begin.wait()
                since = time.perf_counter()
                for work in works:
                    with instance.lock:
                        instance.run(work)
                if number:  # The first one finds caches cold.
                    found.append(time.perf_counter() - since)
        except BaseException:
            begin.abort()  # Or the others would wait for this one without end.
            raise
        return found

    with ThreadPoolExecutor(len(copies)) as pool:
        return statistics.median(t for each in pool.map(times, copies) for t in each)
