"""What both transports check of a request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphwright.serving import requests
from graphwright.serving.protocol import BYTES, DTYPES, ErrorKind, RequestError, Strings, Value

SHAPES = st.lists(st.integers(-1, 3) | st.just(2**61), max_size=4)


def read(datatype: str, shape: list[int], data: bytes) -> Value:
    if datatype == BYTES:
        return requests.strings_from_bytes(data, shape, "x")
    return requests.numbers_from_bytes(data, datatype, shape, "x")


@pytest.mark.parametrize("sent", ["Bearer sécret", "bearer  sécret ", "BEARER sécret"])
def test_the_token_in_any_writing_of_its_scheme(sent: str) -> None:
    requests.check_token(sent, "sécret")


@pytest.mark.parametrize("sent", [None, "", "sécret", "Bearer", "Bearer secret", "Basic sécret"])
def test_no_token_or_another_one(sent: str | None) -> None:
    requests.check_token(sent, None)
    with pytest.raises(RequestError) as caught:
        requests.check_token(sent, "sécret")
    assert caught.value.kind is ErrorKind.UNAUTHENTICATED
    assert "sécret" not in str(caught.value)


def test_data_may_be_a_part_of_something_larger() -> None:
    body = memoryview(b"..\1\0\2\0\1\0\0\0a")
    found = requests.numbers_from_bytes(body[2:6], "UINT16", [2], "x")
    assert torch.equal(found, torch.tensor([1, 2], dtype=torch.uint16))
    assert requests.strings_from_bytes(body[6:], [], "x") == Strings((), (b"a",))


def test_numbers_lie_in_the_data_where_it_is_writable_and_aligned() -> None:
    body = bytearray(b"\1\0\2\0\3\0")
    shared = requests.numbers_from_bytes(memoryview(body)[2:6], "UINT16", [2], "x")
    apart = requests.numbers_from_bytes(memoryview(body)[1:5], "UINT16", [2], "x")
    kept = requests.numbers_from_bytes(bytes(body)[2:6], "UINT16", [2], "x")
    body[2:] = b"\7\0\7\0"
    assert shared.tolist() == [7, 7]
    assert apart.tolist() == [2 << 8, 3 << 8]
    assert kept.tolist() == [2, 3]


@settings(max_examples=300)
@given(datatype=st.sampled_from([*DTYPES, BYTES]), shape=SHAPES, data=st.binary(max_size=24))
def test_any_data_is_refused_or_read_as_it_is(datatype: str, shape: list[int], data: bytes) -> None:
    try:
        found = read(datatype, shape, data)
    except RequestError as error:
        refused = error
    else:
        assert list(found.shape) == shape
        assert requests.bytes_of(found) == data
        return
    assert refused.kind is ErrorKind.INVALID
    assert "'x'" in str(refused)


@settings(max_examples=100)
@given(datatype=st.sampled_from(list(DTYPES)), shape=st.lists(st.integers(0, 3), max_size=4))
def test_data_that_fits_is_not_refused(datatype: str, shape: list[int]) -> None:
    size = requests.element_count(shape, "x") * DTYPES[datatype].itemsize
    data = bytes(i % 2 for i in range(size))
    found = requests.numbers_from_bytes(data, datatype, shape, "x")
    assert found.dtype is DTYPES[datatype]
    assert requests.bytes_of(found) == data


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=5), max_size=5))
def test_strings_come_back(values: list[bytes]) -> None:
    held = Strings((len(values),), tuple(values))
    assert requests.strings_from_bytes(requests.bytes_of(held), [len(values)], "x") == held
