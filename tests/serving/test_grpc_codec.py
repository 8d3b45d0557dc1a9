"""Messages of gRPC to requests and back, and all that a message may get wrong."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from open_inference.grpc import protocol as messages

from graphwright.serving import grpc_codec, requests
from graphwright.serving import grpc_extensions as extensions
from graphwright.serving.protocol import (
    BYTES,
    DTYPES,
    ErrorKind,
    InferRequest,
    InferResponse,
    RequestError,
    Strings,
)

Tensor = messages.ModelInferRequest.InferInputTensor


def message(*inputs: dict[str, Any], **fields: Any) -> messages.ModelInferRequest:
    return messages.ModelInferRequest(model_name="m", inputs=inputs, **fields)


def read(*inputs: dict[str, Any], **fields: Any) -> InferRequest:
    return grpc_codec.infer_request(message(*inputs, **fields), 100.0, None, None)


def raw(datatype: str, shape: list[int], name: str = "x") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


def typed(datatype: str, shape: list[int], **contents: Any) -> dict[str, Any]:
    return {**raw(datatype, shape), "contents": contents}


def some(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([[True, False, True]])
    if dtype.is_floating_point:
        return torch.tensor([[1.5, -2.25, float("inf")]], dtype=dtype)
    limits = torch.iinfo(dtype)
    return torch.tensor([[limits.min, 3, limits.max]], dtype=dtype)


@pytest.mark.parametrize("datatype", DTYPES)
def test_raw_numbers_come_and_go_as_they_are(datatype: str) -> None:
    expected = some(DTYPES[datatype])
    data = requests.bytes_of(expected)
    assert len(data) == 3 * expected.element_size()
    found = read(raw(datatype, [1, 3]), raw_input_contents=[data]).inputs["x"]
    assert isinstance(found, torch.Tensor)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    answer = grpc_codec.infer_response(InferResponse("m", "1", "", {"y": found}))
    assert answer.outputs[0].datatype == datatype
    assert list(answer.outputs[0].shape) == [1, 3]
    assert answer.raw_output_contents[0] == data
    found.zero_()  # It may be written to, and is nobody else's.


def test_raw_numbers_are_little_endian() -> None:
    data = struct.pack("<2i", 1, -2)
    found = read(raw("INT32", [2]), raw_input_contents=[data]).inputs["x"]
    assert torch.equal(found, torch.tensor([1, -2], dtype=torch.int32))


def test_an_answer_may_be_strided_empty_and_a_single_number() -> None:
    grid = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    outputs = {"t": grid.t(), "none": torch.empty(0, 4), "one": torch.tensor(7, dtype=torch.int8)}
    answer = grpc_codec.infer_response(InferResponse("m", "", "", outputs))
    assert list(answer.raw_output_contents) == [struct.pack("<6h", 0, 3, 1, 4, 2, 5), b"", b"\x07"]
    assert [list(each.shape) for each in answer.outputs] == [[3, 2], [0, 4], []]


FIELDS = {
    "BOOL": ("bool_contents", [True, False, True]),
    "UINT8": ("uint_contents", [0, 3, 255]),
    "UINT16": ("uint_contents", [0, 3, 2**16 - 1]),
    "UINT32": ("uint_contents", [0, 3, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 3, 2**64 - 1]),
    "INT8": ("int_contents", [-128, 3, 127]),
    "INT16": ("int_contents", [-(2**15), 3, 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 3, 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 3, 2**63 - 1]),
    "FP32": ("fp32_contents", [1.5, -2.25, float("inf")]),
    "FP64": ("fp64_contents", [1.5, -2.25, float("inf")]),
}


@pytest.mark.parametrize("datatype", FIELDS)
def test_typed_numbers(datatype: str) -> None:
    field, values = FIELDS[datatype]
    found = read(typed(datatype, [1, 3], **{field: values})).inputs["x"]
    assert isinstance(found, torch.Tensor)
    assert found.dtype is DTYPES[datatype]
    assert torch.equal(found, some(DTYPES[datatype]))


def test_strings_raw_and_typed() -> None:
    values = (b"a", b"", b"\xff\x00z")
    expected = Strings((3, 1), values)
    data = requests.bytes_of(expected)
    assert data == b"\1\0\0\0a\0\0\0\0\3\0\0\0\xff\0z"
    assert read(raw(BYTES, [3, 1]), raw_input_contents=[data]).inputs["x"] == expected
    assert read(typed(BYTES, [3, 1], bytes_contents=values)).inputs["x"] == expected
    answer = grpc_codec.infer_response(InferResponse("m", "", "", {"y": expected}))
    assert answer.outputs[0].datatype == BYTES
    assert answer.raw_output_contents[0] == data


def test_nothing_is_a_tensor_too() -> None:
    found = read(raw("FP32", [0, 2]), raw(BYTES, [0], "s")).inputs
    assert found["x"].shape == (0, 2)
    assert found["s"] == Strings((0,), ())
    assert read(raw("FP32", [0, 2]), raw_input_contents=[b""]).inputs["x"].shape == (0, 2)


def test_all_else_of_a_request() -> None:
    found = read(
        model_version="2",
        id="mine",
        outputs=[{"name": "b"}, {"name": "a"}],
        parameters={
            "yes": {"bool_param": False},
            "count": {"int64_param": -3},
            "large": {"uint64_param": 2**64 - 1},
            "share": {"double_param": 0.5},
            "word": {"string_param": ""},
        },
    )
    assert found == InferRequest(
        model="m",
        version="2",
        id="mine",
        inputs={},
        outputs=("b", "a"),
        parameters={"yes": False, "count": -3, "large": 2**64 - 1, "share": 0.5, "word": ""},
        received=100.0,
    )
    assert found.parameters["yes"] is False


def test_parameters_of_an_answer() -> None:
    given = {"yes": True, "count": -3, "large": 2**64 - 1, "share": 0.5, "word": "w"}
    sent = grpc_codec.infer_response(InferResponse("m", "1", "mine", {}, given))
    assert (sent.model_name, sent.model_version, sent.id) == ("m", "1", "mine")
    assert {
        key: value.WhichOneof("parameter_choice") for key, value in sent.parameters.items()
    } == {
        "yes": "bool_param",
        "count": "int64_param",
        "large": "uint64_param",
        "share": "double_param",
        "word": "string_param",
    }
    back = messages.ModelInferRequest(parameters=sent.parameters)
    assert grpc_codec.infer_request(back, 0.0, None, None).parameters == given


@pytest.mark.parametrize(
    ("timeout", "client_s", "default_s", "expected"),
    [
        (None, None, None, None),
        (None, None, 3.0, 103.0),
        (None, 2.0, 1.0, 102.0),
        (500_000, None, 0.1, 100.5),
        (500_000, 2.0, None, 100.5),
        (5_000_000, 2.0, None, 102.0),
        (0, None, 3.0, 103.0),
        (None, 0.0, 3.0, 100.0),
    ],
)
def test_deadlines(
    timeout: int | None, client_s: float | None, default_s: float | None, expected: float | None
) -> None:
    parameters = {} if timeout is None else {"timeout": {"int64_param": timeout}}
    sent = message(parameters=parameters)
    assert grpc_codec.infer_request(sent, 100.0, client_s, default_s).deadline == expected


F4 = b"\0" * 4
CONFUSED: dict[str, tuple[messages.ModelInferRequest, str]] = {
    "too few bytes": (message(raw("FP32", [2]), raw_input_contents=[F4]), "4 bytes"),
    "too many bytes": (message(raw("FP16", [1]), raw_input_contents=[F4]), "4 bytes"),
    "no bytes": (message(raw("FP32", [1]), raw_input_contents=[b""]), "0 bytes"),
    "negative": (message(raw("FP32", [-1, -1]), raw_input_contents=[F4]), "negative size"),
    "wrapped": (message(raw("FP32", [2**33, 2**31]), raw_input_contents=[b""]), "too large"),
    "huge": (message(raw("FP32", [2**62]), raw_input_contents=[F4]), "too large"),
    "huge and empty": (
        message(raw("FP32", [0, 2**62, 2**62]), raw_input_contents=[b""]),
        "too large",
    ),
    "deep": (message(raw("FP32", [1] * 65), raw_input_contents=[F4]), "65 dimensions"),
    "huge strings": (message(raw(BYTES, [2**40]), raw_input_contents=[b""]), "0 elements"),
    "huge typed": (message(typed("INT8", [2**40], int_contents=[1])), "1 element"),
    "no such datatype": (message(raw("FP31", [1]), raw_input_contents=[F4]), "FP31"),
    "lower case": (message(raw("fp32", [1]), raw_input_contents=[F4]), "fp32"),
    "no datatype": (message(raw("", [1]), raw_input_contents=[F4]), "unknown datatype"),
    "no such typed datatype": (message(typed("FP31", [1], fp32_contents=[1])), "FP31"),
    "neither true nor false": (
        message(raw("BOOL", [2]), raw_input_contents=[b"\1\2"]),
        "neither 0 nor 1",
    ),
    "too few contents": (
        message(raw("FP32", [1], "w"), raw("FP32", [1]), raw_input_contents=[F4]),
        "1 raw content for 2 inputs: none for 'x'",
    ),
    "both": (
        message(typed("FP32", [1], fp32_contents=[1]), raw_input_contents=[F4]),
        "beside raw ones",
    ),
    "too few typed": (message(typed("FP32", [2], fp32_contents=[1])), "1 element"),
    "too many typed": (message(typed("FP32", [], fp32_contents=[1, 2])), "2 elements"),
    "no contents": (message(raw("FP32", [1])), "0 elements"),
    "wrong kind": (message(typed("INT64", [1], int_contents=[1])), "has int64_contents"),
    "two kinds": (
        message(typed("FP32", [1], fp32_contents=[1], int_contents=[1])),
        "int_contents",
    ),
    "strings as numbers": (message(typed("FP32", [1], bytes_contents=[F4])), "bytes_contents"),
    "numbers as strings": (message(typed(BYTES, [1], fp32_contents=[1])), "fp32_contents"),
    "half": (message(typed("FP16", [1], fp32_contents=[1])), "raw_input_contents"),
    "brain": (message(typed("BF16", [1], fp32_contents=[1])), "raw_input_contents"),
    "above INT8": (message(typed("INT8", [2], int_contents=[1, 128])), "range of INT8"),
    "below INT16": (message(typed("INT16", [1], int_contents=[-(2**15) - 1])), "range of INT16"),
    "above UINT8": (message(typed("UINT8", [1], uint_contents=[256])), "range of UINT8"),
    "above UINT16": (message(typed("UINT16", [1], uint_contents=[2**16])), "range of UINT16"),
    "length cut": (message(raw(BYTES, [1]), raw_input_contents=[b"\1\0"]), "length of an element"),
    "element cut": (
        message(raw(BYTES, [1]), raw_input_contents=[b"\2\0\0\0a"]),
        "it has 1 of 2 bytes",
    ),
    "too few strings": (message(raw(BYTES, [2]), raw_input_contents=[F4]), "1 element"),
    "too many strings": (message(raw(BYTES, [0]), raw_input_contents=[F4]), "1 element"),
    "too few typed strings": (message(typed(BYTES, [2], bytes_contents=[b""])), "1 element"),
    "twice": (message(raw("FP32", [0]), raw("FP32", [0])), "two inputs of the name 'x'"),
    "output twice": (
        message(outputs=[{"name": "x"}, {"name": "x"}]),
        "two outputs of the name 'x'",
    ),
    "empty parameter": (message(parameters={"x": {}}), "'x' has no value"),
}


@pytest.mark.parametrize("what", CONFUSED)
def test_a_confused_request_is_refused_and_its_tensor_named(what: str) -> None:
    sent, text = CONFUSED[what]
    with pytest.raises(RequestError) as caught:
        grpc_codec.infer_request(sent, 0.0, None, None)
    assert caught.value.kind is ErrorKind.INVALID
    assert text in str(caught.value)
    assert "'x'" in str(caught.value)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (message(raw("FP32", [0], "")), "An input has no name"),
        (message(outputs=[{}]), "An output has no name"),
        (message(raw_input_contents=[F4]), "1 raw content for 0 inputs"),
        (message(parameters={"timeout": {"int64_param": -1}}), "'timeout' is -1"),
        (message(parameters={"timeout": {"bool_param": True}}), "'timeout' is True"),
        (message(parameters={"timeout": {"string_param": "1s"}}), "'timeout' is '1s'"),
    ],
)
def test_a_confused_request_with_no_tensor_to_name(
    sent: messages.ModelInferRequest, text: str
) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        grpc_codec.infer_request(sent, 0.0, None, None)
    assert caught.value.kind is ErrorKind.INVALID


def test_what_is_not_supported() -> None:
    shared = {"shared_memory_region": {"string_param": "r"}}
    classes = {"classification": {"int64_param": 3}}
    for sent in (
        message({**raw("FP32", [1]), "parameters": shared}),
        message(outputs=[{"name": "x", "parameters": shared}]),
        message(outputs=[{"name": "x", "parameters": classes}]),
    ):
        with pytest.raises(RequestError, match="'x'") as caught:
            grpc_codec.infer_request(sent, 0.0, None, None)
        assert caught.value.kind is ErrorKind.UNSUPPORTED


def test_a_message_does_not_hold_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_codec, "MOST_BYTES", 15)
    with pytest.raises(RequestError, match="16 bytes") as caught:
        grpc_codec.infer_response(InferResponse("m", "", "", {"y": torch.zeros(4)}))
    assert caught.value.kind is ErrorKind.TOO_LARGE


def test_parameters_to_load_a_model() -> None:
    def sent(**values: dict[str, Any]) -> Any:
        entries = [{"key": key, "value": value} for key, value in values.items()]
        return extensions.RepositoryModelLoadRequest(parameters=entries)

    plain = sent(config={"string_param": "{}"}, warm={"bool_param": False}, n={"int64_param": 0})
    assert grpc_codec.load_parameters(plain) == {"config": "{}", "warm": False, "n": 0}
    for values, kind in (({"bytes_param": b""}, ErrorKind.UNSUPPORTED), ({}, ErrorKind.INVALID)):
        with pytest.raises(RequestError, match="'x'") as caught:
            grpc_codec.load_parameters(sent(x=values))
        assert caught.value.kind is kind
