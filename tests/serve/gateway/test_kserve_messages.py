"""Serialised requests, looked into without parsing their audio."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from serve.gateway.errors import ApiError
from serve.gateway.kserve import messages
from serve.gateway.kserve.messages import check_request
from serve.gateway.limits import MAX_STRUCTURE_BYTES
from tests.gateways import message

Request = service_pb2.ModelInferRequest


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"\x0a\x05abc", "not a valid KServe v2 ModelInferRequest"),  # shorter than it says
        (b"\x38\x01", "not a valid KServe v2 ModelInferRequest"),  # raw contents that are a number
        (b"\xff" * 11, "not a valid KServe v2 ModelInferRequest"),  # a tag without end
        (b"\x2a\x01\xff", "not a valid KServe v2 ModelInferRequest"),  # an input that is none
        (b"\x3a\x00" * 1000, "more than 256 fields"),
        (b"\x1a\x80\x80\x80\x01" + bytes(2**21), f"more than {MAX_STRUCTURE_BYTES} bytes"),
    ],
)
def test_what_is_no_request_is_refused(sent, told):
    with pytest.raises(ApiError) as caught:
        messages.read_head(sent)
    assert told in caught.value.text


def test_deeply_nested_messages_are_refused():
    nested = b""
    for _ in range(300):  # contents of an input of an input ...
        nested = bytes([0x2A, len(nested) & 127 | 128, len(nested) >> 7]) + nested
    request, raw, _ = messages.read_head(nested)
    with pytest.raises(ApiError):
        check_request(request, raw, streamed=False)


def contents_beside(request):
    request.inputs[0].contents.bytes_contents.append(b"a")


def one_too_few(request):
    del request.raw_input_contents[1:]


def one_byte_too_few(request):
    request.raw_input_contents[1] = request.raw_input_contents[1][1:]


def contents_too_few(request):
    del request.raw_input_contents[:]
    request.inputs[0].contents.bytes_contents.append(b"a")
    request.inputs[1].contents.int_contents.append(1)


def key_of_its_own(request):
    request.parameters["earshot_key"].string_param = "mine"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (key_of_its_own, "parameter 'earshot_key'"),
        (contents_beside, "contents beside"),
        (one_too_few, "1 raw_input_contents"),
        (one_byte_too_few, "1599 bytes; expected 1600"),
        (contents_too_few, "SAMPLES has 0 bytes; expected 1600 for FP32"),
    ],
)
def test_what_the_models_cannot_take_is_refused(change, told):
    request = Request.FromString(message())
    change(request)
    head, raw, _ = messages.read_head(request.SerializeToString())
    with pytest.raises(ApiError, match=told):
        check_request(head, raw, streamed=True)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.binary(max_size=80) | st.tuples(st.integers(0, 60), st.binary(max_size=4)))
def test_any_bytes_are_read_as_protobuf_reads_them_or_refused(change):
    sent = change
    if isinstance(change, tuple):
        position, new = change
        whole = message(samples=4)
        sent = whole[:position] + new + whole[position + len(new) :]
    try:
        request, raw, _ = messages.read_head(sent)
        check_request(request, raw, streamed=False)
    except ApiError:
        return
    whole = Request.FromString(sent)
    assert list(whole.raw_input_contents) == list(map(bytes, raw))
