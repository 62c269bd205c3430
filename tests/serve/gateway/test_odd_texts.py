"""Texts that UTF-8 cannot hold, and texts that are too long: each door refuses them by name."""

import json

import pytest
from tritonclient.grpc import service_pb2

from serve.contract.server_config import JobsConfig, LiveConfig
from tests.gateways import END, FILE, FORM, INFER, TRANSCRIPTIONS, Running, json_request, part
from tests.jobs import JOBS, JSON

HALF = "\\ud800"  # of a surrogate pair, as JSON may write it
RAW_HALF = b"\xed\xa0\x80"  # the same as UTF-8 would have it, which has none
URL = "https://files.example.org/a.wav"
SECRETS = "/v1/realtime/client_secrets"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    jobs = JobsConfig(folder=str(folder / "jobs"), allowed_hosts=("files.example.org",))
    running = Running(folder, 600.0, jobs=jobs, live=LiveConfig())
    yield running
    running.close()


def refused(running, path, body, headers=JSON):
    """The error of a request that is the client's fault."""
    status, _, answer = running.ask("POST", path, body, headers)
    assert status == 400, answer
    error = json.loads(answer)["error"] if answer[:1] == b"{" else answer.decode()
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (JOBS, f'{{"url": "{URL}", "prompt": "{HALF}"}}'),
        (JOBS, f'{{"url": "{URL}", "{HALF}": "Anna"}}'),
        (JOBS, b'{"url": "%s", "prompt": "%s"}' % (URL.encode(), RAW_HALF)),
        (JOBS, "[" * 10_000),
        (SECRETS, f'{{"session": {{"{HALF}": 1}}}}'),
        (SECRETS, f'{{"expires_after": {{"anchor": "{HALF}", "seconds": 10}}}}'),
        (SECRETS, "[" * 10_000),
        (INFER, json.dumps(json_request("\ud800"))),
        (INFER, json.dumps(json_request(id="\ud800"))),
        ("/subtitles", f'{{"format": "srt", "duration": 1, "segments": [], "{HALF}": 1}}'),
    ],
)
def test_json_with_half_a_surrogate_pair_is_refused(running, path, body):
    assert "JSON" in refused(running, path, body)


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, JOBS])
@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("prompt", RAW_HALF, "prompt is not UTF-8"),
        ("prompt", "Zoë".encode("latin-1"), "prompt is not UTF-8"),
        ("phrases[]", RAW_HALF, "phrases[] is not UTF-8"),
        ("chunking_strategy", f'{{"type": "{HALF}"}}'.encode(), "JSON"),
        ("include[]", f'["{HALF}"]'.encode(), "expected logprobs"),
    ],
)
def test_a_form_whose_text_is_not_utf_8_is_refused(running, path, name, text, says):
    assert says in refused(running, path, FILE + part(name, text) + END, FORM)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, JOBS])
def test_a_form_with_too_many_phrases_is_refused(running, path):
    body = FILE + part("phrases[]", b"a" * 140_000) + part("phrases[]", b"b" * 140_000) + END
    message = refused(running, path, body, FORM)
    assert "PHRASES has 280000 bytes; expected at most 262144" in message


def test_a_json_job_with_too_many_fields_is_refused(running):
    body = json.dumps({"url": URL} | {f"x_{i}": "" for i in range(10_000)})
    assert "has 10001 fields; expected at most 128" in refused(running, JOBS, body)


def texts(*values):
    return b"".join(len(text).to_bytes(4, "little") + text for text in values)


def asked(phrases, count):
    request = service_pb2.ModelInferRequest(model_name="whisper")
    request.inputs.add(name="PHRASES", datatype="BYTES", shape=[count])
    request.inputs.add(name="SAMPLES", datatype="FP32", shape=[400])
    request.raw_input_contents.extend([phrases, bytes(1600)])
    return request.SerializeToString()


def test_tensors_of_several_texts_are_taken_up_to_their_bytes(running):
    running.call()(asked(texts(b"Anna", b"", "Zoë".encode()), 3))
    (found,) = running.triton.inputs
    assert "Anna" in found["PHRASES"]
    for phrases, count, says in (
        (texts(b"a" * 262_145), 1, "PHRASES has 262149 bytes; expected at most 262148"),
        (texts(*[b""] * 70_000), 70_000, "PHRASES has 280000 bytes"),
        (texts(b"Anna"), 2, "PHRASES has 8 bytes; expected 12"),
        (texts(b"Anna", b"Zo"), 1, "PHRASES has 14 bytes; expected 8"),
        (texts(b"Anna")[:-1], 1, "PHRASES has 7 bytes; expected 8"),
        (b"", 2**40, "PHRASES has 0 bytes"),
    ):
        call = running.call().future(asked(phrases, count))
        assert call.code().name == "INVALID_ARGUMENT"
        assert says in call.details()
