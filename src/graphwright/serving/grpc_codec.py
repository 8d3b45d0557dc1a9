"""Protobuf messages to the classes of protocol.py, and back; nothing here knows of a connection.

Numbers are sent raw or typed (`contents`), and answered raw, as Triton does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from open_inference.grpc import protocol as messages

from ..calls.options import in_brief
from ..calls.plurals import counted
from . import grpc_extensions as extensions
from . import requests
from .off_loop import SMALL
from .protocol import (
    BYTES,
    Duration,
    ErrorKind,
    IndexEntry,
    InferRequest,
    InferResponse,
    ModelConfiguration,
    ModelMetadata,
    ModelStatistics,
    Parameter,
    Parameters,
    RequestError,
    ServerMetadata,
    Strings,
    TensorMetadata,
    Value,
    datatype_of,
)

# Protobuf has no longer messages; some room is left for all that is not data.
MOST_BYTES = 2**31 - 2**20
# Where typed contents of a datatype are, and the type code of Python's arrays for it, which refuse
# what is out of range.
_TYPED: Mapping[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", "B"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
}
_SHARED_MEMORY = "shared_memory_region"
_CLASSIFICATION = "classification"


def infer_request(
    message: messages.ModelInferRequest,
    received: float,
    client_s: float | None,
    default_s: float | None,
) -> InferRequest:
    """What a client asks for.

    Args:
        message: of the client.
        received: when it was read, on the clock of `time.monotonic`.
        client_s: the seconds that its call leaves; None for no deadline.
        default_s: the seconds for a request without any deadline.

    Raises:
        RequestError: INVALID, the message contradicts itself or makes no sense; UNSUPPORTED, it
            asks for shared memory or classification.
    """
    requests.check_names((each.name for each in message.inputs), "input")
    requests.check_names((each.name for each in message.outputs), "output")
    for tensor in (*message.inputs, *message.outputs):
        for extension in (_SHARED_MEMORY, _CLASSIFICATION):
            if extension in tensor.parameters:
                what = f"The tensor {in_brief(tensor.name)} has the parameter {extension!r}, "
                raise RequestError(
                    ErrorKind.UNSUPPORTED, f"{what}which this server does not support."
                )
    parameters = _parameters(message.parameters)
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        inputs=_inputs(message),
        outputs=tuple(each.name for each in message.outputs),
        parameters=parameters,
        deadline=requests.deadline(received, parameters, client_s, default_s),
        received=received,
    )


def writes_quickly(response: InferResponse) -> bool:
    """Whether `infer_response` takes so little time that a loop can wait for it."""
    size = 0
    for value in response.outputs.values():
        if isinstance(value, Strings):
            size += sum(map(len, value.values)) + 4 * len(value.values)
        else:
            size += value.nbytes
    return size <= SMALL


def infer_response(response: InferResponse) -> messages.ModelInferResponse:
    """The message for an answer, with its outputs in their order.

    Raises:
        RequestError: TOO_LARGE, the outputs are more than a message holds.
    """
    contents = [requests.bytes_of(value) for value in response.outputs.values()]
    size = sum(map(len, contents))
    if size > MOST_BYTES:
        raise RequestError(
            ErrorKind.TOO_LARGE,
            f"The outputs have {size} bytes, and a message of gRPC holds {MOST_BYTES}.",
            remedy="Ask for fewer outputs or rows at once, or over HTTP.",
        )
    return messages.ModelInferResponse(
        model_name=response.model,
        model_version=response.version,
        id=response.id,
        parameters={key: _parameter_message(each) for key, each in response.parameters.items()},
        outputs=[
            messages.ModelInferResponse.InferOutputTensor(
                name=name, datatype=datatype_of(value), shape=value.shape
            )
            for name, value in response.outputs.items()
        ],
        raw_output_contents=contents,
    )


def server_metadata(metadata: ServerMetadata) -> messages.ServerMetadataResponse:
    """The message that describes the server."""
    return messages.ServerMetadataResponse(
        name=metadata.name, version=metadata.version, extensions=metadata.extensions
    )


def model_metadata(metadata: ModelMetadata) -> messages.ModelMetadataResponse:
    """The message that describes a model."""
    return messages.ModelMetadataResponse(
        name=metadata.name,
        versions=metadata.versions,
        platform=metadata.platform,
        inputs=_tensors(metadata.inputs),
        outputs=_tensors(metadata.outputs),
    )


def statistics(entries: Iterable[ModelStatistics]) -> Any:
    """The message that says what models have done."""
    return extensions.ModelStatisticsResponse(
        model_stats=[
            {
                "name": each.name,
                "version": each.version,
                "last_inference": each.last_inference,
                "inference_count": each.inference_count,
                "execution_count": each.execution_count,
                "inference_stats": {
                    "success": _duration(each.success),
                    "fail": _duration(each.fail),
                    "queue": _duration(each.queue),
                    "compute_input": _duration(each.compute_input),
                    "compute_infer": _duration(each.compute_infer),
                    "compute_output": _duration(each.compute_output),
                },
                "batch_stats": [
                    {"batch_size": size, "compute_infer": _duration(taken)}
                    for size, taken in each.batches.items()
                ],
            }
            for each in entries
        ]
    )


def configuration(found: ModelConfiguration) -> Any:
    """The message that says how a model is called."""
    metadata = found.metadata

    def tensors(every: Sequence[TensorMetadata]) -> list[dict[str, Any]]:
        return [
            {
                "name": each.name,
                "data_type": extensions.DATA_TYPES[each.datatype],
                "dims": found.dims(each),
            }
            for each in every
        ]

    return extensions.ModelConfigResponse(
        config={
            "name": metadata.name,
            "platform": metadata.platform,
            "max_batch_size": found.max_batch_size,
            "input": tensors(metadata.inputs),
            "output": tensors(metadata.outputs),
        }
    )


def index(entries: Iterable[IndexEntry]) -> Any:
    """The message that lists the models of the repository."""
    return extensions.RepositoryIndexResponse(
        models=[
            {
                "name": each.name,
                "version": each.version,
                "state": each.state,
                "reason": each.reason,
            }
            for each in entries
        ]
    )


def load_parameters(message: Any) -> Parameters:
    """The parameters of a RepositoryModelLoadRequest.

    Raises:
        RequestError: INVALID, one has no value; UNSUPPORTED, one is a file.
    """
    entries = {entry.key: entry.value for entry in message.parameters}
    for key, value in entries.items():
        if value.HasField("bytes_param"):
            what = f"The parameter {in_brief(key)} is a file, and this server takes none."
            raise RequestError(ErrorKind.UNSUPPORTED, what)
    return _parameters(entries)


def _inputs(message: messages.ModelInferRequest) -> dict[str, Value]:
    raw = message.raw_input_contents
    if not raw:
        return {tensor.name: _typed(tensor) for tensor in message.inputs}
    for tensor in message.inputs:
        if tensor.contents.ListFields():
            raise requests.invalid(
                f"The tensor {in_brief(tensor.name)} has typed contents beside raw ones.",
                "Send all inputs in one of the two ways.",
            )
    if len(raw) != len(message.inputs):
        lacking = [in_brief(tensor.name) for tensor in message.inputs[len(raw) :]]
        raise requests.invalid(
            f"The message has {counted(len(raw), 'raw content')} for "
            f"{counted(len(message.inputs), 'input')}"
            + (f": none for {', '.join(lacking[:10])}." if lacking else ".")
        )
    return {
        tensor.name: _raw(tensor, data) for tensor, data in zip(message.inputs, raw, strict=True)
    }


def _raw(tensor: messages.ModelInferRequest.InferInputTensor, data: bytes) -> Value:
    requests.check_datatype(tensor.datatype, tensor.name)
    if tensor.datatype == BYTES:
        return requests.strings_from_bytes(data, tensor.shape, tensor.name)
    return requests.numbers_from_bytes(data, tensor.datatype, tensor.shape, tensor.name)


def _typed(tensor: messages.ModelInferRequest.InferInputTensor) -> Value:
    name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
    requests.check_datatype(datatype, name)
    count = requests.element_count(shape, name)
    if datatype == BYTES:
        return requests.strings(_contents(tensor, "bytes_contents"), count, shape, name)
    if datatype not in _TYPED:
        raise requests.invalid(
            f"The tensor {in_brief(name)} of {datatype} has no raw contents.",
            f"There are no typed contents for {datatype}: send it in raw_input_contents.",
        )
    field, code = _TYPED[datatype]
    values = _contents(tensor, field)
    requests.check_count(len(values), count, shape, name)
    try:
        elements = array(code, values)
    except OverflowError:
        what = f"The tensor {in_brief(name)} has elements that are out of the range of {datatype}."
        raise requests.invalid(what) from None
    return requests.numbers(elements, datatype, shape, name)


def _contents(tensor: messages.ModelInferRequest.InferInputTensor, field: str) -> Sequence[Any]:
    """The typed contents of one field, if there are none in another."""
    for descriptor, _ in tensor.contents.ListFields():
        if descriptor.name != field:
            raise requests.invalid(
                f"The tensor {in_brief(tensor.name)} has {descriptor.name}, "
                f"and {tensor.datatype} has {field}."
            )
    values: Sequence[Any] = getattr(tensor.contents, field)
    return values


def _parameters(found: Mapping[str, Any]) -> dict[str, Parameter]:
    return {key: _parameter(key, message) for key, message in found.items()}


def _parameter(key: str, message: Any) -> Parameter:
    choice = message.WhichOneof("parameter_choice")
    if choice is None:
        raise requests.invalid(f"The parameter {in_brief(key)} has no value.")
    value: Parameter = getattr(message, choice)
    return value


def _parameter_message(value: Parameter) -> messages.InferParameter:
    if isinstance(value, bool):
        return messages.InferParameter(bool_param=value)
    if isinstance(value, int):
        if value < 2**63:
            return messages.InferParameter(int64_param=value)
        return messages.InferParameter(uint64_param=value)
    if isinstance(value, float):
        return messages.InferParameter(double_param=value)
    return messages.InferParameter(string_param=value)


def _tensors(
    tensors: Sequence[TensorMetadata],
) -> list[messages.ModelMetadataResponse.TensorMetadata]:
    return [
        messages.ModelMetadataResponse.TensorMetadata(
            name=each.name, datatype=each.datatype, shape=each.shape
        )
        for each in tensors
    ]


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
