"""KServe v2 as JSON and bytes, to and from protobuf."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.gateway.errors import ApiError
from serve.gateway.kserve.http import request_from_http
from serve.wire.tensors import INPUTS


def read(request, binary=b""):
    text = request if isinstance(request, bytes) else json.dumps(request).encode()
    return request_from_http(text + binary, len(text))


def tensor(name="SAMPLES", shape=(2,), datatype="FP32", **fields):
    return {"name": name, "shape": shape, "datatype": datatype, **fields}


def binary(size, **fields):
    return tensor(parameters={"binary_data_size": size}, **fields)


AUDIO = b"\x03\0\0\0abc"
RAW = [
    (tensor(data=[1, -0.5]), np.array([1, -0.5], "<f4").tobytes()),
    (tensor("SAMPLE_RATE", [1], "INT32", data=[16000]), np.array([16000], "<i4").tobytes()),
    (tensor("TIMESTAMPS", [1], "BOOL", data=[False]), b"\0"),
    (tensor("CLIP_TIMESTAMPS", [2], "FP64", data=[0, 1.1]), np.array([0, 1.1], "<f8").tobytes()),
    (tensor("PROMPT", [1], "BYTES", data=["¿Qué?"]), b"\x07\0\0\0" + "¿Qué?".encode()),
    (binary(7, name="AUDIO", shape=[1], datatype="BYTES"), AUDIO),
]


def test_values_become_raw_bytes():
    read_ = read({"id": "a", "inputs": [sent for sent, _ in RAW]}, AUDIO)
    assert list(map(bytes, read_.raw)) == [expected for _, expected in RAW]
    first = read_.request.inputs[0]
    assert (first.name, first.datatype, list(first.shape)) == ("SAMPLES", "FP32", [2])
    assert read_.request.id == "a"


WRONG = {
    "no JSON": (b"hello", "is not JSON"),
    "no inputs": ({}, "inputs is missing"),
    "unknown input": ({"inputs": [tensor("VIDEO", data=[1, 2])]}, "no 'VIDEO'"),
    "too many": ({"inputs": [tensor(data=[1, 2])] * (len(INPUTS) + 1)}, f"at most {len(INPUTS)}"),
    "other type": ({"inputs": [tensor(datatype="BOOL", data=[True, True])]}, "expected FP32"),
    "no type": ({"inputs": [tensor(datatype="FP16", data=[1, 2])]}, "FP16"),
    "other values": ({"inputs": [tensor(data=["1", 2])]}, "expected a number"),
    "not finite": ({"inputs": [tensor(data=[math.nan, 1])]}, ""),
    "too large": ({"inputs": [tensor(data=[1e300, 2])]}, "expected at most"),
    "too few": ({"inputs": [tensor(data=[1])]}, "has 4 bytes; expected 8"),
    "other rank": ({"inputs": [tensor(shape=[1, 2], data=[1, 2])]}, "of shape [-1]"),
    "two texts": (
        {"inputs": [tensor("PROMPT", [2], "BYTES", data=["a", "b"])]},
        "expected BYTES of shape [1]",
    ),
    "no data": ({"inputs": [tensor()]}, "either data or binary_data_size"),
    "both": ({"inputs": [binary(8, data=[1, 2])]}, "either data or binary_data_size"),
    "missing bytes": ({"inputs": [binary(8)]}, "8 bytes of binary data, and 0 follow"),
    "shared memory": (
        {"inputs": [tensor(parameters={"shared_memory_region": "a"})]},
        "shared_memory_region",
    ),
    "classification": (
        {"inputs": [], "outputs": [{"name": "TEXT", "parameters": {"classification": 1}}]},
        "classification",
    ),
    "sequence": ({"inputs": [], "parameters": {"sequence_id": 1}}, "sequence_id"),
    "parameter": ({"inputs": [], "parameters": {"priority": 1}}, "'priority'"),
    "key": ({"inputs": [], "parameters": {"earshot_key": "a-1"}}, "'earshot_key'"),
    "unknown output": ({"inputs": [], "outputs": [{"name": "WORDS"}]}, "no 'WORDS'"),
    "output twice": ({"inputs": [], "outputs": [{"name": "TEXT"}] * 2}, "each name once"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case):
    request, told = WRONG[case]
    with pytest.raises(ApiError) as caught:
        read(request)
    assert caught.value.status.grpc == "INVALID_ARGUMENT"
    assert told in caught.value.text
    assert len(caught.value.text) < 3000


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[' + b",".join([b'{"name":"A"}'] * 10_000) + b"]}",
        b"{" + b",".join(b'"%d":1' % key for key in range(30_000)) + b"}",
        b'{"inputs":[{"name":"SAMPLES","shape":[1],"datatype":"FP32","data":['
        + b",".join([b'"a"'] * 30_000)
        + b"]}]}",
    ],
)
def test_many_errors_are_refused_without_listing_them(text):
    """Listing a million takes many seconds, in which no other request is served."""
    with pytest.raises(ApiError) as caught:
        read(text)
    assert len(caught.value.text) < 3000
    cause = caught.value.__cause__
    assert cause is None or cause.error_count() <= 1000


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[' + b",".join([b"{}"] * 100_000) + b"]}",
        b"{" + b",".join(b'"%d":1' % key for key in range(100_000)) + b"}",
        b'{"inputs":[{"data":[' + b",".join([b"1"] * 2_000_000) + b"]}]}",
    ],
)
def test_what_json_is_made_of_is_counted_before_it_is_read(text, monkeypatch):
    monkeypatch.setattr("serve.gateway.kserve.http.from_json", None)
    with pytest.raises(ApiError, match=r"commas and .* brackets; expected at most"):
        read(text)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)
VALID = {
    "inputs": [tensor(data=[1, -0.5]), binary(7, name="AUDIO", shape=[1], datatype="BYTES")],
    "outputs": [{"name": "TEXT", "parameters": {"binary_data": True}}],
    "parameters": {"binary_data_output": False},
    "id": "a",
}


def places(value, above=()):
    """Where something stands in a value, as keys and indices."""
    yield above
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield from places(value[key], (*above, key))


def changed(value, place, new):
    """The value with something else at a place."""
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = changed(value[place[0]], place[1:], new)
    return copy


@pytest.mark.nightly
@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.sampled_from([*places(VALID)]), VALUES, st.just(AUDIO) | st.binary(max_size=20))
def test_any_json_is_read_or_refused(place, value, raw):
    try:
        found = read(changed(VALID, place, value), raw)
    except ApiError as refusal:
        assert refusal.status.grpc == "INVALID_ARGUMENT"
    else:
        assert len(found.raw) == len(found.request.inputs)
