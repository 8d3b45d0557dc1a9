"""Triton's extensions of the protocol as protobuf messages.

They are the model repository, model configuration and statistics; open-inference-grpc knows the
protocol itself only. What is described here agrees with Triton's grpc_service.proto and
model_config.proto on the wire, has a descriptor pool of its own, and so may be used beside any
other description of the same messages. Fields that this server neither reads nor writes are left
out, and a map is a list of its entries, which is the same on the wire.
Source: https://github.com/triton-inference-server/common/blob/main/protobuf/grpc_service.proto.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "inference"
# The fields of each message, numbered from 1 and on from where a number is given.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "RepositoryIndexRequest": ("string repository_name", "bool ready"),
    "ModelIndex": ("string name", "string version", "string state", "string reason"),
    "RepositoryIndexResponse": ("repeated ModelIndex models",),
    # One of the four.
    "ModelRepositoryParameter": (
        "bool bool_param",
        "int64 int64_param",
        "string string_param",
        "bytes bytes_param",
    ),
    "ParametersEntry": ("string key", "ModelRepositoryParameter value"),
    "RepositoryModelLoadRequest": (
        "string repository_name",
        "string model_name",
        "repeated ParametersEntry parameters",
    ),
    "RepositoryModelLoadResponse": (),
    "RepositoryModelUnloadRequest": ("string repository_name", "string model_name"),
    "RepositoryModelUnloadResponse": (),
    "ModelStatisticsRequest": ("string name", "string version"),
    "StatisticDuration": ("uint64 count", "uint64 ns"),
    "InferStatistics": (
        "StatisticDuration success",
        "StatisticDuration fail",
        "StatisticDuration queue",
        "StatisticDuration compute_input",
        "StatisticDuration compute_infer",
        "StatisticDuration compute_output",
    ),
    "InferBatchStatistics": (
        "uint64 batch_size",
        "StatisticDuration compute_input",
        "StatisticDuration compute_infer",
    ),
    "ModelStatistics": (
        "string name",
        "string version",
        "uint64 last_inference",
        "uint64 inference_count",
        "uint64 execution_count",
        "InferStatistics inference_stats",
        "repeated InferBatchStatistics batch_stats",
    ),
    "ModelStatisticsResponse": ("repeated ModelStatistics model_stats",),
    "ModelConfigRequest": ("string name", "string version"),
    "ModelInput": ("string name", "int32 data_type", "4 repeated int64 dims"),
    "ModelOutput": ("string name", "int32 data_type", "repeated int64 dims"),
    "ModelConfig": (
        "string name",
        "string platform",
        "4 int32 max_batch_size",
        "repeated ModelInput input",
        "repeated ModelOutput output",
    ),
    "ModelConfigResponse": ("ModelConfig config",),
}
# Numbers of the enumeration DataType.
DATA_TYPES = {
    "BOOL": 1,
    "UINT8": 2,
    "UINT16": 3,
    "UINT32": 4,
    "UINT64": 5,
    "INT8": 6,
    "INT16": 7,
    "INT32": 8,
    "INT64": 9,
    "FP16": 10,
    "FP32": 11,
    "FP64": 12,
    "BYTES": 13,
    "BF16": 14,
}
_CHOICES = {"ModelRepositoryParameter": "parameter_choice"}


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="graphwright_extensions.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _CHOICES:
            message.oneof_decl.add(name=_CHOICES[name])
        number = 0
        for written in fields:
            *given, kind, called = written.split()
            number = int(given.pop(0)) if given and given[0].isdigit() else number + 1
            field = message.field.add(name=called, number=number)
            field.label = field.LABEL_REPEATED if given else field.LABEL_OPTIONAL
            if kind in _MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = field.Type.Value(f"TYPE_{kind.upper()}")
            if name in _CHOICES:
                field.oneof_index = 0
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(_described().SerializeToString())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ModelRepositoryParameter = _message("ModelRepositoryParameter")
ModelConfigRequest = _message("ModelConfigRequest")
ModelConfigResponse = _message("ModelConfigResponse")
ModelStatisticsRequest = _message("ModelStatisticsRequest")
ModelStatisticsResponse = _message("ModelStatisticsResponse")
RepositoryIndexRequest = _message("RepositoryIndexRequest")
RepositoryIndexResponse = _message("RepositoryIndexResponse")
RepositoryModelLoadRequest = _message("RepositoryModelLoadRequest")
RepositoryModelLoadResponse = _message("RepositoryModelLoadResponse")
RepositoryModelUnloadRequest = _message("RepositoryModelUnloadRequest")
RepositoryModelUnloadResponse = _message("RepositoryModelUnloadResponse")
