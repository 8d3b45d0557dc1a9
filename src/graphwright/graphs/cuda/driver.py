"""The few functions of the CUDA driver that PyTorch does not expose, called through ctypes.

The copy nodes of an executable graph can be given other addresses between launches
(cuGraphExecMemcpyNodeSetParams; what is already launched keeps its own). So the copies of a call's
arguments and results are nodes of the graph itself, and a call is a single launch. libcuda's
interface is stable, and graph handles of runtime and driver are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...calls.plurals import counted
from ...errors import CaptureError

_MEMCPY_NODE = 1
_NON_BLOCKING = 1
_RELAXED = 2


def _end(name: str) -> tuple[tuple[str, Any], ...]:
    """The fields of CUDA_MEMCPY3D for one end of the copy."""
    return (
        (f"{name}XInBytes", ctypes.c_size_t),
        (f"{name}Y", ctypes.c_size_t),
        (f"{name}Z", ctypes.c_size_t),
        (f"{name}LOD", ctypes.c_size_t),
        (f"{name}MemoryType", ctypes.c_int),
        (f"{name}Host", ctypes.c_void_p),
        (f"{name}Device", ctypes.c_uint64),
        (f"{name}Array", ctypes.c_void_p),
        (f"{name}Reserved", ctypes.c_void_p),
        (f"{name}Pitch", ctypes.c_size_t),
        (f"{name}Height", ctypes.c_size_t),
    )


class Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D of cuda.h."""

    _fields_ = (
        *_end("src"),
        *_end("dst"),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
        ("Depth", ctypes.c_size_t),
    )


