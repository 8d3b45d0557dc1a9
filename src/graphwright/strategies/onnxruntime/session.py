"""An ONNX model in ONNX Runtime, run on the caller's own memory and on PyTorch's stream.

Imports nothing of ONNX Runtime until a session is made: it is an optional library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.dlpack

from ...calls.switches import precision
from ...errors import StrategyFailed, first_line
from .plan import ELEMENTS, Result

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# torch's default stream is 0, which ONNX Runtime takes for none given; this is the same stream.
_CUDA_STREAM_LEGACY = 1
# Kernels read vectors of this many bytes; a slice may begin between them.
_ALIGNMENT = 16
_TELEMETRY = "ORT_DISABLE_TELEMETRY"
_SILENT = 4  # What ONNX Runtime logs as an error it raises as well.


def runtime() -> Any:
    """The onnxruntime package, which from 1.29 on reports to its makers unless told otherwise.

    It asks once, on its first import; ORT_DISABLE_TELEMETRY=0 in the environment leaves it at that.

    Raises:
        ImportError: it is not installed.
    """
    asked = os.environ.get(_TELEMETRY)
    os.environ.setdefault(_TELEMETRY, "1")
    try:
        return importlib.import_module("onnxruntime")
    finally:
        if asked is None:
            os.environ.pop(_TELEMETRY, None)


class Session:
    """Calls a model with a row of tensors; its results are fresh tensors, owned by the caller.

    Args:
        path: of the model. Its inputs are in0, in1, …, some of which may be gone, and its outputs
            out0, out1, …
        device: where it runs.
        samples: the tensors of one call.
        results: what eager gave for them, by the number of the output; others are left out.
        dynamic: whether sizes change from call to call.
        graph: replay ONNX Runtime's own CUDA graph, between static inputs and outputs.

    Raises:
        StrategyFailed: the provider for this device does not load.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        samples: Sequence[torch.Tensor],
        results: dict[int, Result],
        *,
        dynamic: bool = False,
        graph: bool = False,
    ) -> None:
        self._device = device
        self._results = results
        self._stream = _stream(device, graph) if device.type == "cuda" else None
        # One stream holds one run at a time, whichever threads these come from.
        self._lock = threading.Lock()
        self._session = _make(path, device, self._stream, dynamic=dynamic, graph=graph)
        self._inputs = [int(i.name.removeprefix("in")) for i in self._session.get_inputs()]
        self._shapes = {
            int(o.name.removeprefix("out")): tuple(o.shape) for o in self._session.get_outputs()
        }
        self._options = runtime().RunOptions()
        self._options.log_severity_level = _SILENT
        # Asked for at each run: where it is not set, that costs an exception of 50 µs inside.
        self._options.add_run_config_entry("gpu_graph_id", "1" if graph else "-1")
        kinds = {t.device.type for t in samples} | {r.kind for r in results.values()}
        if graph and kinds == {"cuda"}:
            # A replay need not be waited for, as the stream orders all. Other runs are: only then
            # does ONNX Runtime let go of the host memory that its kernels were given (to join over
            # 32 tensors asks for some, as the steps of an RNN are). Else it grows with each call,
            # and is freed at last in a callback of CUDA's, where that is not allowed: the process
            # is aborted (1.31.1).
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._replayed = self._bind_once(samples) if graph else None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The results by their numbers."""
        if self._stream is None:
            return self._run(tensors)
        with self._lock, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            if current == self._stream:
                return self._run(tensors)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                results = self._run(tensors)
            current.wait_stream(self._stream)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            for result in results.values():
                if result.is_cuda:
                    result.record_stream(current)
            return results

    def nodes_elsewhere(self, provider: str = "") -> list[str]:
        """A note on nodes that run on another provider than the device's own, if there are any."""
        provider = provider or PROVIDERS[self._device.type]
        unknown = ["which nodes run on the CPU is unknown: this ONNX Runtime does not tell"]
        if not hasattr(self._session, "get_provider_graph_assignment_info"):
            return unknown
        parts = self._session.get_provider_graph_assignment_info()
        nodes = [(part.ep_name, node.op_type) for part in parts for node in part.get_nodes()]
        others = [kind for name, kind in nodes if name != provider]
        if not nodes and self._device.type != "cpu":
            return unknown
        if not others:
            return []
        return [
            f"{len(others)} of {len(nodes)} nodes run on the CPU: {', '.join(sorted({*others}))}"
        ]

    def _run(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        if self._replayed is not None:
            return self._replay(tensors)
        binding = self._session.io_binding()
        bound = [_ready(tensors[number]) for number in self._inputs]
        for number, tensor in zip(self._inputs, bound, strict=True):
            binding.bind_input(f"in{number}", *_memory(tensor))
        made: dict[int, torch.Tensor] = {}
        for number, result in self._results.items():
            if self._shapes[number] == result.shape:
                made[number] = torch.empty(
                    result.shape, dtype=result.dtype, device=self._of(result.kind)
                )
                binding.bind_output(f"out{number}", *_memory(made[number]))
            else:
                index = self._device.index or 0
                binding.bind_output(f"out{number}", result.kind, index * (result.kind == "cuda"))
        self._session.run_with_iobinding(binding, self._options)
        if len(made) < len(self._results):
            # ONNX Runtime has found the shapes and allocated these.
            for number, value in zip(self._results, binding.get_outputs(), strict=True):
                if number not in made:
                    made[number] = _taken_over(value, self._results[number].dtype)
        return {number: result.lay_out(made[number]) for number, result in self._results.items()}

    def _of(self, kind: str) -> torch.device:
        return self._device if kind == self._device.type else torch.device(kind)

    def _bind_once(
        self, samples: Sequence[torch.Tensor]
    ) -> tuple[Any, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        for number, result in self._results.items():
            if self._shapes[number] != result.shape:
                raise StrategyFailed(
                    f"output {number} has shape {self._shapes[number]} in the exported model: a "
                    "CUDA graph has fixed shapes."
                )
        binding = self._session.io_binding()
        inputs = {
            number: torch.empty_like(samples[number], memory_format=torch.contiguous_format)
            for number in self._inputs
        }
        outputs = {
            number: torch.empty(result.shape, dtype=result.dtype, device=self._of(result.kind))
            for number, result in self._results.items()
        }
        for number, tensor in inputs.items():
            binding.bind_input(f"in{number}", *_memory(tensor))
        for number, tensor in outputs.items():
            binding.bind_output(f"out{number}", *_memory(tensor))
        return binding, inputs, outputs

    def _replay(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        assert self._replayed is not None  # Asked by the caller.
        binding, inputs, outputs = self._replayed
        for number, static in inputs.items():
            if tensors[number].shape != static.shape or tensors[number].dtype != static.dtype:
                raise StrategyFailed(
                    f"input {number} is {tensors[number].dtype} of shape "
                    f"{tuple(tensors[number].shape)}; the graph has {static.dtype} of shape "
                    f"{tuple(static.shape)}."
                )
            static.copy_(tensors[number])
        self._session.run_with_iobinding(binding, self._options)
        return {n: r.lay_out(outputs[n].clone()) for n, r in self._results.items()}


def _make(
    path: Path,
    device: torch.device,
    stream: torch.cuda.Stream | None,
    *,
    dynamic: bool,
    graph: bool,
) -> Any:
    ort = runtime()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    options.use_deterministic_compute = torch.are_deterministic_algorithms_enabled()
    options.log_severity_level = _SILENT
    # Threads that spin after a run take the cores from whatever is timed next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    providers: list[Any] = [PROVIDERS["cpu"]]
    if stream is not None:
        _preload()
        settings = {
            "device_id": str(device.index or 0),
            "user_compute_stream": str(stream.cuda_stream or _CUDA_STREAM_LEGACY),
            # The search is made anew for each size: worth it where there is only one.
            "cudnn_conv_algo_search": "HEURISTIC" if dynamic else "EXHAUSTIVE",
            "use_tf32": "1" if _tf32() else "0",
            "enable_cuda_graph": "1" if graph else "0",
        }
        providers.insert(0, (PROVIDERS["cuda"], settings))
    # Without enable_fallback=0 a session that fails on the GPU is made again on the CPU.
    session = ort.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    if PROVIDERS[device.type] not in session.get_providers():
        raise StrategyFailed(
            f"ONNX Runtime did not load its {PROVIDERS[device.type]}: {_reason(ort)}",
            remedy="Install the CUDA and cuDNN libraries that this onnxruntime-gpu was built for.",
        )
    return session


def _stream(device: torch.device, graph: bool) -> torch.cuda.Stream:
    """The stream that torch uses now; for a graph one of its own: no capture on the default one."""
    return torch.cuda.Stream(device) if graph else torch.cuda.current_stream(device)


def _tf32() -> bool:
    """Whether torch's switches allow it; ONNX Runtime has one for products and convolutions."""
    return precision("cuda", "matmul") == "tf32" and precision("cuda", "conv") != "ieee"


@functools.cache
def _preload() -> None:
    """Let ONNX Runtime find the CUDA libraries that came with torch; it prints what it misses."""
    ort = runtime()
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()


def _reason(ort: Any) -> str:
    """Why the CUDA provider's library cannot be loaded, as the loader says it."""
    folder = Path(ort.__file__).parent / "capi"
    try:
        for name in ("shared", "cuda"):
            library = folder / f"libonnxruntime_providers_{name}.so"
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return first_line(error)
    return "its library loads, so the reason is unknown"


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a contiguous tensor lies, as a binding takes it."""
    if tensor.dtype not in ELEMENTS:
        raise StrategyFailed(f"ONNX Runtime cannot take {tensor.dtype} tensors here.")
    kind, index = tensor.device.type, tensor.device.index or 0
    # Where there are no elements there may be no address, which is refused though never read.
    address = tensor.data_ptr() or _ALIGNMENT
    return kind, index, ELEMENTS[tensor.dtype], tuple(tensor.shape), address


def _ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where kernels can read it as it lies, else a copy."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _taken_over(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Memory of ONNX Runtime's as a tensor; on a GPU copied into torch's, which knows streams."""
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(value)
    if tensor.dtype != dtype:
        tensor = tensor.view(dtype)  # DLPack carries booleans as bytes.
    return tensor.clone() if tensor.is_cuda else tensor
