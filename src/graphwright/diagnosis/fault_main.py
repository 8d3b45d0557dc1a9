"""The program of the child that looks for faults; see `faults`.

Run as `python -m graphwright.diagnosis.fault_main TASK TOLD`: the file with the pickled call, and
the file that messages are added to.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..calls.modes import OperationMode
from ..errors import first_line
from ..evaluation.clock import synchronize
from ..graphs.captured_call import CapturedCall
from ..graphs.cpu.recorder import CpuRecording
from ..graphs.cuda import driver
from ..graphs.cuda.recording import CudaRecording
from ..graphs.inspection.origins import Observer, Operation, Origins
from ..processes.pickled_files import read_pickled

# Operations of a call whose numbers can be told; later ones share the last.
_MOST = 1 << 16


class _Teller:
    """Adds messages to a file, each at once: the next operation may end the process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def say(self, what: str, **more: Any) -> None:
        os.write(self._file, json.dumps({"say": what} | more).encode() + b"\n")


def _described(operation: Operation, index: int) -> dict[str, Any]:
    where = {"module": operation.module, "line": operation.line}
    return {"name": operation.name, "index": index} | where


class _OneByOne(OperationMode):
    """Tells of each operation before it runs, and waits for its end."""

    def __init__(self, origins: Origins, teller: _Teller, device: torch.device) -> None:
        super().__init__()
        self._origins, self._teller, self._device = origins, teller, device
        self._count = 0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operation = self._origins.of(func, args, kwargs)
        self._teller.say("operation", **_described(operation, self._count))
        self._count += 1
        result = func(*args, **kwargs)
        synchronize(self._device)
        return result


class _Marking(Observer):
    """Has each operation of a CUDA graph leave its number on the host.

    Attributes:
        operations: with the keys of their nodes.
        reached: the number that was left last, in pinned memory; -1 before the first.
    """

    def __init__(self, origins: Origins, device: torch.device) -> None:
        super().__init__(origins)
        self.operations: list[tuple[Operation, tuple[int, ...]]] = []
        self._numbers = torch.arange(_MOST, dtype=torch.int32, device=device)
        self.reached = torch.full((1,), -1, dtype=torch.int32).pin_memory()
        self._device = device

    def after(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        keys: Sequence[int],
    ) -> None:
        """Capture a copy of the operation's number to the host."""
        number = min(len(self.operations), _MOST - 1)
        self.operations.append((self.origins.of(func, args, kwargs), tuple(keys)))
        if not keys:
            return
        cuda, address = driver.libcuda(), ctypes.c_uint64
        source = address(self._numbers.data_ptr() + 4 * number)
        target = ctypes.c_void_p(self.reached.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        code = cuda.cuMemcpyDtoHAsync_v2(target, source, ctypes.c_size_t(4), stream)
        driver.check(code, "cuMemcpyDtoHAsync")

    def culprit(self) -> tuple[int, Operation, tuple[int, ...]] | None:
        """The first operation with nodes whose number was not left."""
        reached = int(self.reached[0])
        for index, (operation, keys) in enumerate(self.operations):
            if keys and index > reached:
                return index, operation, keys
        return None


def main(task: int, told: str) -> None:
    """Run the call one operation at a time, then as a graph, and tell where that ends.

    Args:
        task: handle of the file with the call.
        told: path of the file that is told.
    """
    teller = _Teller(told)
    fn, args, kwargs = read_pickled(task)
    with torch.no_grad():
        graph = CapturedCall(fn, args, kwargs, breaks="auto")
        device, origins = graph.device, Origins(graph.spec.module)
        synchronize(device)
        teller.say("phase", phase="eager")
        try:
            with _OneByOne(origins, teller, device):
                fn(*args, **kwargs)
        except BaseException as error:
            teller.say("error", error=first_line(error))
            return
        teller.say("phase", phase="replay")
        _replay(graph, origins, teller)
    teller.say("over")


def _replay(graph: CapturedCall, origins: Origins, teller: _Teller) -> None:
    """Capture the call, replay it, and tell of a fault."""
    device = graph.device
    try:
        graph.warm()
        graph.record()
    except Exception:
        return  # The caller's graph was captured: what is wrong here is not what is looked for.
    if graph.tree is not None:
        return
    marking = _Marking(origins, device) if device.type == "cuda" else None
    by = Observer(origins) if marking is None else marking
    with graph.recorded_again(by) as twin:
        recording: Any = twin.recorded.recording
        recording = getattr(recording, "drawn_beside", recording)
        if isinstance(recording, CpuRecording):
            for index, step in enumerate(recording.step_by_step()):
                operation = by.recorded.get(step.key) or Operation(str(step.func))
                teller.say("operation", **_described(operation, index))
                step.run()
            return
        assert isinstance(recording, CudaRecording)
        assert marking is not None
        nodes, keys = recording.inspect()
        names = dict(zip(keys, nodes, strict=True))
        try:
            recording.replay()
            synchronize(device)
        except Exception as error:
            found, more = marking.culprit(), dict[str, Any]()
            if found is not None:
                index, operation, its = found
                kernels = [names[key].name for key in its if names[key].kind == "kernel"]
                more = {"operation": _described(operation, index)}
                more |= {"kernel": kernels[0]} if kernels else {}
            teller.say("error", error=first_line(error), **more)
            os._exit(3)  # To tidy up a device that has faulted would end in more errors.


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
