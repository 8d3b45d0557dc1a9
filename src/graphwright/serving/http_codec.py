"""Bytes of HTTP bodies to requests of the protocol, and answers back to bytes.

A body is JSON, behind which the binary tensor data extension puts tensors as they lie in memory:
little-endian, row-major, in the order of the JSON. The header Inference-Header-Content-Length then
says where the JSON ends. Nothing here knows of a server, and whatever a client sends is either a
request or a RequestError that names the field.

Sources: https://github.com/kserve/open-inference-protocol, and Triton's extensions in
https://github.com/triton-inference-server/server/tree/main/docs/protocol. As there, numbers may be
NaN, Infinity and -Infinity, and FP16 and BF16 have no JSON form.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..calls.plurals import counted
from .off_loop import SMALL
from .protocol import (
    BYTES,
    DATATYPES,
    DTYPES,
    Duration,
    ErrorKind,
    InferRequest,
    InferResponse,
    ModelConfiguration,
    ModelStatistics,
    Parameter,
    RequestError,
    Strings,
    TensorMetadata,
    Value,
    datatype_of,
)
from .requests import (
    bytes_of,
    check_datatype,
    deadline,
    element_count,
    numbers_from_bytes,
    strings_from_bytes,
)

Headers: TypeAlias = list[tuple[bytes, bytes]]
Object: TypeAlias = dict[str, Any]

_ALIGNMENT = 16  # is enough for every datatype
_SHOWN = 60  # characters of a client's value in a sentence
# An array's code for each datatype that has a JSON form.
_TYPECODES = {
    "BOOL": "B",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}  # zlib's `wbits`
_OF_OTHER_EXTENSIONS = ("shared_memory_region", "classification")


@dataclass(frozen=True)
class BinaryOutputs:
    """Which outputs a client wants behind the JSON of the answer.

    Attributes:
        default: whether all are that nothing more is said of.
        chosen: by name, whether this one is.
    """

    default: bool
    chosen: Mapping[str, bool]

    def __contains__(self, name: str) -> bool:
        return self.chosen.get(name, self.default)


def json_length(header: bytes | None) -> int | None:
    """The bytes of JSON that a body begins with; None if it is all JSON.

    Args:
        header: the value of Inference-Header-Content-Length.

    Raises:
        RequestError: it is no whole number.
    """
    if header is None:
        return None
    if not header.isdigit() or len(header) > 18:
        text = _shown(header.decode("latin-1"))
        raise _invalid(f"Inference-Header-Content-Length is {text}, no number of bytes.")
    return int(header)


def lead(length: int | None) -> int:
    """How many bytes to keep free before a body, so that its binary data begins aligned."""
    return 0 if length is None else -length % _ALIGNMENT


def decompress(body: memoryview, encoding: bytes, limit: int, free: int) -> memoryview:
    """What a body holds; never more than the limit is decompressed.

    Args:
        body: as it was sent.
        encoding: the value of Content-Encoding.
        limit: the largest result, in bytes.
        free: bytes to keep free before the result, see `lead`.

    Raises:
        RequestError: the encoding is unknown, the body is not of it, or holds too much.
    """
    encoding = encoding.strip().lower()
    if encoding not in _WINDOWS:
        text = _shown(encoding.decode("latin-1"))
        raise _invalid(f"Content-Encoding is {text}; it may be gzip, deflate or identity.")
    name = encoding.decode()
    stream = zlib.decompressobj(_WINDOWS[encoding])
    result = bytearray(free)
    try:
        # One byte more tells a result of the limit's size from a larger one.
        result += stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise _invalid(f"The body is no {name}: {error}.") from error
    if len(result) - free > limit:
        raise too_large(limit)
    if not stream.eof:
        raise _invalid(f"The body's {name} ends too early.")
    if stream.unused_data:
        raise _invalid(f"The body goes on behind the end of its {name}.")
    return memoryview(result)[free:]


def too_large(limit: int) -> RequestError:
    """The error of a body that is larger than the limit, in bytes."""
    return RequestError(
        ErrorKind.TOO_LARGE,
        f"The body is larger than {limit} bytes.",
        remedy="Send less at once, or let the server take more.",
    )


def reads_quickly(body: memoryview, length: int | None) -> bool:
    """Whether `decode_infer` takes so little time that a loop can wait for it.

    It looks at each element of JSON and of BYTES, but not at those of other binary data.
    """
    if len(body) <= SMALL:
        return True
    head = bytes(body[:length])
    # An escape may hide the datatype.
    return len(head) <= SMALL and b"BYTES" not in head and b"\\" not in head


def decode_infer(
    body: memoryview,
    length: int | None,
    *,
    model: str,
    version: str,
    received: float,
    timeout_s: float | None,
) -> tuple[InferRequest, BinaryOutputs]:
    """The request that a body holds, and how its answer is to be written.

    Tensors share the body's memory where its alignment allows that.

    Args:
        body: writable, decompressed.
        length: of the JSON, see `json_length`.
        model: the name in the path.
        version: the version in the path, or "".
        received: when the body was read, on the clock of `time.monotonic`.
        timeout_s: how long an answer is of use, if the client does not say so.

    Raises:
        RequestError: INVALID, or UNSUPPORTED if it asks for an extension that is not there.
    """
    end = len(body) if length is None else length
    if end > len(body):
        raise _invalid(
            f"Inference-Header-Content-Length is {end}, and the body has "
            f"{counted(len(body), 'byte')}."
        )
    asked = _object(body[:end])
    parameters = _parameters(asked, "parameters")
    default = _flag(parameters.pop("binary_data_output", False), "parameters.binary_data_output")
    until = deadline(received, parameters, None, timeout_s)

    if asked.get("inputs") is None:
        raise _invalid("inputs is missing.")
    inputs: dict[str, Value] = {}
    for number, entry in enumerate(_objects(asked["inputs"], "inputs")):
        field = f"inputs[{number}]"
        name = _text(entry.get("name"), f"{field}.name")
        if name in inputs:
            raise _invalid(f"{field}.name is {_shown(name)}, as that of another input.")
        inputs[name], end = _input(entry, field, body, end)
    if end != len(body):
        raise _invalid(f"The body has {counted(len(body) - end, 'byte')} after its last input.")

    outputs: dict[str, None] = {}
    chosen: dict[str, bool] = {}
    for number, entry in enumerate(_objects(asked.get("outputs"), "outputs")):
        field = f"outputs[{number}]"
        name = _text(entry.get("name"), f"{field}.name")
        if name in outputs:
            raise _invalid(f"{field}.name is {_shown(name)}, as that of another output.")
        outputs[name] = None
        of_output = _parameters(entry, f"{field}.parameters")
        _refuse_extensions(of_output, f"{field}.parameters")
        if "binary_data" in of_output:
            chosen[name] = _flag(of_output["binary_data"], f"{field}.parameters.binary_data")

    request = InferRequest(
        model=model,
        version=version,
        id="" if asked.get("id") is None else _text(asked["id"], "id", empty=True),
        inputs=inputs,
        outputs=tuple(outputs),
        parameters=parameters,
        deadline=until,
        received=received,
    )
    return request, BinaryOutputs(default, chosen)


def decode_parameters(body: memoryview) -> dict[str, Parameter]:
    """The parameters of a request to load or unload a model; its body may be empty.

    Raises:
        RequestError: INVALID.
    """
    return _parameters(_object(body), "parameters") if body else {}


def decode_index(body: memoryview) -> bool:
    """Whether a request for the index wants models that are ready, and no others.

    Raises:
        RequestError: INVALID.
    """
    return _flag(_object(body).get("ready", False), "ready") if body else False


def writes_quickly(response: InferResponse, binary: BinaryOutputs) -> bool:
    """Whether `encode_infer` takes so little time that a loop can wait for it."""
    size = 0
    for name, value in response.outputs.items():
        if isinstance(value, Strings):
            size += sum(map(len, value.values)) + 4 * len(value.values)
        elif name not in binary:
            size += value.nbytes
    return size <= SMALL


def encode_infer(
    response: InferResponse, binary: BinaryOutputs
) -> tuple[Headers, list[bytes | memoryview]]:
    """Headers and body of an answer; the body as parts, of which tensors share their memory.

    Raises:
        RequestError: INVALID if an output has no JSON form and was not asked for as binary data.
    """
    outputs: list[Object] = []
    parts: list[bytes | memoryview] = [b""]
    for name, value in response.outputs.items():
        output: Object = {"name": name, "datatype": datatype_of(value), "shape": value.shape}
        if name in binary:
            part = _binary(value)
            output["parameters"] = {"binary_data_size": len(part)}
            parts.append(part)
        else:
            output["data"] = _plain(value, name)
        outputs.append(output)
    answer: Object = {"model_name": response.model, "model_version": response.version}
    if response.id:
        answer["id"] = response.id
    if response.parameters:
        answer["parameters"] = dict(response.parameters)
    answer["outputs"] = outputs
    parts[0] = dumps(answer)
    size = b"%d" % sum(map(len, parts))
    if len(parts) == 1:
        return [(b"content-type", b"application/json"), (b"content-length", size)], parts
    return [
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", b"%d" % len(parts[0])),
        (b"content-length", size),
    ], parts


def statistics(models: Sequence[ModelStatistics]) -> Object:
    """The statistics extension's object."""
    return {"model_stats": [_statistics(model) for model in models]}


