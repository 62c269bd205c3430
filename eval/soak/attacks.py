"""Hostile clients: floods, requests that ended or froze servers before, and harmful files."""

import contextlib
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
from typing import NamedTuple

from eval.clients import (
    INFER_PATH,
    PATIENCE_S,
    Answer,
    Ask,
    all_answered,
    answer_to,
    by_form,
    by_grpc,
    by_http,
    channel_to,
    counted,
    kserve_text,
)
from eval.record import Check
from eval.soak.stage import Found, Stage, changed_broadcast

MAX_RATIO = 2.0  # of the time in quiet, for the requests of other clients
_PIECE_S = 10.0  # longest wait for room to send one piece

# ---------------------------------------------------------------- HTTP by hand


class Upload(NamedTuple):
    """The end of an upload."""

    answer: Answer
    sent_bytes: int


def connect(address: str, timeout_s: float) -> socket.socket:
    """Open a connection to host:port; raises OSError."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout_s)


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
        pieces: pieces of the body as they go over the wire, maybe without end.
        timeout_s: the longest time for all of it.

    Raises:
        OSError: there is no connection.
    """
    end_s, sent = time.monotonic() + timeout_s, 0
    with contextlib.closing(connect(address, timeout_s)) as connection:
        try:
            connection.sendall(head)
            for piece in pieces:
                if time.monotonic() > end_s or _has_answer(connection):
                    break
                connection.settimeout(_PIECE_S)
                connection.sendall(piece)
                sent += len(piece)
        except OSError:
            pass  # a server may hang up after a refusal; its answer can still be read

        def text() -> str:
            connection.settimeout(max(1.0, end_s - time.monotonic()))
            answer = http.client.HTTPResponse(connection, method="POST")
            answer.begin()
            return kserve_text(answer.status, answer.read())

        return Upload(answer_to(text), sent)


def _has_answer(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) is not None
    except BlockingIOError:
        return False
    finally:
        connection.setblocking(True)


# ---------------------------------------------------------------- a harmful file


