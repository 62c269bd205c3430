"""What the gateway's tests share: one over a stand-in for Triton, clients, and requests.

Gateway and stand-in have an event loop on a thread each.
"""

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import resource
import socket
import threading

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2

from serve.contract.config import Config, TranscriberConfig
from serve.contract.server_config import GatewayConfig, ServerConfig
from serve.gateway.engines import SERVICE, EngineAddress
from serve.gateway.run import GatewayServer
from serve.supervisor.supervisor import free_ports
from serve.wire import tensors
from serve.wire.folder import engine_links
from tests.fake_upstream import FakeTriton
from tests.waits import WAIT_S, wait_until

SECTIONS = ("name", "runtime", "live", "jobs", "shadow")
TRANSCRIPTIONS = "/v1/audio/transcriptions"
INFER = "/v2/models/whisper/infer"
FORM = {"content-type": "multipart/form-data; boundary=x"}
END = b"--x--\r\n"


class Clock:
    """A clock that stands still until a test sets `now_s`."""

    def __init__(self, now_s=1000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


class Running:
    """A gateway that runs, what is behind it, and clients of it.

    Options are sections of the configuration, as `SECTIONS` has them, and keys of `[server]`.
    `devices`: it has a Triton on each, `tritons`, of which `triton` is the first.
    """

    def __init__(
        self,
        folder,
        request_timeout_s,
        triton_metrics=b"",
        devices=("cpu",),
        target_p99_s=0.0,
        **options,
    ):
        sections = {name: options.pop(name) for name in SECTIONS if name in options}
        http, rpc, metrics = free_ports("127.0.0.1", 3)
        ports = {"http_port": http, "grpc_port": rpc, "metrics_port": metrics}
        self.config = Config(
            server=dataclasses.replace(ServerConfig(**ports), **options),
            transcriber=TranscriberConfig(request_timeout_s=request_timeout_s),
            gateway=GatewayConfig(target_p99_s=target_p99_s),
            **sections,
        )
        self.http, self.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{rpc}"
        self.metrics = f"127.0.0.1:{metrics}"
        self.folder = folder
        self._devices = devices
        self.links = engine_links(folder, len(devices))
        self.tritons = []
        for number, link in enumerate(self.links):
            self.tritons.append(self.make_triton(f"triton-{number}", triton_metrics))
            link.symlink_to(self.tritons[-1].folder)
        self.triton = self.tritons[0]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.gateway = self.run(self._start())
        self.services = self.gateway.services
        self._exits = contextlib.ExitStack()
        self.channel = self._exits.enter_context(grpc.insecure_channel(self.grpc))

    def make_triton(self, name, metrics=b""):
        """A stand-in with its own folder, for no device yet."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return FakeTriton(folder, metrics)

    async def _start(self):
        engines = [
            EngineAddress(device, link)
            for device, link in zip(self._devices, self.links, strict=True)
        ]
        gateway = GatewayServer(self.config, self.folder, engines)
        await gateway.start()
        return gateway

    def run(self, coroutine):
        return self.submit(coroutine).result(WAIT_S)

    def submit(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self):
        self._exits.close()
        self.run(self.gateway.close())
        for triton in self.tritons:
            triton.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, method="ModelInfer"):
        """One gRPC call of raw bytes, as any client makes it."""
        return self.channel.unary_unary(SERVICE + method)

    def grpc_client(self):
        return self._exits.enter_context(
            contextlib.closing(triton_grpc.InferenceServerClient(self.grpc))
        )

    def http_client(self, **options):
        return self._exits.enter_context(
            contextlib.closing(triton_http.InferenceServerClient(self.http, **options))
        )

    def ask(self, method, path, body=None, headers=None):
        """Status, headers and body of one HTTP request."""
        connection = http.client.HTTPConnection(self.http, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    @contextlib.contextmanager
    def connected(self, said=b"", address=None):
        """A socket to the HTTP address, or another one, over which this has been sent."""
        host, _, port = (address or self.http).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(said)
            yield connection

    def transcribe(self, audio=b"RIFF", headers=(), **fields):
        """Status, headers and body of a request of OpenAI's API."""
        body = form(audio, **fields)
        return self.ask("POST", TRANSCRIPTIONS, body, {**FORM, **dict(headers)})

    def infer(self, body, **headers):
        """Status and error of an HTTP request to infer."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        status, _, answer = self.ask("POST", INFER, body, headers)
        return status, json.loads(answer).get("error")

    def page(self):
        connection = http.client.HTTPConnection(self.metrics, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()


until = functools.partial(wait_until, look_s=0.005)


def refusal(call):
    """Status and text with which a gRPC call ends."""
    with pytest.raises(grpc.RpcError) as caught:
        call.result(WAIT_S)
    return caught.value.code().name, caught.value.details()


def refused(running, message, method="ModelInfer"):
    return refusal(running.call(method).future(message, timeout=WAIT_S))


@contextlib.contextmanager
def full_disk():
    """No byte more is written to any file, as where there is no room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def all_from(connection):
    """What comes until the server has ended the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(10_000):
            received += more
    return received


def post(body=b"", path=INFER, length=None, headers=""):
    """An HTTP request by hand; `length`: the declared length."""
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {length}\r\n{headers}\r\n"
    return head.encode() + body


def part(name, content, filename=None):
    """A part of a form, with this name and file name."""
    file = "" if filename is None else f'; filename="{filename}"'
    head = f'--x\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + content + b"\r\n"


FILE = part("file", b"RIFF", "a.wav")


def form(audio=b"RIFF", filename="a.wav", **fields):
    """The body of a form, with the headers `FORM`."""
    parts = [part(name, str(text).encode()) for name, text in fields.items()]
    return b"".join(parts) + part("file", audio, filename) + END


def message(prompt="hello", model=tensors.MODEL, samples=400, **fields):
    """A serialised ModelInferRequest."""
    request = service_pb2.ModelInferRequest(model_name=model, **fields)
    data = prompt.encode()
    request.inputs.add(name="PROMPT", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    request.inputs.add(name="SAMPLES", datatype="FP32", shape=[samples])
    request.raw_input_contents.append(bytes(4 * samples))
    return request.SerializeToString()


def inputs(client, prompt="hello", samples=400, **options):
    """The same, as tritonclient's `client` (its grpc or http module) has it."""
    values = {
        "PROMPT": np.array([prompt.encode()], np.object_),
        "SAMPLES": np.zeros(samples, np.float32),
    }
    made = []
    for name, array in values.items():
        tensor = client.InferInput(name, list(array.shape), tensors.INPUTS[name].datatype)
        tensor.set_data_from_numpy(array, **options)
        made.append(tensor)
    return made


def json_request(prompt="hello", **fields):
    """The JSON of a request over HTTP."""
    sent = [
        {"name": "PROMPT", "datatype": "BYTES", "shape": [1], "data": [prompt]},
        {"name": "SAMPLES", "datatype": "FP32", "shape": [2], "data": [0.5, -1]},
    ]
    return {"inputs": sent, **fields}
