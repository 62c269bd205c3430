"""Hostile clients: floods, requests that ended or froze servers before, and harmful files."""

import asyncio
import contextlib
import http.client
import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from websockets.frames import Frame, Opcode

from eval.clients import (
    INFER_PATH,
    PATIENCE_S,
    Answer,
    Ask,
    Client,
    answer_to,
    by_form,
    by_grpc,
    by_http,
    channel_to,
    content_of,
    text_of,
)
from eval.server import Addresses

_PIECE_S = 10.0  # longest wait for room to send one piece

# ---------------------------------------------------------------- HTTP by hand


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


def upload(
    address: str, head: bytes, pieces: Iterable[bytes], timeout_s: float
) -> tuple[Answer, int]:
    """Send a head and pieces of a body until the server answers or hangs up, then read the answer.

    Args:
        address: host:port.
        head: up to the empty line.
        pieces: pieces of the body as they go over the wire, maybe without end.
        timeout_s: the longest time for all of it.

    Returns:
        the answer, and the number of bytes of the body that were sent.

    Raises:
        OSError: there is no connection.
    """
    end_s, sent = time.monotonic() + timeout_s, 0
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        # A server may hang up after a refusal; its answer can still be read.
        with contextlib.suppress(OSError):
            connection.sendall(head)
            connection.settimeout(_PIECE_S)
            for piece in pieces:
                if poll.poll(0) or time.monotonic() > end_s:
                    break
                connection.sendall(piece)
                sent += len(piece)

        def text() -> str:
            connection.settimeout(max(1.0, end_s - time.monotonic()))
            answer = http.client.HTTPResponse(connection, method="POST")
            answer.begin()
            return text_of(content_of(answer.status, answer.read()))

        return answer_to(text), sent


# ---------------------------------------------------------------- harmful files


def greedy_mp4(samples: int, tracks: int = 1) -> bytes:
    """Make an MP4 of about 1 kB without audio data. Its tables claim `samples` samples per track.

    FFmpeg allocates an index of 24 bytes for each sample before it returns the file.
    """
    sound = struct.pack(">6xH8xHHIi", 1, 1, 16, 0, 16_000 << 16)
    table = _box(
        "stbl",
        _box("stsd", struct.pack(">4xI", 1), _box("mp4a", sound)),
        _box("stts", struct.pack(">4xIII", 1, samples, 1024)),
        _box("stsc", struct.pack(">4xIIII", 1, 1, samples, 1)),
        _box("stsz", struct.pack(">4xII", 1, samples)),  # all of 1 byte, so no table of sizes
        _box("stco", struct.pack(">4xII", 1, 0)),
    )
    media = _box(
        "mdia",
        _box("mdhd", struct.pack(">4x8xIIHH", 16_000, 1000, 0, 0)),
        _box("hdlr", struct.pack(">8x4s12x", b"soun"), b"\0"),
        _box("minf", table),
    )
    return _box("ftyp", b"isom", bytes(4), b"isom") + _box("moov", _box("trak", media) * tracks)


