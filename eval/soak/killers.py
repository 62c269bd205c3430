"""Requests that are known to have ended or frozen servers: this one lives, and says no."""

import itertools
import json
import struct
import time
from collections.abc import Callable

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from eval.record import Check
from eval.soak.client import Ending, by_grpc, by_http, channel_to, infer
from eval.soak.findings import Found
from eval.soak.raw import head, upload
from eval.soak.stage import Stage

DEPTH = 200_000
_FIELDS = 200_000
_PROMPT_CHARS = 30_000_000
_TIMEOUT_S = 60.0
_ALIVE_S = 10.0  # in which a short clip must be answered after each
_WAV_CHUNKS = 10_000_000


def killers(stage: Stage) -> Found:
    """Try each of them once; after each a short clip is answered, and no process has died."""
    before = stage.pids()
    for name, attack in KILLERS.items():
        began = time.monotonic()
        ending = attack(stage)
        took_s = time.monotonic() - began
        alive = stage.ask(_ALIVE_S)
        unhurt = alive.kind == "answered" and stage.pids() == before
        stage.say(f"killers: {name}: {ending}; then {alive.kind}")
        detail = f"it {ending}; then a short clip is {alive}"
        if not unhurt:
            detail += f"; processes before {before}, now {stage.pids()}"
        yield f"{name}, s", took_s
        yield Check(f"{name}: the server lives and answers", unhurt, detail)
        if stage.process.poll() is not None:
            yield Check("the others can be tried", False, "the server has ended")
            return
        if stage.pids() != before:
            stage.answers_again(_TIMEOUT_S)
            before = stage.pids()
    for name, call in _CLOSED.items():
        status = _status_of(stage, call)
        yield Check(f"{name} is closed to clients", status != "OK", status)


# ---------------------------------------------------------------- what is sent


def _post(stage: Stage, body: bytes, **headers: object) -> Ending:
    top = head(stage.at.http, Content_Length=len(body), **headers, **stage.at.headers)
    return upload(stage.at.http, top, [body], _TIMEOUT_S).ending


def _nested(stage: Stage) -> Ending:
    return _post(stage, b'{"inputs":' + b"[" * DEPTH + b"]" * DEPTH + b"}")


def _nested_parameters(stage: Stage) -> Ending:
    inner = b'{"a":' * DEPTH + b"1" + b"}" * DEPTH
    return _post(stage, b'{"parameters":' + inner + b',"inputs":[]}')


def _nested_before_binary(stage: Stage) -> Ending:
    body = b'{"inputs":' + b"[" * DEPTH + b"]" * DEPTH + b"}"
    return _post(stage, body + bytes(8), Inference_Header_Content_Length=len(body))


def _many_fields(stage: Stage) -> Ending:
    inputs = [{"name": f"I{i}", "shape": [1], "datatype": "INT32", "data": [i]} for i in range(100)]
    body = {"inputs": inputs, "parameters": {f"p{i}": i for i in range(_FIELDS)}}
    return _post(stage, json.dumps(body).encode())


def _endless_header(stage: Stage) -> Ending:
    lines = itertools.chain([b"POST / HTTP/1.1\r\nX: "], itertools.repeat(b"a" * 65536, 1600))
    return upload(stage.at.http, b"", lines, _TIMEOUT_S).ending


def _rubbish(address: str) -> Ending:
    return upload(address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [b"\xff" * 65536] * 16, 5.0).ending


def _empty_chunks(stage: Stage) -> Ending:
    """Send a WAV file of 80 MB in empty chunks."""
    chunks = struct.pack("<4sI", b"LIST", 0) * _WAV_CHUNKS
    riff = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
    return by_grpc(stage.at, riff, _TIMEOUT_S)


def _torn_protobuf(stage: Stage) -> Ending:
    """Send a message that is no ModelInferRequest to the method that wants one."""
    with channel_to(stage.at) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=None,
            response_deserializer=None,
        )
        began = time.monotonic()
        try:
            call(b"\xff" * 10_000, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            return Ending("failed", f"{error.code().name}", time.monotonic() - began)
        return Ending("answered", "", time.monotonic() - began)


def _shared_memory(stage: Stage) -> Ending:
    """Ask for audio in the memory of Triton itself, by the names that its regions may have."""
    with channel_to(stage.at) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        began = time.monotonic()
        for key in ("triton_python_backend_shm_region_0", "earshot", "/"):
            request = pb.SystemSharedMemoryRegisterRequest(
                name="all", key=key, offset=0, byte_size=1 << 20
            )
            try:
                stub.SystemSharedMemoryRegister(request, timeout=5)
            except grpc.RpcError as error:
                last = f"{error.code().name} {error.details()}"
        infer(channel, stage.short, _TIMEOUT_S, stage.at.headers)
    return Ending("failed", last, time.monotonic() - began)


KILLERS: dict[str, Callable[[Stage], Ending]] = {
    f"JSON with {_FIELDS:,} fields": _many_fields,
    "a header length beyond the body": lambda stage: _post(
        stage, b"{}", Inference_Header_Content_Length=2**63
    ),
    "a header of 100 MB": _endless_header,
    "rubbish by HTTP": lambda stage: _rubbish(stage.at.http),
    "rubbish by gRPC": lambda stage: _rubbish(stage.at.grpc),
    "a torn message by gRPC": _torn_protobuf,
    "shared memory by name": _shared_memory,
    "a playlist": lambda stage: by_http(
        stage.at, b"#EXTM3U\n#EXTINF:5,\nfile:///etc/hostname\n", _TIMEOUT_S
    ),
    "80 MB of empty WAV chunks": _empty_chunks,
    "a prompt of 30 MB": lambda stage: by_grpc(
        stage.at, stage.short, _TIMEOUT_S, PROMPT="palabra " * (_PROMPT_CHARS // 8)
    ),
    "a language of 2 MB": lambda stage: by_grpc(
        stage.at, stage.short, _TIMEOUT_S, LANGUAGE="x" * 2_000_000
    ),
    f"JSON nested {DEPTH:,} deep": _nested,
    "JSON nested in parameters": _nested_parameters,
    "JSON nested before binary data": _nested_before_binary,
}
"""Requests that may kill a server, by their names."""


# ---------------------------------------------------------------- what must be closed

_CLOSED: dict[str, Callable[[service_pb2_grpc.GRPCInferenceServiceStub], object]] = {
    "shared memory's status": lambda stub: stub.SystemSharedMemoryStatus(
        pb.SystemSharedMemoryStatusRequest(), timeout=5
    ),
    "the model repository": lambda stub: stub.RepositoryIndex(
        pb.RepositoryIndexRequest(), timeout=5
    ),
    "unloading a model": lambda stub: stub.RepositoryModelUnload(
        pb.RepositoryModelUnloadRequest(model_name="none"), timeout=5
    ),
    "a model's configuration": lambda stub: stub.ModelConfig(
        pb.ModelConfigRequest(name="whisper"), timeout=5
    ),
    "statistics": lambda stub: stub.ModelStatistics(pb.ModelStatisticsRequest(), timeout=5),
    "tracing": lambda stub: stub.TraceSetting(pb.TraceSettingRequest(), timeout=5),
    "logging": lambda stub: stub.LogSettings(pb.LogSettingsRequest(), timeout=5),
}


def _status_of(
    stage: Stage, call: Callable[[service_pb2_grpc.GRPCInferenceServiceStub], object]
) -> str:
    with channel_to(stage.at) as channel:
        try:
            call(service_pb2_grpc.GRPCInferenceServiceStub(channel))
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"
    return "OK"
