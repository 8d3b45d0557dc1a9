"""Backwards in a thread of their own, as those of a GPU are."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.autograd import graph

Work = Callable[[], Any]


def within(seconds: float, work: Work) -> Any:
    """What a function returns; fails where it takes longer, since it waits for itself."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((True, work()))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"it hangs: {seconds:g} s were not enough"
    done, result = found[0]
    if not done:
        raise result
    return result


@contextlib.contextmanager
def in_another_thread() -> Iterator[None]:
    """Run each backward in one other thread, for which its caller waits.

    Nothing can be recorded on a CPU meanwhile: that recorder sees its own thread alone.
    """
    asked: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
    plain = graph._engine_run_backward

    def serve() -> None:
        while (work := asked.get()) is not None:
            work()

    device = threading.Thread(target=serve, daemon=True)
    device.start()

    def backward(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is device or not torch._C._is_multithreading_enabled():
            return plain(*args, **kwargs)
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        grad = torch.is_grad_enabled()

        def work() -> None:
            try:
                with torch.set_grad_enabled(grad):
                    done.put((True, plain(*args, **kwargs)))
            except BaseException as error:
                done.put((False, error))

        asked.put(work)
        fine, result = done.get()
        if not fine:
            raise result
        return result

    with (
        mock.patch.object(graph, "_engine_run_backward", backward),
        mock.patch.object(torch.autograd, "_engine_run_backward", backward),
    ):
        yield
    asked.put(None)
