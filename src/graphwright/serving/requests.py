"""What both transports read of a request and check: token, names, shapes, data and deadline.

All of it raises RequestError with text that names the tensor or parameter.
"""

from __future__ import annotations

import ctypes
import hmac
import math
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..calls.options import in_brief, nearest
from ..calls.plurals import counted
from .protocol import (
    BYTES,
    DTYPES,
    ErrorKind,
    Parameters,
    RequestError,
    Strings,
    TensorMetadata,
    Value,
    datatype_of,
)

# More dimensions than these many of PyTorch's operators refuse, and numpy too.
MOST_DIMENSIONS = 64
# Strides and sizes in bytes are to fit into 64 bits, of empty tensors as well.
_MOST_ELEMENTS = 2**59


def invalid(what: str, remedy: str | None = None) -> RequestError:
    """The error for a request that makes no sense."""
    return RequestError(ErrorKind.INVALID, what, remedy=remedy)


def check_token(authorization: str | None, token: str | None) -> None:
    """Compare what a client sent as "Authorization" to the token, if there is one.

    Raises:
        RequestError: UNAUTHENTICATED, it is not "Bearer" and the token.
    """
    if token is None:
        return
    scheme, _, sent = (authorization or "").partition(" ")
    same = hmac.compare_digest(sent.strip().encode(), token.encode())
    if scheme.lower() != "bearer" or not same:
        remedy = "Send the server's token as 'Authorization: Bearer …'."
        raise RequestError(
            ErrorKind.UNAUTHENTICATED, "The request has no valid token.", remedy=remedy
        )


def check_names(names: Iterable[str], what: str) -> None:
    """Refuse tensors without a name and two of one name; `what` is "input" or "output"."""
    known: set[str] = set()
    for name in names:
        if not name:
            raise invalid(f"An {what} has no name.")
        if name in known:
            raise invalid(f"There are two {what}s of the name {in_brief(name)}.")
        known.add(name)


def check_datatype(datatype: str, name: str) -> None:
    """Refuse a datatype that the protocol does not know."""
    if datatype != BYTES and datatype not in DTYPES:
        raise invalid(
            f"The tensor {in_brief(name)} is of an unknown datatype, {in_brief(datatype)}.",
            nearest(datatype[:20], [*DTYPES, BYTES]) or f"Known are {', '.join([*DTYPES, BYTES])}.",
        )


def element_count(shape: Sequence[int], name: str) -> int:
    """How many elements a tensor of a shape has; refuses what is no shape, or of no use."""
    if len(shape) > MOST_DIMENSIONS:
        raise invalid(
            f"The tensor {in_brief(name)} has {len(shape)} dimensions, "
            f"and at most {MOST_DIMENSIONS} are possible."
        )
    if any(size < 0 for size in shape):
        raise invalid(
            f"The tensor {in_brief(name)} has a negative size in its shape {list(shape)}."
        )
    if math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise invalid(f"The tensor {in_brief(name)} is too large: its shape is {list(shape)}.")
    return math.prod(shape)


def numbers_from_bytes(
    data: bytes | memoryview, datatype: str, shape: Sequence[int], name: str
) -> torch.Tensor:
    """A tensor of numbers from its elements in row-major order, little-endian.

    Args:
        data: the elements; copied unless they lie in writable memory that is aligned.
        datatype: one of DTYPES.
        shape: of the tensor.
        name: of the tensor, for errors.

    Raises:
        RequestError: the shape is none, the data is not as long as the shape and the datatype
            say, or a BOOL is neither 0 nor 1.
    """
    dtype = DTYPES[datatype]
    size = element_count(shape, name) * dtype.itemsize
    if len(data) != size:
        raise invalid(
            f"The tensor {in_brief(name)} has {counted(len(data), 'byte')} of data, "
            f"and {datatype} of shape {list(shape)} has {size}."
        )
    if isinstance(data, memoryview) and _is_ready(data, dtype):
        return numbers(data, datatype, shape, name)
    return numbers(bytearray(data), datatype, shape, name)


def _is_ready(data: memoryview, dtype: torch.dtype) -> bool:
    """Whether a tensor may lie in the data: it is writable and aligned."""
    if data.readonly or not len(data):
        return False
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr() % dtype.itemsize == 0


