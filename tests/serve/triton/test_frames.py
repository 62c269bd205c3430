"""Messages as bytes and back, and what is refused: arriving bytes can do nothing else."""

import dataclasses
import json
import pickle

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from serve.errors import AudioError, EarshotError, RequestError
from serve.messages import Failed, Finished, Request, SegmentReady
from serve.triton import frames, wire
from serve.triton.frames import Cancel, CancelKey, Event, Hello, Start
from tests.serving import SEGMENT, TRANSCRIPT

REQUEST = Request(
    audio=np.linspace(-1, 1, 5, dtype=np.float32),
    sample_rate=16_000,
    prompt="Zoë",
    timestamps=False,
    temperature=0.2,
)
MESSAGES = [
    Hello("gateway"),
    Cancel(3),
    CancelKey("gateway-1"),
    Event(4, SegmentReady(SEGMENT)),
    Event(5, Finished(TRANSCRIPT)),
    Event(6, SegmentReady(dataclasses.replace(SEGMENT, avg_logprob=float("-inf")))),
]


def parts(message):
    """The JSON and the tensors of a message's frame."""
    frame = memoryview(b"".join(frames.encode(message)))
    json_bytes, tensor_bytes = frames.LENGTHS.unpack(frame[: frames.LENGTHS.size])
    rest = frame[frames.LENGTHS.size :]
    assert len(rest) == json_bytes + tensor_bytes
    return rest[:json_bytes], rest[json_bytes:]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back(message):
    assert frames.decode(*parts(message)) == message


@pytest.mark.parametrize("key", [None, "gateway-7"])
@pytest.mark.parametrize("request_", [REQUEST, Request(audio=b"RIFF\0", language="en")])
def test_a_request_comes_back_with_arrays_of_its_own(request_, key):
    text, tensors = parts(Start(7, wire.request_to_inputs(request_), key))
    data = bytearray(tensors)
    message = frames.decode(text, memoryview(data))
    data[:] = b"\xff" * len(data)
    found = wire.request_from_inputs(message.inputs)
    assert (message.id, message.key) == (7, key)
    np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(request_))
    assert all(tensor.flags.writeable for tensor in message.inputs.values())


@pytest.mark.parametrize("samples", [0, 1])
def test_few_samples_come_back(samples):
    inputs = {"SAMPLES": np.zeros(samples, np.float32)}
    assert frames.decode(*parts(Start(1, inputs))).inputs["SAMPLES"].shape == (samples,)


def test_an_error_keeps_its_class_and_its_words():
    event = frames.decode(*parts(Event(1, Failed(AudioError("a: b"))))).event
    assert type(event.error) is AudioError and str(event.error) == "a: b"
    unexpected = frames.decode(*parts(Event(1, Failed(KeyError("x"))))).event.error
    assert type(unexpected) is EarshotError and "KeyError('x')" in str(unexpected)


def test_an_answer_that_is_too_long_becomes_an_error(monkeypatch):
    monkeypatch.setattr(frames, "MAX_JSON_BYTES", 200)
    event = frames.decode(*parts(Event(1, Finished(TRANSCRIPT)))).event
    assert isinstance(event, Failed) and "bytes" in str(event.error)


def head(**fields):
    return json.dumps({"message": fields}).encode()


def start(*tensors, **fields):
    listed = [dict(zip(("name", "shape", "bytes"), tensor, strict=True)) for tensor in tensors]
    return head(kind="start", **{"id": 1, "key": None, "tensors": listed, **fields})


TASK = ("TASK", [1], 1)
REFUSED = {
    "pickle": (pickle.dumps((1, {})), b"", "not JSON"),
    "another message": (head(kind="exec", code="1"), b"", "message"),
    "no id": (head(kind="cancel"), b"", "id is missing"),
    "negative id": (head(kind="cancel", id=-1), b"", "at least 0"),
    "no key": (head(kind="cancel_key", key=""), b"", "key"),
    "long key": (head(kind="cancel_key", key="x" * 65), b"", "key"),
    "unknown field": (head(kind="cancel", id=1, more=2), b"", "unknown key 'more'"),
    "bytes after a cancel": (head(kind="cancel", id=1), b"x", "1 bytes follow"),
    "unknown input": (start(("VOLUME", [1], 4)), b"1234", "no input is named 'VOLUME'"),
    "an input twice": (start(TASK, TASK), b"xy", "each name once"),
    "too few bytes": (start(TASK), b"", "lists tensors TASK of 1 bytes, but holds 0"),
    "too many bytes": (start(TASK), b"xyz", "but holds 3"),
    "negative bytes": (start(("TASK", [1], -1)), b"", "at least 0"),
    "another shape": (start(("TASK", [2], 1)), b"x", "TASK has shape [2]"),
    "more dimensions": (start(("SAMPLES", [1, 1], 4)), b"1234", "SAMPLES has shape [1, 1]"),
    "shape without bytes": (start(("SAMPLES", [2**30], 4)), b"1234", "SAMPLES has shape"),
    "huge shape": (start(("SAMPLES", [2**62], 4)), b"1234", "less than"),
    "half a number": (start(("SAMPLES", [1], 3)), b"123", "SAMPLES has shape [1] in 3 bytes"),
    "many tensors": (start(*[TASK] * 99), b"x" * 99, "at most"),
}


@pytest.mark.parametrize("text, tensors, message", REFUSED.values(), ids=REFUSED)
def test_what_is_no_message_is_refused_by_name(text, tensors, message):
    with pytest.raises(EarshotError) as refused:
        frames.decode(text, memoryview(tensors))
    assert message in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"VOLUME": np.zeros(1, np.float32)}, "VOLUME"),
        ({"TEMPERATURE": np.zeros((1, 1), np.float32)}, "TEMPERATURE"),
        ({"TEMPERATURE": np.zeros(1, np.float64)}, "TEMPERATURE"),
        ({"AUDIO": np.array([b"x" * 101], np.object_)}, "101 bytes; expected at most 100"),
    ],
)
def test_inputs_are_checked_before_they_are_sent(inputs, message):
    with pytest.raises(RequestError, match=message):
        frames.check_inputs(inputs, 100)
    frames.check_inputs({"AUDIO": np.array([b"x" * 100], np.object_)}, 100)


SEEDS = [b"".join(map(bytes, parts(message))) for message in MESSAGES]
SEEDS.append(b"".join(map(bytes, parts(Start(1, wire.request_to_inputs(REQUEST), "a-1")))))
splices = strategies.tuples(
    strategies.sampled_from(SEEDS),
    strategies.integers(0, 400),
    strategies.integers(0, 400),
    strategies.binary(max_size=20) | strategies.sampled_from([b"9" * 30, b'"', b"[" * 300, b"-"]),
)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
@hypothesis.given(splices, strategies.integers(0, 2000))
def test_whatever_arrives_is_a_message_or_an_expected_error(splice, cut):
    seed, begin, length, middle = splice
    data = memoryview(seed[:begin] + middle + seed[begin + length :])
    for text, tensors in ((data[:cut], data[cut:]), (data, memoryview(b""))):
        try:
            message = frames.decode(text, tensors)
        except EarshotError:
            continue
        assert isinstance(message, frames.Message)
