"""The nodes of a CUDA graph as the driver tells them.

The functions of the driver that this needs are looked up by name and version, since older drivers
lack some: what cannot be asked is None. Edges are asked by cuGraphGetEdges_v2 where there is one:
the first version fails on edges with data, such as those of programmatic dependent launch.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...calls.plurals import counted
from ...errors import CaptureError
from ..inspection.node import Node
from ..inspection.origins import Observer
from . import driver
from .driver import check

# CUgraphNodeType of cuda.h.
_KERNEL, _COPY, _MEMSET, _CHILD = 0, 1, 2, 4
_KINDS = {
    _KERNEL: "kernel",
    _COPY: "copy",
    _MEMSET: "memset",
    3: "host",
    _CHILD: "graph",
    5: "empty",
    6: "event wait",
    7: "event record",
    10: "allocation",
    11: "free",
    13: "conditional",
}
# CUmemorytype.
_ENDS = {1: "host", 2: "device", 3: "array"}
# CUfunction_attribute.
_STATIC_SHARED, _REGISTERS = 1, 4
# Keys of a kernel's packed arguments (CU_LAUNCH_PARAM_*).
_END, _BUFFER, _BUFFER_SIZE = 0, 1, 2
# Of CUgraphDebugDot_flags.
_VERBOSE = 1


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("kernelParams", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class _MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS of cuda.h."""

    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("elementSize", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@functools.cache
def _function(name: str, *arguments: Any) -> Any:
    """A function of the driver, with the types of its arguments; None if it has none."""
    found = getattr(driver.libcuda(), name, None)
    if found is not None:
        found.argtypes = list(arguments)
    return found


def _pointer(*names: str, count: int) -> Any:
    """The first of some functions that the driver has, all of whose arguments are pointers."""
    for name in names:
        found = _function(name, *[ctypes.c_void_p] * count)
        if found is not None:
            return found
    return None


def handles_of(graph: int, start: int = 0) -> list[int]:
    """Handles of a graph's nodes, from one on, in the driver's order: as they were added."""
    count = ctypes.c_size_t(driver.node_count(graph))
    if count.value <= start:
        return []
    nodes = (ctypes.c_void_p * count.value)()
    check(driver.libcuda().cuGraphGetNodes(graph, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    return [node for node in nodes[start : count.value] if node]


def nodes_of(graph: int) -> tuple[list[Node], list[int]]:
    """The nodes of a graph as they were added, without branches, and their handles."""
    handles = handles_of(graph)
    place = {handle: index for index, handle in enumerate(handles)}
    before: list[list[int]] = [[] for _ in handles]
    for source, target in edges_of(graph):
        before[place[target]].append(place[source])
    nodes = []
    for index, handle in enumerate(handles):
        nodes.append(_node(index, handle, tuple(sorted({*before[index]}))))
    return nodes, handles


def edges_of(graph: int) -> Iterator[tuple[int, int]]:
    """Pairs of handles: the second node waits for the first one."""
    pointer = ctypes.c_void_p
    count = ctypes.c_size_t()
    asked = _pointer("cuGraphGetEdges_v2", count=5)
    with_data = asked is not None
    if not with_data:
        asked = _pointer("cuGraphGetEdges", count=4)
    nothing = [None] * (3 if with_data else 2)
    check(asked(graph, *nothing, ctypes.byref(count)), "cuGraphGetEdges")
    if not count.value:  # The driver takes no room for no edges.
        return
    ends = [(pointer * count.value)() for _ in range(2)]
    # CUgraphEdgeData has 8 bytes.
    data = [ctypes.create_string_buffer(8 * count.value)] if with_data else []
    check(asked(graph, *ends, *data, ctypes.byref(count)), "cuGraphGetEdges")
    for source, target in zip(*(each[: count.value] for each in ends), strict=True):
        if source and target:
            yield source, target


def _node(index: int, handle: int, before: tuple[int, ...]) -> Node:
    kind = ctypes.c_int()
    check(driver.libcuda().cuGraphNodeGetType(handle, ctypes.byref(kind)), "cuGraphNodeGetType")
    word = _KINDS.get(kind.value, "other")
    if kind.value == _KERNEL:
        return _kernel(index, handle, before)
    if kind.value == _COPY:
        params = driver.Memcpy3D()
        code = driver.libcuda().cuGraphMemcpyNodeGetParams(handle, ctypes.byref(params))
        check(code, "cuGraphMemcpyNodeGetParams")
        ends = (_ENDS.get(kind, "memory") for kind in (params.srcMemoryType, params.dstMemoryType))
        moved = params.WidthInBytes * max(1, params.Height) * max(1, params.Depth)
        return Node(index, word, " to ".join(ends), before, bytes=moved)
    if kind.value == _MEMSET:
        filled = _memset_params(handle)
        if filled is None:
            return Node(index, word, "memset", before)
        count = filled.elementSize * filled.width * max(1, filled.height)
        return Node(index, word, f"set to {filled.value:#x}", before, bytes=count)
    if kind.value == _CHILD:
        child = ctypes.c_void_p()
        asked = _pointer("cuGraphChildGraphNodeGetGraph", count=2)
        if asked is not None and not asked(handle, ctypes.byref(child)) and child.value:
            return Node(
                index, word, f"graph of {counted(driver.node_count(child.value), 'node')}", before
            )
    return Node(index, word, word, before)


def _memset_params(handle: int) -> _MemsetParams | None:
    params = _MemsetParams()
    asked = _pointer("cuGraphMemsetNodeGetParams", count=2)
    if asked is None or asked(handle, ctypes.byref(params)):
        return None
    return params


def _kernel_params(handle: int) -> _KernelParams | None:
    params = _KernelParams()
    asked = _pointer("cuGraphKernelNodeGetParams_v2", count=2)
    if asked is None or asked(handle, ctypes.byref(params)):
        return None
    return params


def _kernel(index: int, handle: int, before: tuple[int, ...]) -> Node:
    params = _kernel_params(handle)
    if params is None:
        return Node(index, "kernel", "an unknown kernel", before)
    grid, block = tuple(params.grid), tuple(params.block)
    static = _attribute(params, _STATIC_SHARED)
    return Node(
        index,
        "kernel",
        demangled(_name_of(params)),
        before,
        grid=(grid[0], grid[1], grid[2]),
        block=(block[0], block[1], block[2]),
        shared_bytes=None if static is None else static + params.shared,
        registers=_attribute(params, _REGISTERS),
    )


def _name_of(params: _KernelParams) -> str:
    name = ctypes.c_char_p()
    asked, handle = _pointer("cuFuncGetName", count=2), params.func
    if not handle:
        asked, handle = _pointer("cuKernelGetName", count=2), params.kern
    if not handle or asked is None or asked(ctypes.byref(name), handle) or not name.value:
        return "an unnamed kernel"
    return name.value.decode(errors="replace")


def _function_of(params: _KernelParams) -> int | None:
    """The kernel as a CUfunction; None where the driver does not give it."""
    if params.func or not params.kern:
        return params.func or None
    function = ctypes.c_void_p()
    asked = _pointer("cuKernelGetFunction", count=2)
    if asked is None or asked(ctypes.byref(function), params.kern):
        return None
    return function.value


def _attribute(params: _KernelParams, number: int) -> int | None:
    function, value = _function_of(params), ctypes.c_int()
    asked = _function("cuFuncGetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    if function is None or asked is None or asked(ctypes.byref(value), number, function):
        return None
    return value.value


@functools.cache
def demangled(name: str) -> str:
    """A C++ symbol as it was written; other names as they are."""
    if not name.startswith("_Z"):
        return name
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        demangle, free = library["__cxa_demangle"], ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return name
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    demangle.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    status = ctypes.c_int()
    made = demangle(name.encode(), None, None, ctypes.byref(status))
    if not made:
        return name
    try:
        return ctypes.string_at(made).decode(errors="replace")
    finally:
        free(made)


def dump(graph: int, path: Path) -> None:
    """Have the driver write a graph to a file, in graphviz' language."""
    arguments = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint
    asked = _function("cuGraphDebugDotPrint", *arguments)
    if asked is None:
        raise CaptureError("This CUDA driver writes no graphs.")
    check(asked(graph, os.fsencode(path), _VERBOSE), "cuGraphDebugDotPrint")


def constants_of(handles: Sequence[int]) -> list[tuple[bytes, ...] | None]:
    """What is written into each node: a kernel's arguments, a memset's value, a copy's ends.

    None where the driver does not tell. Addresses are among them: compare with other captures.
    """
    found: list[tuple[bytes, ...] | None] = []
    for handle in handles:
        kind = ctypes.c_int()
        code = driver.libcuda().cuGraphNodeGetType(handle, ctypes.byref(kind))
        check(code, "cuGraphNodeGetType")
        if kind.value == _KERNEL:
            params = _kernel_params(handle)
            found.append(None if params is None else _arguments(params))
        elif kind.value == _MEMSET:
            filled = _memset_params(handle)
            parts = None if filled is None else (filled.value, filled.dst)
            found.append(None if parts is None else tuple(map(_as_word, parts)))
        elif kind.value == _COPY:
            copied = driver.Memcpy3D()
            code = driver.libcuda().cuGraphMemcpyNodeGetParams(handle, ctypes.byref(copied))
            check(code, "cuGraphMemcpyNodeGetParams")
            ends = copied.srcHost, copied.srcDevice, copied.dstHost, copied.dstDevice
            found.append(tuple(_as_word(end or 0) for end in ends))
        else:
            found.append(())
    return found


def _as_word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def set_arguments(executable: int, handle: int, arguments: Sequence[bytes]) -> None:
    """Give a kernel of an executable graph other arguments, from its next launch on.

    Args:
        executable: the graph.
        handle: of the node, in the graph that it was made of.
        arguments: as `constants_of` gives them.
    """
    params = _kernel_params(handle)
    asked = _pointer("cuGraphExecKernelNodeSetParams_v2", count=3)
    if params is None or asked is None:
        raise CaptureError("This CUDA driver does not change a kernel's arguments.")
    held = [ctypes.create_string_buffer(each, max(1, len(each))) for each in arguments]
    places = [ctypes.addressof(each) for each in held]
    size = ctypes.c_size_t(len(arguments[0]) if arguments else 0)
    if params.kernelParams or not params.extra:
        table = (ctypes.c_void_p * max(1, len(places)))(*places)
        params.kernelParams, params.extra = ctypes.addressof(table), None
    else:
        words = _BUFFER, places[0], _BUFFER_SIZE, ctypes.addressof(size), _END
        table = (ctypes.c_void_p * len(words))(*words)
        params.extra = ctypes.addressof(table)
    code = asked(executable, handle, ctypes.byref(params))
    check(code, "cuGraphExecKernelNodeSetParams")


def _arguments(params: _KernelParams) -> tuple[bytes, ...] | None:
    """The bytes of a kernel's arguments, each by itself, or all packed as the library gave them."""
    word = ctypes.sizeof(ctypes.c_void_p)
    if params.extra and not params.kernelParams:
        place, buffer, size = params.extra, 0, 0
        while True:
            key = ctypes.c_void_p.from_address(place).value or _END
            if key == _END:
                break
            value = ctypes.c_void_p.from_address(place + word).value or 0
            if key == _BUFFER:
                buffer = value
            elif key == _BUFFER_SIZE:
                size = ctypes.c_size_t.from_address(value).value
            place += 2 * word
        return (ctypes.string_at(buffer, size),) if buffer else None
    function = _function_of(params)
    arguments = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
    asked = _function("cuFuncGetParamInfo", *arguments)
    if function is None or asked is None:
        return None
    offset, size_of = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[bytes] = []
    while not asked(function, len(found), ctypes.byref(offset), ctypes.byref(size_of)):
        if not params.kernelParams:
            return None
        place = ctypes.c_void_p.from_address(params.kernelParams + word * len(found)).value
        if not place:
            return None
        found.append(ctypes.string_at(place, size_of.value))
    return tuple(found)


class CaptureObserver:
    """Tells an observer which nodes each operation adds to the graph that is being captured.

    Args:
        by: the observer.
        stream: a stream that is being captured.
    """

    def __init__(self, by: Observer, stream: torch.cuda.Stream) -> None:
        self._by = by
        self._graph = _captured_into(stream)
        self._count = driver.node_count(self._graph)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and tell of it."""
        self._by.before(func, args, kwargs)
        start = driver.node_count(self._graph)  # The observer may have added some.
        result = func(*args, **kwargs)
        self._by.after(func, args, kwargs, result, handles_of(self._graph, start))
        return result


def _captured_into(stream: torch.cuda.Stream) -> int:
    """The graph that a stream is being captured into."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, data, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    first = [ctypes.byref(each) for each in (status, number, graph, nodes)]
    asked = _pointer("cuStreamGetCaptureInfo_v3", count=7)
    if asked is not None:
        rest = [ctypes.byref(data), ctypes.byref(count)]
    else:
        asked = _pointer("cuStreamGetCaptureInfo_v2", count=6)
        rest = [ctypes.byref(count)]
    check(asked(stream.cuda_stream, *first, *rest), "cuStreamGetCaptureInfo")
    assert graph.value is not None
    return graph.value
