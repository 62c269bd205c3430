"""The engine behind the models, with stand-ins for transcriber and metrics."""

import contextlib
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from serve.contract.errors import AudioError, EarshotError, OptionError, OverloadedError
from serve.contract.messages import Request, RequestFailed, RequestFinished
from serve.speech.tokenizer import Tokenizer
from serve.triton import metrics
from serve.triton.backends import EngineBackend
from serve.wire import tensors, uploads
from tests import fake_triton
from tests.fakes import CAPABILITIES
from tests.serving import STATS, TRANSCRIPT
from tests.waits import wait_until


class Transcriber:
    """Accepts everything, and writes down what is asked of it."""

    capabilities = CAPABILITIES
    tokenizer = SimpleNamespace(languages=frozenset(["en"]))

    def __init__(self):
        self.calls = []
        self.submitted = []
        self.healthy = True
        self.refusal = None
        self.rejected = 0

    def submit(self, request, on_event, priority):
        if self.refusal:
            raise self.refusal
        self.submitted.append((request, on_event))
        return "the handle"

    def reject(self):
        self.rejected += 1

    def stats(self):
        return STATS

    def drain(self, timeout_s):
        self.calls.append(("drain", timeout_s))

    def close(self):
        self.calls.append("close")


@pytest.fixture
def transcriber():
    return Transcriber()


@pytest.fixture
def backend(transcriber, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "INTERVAL_S", 0.001)
    backend = EngineBackend(transcriber, 7.0, tmp_path, fake_triton.MetricFamily)
    yield backend
    backend.close()


@pytest.mark.parametrize(
    "end",
    [
        RequestFinished(TRANSCRIPT),
        RequestFailed(AudioError("silent")),
        OverloadedError("full"),
        OptionError("bad"),
    ],
    ids=lambda end: type(end).__name__,
)
def test_a_file_is_let_go_where_its_request_ends_whoever_keeps_the_error(
    backend, transcriber, tmp_path, end
):
    uploads.make_folder(tmp_path)
    path = uploads.folder_of(tmp_path, 0) / "0-ab-1"
    path.write_bytes(b"RIFF")
    lies = path.stat()
    inputs = tensors.request_to_inputs(Request(audio=b"RIFF"))
    del inputs["AUDIO"]
    if isinstance(end, RequestFinished | RequestFailed):
        backend.start(inputs, lambda event: None, "0-ab-1")
        ((_, on_event),) = transcriber.submitted
        assert is_open(lies)
        on_event(end)
    else:
        transcriber.refusal = end if isinstance(end, OverloadedError) else None
        if isinstance(end, OptionError):
            inputs["PROMPT"] = np.array([b"\xff"])
        with pytest.raises(EarshotError) as kept:
            backend.start(inputs, print, "0-ab-1")
        assert kept.value.__traceback__ is not None
    assert not is_open(lies)


def is_open(lies):
    """Whether this process has a file open, under whatever name."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/self/fd/{descriptor}"), lies):
                return True
    return False


def test_malformed_requests_are_counted_as_rejected(backend, transcriber):
    for _ in range(2):
        with pytest.raises(AudioError, match="neither AUDIO nor SAMPLES"):
            backend.start({"LANGUAGE": np.array([b"en"])}, print)
    assert not transcriber.submitted
    assert transcriber.rejected == 2


@pytest.fixture
def tokenized(monkeypatch):
    """The texts that a tokenizer was given."""
    texts = []
    monkeypatch.setattr(Tokenizer, "previous_text", lambda self, text: texts.append(text))
    return texts


def test_thirty_megabytes_of_prompt_are_refused_before_anybody_reads_them(
    backend, transcriber, tokenized
):
    class Unread(bytes):
        def decode(self, *_):
            raise AssertionError("somebody looks at the text")

    inputs = {
        "AUDIO": np.array([b"x"], np.object_),
        "PROMPT": np.array([Unread(30_000_000)], np.object_),
    }
    with pytest.raises(OptionError, match="PROMPT has 30000000 bytes"):
        backend.start(inputs, print)
    assert not transcriber.submitted and not tokenized


def test_what_the_transcriber_refuses_it_counts_itself(backend, transcriber):
    transcriber.refusal = OverloadedError("full")
    with pytest.raises(OverloadedError):
        backend.start(tensors.request_to_inputs(Request(audio=b"x")), print)
    assert transcriber.rejected == 0


def test_a_broken_device_is_told_to_the_launcher(backend, transcriber, tmp_path):
    assert not (tmp_path / "failure").exists()
    transcriber.healthy = False
    wait_until((tmp_path / "failure").exists, "nobody looks")
    wait_until((tmp_path / "failure").read_text, "empty")
    assert "device failed" in (tmp_path / "failure").read_text()


def test_the_end_drains_before_it_closes(backend, transcriber):
    backend.close()
    threads = {thread.name for thread in threading.enumerate()}
    assert "earshot-metrics" not in threads, "it would ask a closed transcriber"
    assert transcriber.calls == [("drain", 7.0), "close"]
    backend.close = lambda: None
