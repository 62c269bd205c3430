"""What Triton calls, with a stand-in for Triton and for what answers."""

import dataclasses
import importlib.util
import json
import signal
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from serve.contract.errors import EarshotError, OverloadedError
from serve.contract.messages import Phase, Request, RequestFinished, SegmentReady
from serve.wire import tensors
from tests import fake_triton
from tests.serving import SEGMENT, TRANSCRIPT
from tests.waits import WAIT_S

MODEL = Path(__file__).parents[3] / "serve/triton/model_repository/whisper/1/model.py"


class Backend:
    """Keeps what is started, and answers by hand."""

    def __init__(self):
        self.started = []
        self.priorities = []
        self.refusal = None
        self.closed = False

    def start(self, inputs, on_event, key, priority):
        if self.refusal:
            raise self.refusal
        self.started.append((inputs, on_event))
        self.priorities.append(priority)

    def close(self):
        self.closed = True


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_triton)
    spec = importlib.util.spec_from_file_location("model_under_test", MODEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backend():
    return Backend()


@pytest.fixture
def failure(tmp_path):
    """The file by which the launcher learns why a model did not start."""
    return tmp_path / "failure"


@pytest.fixture
def start(module, backend, failure, monkeypatch):
    """Start the model as Triton does."""
    monkeypatch.setattr(module, "open_backend", lambda parameters: backend)
    models = []
    interval = sys.getswitchinterval()

    def start():
        model = module.TritonPythonModel()
        config = json.dumps({"parameters": {"folder": {"string_value": str(failure.parent)}}})
        model.initialize({"model_config": config})
        models.append(model)
        return model

    yield start
    for model in models:
        model.finalize()
    signal.setitimer(signal.ITIMER_REAL, 0)  # a model's heartbeat leaves one, which ends a process
    sys.setswitchinterval(interval)


def asked(segments=False, priority="file", **options):
    inputs = tensors.request_to_inputs(Request(audio=b"RIFF"))
    request = fake_triton.Request(**inputs, **options)
    request.sent = {"earshot_segments": True} if segments else {}
    request.sent |= {} if priority == "file" else {"earshot_priority": priority}
    return request


def threads():
    return {thread.name for thread in threading.enumerate()}


def last(request):
    response, final = request.sender.sent.get(timeout=WAIT_S)
    assert final and request.sender.sent.empty()
    return response


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_goes_out_once_and_segments_in_a_stream_before_it(start, backend, stream):
    model, request = start(), asked(stream)
    model.execute([request])
    ((inputs, on_event),) = backend.started
    assert tensors.request_from_inputs(inputs) == Request(audio=b"RIFF")
    for event in (SegmentReady(SEGMENT), RequestFinished(TRANSCRIPT)):
        on_event(event)
    if stream:
        response, final = request.sender.sent.get(timeout=WAIT_S)
        assert not final and tensors.segments_from_outputs(response.outputs.get) == (SEGMENT,)
    assert tensors.transcript_from_outputs(last(request).outputs.get) == TRANSCRIPT


@pytest.mark.parametrize("traced", [False, True])
def test_the_phases_of_a_requests_time_are_told_where_it_is_traced(start, backend, traced):
    model, request = start(), asked()
    request.sent = {"earshot_phases": True} if traced else {}
    model.execute([request])
    ((_, on_event),) = backend.started
    phases = (Phase("encode", 1764.25, 1764.5, 0.25, 1),)
    on_event(RequestFinished(dataclasses.replace(TRANSCRIPT, phases=phases)))
    outputs = last(request).outputs
    assert tensors.transcript_from_outputs(outputs.get).phases == (phases if traced else ())
    assert ("PHASES" in outputs) is traced


def test_the_engine_is_told_the_priority(start, backend):
    start().execute([asked(priority=priority) for priority in ("live", "file", "job")])
    assert backend.priorities == ["live", "file", "job"]


@pytest.mark.parametrize(
    "refusal, code, message",
    [
        (OverloadedError("full"), "unavailable", "OverloadedError: full"),
        (KeyError("x"), "internal", "EarshotError: internal error: KeyError('x')"),
    ],
)
def test_a_refusal_is_an_answer_and_its_neighbours_go_on(
    start, backend, caplog, refusal, code, message
):
    model, request = start(), asked()
    backend.refusal = refusal
    model.execute([request])
    error = last(request).error
    assert (error.code, error.message) == (code, message)
    assert ("a request failed" in caplog.text) is (code == "internal")
    backend.refusal = None
    model.execute([asked()])
    assert len(backend.started) == 1


def test_a_refused_request_is_let_go(start, backend):
    """Triton keeps a request as long as its sender lives, and a traceback all that has a name."""
    model, request = start(), asked()
    backend.refusal = OverloadedError("full")
    model.execute([request])
    last(request)
    sender = weakref.ref(request.sender)
    del request.sender
    assert sender() is None


def test_tensors_are_copied_because_tritons_memory_ends_with_execute(start, backend):
    samples = np.zeros(3, np.float32)
    start().execute([fake_triton.Request(SAMPLES=samples)])
    samples[:] = 1.0
    assert not backend.started[0][0]["SAMPLES"].any()


def test_the_interpreter_changes_threads_sooner_than_a_decoder_step_takes(start):
    start()
    assert sys.getswitchinterval() == pytest.approx(0.0005)


def test_the_end_sends_what_the_drain_still_answers(start, backend):
    model, request = start(), asked()
    model.execute([request])
    backend.close = lambda: backend.started[0][1](RequestFinished(TRANSCRIPT))
    model.finalize()
    assert "TIMINGS" in last(request).outputs
    assert "earshot-responses" not in threads()
    del backend.close


@pytest.mark.parametrize(
    "error, told", [(EarshotError("no engine at x"), "no engine at x"), (KeyError(), "KeyError()")]
)
def test_a_start_that_fails_leaves_its_reason(
    start, module, failure, monkeypatch, caplog, error, told
):
    def fail(parameters):
        raise error

    monkeypatch.setattr(module, "open_backend", fail)
    with pytest.raises(fake_triton.TritonModelException, match=f"^{error}$"):
        start()
    assert failure.read_text() == told
    unexpected = not isinstance(error, EarshotError)
    assert ("the model failed to start" in caplog.text) is unexpected, "a trace only for bugs"
