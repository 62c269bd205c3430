"""Hostile clients: floods, requests that ended or froze servers before, and harmful files."""

import contextlib
import dataclasses
import functools
import http.client
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from eval.clients import (
    INFER_PATH,
    PATIENCE_S,
    Answer,
    Ask,
    all_answered,
    by_form,
    by_grpc,
    by_http,
    channel_to,
    counted,
    ended_by_http,
    infer,
    lost,
)
from eval.record import Check
from eval.soak.stage import Found, Stage, changed_broadcast

# ---------------------------------------------------------------- HTTP by hand


def connect(address: str, timeout_s: float) -> socket.socket:
    """Open a connection to host:port; raises OSError."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout_s)


_PIECE_S = 10.0  # longest wait for room to send one piece


@dataclasses.dataclass(frozen=True)
class Upload:
    """An upload that ended, and what it had sent until then."""

    answer: Answer
    sent_bytes: int


def head(host: str, **headers: object) -> bytes:
    """Write the head of a POST to the model; underscores in names stand for dashes."""
    lines = [f"POST {INFER_PATH} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def chunked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces as chunks of a body without a length."""
    for piece in pieces:
        yield b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def upload(address: str, head: bytes, pieces: Iterable[bytes], timeout_s: float) -> Upload:
    """Send a head and pieces of a body until the server answers or hangs up, then read the answer.

    Args:
        address: host:port.
        head: up to the empty line.
        pieces: of the body as they go over the wire; they may be endless.
        timeout_s: how long all of it may take.
    """
    began, sent = time.monotonic(), 0
    with contextlib.closing(connect(address, timeout_s)) as connection:
        try:
            connection.sendall(head)
            for piece in pieces:
                if time.monotonic() - began > timeout_s:
                    break
                if _has_answer(connection):
                    break
                connection.settimeout(_PIECE_S)
                connection.sendall(piece)
                sent += len(piece)
        except OSError:
            pass  # a refusal may be followed by a hang-up; the answer can still be read
        left_s = max(1.0, timeout_s - (time.monotonic() - began))
        return Upload(_read_answer(connection, began, left_s), sent)


def _has_answer(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) is not None
    except BlockingIOError:
        return False
    finally:
        connection.setblocking(True)


def _read_answer(connection: socket.socket, began: float, timeout_s: float) -> Answer:
    connection.settimeout(timeout_s)
    answer = http.client.HTTPResponse(connection, method="POST")
    try:
        answer.begin()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return lost(error, began)
    return ended_by_http(answer.status, body, time.monotonic() - began)


# ---------------------------------------------------------------- files made to harm


def greedy_mp4(samples: int, tracks: int = 1) -> bytes:
    """Make an MP4 of a kilobyte or so without sound, whose tables tell of so many samples a track.

    FFmpeg makes an index of 24 bytes for each before it gives the file to anybody.
    """
    movie = _box("mvhd", struct.pack(">4x8xIII2x", 1000, 1000, 0x10000), bytes(70))
    return _box("ftyp", b"isom", bytes(4), b"isom") + _box(
        "moov", movie, *(_track(samples) for _ in range(tracks))
    )


def _track(samples: int) -> bytes:
    sound = struct.pack(">6xH8xHHIi", 1, 1, 16, 0, 16_000 << 16)
    table = _box(
        "stbl",
        _box("stsd", struct.pack(">4xI", 1), _box("mp4a", sound)),
        _box("stts", struct.pack(">4xIII", 1, samples, 1024)),
        _box("stsc", struct.pack(">4xIIII", 1, 1, samples, 1)),
        _box("stsz", struct.pack(">4xII", 1, samples)),  # of one byte each: no table follows
        _box("stco", struct.pack(">4xII", 1, 0)),
    )
    media = _box(
        "mdia",
        _box("mdhd", struct.pack(">4x8xIIHH", 16_000, 1000, 0, 0)),
        _box("hdlr", struct.pack(">8x4s12x", b"soun"), b"\0"),
        _box("minf", _box("smhd", bytes(8)), table),
    )
    return _box("trak", _box("tkhd", bytes(12), struct.pack(">I", 1), bytes(68)), media)