def numbers(
    buffer: bytearray | memoryview | array[Any], datatype: str, shape: Sequence[int], name: str
) -> torch.Tensor:
    """A tensor over a writable buffer of the right size, which is not copied."""
    dtype = DTYPES[datatype]
    if not len(buffer):
        return torch.empty(tuple(shape), dtype=dtype)
    tensor = torch.frombuffer(buffer, dtype=dtype)
    if dtype is torch.bool and int(tensor.view(torch.uint8).max()) > 1:
        raise invalid(f"The tensor {in_brief(name)} of BOOL has bytes that are neither 0 nor 1.")
    return tensor.reshape(tuple(shape))


def strings_from_bytes(data: bytes | memoryview, shape: Sequence[int], name: str) -> Strings:
    """A tensor of BYTES from its elements, each after its length as 4 bytes, little-endian.

    Raises:
        RequestError: the shape is none, the data ends within an element, or it holds more or fewer
            elements than the shape says.
    """
    count = element_count(shape, name)
    values: list[bytes] = []
    start, end = 0, len(data)
    while start < end:
        if start + 4 > end:
            raise invalid(
                f"The tensor {in_brief(name)} of BYTES ends within the length of an element."
            )
        (length,) = struct.unpack_from("<I", data, start)
        start += 4
        if start + length > end:
            raise invalid(
                f"The tensor {in_brief(name)} of BYTES ends within an element: "
                f"it has {end - start} of {counted(length, 'byte')}."
            )
        values.append(bytes(data[start : start + length]))
        start += length
    return strings(values, count, shape, name)


def strings(values: Sequence[bytes], count: int, shape: Sequence[int], name: str) -> Strings:
    """A tensor of BYTES from its elements in row-major order, of which there are to be `count`."""
    check_count(len(values), count, shape, name)
    return Strings(tuple(shape), tuple(values))


def check_count(found: int, count: int, shape: Sequence[int], name: str) -> None:
    """Refuse more or fewer elements than a shape has."""
    if found != count:
        raise invalid(
            f"The tensor {in_brief(name)} has {counted(found, 'element')}, "
            f"and its shape {list(shape)} has {count}."
        )


def bytes_of(value: Value) -> bytes:
    """The elements of a tensor as `numbers_from_bytes` and `strings_from_bytes` read them.

    Numbers are copied once.
    """
    if isinstance(value, Strings):
        return b"".join(struct.pack("<I", len(each)) + each for each in value.values)
    held = value.contiguous()
    return (ctypes.c_char * held.nbytes).from_address(held.data_ptr()).raw


def check_inputs(inputs: Mapping[str, Value], declared: Sequence[TensorMetadata]) -> None:
    """Compare a request's inputs to those that a model takes: names, datatypes and shapes.

    Raises:
        RequestError: an input is missing, unknown, or of another datatype or shape.
    """
    known = [each.name for each in declared]
    unknown = [name for name in inputs if name not in known]
    missing = [name for name in known if name not in inputs]
    if unknown or missing:
        wanted = (f"{each.name} {each.datatype} {list(each.shape)}" for each in declared)
        takes = f"it takes {', '.join(wanted)}."
        if unknown:
            raise invalid(f"The model has no input {in_brief(unknown[0])}; {takes}")
        raise invalid(f"The input {missing[0]!r} is missing; {takes}")
    for each in declared:
        given = inputs[each.name]
        if datatype_of(given) != each.datatype:
            raise invalid(f"The input {each.name!r} is {datatype_of(given)}, not {each.datatype}.")
        shape = list(given.shape)
        if len(shape) != len(each.shape) or any(
            n not in (-1, m) for n, m in zip(each.shape, shape, strict=True)
        ):
            raise invalid(f"The input {each.name!r} has the shape {shape}, not {list(each.shape)}.")


def deadline(
    received: float, parameters: Parameters, client_s: float | None, default_s: float | None
) -> float | None:
    """Until when an answer is of use, on the clock of `received`; None for ever.

    Args:
        received: when the request was read.
        parameters: of the request; Triton's "timeout" is in microseconds, 0 for none.
        client_s: the seconds that the transport's own deadline leaves; None if there is none.
        default_s: the seconds for a client that says neither.

    Raises:
        RequestError: "timeout" is no whole number, or negative.
    """
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise invalid(
            f"The parameter 'timeout' is {in_brief(timeout)}, no whole number of microseconds."
        )
    given = [] if client_s is None else [client_s]
    if timeout:
        given.append(timeout / 1e6)
    seconds = min(given, default=default_s)
    return None if seconds is None else received + seconds