def _box(name: str, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I4s", 8 + len(body), name.encode()) + body


# ---------------------------------------------------------------- requests that ended servers

_DEPTH = 200_000
_WAV_CHUNKS = 10_000_000


def _post(body: Callable[[], bytes], **headers: object) -> Client:
    """Return an attack that posts a body."""

    def attack(server: Addresses, _: Ask) -> Answer:
        content = body()
        top = head(server.http, Content_Length=len(content), **headers, **server.headers)
        return upload(server.http, top, [content], PATIENCE_S)[0]

    return attack


def _endless_header(server: Addresses, _: Ask) -> Answer:
    lines = itertools.chain([b"POST / HTTP/1.1\r\nX: "], itertools.repeat(b"a" * 65536, 1600))
    return upload(server.http, b"", lines, PATIENCE_S)[0]


def _garbage(address: str) -> Answer:
    return upload(address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [b"\xff" * 65536] * 16, 5.0)[0]


def _empty_chunks(server: Addresses, _: Ask) -> Answer:
    """Send a WAV file of 80 MB in empty chunks."""
    chunks = struct.pack("<4sI", b"LIST", 0) * _WAV_CHUNKS
    riff = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
    return by_grpc(server, Ask(riff))


def _torn_protobuf(server: Addresses, _: Ask) -> Answer:
    """Send bytes that are not a message to the method ModelInfer."""
    with channel_to(server) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        return answer_to(lambda: str(call(b"\xff" * 10_000, timeout=PATIENCE_S)))


KILLERS: dict[str, Client] = {
    "a header length beyond the body": _post(lambda: b"{}", Inference_Header_Content_Length=2**63),
    "a header of 100 MB": _endless_header,
    "garbage by HTTP": lambda server, _: _garbage(server.http),
    "garbage by gRPC": lambda server, _: _garbage(server.grpc),
    "a torn message by gRPC": _torn_protobuf,
    "a playlist": lambda server, _: by_http(
        server, Ask(b"#EXTM3U\n#EXTINF:5,\nfile:///etc/hostname\n")
    ),
    "80 MB of empty WAV chunks": _empty_chunks,
    "a prompt of 30 MB": lambda server, short: by_grpc(
        server, Ask(short.audio, {"PROMPT": "palabra " * 3_750_000})
    ),
    f"JSON nested {_DEPTH:,} deep": _post(
        lambda: b'{"inputs":' + b"[" * _DEPTH + b"]" * _DEPTH + b"}"
    ),
}
"""Requests that may end or freeze a server, by their names."""


# ---------------------------------------------------------------- floods

_FLOOD_S = 1.0  # duration of a flood among other clients
_CONNECT_EVERY_S = 0.0005  # all connections of a flood together
_UNKNOWN = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\n"
_INFER = b"POST /v2/models/whisper/infer HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
_LIVE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def flood(name: str, address: str, seconds: float | None = None, connections: int = 0) -> None:
    """Flood a server, and connect again where it hangs up.

    Args:
        name: a name of `FLOODS`.
        address: host:port.
        seconds: the duration; None: until the process ends.
        connections: the number of connections; 0 takes the flood's own.
    """
    content, usual_connections = FLOODS[name]
    (start, repeated), count = content(), connections or usual_connections
    host, _, port = address.rpartition(":")

    async def send(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(start)
            while repeated:
                writer.write(repeated)
                await writer.drain()
                await asyncio.sleep(0)  # `drain` does not yield while the buffer is short

    async def keep_connected(index: int) -> None:
        await asyncio.sleep(index * _CONNECT_EVERY_S)
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                sender = asyncio.create_task(send(writer))
                try:
                    while await reader.read(65536):
                        pass
                finally:
                    sender.cancel()
                    writer.transport.abort()
            await asyncio.sleep(count * _CONNECT_EVERY_S)

    async def flood_all() -> None:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*map(keep_connected, range(count)))

    with contextlib.suppress(TimeoutError):
        asyncio.run(flood_all())


def _flood_briefly(name: str) -> Client:
    """Return an attack that floods for a second, with an eighth of the flood's connections."""

    def attack(server: Addresses, _: Ask) -> Answer:
        flood(name, server.http, _FLOOD_S, connections=FLOODS[name][1] // 8)
        return Answer("refused", "the client left", _FLOOD_S)

    return attack


def _objects() -> tuple[bytes, bytes]:
    data = '{"inputs":[{"name":"SAMPLES","shape":[1],"datatype":"FP32","data":['
    body = data + ",".join(["{}"] * 5_000_000) + "]}]}"
    return b"", _INFER + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()


def _update() -> tuple[bytes, bytes]:
    keys = ",".join(f'"k{number}":1' for number in range(700_000))
    update = '{"type":"session.update","session":{' + keys + "}}"
    return _LIVE, _frame(Opcode.TEXT, update.encode())


def _frame(opcode: Opcode, data: bytes) -> bytes:
    return Frame(opcode, data).serialize(mask=True)


FLOODS: Mapping[str, tuple[Callable[[], tuple[bytes, bytes]], int]] = {
    "bytes apart": (lambda: (_INFER + _CHUNKED, b"1\r\n \r\n" * 10_000), 8),
    "refusals": (lambda: (b"", (_UNKNOWN + b"Content-Length: 0\r\n\r\n") * 1000), 8),
    "a crowd that says nothing": (lambda: (b"", b""), 1300),
    "JSON of empty objects": (_objects, 8),
    "settings of 700,000 keys": (_update, 8),
    "pings": (lambda: (_LIVE, _frame(Opcode.PING, b"x") * 10_000), 8),
    "messages never whole": (
        lambda: (_LIVE + _frame(Opcode.TEXT, bytes(2**24))[: -(2**16)], b""),
        24,
    ),
}
"""The bytes that each flood sends once and in a loop, and its number of connections."""


# ---------------------------------------------------------------- all of them

_UPLOAD_BYTES = 3 << 20  # more than a form keeps in memory
_GREEDY = greedy_mp4(40_000_000, tracks=3)

ATTACKS: dict[str, Client] = {
    **{name: _flood_briefly(name) for name in FLOODS},
    **KILLERS,
    "a greedy MP4": lambda server, _: by_grpc(server, Ask(_GREEDY)),
    "an upload that is no audio": lambda server, _: by_form(server, Ask(os.urandom(_UPLOAD_BYTES))),
}
"""Hostile clients by name."""