def _box(name: str, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I4s", 8 + len(body), name.encode()) + body


# ---------------------------------------------------------------- requests that ended servers

DEPTH = 200_000
_FIELDS = 200_000
_PROMPT_CHARS = 30_000_000
_ALIVE_S = 10.0  # in which a short clip must be answered after each
_WAV_CHUNKS = 10_000_000


def killers(stage: Stage) -> Found:
    """Try each of them once; after each a short clip is answered, and no process has died."""
    before = stage.server.pids()
    for name, attack in KILLERS.items():
        began = time.monotonic()
        answer = attack(stage)
        took_s = time.monotonic() - began
        alive = stage.ask(_ALIVE_S)
        unhurt = alive.kind == "answered" and stage.server.pids() == before
        stage.say(f"killers: {name}: {answer}; then {alive.kind}")
        detail = f"it {answer}; then a short clip is {alive}"
        if not unhurt:
            detail += f"; processes before {before}, now {stage.server.pids()}"
        yield f"{name}, s", took_s
        yield Check(f"{name}: the server lives and answers", unhurt, detail)
        if stage.server.process.poll() is not None:
            yield Check("the others can be tried", False, "the server has ended")
            return
        if stage.server.pids() != before:
            stage.answers_again(PATIENCE_S)
            before = stage.server.pids()
    for name, call in _CLOSED.items():
        status = _status_of(stage, call)
        yield Check(f"{name} is closed to clients", status != "OK", status)


# ---------------------------------------------------------------- what is sent


def _post(stage: Stage, body: bytes, **headers: object) -> Answer:
    top = head(stage.at.http, Content_Length=len(body), **headers, **stage.at.headers)
    return upload(stage.at.http, top, [body], PATIENCE_S).answer


def _nested(stage: Stage) -> Answer:
    return _post(stage, b'{"inputs":' + b"[" * DEPTH + b"]" * DEPTH + b"}")


def _nested_parameters(stage: Stage) -> Answer:
    inner = b'{"a":' * DEPTH + b"1" + b"}" * DEPTH
    return _post(stage, b'{"parameters":' + inner + b',"inputs":[]}')


def _nested_before_binary(stage: Stage) -> Answer:
    body = b'{"inputs":' + b"[" * DEPTH + b"]" * DEPTH + b"}"
    return _post(stage, body + bytes(8), Inference_Header_Content_Length=len(body))


def _many_fields(stage: Stage) -> Answer:
    inputs = [{"name": f"I{i}", "shape": [1], "datatype": "INT32", "data": [i]} for i in range(100)]
    body = {"inputs": inputs, "parameters": {f"p{i}": i for i in range(_FIELDS)}}
    return _post(stage, json.dumps(body).encode())


def _endless_header(stage: Stage) -> Answer:
    lines = itertools.chain([b"POST / HTTP/1.1\r\nX: "], itertools.repeat(b"a" * 65536, 1600))
    return upload(stage.at.http, b"", lines, PATIENCE_S).answer


def _rubbish(address: str) -> Answer:
    return upload(address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [b"\xff" * 65536] * 16, 5.0).answer


def _empty_chunks(stage: Stage) -> Answer:
    """Send a WAV file of 80 MB in empty chunks."""
    chunks = struct.pack("<4sI", b"LIST", 0) * _WAV_CHUNKS
    riff = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
    return by_grpc(stage.at, Ask(riff))


def _torn_protobuf(stage: Stage) -> Answer:
    """Send a message that is no ModelInferRequest to the method that wants one."""
    with channel_to(stage.at) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=None,
            response_deserializer=None,
        )
        began = time.monotonic()
        try:
            call(b"\xff" * 10_000, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return Answer("failed", f"{error.code().name}", time.monotonic() - began)
        return Answer("answered", "", time.monotonic() - began)


def _shared_memory(stage: Stage) -> Answer:
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
        infer(channel, stage.at, Ask(stage.short))
    return Answer("failed", last, time.monotonic() - began)


KILLERS: dict[str, Callable[[Stage], Answer]] = {
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
        stage.at, Ask(b"#EXTM3U\n#EXTINF:5,\nfile:///etc/hostname\n")
    ),
    "80 MB of empty WAV chunks": _empty_chunks,
    "a prompt of 30 MB": lambda stage: by_grpc(
        stage.at, Ask(stage.short, {"PROMPT": "palabra " * (_PROMPT_CHARS // 8)})
    ),
    "a language of 2 MB": lambda stage: by_grpc(
        stage.at, Ask(stage.short, {"LANGUAGE": "x" * 2_000_000})
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


# ---------------------------------------------------------------- floods

MAX_RATIO = 2.0  # times as long as in quiet that others wait
_SECONDS = 6.0  # for which each flood lasts
_BEFORE_S = 4.0  # for a flood to rise, and for what it has left to go
_WAIT_S = 30.0
_CONNECTIONS = 8  # of each flood; a crowd has more
_CROWD = 1300
_MASK = bytes(4)  # that of a WebSocket's frames
_UNKNOWN = "POST /nothing HTTP/1.1\r\nHost: localhost\r\n"
_INFER = "POST /v2/models/whisper/infer HTTP/1.1\r\nHost: localhost\r\n"
_LIVE = (
    "GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)

Flood = Callable[[socket.socket], None]


def floods(stage: Stage) -> Found:
    """Ask for a short clip over and over, in quiet and beside each flood."""
    quiet = _asked(stage)
    yield all_answered(quiet)
    quiet_s = statistics.median(answer.seconds for answer in quiet)
    yield "quiet: median, s", quiet_s
    for name in FLOODS:
        # Spawned, because this process has threads of gRPC; daemonic, to end with it.
        spawn = multiprocessing.get_context("spawn")
        flooding = spawn.Process(target=_flood, args=(name, stage.at.http), daemon=True)
        flooding.start()
        try:
            time.sleep(_BEFORE_S)
            beside = _asked(stage)
        finally:
            flooding.kill()
            flooding.join()
            time.sleep(_BEFORE_S)
        median_s = statistics.median(answer.seconds for answer in beside)
        stage.say(f"floods: {name}: {median_s:.2f} s; {counted(beside)}")
        yield f"{name}: median, s", median_s
        held = median_s <= MAX_RATIO * quiet_s and all(e.kind == "answered" for e in beside)
        detail = f"{median_s:.2f} s against {quiet_s:.2f} s; {counted(beside)}"
        yield Check(f"{name}: others wait at most {MAX_RATIO:g} times as long", held, detail)


def _asked(stage: Stage) -> list[Answer]:
    """Ask for `_SECONDS`, at least once."""
    answers, end_s = [stage.ask(_WAIT_S)], time.monotonic() + _SECONDS
    while time.monotonic() < end_s:
        answers.append(stage.ask(_WAIT_S))
    return answers


def _flood(name: str, address: str) -> None:
    """Flood until this process is killed."""
    os.nice(10)  # the clients' own work is not what is measured
    made, connections = FLOODS[name]
    flood = made()

    def again() -> None:
        while True:
            with contextlib.suppress(OSError), connect(address, _WAIT_S) as connection:
                flood(connection)
            time.sleep(0.01)

    threads = [threading.Thread(target=again, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def flood_once(name: str, address: str, seconds: float) -> None:
    """Do what a client of a flood does, once and for so long; where it is a crowd, what all do."""
    _, connections = FLOODS[name]
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        sockets = [
            stack.enter_context(connect(address, seconds))
            for _ in range(connections if connections == _CROWD else 1)
        ]
        answer = threading.Timer(seconds, _hang_up, (sockets[0],))
        stack.callback(answer.cancel)
        answer.start()
        _flood_of(name)(sockets[0])


def _hang_up(connection: socket.socket) -> None:
    """Shut it down and do not close it, for threads may wait for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@functools.cache
def _flood_of(name: str) -> Flood:
    return FLOODS[name][0]()  # some make megabytes


def _bytes_apart(head: str) -> Flood:
    """Send a body in chunks of one byte."""

    def flood(connection: socket.socket) -> None:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(100):
            connection.sendall(b"1\r\n \r\n" * 10_000)

    return flood


def _silence(connection: socket.socket) -> None:
    """Say nothing until the server hangs up."""
    connection.recv(1)


def _refused(connection: socket.socket) -> None:
    """Send requests that are refused, one behind the other."""
    drain = threading.Thread(target=_take_all, args=(connection,), daemon=True)
    drain.start()
    while True:
        connection.sendall(f"{_UNKNOWN}Content-Length: 0\r\n\r\n".encode() * 1000)


def _json(piece: str, size: int) -> Flood:
    """Send a request whose JSON is a list of so many bytes."""
    data = '{"inputs":[{"name":"SAMPLES","shape":[1],"datatype":"FP32","data":['
    body = data + ",".join(itertools.repeat(piece, size // (len(piece) + 1))) + "]}]}"
    request = f"{_INFER}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def flood(connection: socket.socket) -> None:
        connection.sendall(request)
        connection.recv(10_000)

    return flood


def _frames(first: bytes, further: bytes) -> Flood:
    """Send a WebSocket's first frames once, and further ones over and over."""

    def flood(connection: socket.socket) -> None:
        connection.sendall(_LIVE.encode() + first)
        threading.Thread(target=_take_all, args=(connection,), daemon=True).start()
        while True:
            connection.sendall(further)

    return flood


def _unfinished(connection: socket.socket) -> None:
    """Send a message that is never whole."""
    connection.sendall(_LIVE.encode())
    connection.sendall(_frame(1, bytes(2**24 - 2**16), length=2**24))
    _take_all(connection)


def _frame(opcode: int, data: bytes, fin: bool = True, length: int | None = None) -> bytes:
    length = len(data) if length is None else length
    head = bytes([opcode | (0x80 if fin else 0)])
    if length < 126:
        return head + bytes([0x80 | length]) + _MASK + data
    return head + bytes([0x80 | 127]) + length.to_bytes(8, "big") + _MASK + data


def _take_all(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


def _update() -> Flood:
    keys = ",".join(f'"k{number}":1' for number in range(700_000))
    return _frames(b"", _frame(1, ('{"type":"session.update","session":{' + keys + "}}").encode()))


FLOODS: dict[str, tuple[Callable[[], Flood], int]] = {
    "bytes apart, refused": (lambda: _bytes_apart(_UNKNOWN), _CONNECTIONS),
    "bytes apart, taken": (lambda: _bytes_apart(_INFER), _CONNECTIONS),
    "refusals": (lambda: _refused, _CONNECTIONS),
    "a crowd that says nothing": (lambda: _silence, _CROWD),
    "JSON of empty objects": (lambda: _json("{}", 15_000_000), _CONNECTIONS),
    "JSON of numbers": (lambda: _json("0.123456", 9_000_000), _CONNECTIONS),
    "settings of 700,000 keys": (_update, _CONNECTIONS),
    "pings": (lambda: _frames(b"", _frame(9, b"x") * 10_000), _CONNECTIONS),
    "frames of 2 bytes": (
        lambda: _frames(_frame(1, b"  ", fin=False), _frame(0, b"  ", fin=False) * 10_000),
        _CONNECTIONS,
    ),
    "messages never whole": (lambda: _unfinished, 24),
}
"""What makes the behaviour of a connection, and how many behave so, each again and again."""


# ---------------------------------------------------------------- all of them

_FLOOD_S = 1.0
_UPLOAD_BYTES = 3 << 20  # more than a form keeps in memory
_GREEDY = greedy_mp4(40_000_000, tracks=3)


def _flooding(name: str) -> Callable[[Stage], Answer]:
    def attack(stage: Stage) -> Answer:
        flood_once(name, stage.at.http, _FLOOD_S)
        return Answer("refused", "the client went", _FLOOD_S)

    return attack


ATTACKS: dict[str, Callable[[Stage], Answer]] = {
    **{name: _flooding(name) for name in FLOODS},
    **KILLERS,
    "a greedy MP4": lambda stage: by_grpc(stage.at, Ask(_GREEDY)),
    "a broadcast that changes": lambda stage: by_grpc(stage.at, Ask(changed_broadcast())),
    "an upload that is no audio": lambda stage: by_form(stage.at, Ask(os.urandom(_UPLOAD_BYTES))),
}
"""Attacks by their names; each gives what the server said."""