def greedy_mp4(samples: int, tracks: int = 1) -> bytes:
    """Make an MP4 of about 1 kB without sound, whose tables claim `samples` samples per track.

    FFmpeg allocates an index of 24 bytes for each sample before it returns the file.
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

_DEPTH = 200_000
_FIELDS = 200_000
_ALIVE_S = 10.0  # longest wait for a short clip after each of them
_WAV_CHUNKS = 10_000_000


def killers(stage: Stage) -> Found:
    """Send each of them once; afterwards a short clip is answered, and no process has died."""
    before = stage.server.pids()
    for name, attack in KILLERS.items():
        began = time.monotonic()
        answer = attack(stage)
        took_s = time.monotonic() - began
        alive, now = stage.ask(_ALIVE_S), stage.server.pids()
        stage.say(f"killers: {name}: {answer}; then {alive.kind}")
        detail = f"it is {answer}; then a short clip is {alive}"
        if now != before:
            detail += f"; processes before {before}, now {now}"
        yield f"{name}, s", took_s
        unhurt = alive.kind == "answered" and now == before
        yield Check(f"{name}: the server lives and answers", unhurt, detail)
        if stage.server.process.poll() is not None:
            yield Check("the others can be tried", False, "the server has ended")
            return
        if now != before:
            stage.answers_again(PATIENCE_S)
            before = stage.server.pids()


def _post(body: Callable[[], bytes], **headers: object) -> Callable[[Stage], Answer]:
    """Return an attack that posts a body."""

    def attack(stage: Stage) -> Answer:
        content = body()
        top = head(stage.at.http, Content_Length=len(content), **headers, **stage.at.headers)
        return upload(stage.at.http, top, [content], PATIENCE_S).answer

    return attack


def _nested() -> bytes:
    return b'{"inputs":' + b"[" * _DEPTH + b"]" * _DEPTH + b"}"


def _nested_parameters() -> bytes:
    return b'{"parameters":' + b'{"a":' * _DEPTH + b"1" + b"}" * _DEPTH + b',"inputs":[]}'


def _many_fields() -> bytes:
    inputs = [{"name": f"I{i}", "shape": [1], "datatype": "INT32", "data": [i]} for i in range(100)]
    body = {"inputs": inputs, "parameters": {f"p{i}": i for i in range(_FIELDS)}}
    return json.dumps(body).encode()


def _endless_header(stage: Stage) -> Answer:
    lines = itertools.chain([b"POST / HTTP/1.1\r\nX: "], itertools.repeat(b"a" * 65536, 1600))
    return upload(stage.at.http, b"", lines, PATIENCE_S).answer


def _garbage(address: str) -> Answer:
    return upload(address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [b"\xff" * 65536] * 16, 5.0).answer


def _empty_chunks(stage: Stage) -> Answer:
    """Send a WAV file of 80 MB in empty chunks."""
    chunks = struct.pack("<4sI", b"LIST", 0) * _WAV_CHUNKS
    riff = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
    return by_grpc(stage.at, Ask(riff))


def _torn_protobuf(stage: Stage) -> Answer:
    """Send bytes that are not a message to the method ModelInfer."""
    with channel_to(stage.at) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        return answer_to(lambda: str(call(b"\xff" * 10_000, timeout=PATIENCE_S)))


KILLERS: dict[str, Callable[[Stage], Answer]] = {
    f"JSON with {_FIELDS:,} fields": _post(_many_fields),
    "a header length beyond the body": _post(lambda: b"{}", Inference_Header_Content_Length=2**63),
    "a header of 100 MB": _endless_header,
    "garbage by HTTP": lambda stage: _garbage(stage.at.http),
    "garbage by gRPC": lambda stage: _garbage(stage.at.grpc),
    "a torn message by gRPC": _torn_protobuf,
    "a playlist": lambda stage: by_http(
        stage.at, Ask(b"#EXTM3U\n#EXTINF:5,\nfile:///etc/hostname\n")
    ),
    "80 MB of empty WAV chunks": _empty_chunks,
    "a prompt of 30 MB": lambda stage: by_grpc(
        stage.at, Ask(stage.short, {"PROMPT": "palabra " * 3_750_000})
    ),
    "a language of 2 MB": lambda stage: by_grpc(
        stage.at, Ask(stage.short, {"LANGUAGE": "x" * 2_000_000})
    ),
    f"JSON nested {_DEPTH:,} deep": _post(_nested),
    "JSON nested in parameters": _post(_nested_parameters),
    "JSON nested before binary data": _post(
        lambda: _nested() + bytes(8), Inference_Header_Content_Length=len(_nested())
    ),
}
"""Requests that may end or freeze a server, by their names."""


# ---------------------------------------------------------------- floods

_SECONDS = 6.0  # for which requests are sent beside each flood
_BEFORE_S = 4.0  # for a flood to rise, and for its rest to go
_WAIT_S = 30.0
_CROWD = 1300
_UNKNOWN = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\n"
_INFER = b"POST /v2/models/whisper/infer HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
_LIVE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def floods(stage: Stage) -> Found:
    """Send a short clip in a loop, without a flood and beside each one."""
    quiet = _ask_for_a_while(stage)
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
            beside = _ask_for_a_while(stage)
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


def _ask_for_a_while(stage: Stage) -> list[Answer]:
    answers, end_s = [stage.ask(_WAIT_S)], time.monotonic() + _SECONDS
    while time.monotonic() < end_s:
        answers.append(stage.ask(_WAIT_S))
    return answers


def _flood(name: str, address: str) -> None:
    """Flood until this process is killed."""
    os.nice(10)  # the clients' own work is not measured
    content, connections = FLOODS[name]
    first, further = content()

    def again() -> None:
        while True:
            with contextlib.suppress(OSError), connect(address, _WAIT_S) as connection:
                _pour(connection, first, further)
            time.sleep(0.01)

    threads = [threading.Thread(target=again, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _pour(connection: socket.socket, first: bytes, further: bytes) -> None:
    """Send `first` once and `further` in a loop until the server hangs up; read answers."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while connection.recv(65536):
                pass

    connection.sendall(first)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while further:
        connection.sendall(further)
    reader.join()