@functools.cache
def libcuda() -> Any:
    """libcuda, or None where there is none: on the CPU, and on AMD GPUs."""
    if torch.version.hip is not None:
        return None
    try:
        return declared(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None


def declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """The driver, with argument types declared for functions that take handles as numbers."""
    pointer = ctypes.c_void_p
    found.cuGraphExecMemcpyNodeSetParams.argtypes = [pointer] * 4
    found.cuGraphNodeSetEnabled.argtypes = [pointer, pointer, ctypes.c_uint]
    found.cuGraphGetNodes.argtypes = [pointer] * 3
    found.cuGraphNodeGetType.argtypes = [pointer] * 2
    found.cuGraphMemcpyNodeGetParams.argtypes = [pointer] * 2
    found.cuCtxGetCurrent.argtypes = [pointer]
    found.cuStreamCreate.argtypes = [pointer, ctypes.c_uint]
    address = ctypes.c_uint64
    found.cuMemcpyDtoDAsync_v2.argtypes = [address, address, ctypes.c_size_t, pointer]
    found.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    found.cuModuleUnload.argtypes = [pointer]
    found.cuCtxSetCurrent.argtypes = [pointer]
    found.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    found.cuLaunchKernel.argtypes = [pointer, *[ctypes.c_uint] * 7, *[pointer] * 3]
    return found


def check(code: int, what: str) -> None:
    """Raise CaptureError for a driver's error code."""
    if code:
        text = ctypes.c_char_p()
        libcuda().cuGetErrorString(code, ctypes.byref(text))
        message = (text.value or b"unknown error").decode()
        raise CaptureError(f"The CUDA driver's {what} failed: {message} ({code}).")


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else uses.

    torch.cuda.Stream() hands out 32 streams in turn, and cuBLAS has one workspace per stream:
    graphs that were captured on the same stream must not run at once.
    """
    if libcuda() is None:
        return torch.cuda.Stream(device)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # Makes the context, if there is none yet.
        check(libcuda().cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING), "cuStreamCreate")
    return torch.cuda.ExternalStream(handle.value, device=device)


@contextlib.contextmanager
def capture_mode_relaxed() -> Iterator[None]:
    """Let this thread make calls that a capture forbids, if they do not concern the capture."""
    mode = ctypes.c_int(_RELAXED)
    exchange = libcuda().cuThreadExchangeStreamCaptureMode
    check(exchange(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        check(exchange(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")


def copy_onto_itself(memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Issue a copy of contiguous memory onto itself.

    PyTorch never does this, so in a graph its node can be told from all others. The source is set
    before each launch, so that none has to be allocated.
    """
    place = memory.data_ptr()
    code = libcuda().cuMemcpyDtoDAsync_v2(place, place, memory.nbytes, stream.cuda_stream)
    check(code, "cuMemcpyDtoDAsync")


class CopyNode:
    """A copy node of an executable graph, whose source or target is set before a launch.

    Attributes:
        address: the address that was set last.
        handle: of the node, in the graph that the executable one was made of.
    """

    def __init__(self, executable: int, node: int, params: Memcpy3D, end: str) -> None:
        context = ctypes.c_void_p()
        check(libcuda().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
        self._params = params
        self._field = f"{end}Device"
        self._call = libcuda().cuGraphExecMemcpyNodeSetParams
        self._arguments = (executable, node, ctypes.addressof(params), context.value)
        self.handle = node
        self.address = 0

    def point_at(self, address: int) -> None:
        """Use this address as source, or target, from the next launch on."""
        setattr(self._params, self._field, address)
        code = self._call(*self._arguments)
        if code:
            check(code, "cuGraphExecMemcpyNodeSetParams")
        self.address = address

    def enable(self, on: bool) -> None:
        """Turn the copy on or off from the next launch on."""
        executable, node, _, _ = self._arguments
        check(libcuda().cuGraphNodeSetEnabled(executable, node, on), "cuGraphNodeSetEnabled")


class KernelFunction:
    """A kernel loaded from machine code; it is never unloaded, as graphs may hold it.

    Args:
        code: a cubin.
        symbol: the kernel's name in it.
        sizes: bytes of each of its arguments. The kernel may take further pointers: Triton's
            kernels end with some to scratch memory, which most do not use.
        device: a CUDA device.

    Raises:
        CaptureError: the driver refuses the code, the kernel takes other arguments, or the driver
            cannot say which (before CUDA 12.4).
    """

    def __init__(self, code: bytes, symbol: str, sizes: Sequence[int], device: torch.device):
        self._device, name = device, symbol.encode()
        cuda, module, function = libcuda(), ctypes.c_void_p(), ctypes.c_void_p()
        if cuda is None:
            raise CaptureError("There is no CUDA driver to load a kernel.")
        with torch.cuda.device(device):
            self._bind()
            check(cuda.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
            try:
                got = cuda.cuModuleGetFunction(ctypes.byref(function), module, name)
                check(got, "cuModuleGetFunction")
                self._function = function
                wanted, there = [*sizes], self._sizes()
                extra = there[len(wanted) :]
                if there[: len(wanted)] != wanted or any(size != 8 for size in extra):
                    raise CaptureError(f"The kernel takes {there} bytes, and not {wanted}.")
            except BaseException:
                cuda.cuModuleUnload(module)
                raise
        self._taken, self._extra = len(wanted), len(extra)

    def _sizes(self) -> list[int]:
        """Bytes of each argument."""
        info = getattr(libcuda(), "cuFuncGetParamInfo", None)
        if info is None:
            raise CaptureError("This CUDA driver does not say what a kernel takes.")
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        at = ctypes.byref(offset), ctypes.byref(size)
        while not info(self._function, ctypes.c_size_t(len(sizes)), *at):
            sizes.append(size.value)
        return sizes

    def launch(self, grid: int, threads: int, shared: int, values: Sequence[Any]) -> None:
        """Launch the kernel on the current stream of its device, which must be the current one.

        Args:
            grid: blocks.
            threads: threads per block.
            shared: bytes of shared memory.
            values: its arguments as ctypes objects, of the declared sizes.

        Raises:
            CaptureError: the driver refuses.
        """
        if len(values) != self._taken:
            raise CaptureError(
                f"The kernel takes {counted(self._taken, 'argument')}, and not {len(values)}."
            )
        self._bind()
        # New memory for each call: the GIL is released meanwhile, and another thread may launch.
        given = [*values, *(ctypes.c_uint64() for _ in range(self._extra))]
        places = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        size = grid, 1, 1, threads, 1, 1, shared
        check(libcuda().cuLaunchKernel(self._function, *size, stream, places, None), "launch")

    def _bind(self) -> None:
        """Set a context, since a thread that has not used CUDA yet has none.

        A call of the runtime's would do too, but might end a capture on another thread.
        """
        context = ctypes.c_void_p()
        if libcuda().cuCtxGetCurrent(ctypes.byref(context)) or not context.value:
            context = primary_context(self._device)
            check(libcuda().cuCtxSetCurrent(context), "cuCtxSetCurrent")


def primary_context(device: torch.device) -> ctypes.c_void_p:
    """The context that PyTorch uses on a device, made if need be, with the GIL released.

    It is never released: PyTorch keeps the same one as long as the process runs.

    Raises:
        CaptureError: there is no context.
    """
    driver, number, context = libcuda(), ctypes.c_int(), ctypes.c_void_p()
    if driver is None:
        raise CaptureError("There is no CUDA driver.")
    check(driver.cuInit(0), "cuInit")
    check(driver.cuDeviceGet(ctypes.byref(number), device.index or 0), "cuDeviceGet")
    retained = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    check(retained, "cuDevicePrimaryCtxRetain")
    return context


def node_count(graph: int) -> int:
    """How many nodes a graph has."""
    count = ctypes.c_size_t()
    check(libcuda().cuGraphGetNodes(graph, None, ctypes.byref(count)), "cuGraphGetNodes")
    return count.value


def copies(graph: int) -> Iterator[tuple[int, Memcpy3D]]:
    """The copy nodes of a graph and their parameters."""
    cuda = libcuda()
    count = ctypes.c_size_t(node_count(graph))
    if not count.value:
        return
    nodes = (ctypes.c_void_p * count.value)()
    check(cuda.cuGraphGetNodes(graph, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    for node in filter(None, nodes):
        kind = ctypes.c_int()
        check(cuda.cuGraphNodeGetType(node, ctypes.byref(kind)), "cuGraphNodeGetType")
        if kind.value == _MEMCPY_NODE:
            params = Memcpy3D()
            code = cuda.cuGraphMemcpyNodeGetParams(node, ctypes.byref(params))
            check(code, "cuGraphMemcpyNodeGetParams")
            yield node, params
