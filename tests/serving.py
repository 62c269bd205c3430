"""What the tests of the Triton side share: an answer, audio, and looks at a running server."""

import contextlib
import dataclasses
import functools
import io
import re
import time
import urllib.request
from http.client import HTTPException

import numpy as np
import psutil
import soundfile
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2

from serve.contract.messages import Segment, Timings, Transcript
from serve.gateway.kserve.messages import for_triton
from serve.transcriber.request_tracker import Stats
from serve.wire import tensors
from tests.waits import WAIT_S

SEGMENT = Segment(0.5, 1.5, " ¿Qué?", (1, 2), -0.5, None, 0.2, 1.25)
TIMINGS = Timings(0.1, 0.2, 0.3, 0.7)
TRANSCRIPT = Transcript("¿Qué?", "es", 0.5, 1.75, (SEGMENT, SEGMENT), TIMINGS, (1, 2, 60))
# Every field has a different value, so that none can stand for another.
STATS = Stats(**{field.name: value for value, field in enumerate(dataclasses.fields(Stats), 101)})


@functools.cache
def audio_file(seconds, format="FLAC", seed=0):
    """Noise with a pause in every tenth second, as a file's bytes."""
    samples = np.random.default_rng(seed).normal(0, 0.05, int(seconds * 16_000)).astype("f4")
    samples[(np.arange(len(samples)) // 16_000) % 10 == 9] = 0
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format=format)
    return file.getvalue()


CLIP = audio_file(1.0)
LONG = audio_file(75.0)


def metrics_page(server):
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=WAIT_S) as answer:
        return answer.read().decode()


def is_ready(http):
    """Whether the server at this address is ready to answer."""
    url = f"http://{http}/v2/models/{tensors.MODEL}/ready"
    with (
        contextlib.suppress(OSError, HTTPException),
        urllib.request.urlopen(url, timeout=WAIT_S) as answer,
    ):
        return answer.status == 200
    return False


def triton_pids(server):
    """The processes of a server's Tritons, one for each device; a restart changes them."""
    pids = []
    for link in sorted(server.folder.glob("engine-?")):
        repository = f"--model-repository={link.resolve()}/models"
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended
                pids += [child.pid] * (repository in child.cmdline())
    return tuple(pids)


def outcomes(server):
    """Requests by outcome, as the metrics page counts them."""
    page = metrics_page(server)
    found = re.findall(r'^earshot_requests_total\{.*outcome="(\w+)"\} (\d+)', page, re.MULTILINE)
    found.append(("pending", re.search(r"^earshot_pending_requests\{.*\} (\d+)", page, re.M)[1]))
    return {name: int(value) for name, value in found}


def accepted(server):
    """Requests accepted so far; a counter, so that none that is soon answered is missed."""
    found = re.findall(r"^earshot_accepted_total\{.*\} (\d+)", metrics_page(server), re.MULTILINE)
    return sum(map(int, found))


def settled(server):
    """The counts once nothing is pending and a second has passed in which they stayed."""
    end, last = time.monotonic() + WAIT_S, None
    while True:
        now = outcomes(server)
        if now == last and not now["pending"]:
            return now
        assert time.monotonic() < end, now
        last = now
        time.sleep(1.2)


def http_inputs(request):
    """A request as the HTTP client of tritonclient sends it."""
    made = []
    for name, values in tensors.request_to_inputs(request).items():
        tensor = triton_http.InferInput(name, list(values.shape), tensors.INPUTS[name].datatype)
        tensor.set_data_from_numpy(values)
        made.append(tensor)
    return made


def ask_triton(stub, message, timeout_s=WAIT_S):
    """The messages by which Triton itself answers a serialised request."""
    request = service_pb2.ModelInferRequest.FromString(message)
    return stub.ModelStreamInfer(iter([request]), timeout=timeout_s)


def audio_request(audio, key, segments=False):
    """A request for Triton itself, serialised."""
    request = service_pb2.ModelInferRequest()
    request.inputs.add(name="AUDIO", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(audio).to_bytes(4, "little") + audio)
    return for_triton([request.SerializeToString()], key, segments)