def configuration(found: ModelConfiguration) -> Object:
    """The model configuration extension's object, with what is true of models here."""
    metadata = found.metadata

    def tensors(every: Sequence[TensorMetadata]) -> list[Object]:
        return [
            {"name": each.name, "data_type": _data_type(each), "dims": found.dims(each)}
            for each in every
        ]

    return {
        "name": metadata.name,
        "platform": metadata.platform,
        "max_batch_size": found.max_batch_size,
        "input": tensors(metadata.inputs),
        "output": tensors(metadata.outputs),
    }


def _data_type(tensor: TensorMetadata) -> str:
    return "TYPE_STRING" if tensor.datatype == BYTES else f"TYPE_{tensor.datatype}"


def dumps(value: object) -> bytes:
    """JSON in ASCII; dataclasses become objects."""
    return _ENCODER.encode(value).encode("ascii")


class _Constant(float):
    """NaN, Infinity or -Infinity, as against a number that is too large for a float."""


def _pairs(pairs: list[tuple[str, Any]]) -> Object:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _invalid("The JSON has an object with two fields of one name.")
    return found


# An argument of `default` is always a dataclass: answers hold nothing else that JSON does not know.
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=dataclasses.asdict)
_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_Constant)


def _invalid(what: str) -> RequestError:
    return RequestError(ErrorKind.INVALID, what)