def flood_once(name: str, stage: Stage) -> Answer:
    """Flood for a second over one connection, or over those of a whole crowd."""
    _, connections = FLOODS[name]
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        sockets = [
            stack.enter_context(connect(stage.at.http, _FLOOD_S))
            for _ in range(connections if connections == _CROWD else 1)
        ]
        timer = threading.Timer(_FLOOD_S, _hang_up, (sockets[0],))
        stack.callback(timer.cancel)
        timer.start()
        _pour(sockets[0], *_content_of(name))
    return Answer("refused", "the client left", _FLOOD_S)


def _hang_up(connection: socket.socket) -> None:
    """Shut a connection down without closing it, because threads may wait for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@functools.cache
def _content_of(name: str) -> tuple[bytes, bytes]:
    return FLOODS[name][0]()  # some contents are megabytes


def _json(item: str, size: int) -> tuple[bytes, bytes]:
    """Return a request with a JSON list of about `size` bytes."""
    data = '{"inputs":[{"name":"SAMPLES","shape":[1],"datatype":"FP32","data":['
    body = data + ",".join([item] * (size // (len(item) + 1))) + "]}]}"
    return b"", _INFER + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()


def _frame(opcode: int, data: bytes, fin: bool = True, length: int | None = None) -> bytes:
    """Write a WebSocket frame with a mask of zeros, which may claim another length."""
    length = len(data) if length is None else length
    start = bytes([opcode | (0x80 if fin else 0)])
    if length < 126:
        return start + bytes([0x80 | length]) + bytes(4) + data
    return start + bytes([0x80 | 127]) + length.to_bytes(8, "big") + bytes(4) + data


def _update() -> tuple[bytes, bytes]:
    keys = ",".join(f'"k{number}":1' for number in range(700_000))
    return _LIVE, _frame(1, ('{"type":"session.update","session":{' + keys + "}}").encode())


FLOODS: dict[str, tuple[Callable[[], tuple[bytes, bytes]], int]] = {
    "bytes apart, refused": (lambda: (_UNKNOWN + _CHUNKED, b"1\r\n \r\n" * 10_000), 8),
    "bytes apart, taken": (lambda: (_INFER + _CHUNKED, b"1\r\n \r\n" * 10_000), 8),
    "refusals": (lambda: (b"", (_UNKNOWN + b"Content-Length: 0\r\n\r\n") * 1000), 8),
    "a crowd that says nothing": (lambda: (b"", b""), _CROWD),
    "JSON of empty objects": (lambda: _json("{}", 15_000_000), 8),
    "JSON of numbers": (lambda: _json("0.123456", 9_000_000), 8),
    "settings of 700,000 keys": (_update, 8),
    "pings": (lambda: (_LIVE, _frame(9, b"x") * 10_000), 8),
    "frames of 2 bytes": (
        lambda: (_LIVE + _frame(1, b"  ", fin=False), _frame(0, b"  ", fin=False) * 10_000),
        8,
    ),
    "messages never whole": (
        lambda: (_LIVE + _frame(1, bytes(2**24 - 2**16), length=2**24), b""),
        24,
    ),
}
"""The bytes that each flood sends once and in a loop, and its number of connections."""


# ---------------------------------------------------------------- all of them

_FLOOD_S = 1.0
_UPLOAD_BYTES = 3 << 20  # more than a form keeps in memory
_GREEDY = greedy_mp4(40_000_000, tracks=3)

ATTACKS: dict[str, Callable[[Stage], Answer]] = {
    **{name: functools.partial(flood_once, name) for name in FLOODS},
    **KILLERS,
    "a greedy MP4": lambda stage: by_grpc(stage.at, Ask(_GREEDY)),
    "a broadcast that changes": lambda stage: by_grpc(stage.at, Ask(changed_broadcast())),
    "an upload that is no audio": lambda stage: by_form(stage.at, Ask(os.urandom(_UPLOAD_BYTES))),
}
"""Attacks by their names; each returns the server's answer."""
