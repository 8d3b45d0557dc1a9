"""What the server and its transports say to each other: requests, responses, tensors, errors.

The words are those of the Open Inference Protocol, version 2. HTTP and gRPC translate to and from
these classes, and know nothing of models; models know nothing of HTTP and gRPC.
Source: https://github.com/kserve/open-inference-protocol.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import torch

from ..calls.plurals import counted
from ..errors import GraphwrightError

BYTES = "BYTES"
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
DATATYPES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# A parameter of a request or a tensor.
Parameter: TypeAlias = bool | int | float | str
Parameters: TypeAlias = Mapping[str, Parameter]


class ErrorKind(Enum):
    """What is wrong with a request, or with the server."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    NOT_FOUND = "not found"
    TOO_LARGE = "too large"
    OVERLOADED = "overloaded"
    TOO_LATE = "too late"
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


class RequestError(GraphwrightError):
    """A request that is not answered.

    Args:
        kind: what is wrong.
        what: what happened, as one sentence.
        remedy: what the client can do.
        retry_after_s: when the client may ask again, in seconds.
    """

    def __init__(
        self,
        kind: ErrorKind,
        what: str,
        *,
        remedy: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(what, remedy=remedy)
        self.kind = kind
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Strings:
    """A tensor of BYTES.

    Attributes:
        shape: its shape.
        values: its elements in row-major order.
    """

    shape: tuple[int, ...]
    values: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.values):
            raise ValueError(f"The shape {self.shape} has {counted(len(self.values), 'value')}.")


# Numbers are tensors on the CPU, contiguous.
Value: TypeAlias = torch.Tensor | Strings


def datatype_of(value: Value) -> str:
    """The protocol's name of a value's datatype."""
    return BYTES if isinstance(value, Strings) else DATATYPES[value.dtype]


@dataclass(frozen=True)
class TensorMetadata:
    """An input or output of a model.

    Attributes:
        name: its name.
        datatype: such as "FP32".
        shape: with -1 for a size that varies.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelMetadata:
    """What a model takes and gives."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True)
class ModelConfiguration:
    """How a model is called, as the model configuration extension says it.

    Attributes:
        metadata: what it takes and gives.
        max_batch_size: the rows of the largest batch, if the first dimension of all tensors is the
            batch; else 0.
    """

    metadata: ModelMetadata
    max_batch_size: int = 0

    def dims(self, tensor: TensorMetadata) -> tuple[int, ...]:
        """The shape of an input or output, without the batch."""
        return tensor.shape[1:] if self.max_batch_size else tensor.shape


@dataclass(frozen=True)
class ServerMetadata:
    """Name, version and extensions of a server."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True)
class IndexEntry:
    """A model of the repository.

    Attributes:
        name: of the model.
        version: of the model.
        state: "READY", "LOADING", "UNLOADING" or "UNAVAILABLE".
        reason: why it is not ready.
    """

    name: str
    version: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class InferRequest:
    """A request for one answer of one model.

    Attributes:
        model: its name.
        version: its version; "" for the server's choice.
        id: the client's own name for the request.
        inputs: by name.
        outputs: names of the wanted outputs; empty for all.
        parameters: of the request.
        deadline: until when an answer is of use, on the clock of `time.monotonic`; None for ever.
        received: when the request was read, on the same clock.
    """

    model: str
    version: str
    id: str
    inputs: Mapping[str, Value]
    outputs: tuple[str, ...] = ()
    parameters: Parameters = field(default_factory=dict)
    deadline: float | None = None
    received: float = 0.0


@dataclass(frozen=True)
class InferResponse:
    """The answer to an InferRequest; `outputs` by name, in the order that was asked for."""

    model: str
    version: str
    id: str
    outputs: Mapping[str, Value]
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class Duration:
    """How often something was done, and how long that took in all, in nanoseconds."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True)
class ModelStatistics:
    """What a model has done, as the statistics extension says it.

    Attributes:
        name: of the model.
        version: of the model.
        last_inference: when the last request was answered, in milliseconds since 1970.
        inference_count: rows that were computed for clients.
        execution_count: batches that were computed.
        success: requests that were answered, from their receipt to the answer.
        fail: requests that were not.
        queue: what the requests that were answered waited.
        compute_input: for each of them, joining its batch and copying it to the device.
        compute_infer: for each of them, its batch in the model.
        compute_output: for each of them, copying its batch's results back and cutting them apart.
        batches: for each number of rows how often it was computed, and how long the model took.
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    batches: Mapping[int, Duration]