def _shown(value: object) -> str:
    """A value of a client's, short enough for a sentence."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | str):
        value = value[:_SHOWN]
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        return "a list of lists or objects"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _object(body: memoryview) -> Object:
    try:
        found = _DECODER.decode(str(body, "utf-8"))
    except UnicodeDecodeError as error:
        raise _invalid(f"The JSON is not UTF-8: {error.reason} at byte {error.start}.") from error
    except RecursionError as error:
        raise _invalid("The JSON is nested too deeply.") from error
    except ValueError as error:
        raise _invalid(f"The body does not begin with valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise _invalid(f"The JSON is {_shown(found)}; it has to be an object.")
    return found


def _objects(found: object, field: str) -> list[Object]:
    """The objects of a list; none if there is no list."""
    if found is None:
        return []
    if not isinstance(found, list):
        raise _invalid(f"{field} is {_shown(found)}; it has to be a list.")
    for number, item in enumerate(found):
        if not isinstance(item, dict):
            raise _invalid(f"{field}[{number}] is {_shown(item)}; it has to be an object.")
    return found


def _text(value: object, field: str, *, empty: bool = False) -> str:
    if value is None:
        raise _invalid(f"{field} is missing.")
    if not isinstance(value, str) or not (value or empty):
        raise _invalid(f"{field} is {_shown(value)}; it has to be a text.")
    _utf8(value, field)
    return value


def _utf8(value: str, field: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:  # Half of a surrogate pair, as an escape.
        raise _invalid(f"{field} has a text that is not valid Unicode.") from error


def _flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise _invalid(f"{field} is {_shown(value)}; it has to be true or false.")
    return value


def _parameters(holder: Object, field: str) -> dict[str, Parameter]:
    found = holder.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _invalid(f"{field} is {_shown(found)}; it has to be an object.")
    for name, value in found.items():
        _utf8(name, field)
        if type(value) is str:
            _utf8(value, f"{field}.{name}")
        elif type(value) is int:
            if not -(2**63) <= value < 2**64:
                raise _invalid(f"{field}.{name} is {_shown(value)}, which 64 bits do not hold.")
        elif type(value) is not bool and not (type(value) is float and math.isfinite(value)):
            raise _invalid(
                f"{field}.{name} is {_shown(value)}; it has to be a number, a text, true or false."
            )
    return found


def _refuse_extensions(parameters: Mapping[str, Parameter], field: str) -> None:
    for name in _OF_OTHER_EXTENSIONS:
        if name in parameters:
            raise RequestError(
                ErrorKind.UNSUPPORTED, f"{field}.{name} is of an extension that this server lacks."
            )


def _input(entry: Object, field: str, body: memoryview, at: int) -> tuple[Value, int]:
    """An input, whose binary data would begin at a byte of the body, and where that ends."""
    name = entry["name"]
    datatype = _text(entry.get("datatype"), f"{field}.datatype")
    check_datatype(datatype, name)
    shape = _shape(entry.get("shape"), f"{field}.shape")
    element_count(shape, name)
    parameters = _parameters(entry, f"{field}.parameters")
    _refuse_extensions(parameters, f"{field}.parameters")
    data = entry.get("data")
    if "binary_data_size" not in parameters:
        if data is None:
            raise _invalid(f"{field}.data is missing, and there is no binary_data_size.")
        return _from_json(data, datatype, shape, f"{field}.data"), at

    if data is not None:
        raise _invalid(f"{field} has both data and binary_data_size.")
    size, field = parameters["binary_data_size"], f"{field}.parameters.binary_data_size"
    if type(size) is not int or size < 0:
        raise _invalid(f"{field} is {_shown(size)}; it has to be a number of bytes.")
    end = at + size
    if end > len(body):
        raise _invalid(
            f"{field} is {size}, and the body has {counted(len(body) - at, 'byte')} of it."
        )
    return _from_bytes(body[at:end], datatype, shape, name), end


def _shape(found: object, field: str) -> tuple[int, ...]:
    if found is None:
        raise _invalid(f"{field} is missing.")
    if not isinstance(found, list) or any(type(size) is not int for size in found):
        raise _invalid(f"{field} is {_shown(found)}; it has to be a list of sizes from 0.")
    return tuple(found)


def _from_bytes(data: memoryview, datatype: str, shape: tuple[int, ...], name: str) -> Value:
    if datatype == BYTES:
        return strings_from_bytes(data, shape, name)
    return numbers_from_bytes(data, datatype, shape, name)


def _from_json(data: object, datatype: str, shape: tuple[int, ...], field: str) -> Value:
    values = _flat(data, shape, field)
    if datatype == BYTES:
        _check_types(values, {str}, datatype, field)
        return Strings(shape, tuple(_utf8(value, field) for value in values))
    if datatype not in _TYPECODES:
        raise _invalid(f"{field} is JSON, in which {datatype} has no form: send it as binary data.")
    if datatype == "BOOL":
        _check_types(values, {bool}, datatype, field)
    elif datatype in ("FP32", "FP64"):
        _check_types(values, {float, int, _Constant}, datatype, field)
    else:
        _check_types(values, {int}, datatype, field)
    if not values:
        return torch.empty(shape, dtype=DTYPES[datatype])
    try:
        packed = array(_TYPECODES[datatype], values)
    except OverflowError as error:
        raise _out_of_range(datatype, field) from error
    tensor = torch.frombuffer(packed, dtype=DTYPES[datatype])
    if tensor.is_floating_point():
        for (position,) in tensor.isinf().nonzero().tolist():
            if type(values[position]) is not _Constant:
                raise _out_of_range(datatype, field)
    return tensor.reshape(shape)


def _out_of_range(datatype: str, field: str) -> RequestError:
    return _invalid(f"{field} holds a number that is out of the range of {datatype}.")


def _flat(data: object, shape: tuple[int, ...], field: str) -> list[Any]:
    """The elements in row-major order of a list that is flat, or nested as the shape is."""
    if not isinstance(data, list):
        raise _invalid(f"{field} is {_shown(data)}; it has to be a list.")
    values = data
    if len(shape) > 1 and values and isinstance(values[0], list):
        fits = len(values) == shape[0]
        for size in shape[1:]:
            fits = fits and all(type(row) is list and len(row) == size for row in values)
            if not fits:
                raise _invalid(f"{field} is not nested as the shape {list(shape)} is.")
            values = list(itertools.chain.from_iterable(values))
    if len(values) != math.prod(shape):
        raise _invalid(
            f"{field} has {counted(len(values), 'element')}, and the shape {list(shape)} "
            f"takes {math.prod(shape)}."
        )
    return values


def _check_types(values: list[Any], allowed: set[type], datatype: str, field: str) -> None:
    if not set(map(type, values)) <= allowed:
        wrong = next(value for value in values if type(value) not in allowed)
        raise _invalid(f"{field} holds {_shown(wrong)}, which is no {datatype}.")


def _binary(value: Value) -> bytes | memoryview:
    if isinstance(value, Strings):
        return bytes_of(value)
    return value.reshape(-1).view(torch.uint8).numpy().data


def _plain(value: Value, name: str) -> list[Any]:
    """A flat list of an output's elements, as JSON takes them."""
    remedy = "Ask for it as binary data."
    if isinstance(value, Strings):
        try:
            return [element.decode() for element in value.values]
        except UnicodeDecodeError as error:
            what = f"Output {_shown(name)} has an element that is no UTF-8, and so no JSON."
            raise RequestError(ErrorKind.INVALID, what, remedy=remedy) from error
    datatype = DATATYPES[value.dtype]
    if datatype not in _TYPECODES:
        what = f"Output {_shown(name)} is of {datatype}, which has no form in JSON."
        raise RequestError(ErrorKind.INVALID, what, remedy=remedy)
    plain: list[Any] = value.reshape(-1).tolist()
    return plain


def _statistics(model: ModelStatistics) -> Object:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": {
            "success": model.success,
            "fail": model.fail,
            "queue": model.queue,
            "compute_input": model.compute_input,
            "compute_infer": model.compute_infer,
            "compute_output": model.compute_output,
            # There is no cache, but Triton's clients look for these.
            "cache_hit": Duration(),
            "cache_miss": Duration(),
        },
        "batch_stats": [
            {"batch_size": rows, "compute_infer": took} for rows, took in model.batches.items()
        ],
    }
