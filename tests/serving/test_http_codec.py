"""Bodies to requests and answers to bodies: nothing is lost, nothing wrong gets through."""

from __future__ import annotations

import gzip
import json
import math
import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphwright.serving import http_codec as codec
from graphwright.serving.http_codec import BinaryOutputs
from graphwright.serving.protocol import (
    DTYPES,
    Duration,
    ErrorKind,
    IndexEntry,
    InferRequest,
    InferResponse,
    ModelMetadata,
    ModelStatistics,
    RequestError,
    Strings,
    TensorMetadata,
    Value,
    datatype_of,
)

LIMIT = 1 << 20
IN_JSON = sorted(set(DTYPES) - {"FP16", "BF16"})
ALL_BINARY = BinaryOutputs(True, {})
ALL_JSON = BinaryOutputs(False, {})


def decoded(
    head: Any, tail: bytes = b"", *, length: int | None = None, timeout_s: float | None = None
) -> tuple[InferRequest, BinaryOutputs]:
    """The request of a JSON value, or of bytes, with binary data behind it."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    if length is None and tail:
        length = len(text)
    free = codec.lead(length)
    body = memoryview(bytearray(free) + text + tail)[free:]
    return codec.decode_infer(
        body, length, model="m", version="", received=100.0, timeout_s=timeout_s
    )


def an_input(datatype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, **more}


def asked(datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"inputs": [an_input(datatype, shape, data=data)]}


def asked_binary(datatype: str, shape: list[int], size: Any) -> dict[str, Any]:
    return {"inputs": [an_input(datatype, shape, parameters={"binary_data_size": size})]}


def x_of(request: InferRequest) -> Value:
    return request.inputs["x"]


def same(one: Value, other: Value) -> bool:
    """Whether two values are the same, bit for bit."""
    if isinstance(one, Strings) or isinstance(other, Strings):
        return one == other
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


@st.composite
def tensors(draw: st.DrawFn, names: list[str]) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from(names))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape)
    if dtype is torch.bool:
        flags = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return torch.tensor(flags, dtype=dtype).reshape(shape)
    size = count * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    return (
        torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape).to(dtype)
    )


@st.composite
def strings(draw: st.DrawFn, elements: st.SearchStrategy[bytes]) -> Strings:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape)
    values = draw(st.lists(elements, min_size=count, max_size=count))
    return Strings(tuple(shape), tuple(values))


ANY_VALUE = tensors(sorted(DTYPES)) | strings(st.binary(max_size=9))
JSON_VALUE = tensors(IN_JSON) | strings(st.text(max_size=9).map(str.encode))


def sent(values: dict[str, Value], binary: BinaryOutputs) -> InferRequest:
    """An answer with these outputs, read again as a request with these inputs."""
    _, parts = codec.encode_infer(InferResponse("m", "1", "", values), binary)
    head = json.loads(bytes(parts[0]))
    return decoded({"inputs": head["outputs"]}, b"".join(parts[1:]))[0]


class TestRoundTrip:
    @given(st.lists(ANY_VALUE, max_size=4))
    def test_binary(self, given_values: list[Value]) -> None:
        values = {f"x{n}": value for n, value in enumerate(given_values)}
        read = sent(values, ALL_BINARY).inputs
        assert list(read) == list(values)
        assert all(same(read[name], values[name]) for name in values)

    @given(JSON_VALUE)
    def test_json(self, value: Value) -> None:
        read = x_of(sent({"x": value}, ALL_JSON))
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            # The bits of a NaN are lost in JSON.
            assert read.dtype == value.dtype
            torch.testing.assert_close(read, value, rtol=0, atol=0, equal_nan=True)
        else:
            assert same(read, value)

    @given(st.dictionaries(st.text("abc", min_size=1), st.tuples(JSON_VALUE, st.booleans())))
    def test_mixed(self, given_values: dict[str, tuple[Value, bool]]) -> None:
        values = {name: value for name, (value, _) in given_values.items()}
        binary = BinaryOutputs(False, {name: flag for name, (_, flag) in given_values.items()})
        read = sent(values, binary).inputs
        assert {name: datatype_of(v) for name, v in read.items()} == {
            name: datatype_of(v) for name, v in values.items()
        }
        assert all(same(read[name], values[name]) for name in values if name in binary)

    @given(tensors(IN_JSON))
    def test_nested_lists_read_as_flat_ones(self, value: torch.Tensor) -> None:
        shape, datatype = list(value.shape), datatype_of(value)
        nested = value.tolist() if shape else [value.item()]
        flat = value.reshape(-1).tolist()
        one = x_of(decoded(asked(datatype, shape, nested))[0])
        other = x_of(decoded(asked(datatype, shape, flat))[0])
        assert same(one, other)

    @given(st.binary(max_size=400))
    def test_any_bytes_are_read_or_refused(self, body: bytes) -> None:
        with pytest.raises(RequestError) as info:
            decoded(body)
        assert info.value.kind is ErrorKind.INVALID

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(
                    st.sampled_from(
                        ["inputs", "outputs", "name", "shape", "datatype", "data", "parameters"]
                    )
                    | st.sampled_from(["id", "binary_data_size", "timeout", "binary_data"]),
                    inner,
                )
            ),
            max_leaves=30,
        ),
        st.binary(max_size=20),
    )
    def test_any_json_is_read_or_refused(self, value: Any, tail: bytes) -> None:
        for head in (value, {"inputs": [value]}, {"inputs": [an_input("FP32", [1], data=value)]}):
            try:
                request, _ = decoded(head, tail)
            except RequestError as error:
                kind = error.kind
            else:
                kind = None
                assert not tail
                assert all(isinstance(v, torch.Tensor | Strings) for v in request.inputs.values())
            assert kind in (None, ErrorKind.INVALID, ErrorKind.UNSUPPORTED)


class TestMemory:
    def test_aligned_data_is_not_copied(self) -> None:
        text = json.dumps(asked_binary("FP64", [3], 24)).encode()
        free = codec.lead(len(text))
        buffer = bytearray(free) + text + struct.pack("<3d", 1, 2, 3)
        request, _ = codec.decode_infer(
            memoryview(buffer)[free:], len(text), model="m", version="", received=0, timeout_s=None
        )
        buffer[-8:] = struct.pack("<d", 9)
        assert x_of(request).tolist() == [1, 2, 9]

    def test_unaligned_data_is_copied(self) -> None:
        both = [
            {**an_input("INT8", [1], parameters={"binary_data_size": 1}), "name": "a"},
            an_input("FP64", [2], parameters={"binary_data_size": 16}),
        ]
        request, _ = decoded({"inputs": both}, b"\x05" + struct.pack("<2d", 1, 2))
        x = x_of(request)
        assert isinstance(x, torch.Tensor)
        assert x.data_ptr() % 8 == 0
        assert x.tolist() == [1, 2]

    def test_outputs_are_not_copied(self) -> None:
        tensor = torch.zeros(2, dtype=torch.bfloat16)
        _, parts = codec.encode_infer(InferResponse("m", "", "", {"y": tensor}), ALL_BINARY)
        tensor[1] = 1
        assert bytes(parts[1]) == b"\x00\x00\x80\x3f"

    def test_an_output_may_have_strides(self) -> None:
        tensor = torch.arange(4, dtype=torch.uint8).reshape(2, 2).T
        _, parts = codec.encode_infer(InferResponse("m", "", "", {"y": tensor}), ALL_BINARY)
        assert bytes(parts[1]) == b"\x00\x02\x01\x03"


class TestRequests:
    def test_all_fields(self) -> None:
        request, binary = decoded(
            {
                "model_name": "said in the path too",
                "id": "seven",
                "parameters": {
                    "timeout": 2_500_000,
                    "binary_data_output": True,
                    "beams": 4,
                    "t": 0.5,
                    "on": False,
                    "s": "ü",
                },
                "inputs": [an_input("INT64", [2], data=[1, 2])],
                "outputs": [{"name": "b"}, {"name": "a", "parameters": {"binary_data": False}}],
            }
        )
        assert (request.model, request.version, request.id) == ("m", "", "seven")
        assert request.outputs == ("b", "a")
        said = {"timeout": 2_500_000, "beams": 4, "t": 0.5, "on": False, "s": "ü"}
        assert request.parameters == said
        assert (request.received, request.deadline) == (100.0, 102.5)
        assert "b" in binary
        assert "a" not in binary
        assert "another" in binary

    @pytest.mark.parametrize(
        ("parameters", "deadline"),
        [({}, 103.0), ({"timeout": 0}, 103.0), ({"timeout": 10}, 100.00001)],
    )
    def test_the_client_s_deadline_comes_first(self, parameters: Any, deadline: float) -> None:
        request, _ = decoded({"inputs": [], "parameters": parameters}, timeout_s=3.0)
        assert request.deadline == pytest.approx(deadline, abs=1e-9)

    def test_without_any_timeout_there_is_no_deadline(self) -> None:
        assert decoded({"inputs": []})[0].deadline is None

    def test_optional_fields_may_be_null(self) -> None:
        request, _ = decoded({"inputs": [], "outputs": None, "id": None, "parameters": None})
        assert (request.outputs, request.id, request.parameters) == ((), "", {})

    def test_numbers_may_be_infinite(self) -> None:
        x = x_of(
            decoded(
                b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3],'
                b'"data":[NaN,Infinity,-Infinity]}]}'
            )[0]
        )
        assert str(x.tolist()) == "[nan, inf, -inf]"

    @pytest.mark.parametrize(
        ("datatype", "low", "high"),
        [
            ("INT8", -128, 127),
            ("UINT32", 0, 2**32 - 1),
            ("UINT64", 0, 2**64 - 1),
            ("INT64", -(2**63), 2**63 - 1),
        ],
    )
    def test_ends_of_ranges(self, datatype: str, low: int, high: int) -> None:
        assert x_of(decoded(asked(datatype, [2], [low, high]))[0]).tolist() == [low, high]
        for beyond in (low - 1, high + 1):
            with pytest.raises(RequestError, match=r"inputs\[0\].data .*out of the range"):
                decoded(asked(datatype, [1], [beyond]))

    def test_empty_tensors(self) -> None:
        assert x_of(decoded(asked("FP32", [0, 3], []))[0]).shape == (0, 3)
        assert x_of(decoded(asked("FP32", [2, 0], [[], []]))[0]).shape == (2, 0)
        assert x_of(decoded(asked_binary("INT8", [0], 0))[0]).shape == (0,)
        assert x_of(decoded(asked_binary("BYTES", [0], 0))[0]) == Strings((0,), ())

    def test_load_unload_and_index(self) -> None:
        assert codec.decode_parameters(memoryview(b"")) == {}
        assert codec.decode_parameters(memoryview(b'{"parameters":{"a":1}}')) == {"a": 1}
        assert codec.decode_index(memoryview(b"")) is False
        assert codec.decode_index(memoryview(b'{"ready":true}')) is True
        with pytest.raises(RequestError, match="ready is 1"):
            codec.decode_index(memoryview(b'{"ready":1}'))


class Unreadable:
    """A body that has to be refused, and what the refusal has to say."""

    def __init__(self, says: str, head: Any, tail: bytes = b"", length: int | None = None) -> None:
        self.says, self.head, self.tail, self.length = says, head, tail, length


FP32 = an_input("FP32", [1], data=[1.0])
UNREADABLE = {
    "nothing": Unreadable("valid JSON", b""),
    "no JSON": Unreadable("valid JSON", b"{"),
    "not UTF-8": Unreadable("UTF-8", b'{"id":"\xff"}'),
    "a list": Unreadable("JSON is .* object", []),
    "too deep": Unreadable("nested too deeply", b'{"inputs":' + b"[" * 100_000),
    "a number of too many digits": Unreadable("valid JSON", b'{"id":' + b"9" * 5000 + b"}"),
    "one field twice": Unreadable("two fields of one name", b'{"inputs":[],"inputs":[]}'),
    "no inputs": Unreadable("inputs is missing", {}),
    "inputs of a wrong type": Unreadable('inputs is "x"', {"inputs": "x"}),
    "an input of a wrong type": Unreadable(r"inputs\[1\] is 3", {"inputs": [FP32, 3]}),
    "no name": Unreadable(r"inputs\[0\].name is missing", {"inputs": [{}]}),
    "an empty name": Unreadable(r"inputs\[0\].name is \"\"", {"inputs": [{**FP32, "name": ""}]}),
    "a name of a wrong type": Unreadable("name is 1", {"inputs": [{**FP32, "name": 1}]}),
    "half a surrogate": Unreadable("name .*Unicode", {"inputs": [{**FP32, "name": "\ud800"}]}),
    "a name twice": Unreadable(r"inputs\[1\].name .*another", {"inputs": [FP32, FP32]}),
    "an id of a wrong type": Unreadable("id is 7", {"inputs": [], "id": 7}),
    "no datatype": Unreadable("datatype is missing", {"inputs": [{"name": "x"}]}),
    "an unknown datatype": Unreadable("unknown datatype, 'FP8'", asked("FP8", [1], [1])),
    "a datatype of a wrong type": Unreadable("datatype is 1", asked(1, [1], [1])),  # type: ignore[arg-type]  # on purpose
    "no shape": Unreadable("shape is missing", {"inputs": [{"name": "x", "datatype": "FP32"}]}),
    "a shape of a wrong type": Unreadable("shape is 1", asked("FP32", 1, [1])),  # type: ignore[arg-type]  # on purpose
    "a negative size": Unreadable(r"negative size in its shape \[-1\]", asked("FP32", [-1], [1])),
    "a true size": Unreadable(r"shape is \[true\]", asked("FP32", [True], [1])),
    "half a size": Unreadable(r"shape is \[1.5\]", asked("FP32", [1.5], [1])),  # type: ignore[list-item]  # on purpose
    "a huge shape": Unreadable("too large", asked("FP32", [2**62, 4], [1])),
    "a huge empty shape": Unreadable("too large", asked("FP32", [0, 2**62, 4], [])),
    "a shape of 65 sizes": Unreadable("has 65 dimensions", asked("FP32", [1] * 65, [1])),
    "a large shape": Unreadable("1 element", asked("FP32", [2**40], [1])),
    "a large binary shape": Unreadable(
        "has 4398046511104", asked_binary("FP32", [2**40], 4), b"abcd"
    ),
    "a large shape of BYTES": Unreadable(
        "has 1 element", asked_binary("BYTES", [2**40], 4), b"\0\0\0\0"
    ),
    "no data": Unreadable("data is missing", {"inputs": [an_input("FP32", [1])]}),
    "data of a wrong type": Unreadable("data is 1.0", asked("FP32", [1], 1.0)),
    "data as an object": Unreadable("data is an object", asked("FP32", [1], {"a": 1})),
    "too few elements": Unreadable("1 element", asked("FP32", [2], [1])),
    "too many elements": Unreadable("3 elements", asked("FP32", [2], [1, 2, 3])),
    "ragged lists": Unreadable("not nested", asked("FP32", [2, 2], [[1, 2], [3]])),
    "lists of another shape": Unreadable("not nested", asked("FP32", [2, 3], [[1, 2]] * 3)),
    "lists half way": Unreadable("not nested", asked("FP32", [2, 1, 2], [[1, 2], [3, 4]])),
    "lists too deep": Unreadable("holds a list", asked("FP32", [2], [[[1]], [2]])),
    "a list among numbers": Unreadable(r"holds \[2\]", asked("FP32", [2], [1, [2]])),
    "half an integer": Unreadable("holds 1.5.*INT32", asked("INT32", [1], [1.5])),
    "a float as an integer": Unreadable("holds 1.0.*INT32", asked("INT32", [1], [1.0])),
    "a text as a float": Unreadable('holds "1".*FP32', asked("FP32", [1], ["1"])),
    "true as an integer": Unreadable("holds true.*INT32", asked("INT32", [1], [True])),
    "true as a float": Unreadable("holds true.*FP64", asked("FP64", [1], [True])),
    "1 as a truth": Unreadable("holds 1.*BOOL", asked("BOOL", [1], [1])),
    "null as a float": Unreadable("holds null", asked("FP32", [1], [None])),
    "a number as BYTES": Unreadable("holds 1.*BYTES", asked("BYTES", [1], [1])),
    "half a surrogate as BYTES": Unreadable("data .*Unicode", asked("BYTES", [1], ["\udfff"])),
    "NaN as an integer": Unreadable("holds NaN", asked("INT32", [1], [math.nan])),
    "a large integer": Unreadable("range of UINT8", asked("UINT8", [1], [300])),
    "a large integer as FP64": Unreadable("range of FP64", asked("FP64", [1], [10**400])),
    "a large FP32": Unreadable("range of FP32", asked("FP32", [2], [0, 1e300])),
    "a large FP64": Unreadable(
        "range of FP64",
        b'{"inputs":[{"name":"x","datatype":"FP64","shape":[2],"data":[Infinity,1e400]}]}',
    ),
    "FP16 in JSON": Unreadable("FP16 has no form", asked("FP16", [1], [1.0])),
    "BF16 in JSON": Unreadable("BF16 has no form", asked("BF16", [1], [1.0])),
    "data twice": Unreadable(
        "both",
        {"inputs": [{**FP32, "parameters": {"binary_data_size": 4}}]},
        b"abcd",
    ),
    "no binary data": Unreadable("the body has 0", asked_binary("FP32", [1], 4)),
    "little binary data": Unreadable("the body has 3", asked_binary("FP32", [1], 4), b"abc"),
    "much binary data": Unreadable(
        "1 byte after its last input", asked_binary("FP32", [1], 4), b"abcde"
    ),
    "a size for another shape": Unreadable("has 8", asked_binary("FP32", [2], 4), b"abcd"),
    "a negative size of data": Unreadable("is -4", asked_binary("FP32", [1], -4), b"abcd"),
    "a size of data as text": Unreadable('is "4"', asked_binary("FP32", [1], "4"), b"abcd"),
    "half a size of data": Unreadable("is 4.0", asked_binary("FP32", [1], 4.0), b"abcd"),
    "a true size of data": Unreadable("is true", asked_binary("INT8", [1], True), b"a"),
    "a BOOL of 2": Unreadable("neither 0 nor 1", asked_binary("BOOL", [2], 2), b"\1\2"),
    "BYTES cut in their length": Unreadable(
        "ends within the length", asked_binary("BYTES", [1], 3), b"abc"
    ),
    "BYTES cut": Unreadable("ends within an element", asked_binary("BYTES", [1], 6), b"\3\0\0\0ab"),
    "BYTES too many": Unreadable("has 2 elements", asked_binary("BYTES", [1], 8), b"\0" * 8),
    "JSON longer than the body": Unreadable("is 99, and", b"{}", length=99),
    "JSON of no bytes": Unreadable("valid JSON", b'{"inputs":[]}', length=0),
    "parameters of a wrong type": Unreadable("parameters is 1", {"inputs": [], "parameters": 1}),
    "a parameter of a wrong type": Unreadable(
        "parameters.a is null", {"inputs": [], "parameters": {"a": None}}
    ),
    "a huge parameter": Unreadable("64 bits", {"inputs": [], "parameters": {"a": 2**64}}),
    "NaN as a parameter": Unreadable("a is NaN", {"inputs": [], "parameters": {"a": math.nan}}),
    "a negative timeout": Unreadable(
        "'timeout' is -1", {"inputs": [], "parameters": {"timeout": -1}}
    ),
    "a timeout as text": Unreadable(
        "'timeout' is '1'", {"inputs": [], "parameters": {"timeout": "1"}}
    ),
    "binary_data_output as text": Unreadable(
        "binary_data_output is", {"inputs": [], "parameters": {"binary_data_output": "yes"}}
    ),
    "an output as text": Unreadable(r"outputs\[0\] is", {"inputs": [], "outputs": ["y"]}),
    "an output twice": Unreadable(
        r"outputs\[1\].name .*another", {"inputs": [], "outputs": [{"name": "y"}, {"name": "y"}]}
    ),
    "binary_data as a number": Unreadable(
        r"outputs\[0\].parameters.binary_data is 1",
        {"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
    def test_what_cannot_be_read(self, body: Unreadable) -> None:
        with pytest.raises(RequestError, match=body.says) as info:
            decoded(body.head, body.tail, length=body.length)
        assert info.value.kind is ErrorKind.INVALID
        assert len(info.value.what) < 300

    @pytest.mark.parametrize(
        "body",
        [
            {"inputs": [an_input("FP32", [1], parameters={"shared_memory_region": "r"})]},
            {"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        ],
    )
    def test_other_extensions(self, body: Any) -> None:
        with pytest.raises(RequestError, match="extension") as info:
            decoded(body)
        assert info.value.kind is ErrorKind.UNSUPPORTED

    @pytest.mark.parametrize(
        "header", [b"", b"-1", b"nan", b"1.5", b"0x10", b"1_0", b" 1", b"9" * 30]
    )
    def test_lengths_of_json(self, header: bytes) -> None:
        with pytest.raises(RequestError, match="Inference-Header-Content-Length") as info:
            codec.json_length(header)
        assert info.value.kind is ErrorKind.INVALID

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_halves_have_no_json(self, dtype: torch.dtype) -> None:
        response = InferResponse("m", "", "", {"y": torch.ones(1, dtype=dtype)})
        with pytest.raises(RequestError, match=r'Output "y".*\n.*binary') as info:
            codec.encode_infer(response, ALL_JSON)
        assert info.value.kind is ErrorKind.INVALID

    def test_bytes_that_are_no_text_have_no_json(self) -> None:
        response = InferResponse("m", "", "", {"y": Strings((1,), (b"\xff",))})
        with pytest.raises(RequestError, match=r'Output "y".*UTF-8') as info:
            codec.encode_infer(response, ALL_JSON)
        assert info.value.kind is ErrorKind.INVALID


class TestCompression:
    @pytest.mark.parametrize(
        ("encoding", "compress"),
        [(b"gzip", gzip.compress), (b"GZIP", gzip.compress), (b"deflate", zlib.compress)],
    )
    def test_what_was_sent(self, encoding: bytes, compress: Any) -> None:
        plain = bytes(range(256)) * 4
        body = memoryview(compress(plain))
        assert codec.decompress(body, encoding, len(plain), 5) == plain
        with pytest.raises(RequestError, match=f"larger than {len(plain) - 1} bytes") as info:
            codec.decompress(body, encoding, len(plain) - 1, 5)
        assert info.value.kind is ErrorKind.TOO_LARGE

    @pytest.mark.parametrize(
        ("body", "encoding", "says"),
        [
            (b"abc", b"gzip", "no gzip"),
            (b"abc", b"deflate", "no deflate"),
            (gzip.compress(b"abc", mtime=0)[:-3], b"gzip", "too early"),
            (gzip.compress(b"abc", mtime=0) + b"d", b"gzip", "goes on"),
            (b"", b"gzip", "too early"),
            (b"abc", b"br", "Content-Encoding is"),
            (b"abc", b"gzip, gzip", "Content-Encoding is"),
        ],
    )
    def test_what_is_not_compressed_so(self, body: bytes, encoding: bytes, says: str) -> None:
        with pytest.raises(RequestError, match=says) as info:
            codec.decompress(memoryview(body), encoding, LIMIT, 0)
        assert info.value.kind is ErrorKind.INVALID


class TestAnswers:
    def test_headers_and_json(self) -> None:
        outputs = {"y": torch.tensor([[1, 2]], dtype=torch.int16), "z": Strings((1,), (b"ab",))}
        headers, parts = codec.encode_infer(
            InferResponse("m", "3", "i", outputs, {"k": 1}), BinaryOutputs(False, {"z": True})
        )
        head = bytes(parts[0])
        assert json.loads(head) == {
            "model_name": "m",
            "model_version": "3",
            "id": "i",
            "parameters": {"k": 1},
            "outputs": [
                {"name": "y", "datatype": "INT16", "shape": [1, 2], "data": [1, 2]},
                {
                    "name": "z",
                    "datatype": "BYTES",
                    "shape": [1],
                    "parameters": {"binary_data_size": 6},
                },
            ],
        }
        assert dict(headers) == {
            b"content-type": b"application/octet-stream",
            b"inference-header-content-length": b"%d" % len(head),
            b"content-length": b"%d" % (len(head) + 6),
        }

    @pytest.mark.parametrize(
        ("value", "binary", "quick"),
        [
            (torch.zeros(99_999, dtype=torch.int8), True, True),
            (torch.zeros(99_999, dtype=torch.int8), False, False),
            (torch.zeros(9, dtype=torch.int8), False, True),
            (Strings((1,), (b"x" * 99_999,)), True, False),
            (Strings((20_000,), (b"",) * 20_000), True, False),
            (Strings((1,), (b"x",)), False, True),
        ],
    )
    def test_what_is_written_quickly(self, value: Value, binary: bool, quick: bool) -> None:
        response = InferResponse("m", "", "", {"y": value})
        assert codec.writes_quickly(response, BinaryOutputs(binary, {})) is quick

    @pytest.mark.parametrize(
        ("head", "tail", "quick"),
        [
            (b'"BYTES"', 9, True),
            (b'"FP32"', 99_999, True),
            (b'"BYTES"', 99_999, False),
            (b'"\\u0042YTES"', 99_999, False),
            (b'"FP32"' + b" " * 99_999, 9, False),
        ],
    )
    def test_what_is_read_quickly(self, head: bytes, tail: int, quick: bool) -> None:
        body = memoryview(head + b"BYTES" + b"\\" * tail)
        assert codec.reads_quickly(body, len(head)) is quick

    def test_much_json_is_not_read_quickly(self) -> None:
        assert not codec.reads_quickly(memoryview(b" " * 99_999), None)

    def test_dataclasses(self) -> None:
        metadata = ModelMetadata("m", ("1",), "p", (TensorMetadata("x", "FP32", (-1, 2)),), ())
        assert json.loads(codec.dumps(metadata)) == {
            "name": "m",
            "versions": ["1"],
            "platform": "p",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
            "outputs": [],
        }
        assert json.loads(codec.dumps([IndexEntry("m", "1", "READY")])) == [
            {"name": "m", "version": "1", "state": "READY", "reason": ""}
        ]

    def test_statistics(self) -> None:
        took = [Duration(n, n * 10) for n in range(6)]
        model = ModelStatistics("m", "1", 5, 9, 3, *took, {4: Duration(2, 7)})
        (found,) = json.loads(codec.dumps(codec.statistics([model])))["model_stats"]
        assert (found["last_inference"], found["inference_count"], found["execution_count"]) == (
            5,
            9,
            3,
        )
        assert found["inference_stats"]["compute_output"] == {"count": 5, "ns": 50}
        assert found["inference_stats"]["success"] == {"count": 0, "ns": 0}
        assert found["batch_stats"] == [{"batch_size": 4, "compute_infer": {"count": 2, "ns": 7}}]
