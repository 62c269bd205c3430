"""A client of live text: it streams audio at speaking speed or faster, and receives the text."""

import asyncio
import base64
import dataclasses
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import soxr
import websockets.exceptions
from websockets.asyncio.client import connect

from serve.contract.codec import to_json
from serve.contract.errors import DeadlineError, EarshotError, UnavailableError, from_response
from serve.contract.messages import Samples
from serve.gateway.live.events import Event
from serve.speech.channels import regroup
from serve.speech.rate import SAMPLE_RATE

_WIRE_RATE = 24_000  # Hz, of 16-bit samples
_PIECE_S = 0.1  # audio in one message
_QUIET_S = 1.0  # silence after the audio, which ends its last utterance
_ENDS = ("completed", "failed")


@dataclasses.dataclass(frozen=True)
class Heard:
    """A server event and its arrival time."""

    at_s: float  # since the first sample was sent
    event: Event


class LiveTransport(Protocol):
    """A connection that carries the messages of a session."""

    async def send(self, message: str) -> None:
        """Send a message; return once the transport has accepted it."""

    async def recv(self) -> str | bytes:
        """Wait for the next message."""


async def transcribe_live(
    server: str,
    blocks: Iterable[Samples],
    transcription: dict[str, Any],
    *,
    key: str | None = None,
    pace: float = 1.0,
    wait_s: float = 60.0,
) -> AsyncGenerator[Heard, None]:
    """Stream audio and yield the server's events until all of it is text.

    Args:
        server: ws://host:port of the gateway's HTTP, or wss:// with TLS.
        blocks: float32 (n,) each, 16 kHz mono.
        transcription: settings of the session: model, language, languages, prompt.
        key: an API key.
        pace: seconds of audio to send per second; 0: as fast as the server reads.
        wait_s: longest pause between events after all audio has been sent.

    Raises:
        UnavailableError: the server is not reachable, or it closed the connection.
        DeadlineError: the server sent no event for `wait_s`.
        EarshotError: the server rejected the session, or sent an error.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = f"{server}/v1/realtime?intent=transcription"
    try:
        async with connect(url, additional_headers=headers, max_size=None) as socket:
            async for arrival in converse(socket, blocks, transcription, pace=pace, wait_s=wait_s):
                yield arrival
    except websockets.exceptions.InvalidStatus as error:
        response = error.response
        raise from_response(url, response.status_code, response.body or b"") from error
    except (OSError, websockets.exceptions.WebSocketException) as error:
        raise UnavailableError(f"the server at {server}: {error}") from error


async def converse(
    wire: LiveTransport,
    blocks: Iterable[Samples],
    transcription: dict[str, Any],
    *,
    pace: float,
    wait_s: float,
) -> AsyncGenerator[Heard, None]:
    """Stream audio over an open connection and yield the events; see `transcribe_live`.

    Args:
        wire: the connection of a new session.
        blocks: see `transcribe_live`, also for the other arguments.

    Raises:
        DeadlineError, EarshotError: see `transcribe_live`.
    """
    session = {"type": "transcription", "audio": {"input": {"transcription": transcription}}}
    await wire.send(to_json({"type": "session.update", "session": session}))
    for _ in ("session.created", "session.updated"):
        await _next(wire, wait_s)
    began_s = asyncio.get_running_loop().time()
    sending = asyncio.create_task(_send(wire, blocks, pace, began_s))
    try:
        async for event in _until_all_is_text(wire, sending, wait_s):
            yield Heard(asyncio.get_running_loop().time() - began_s, event)
    finally:
        sending.cancel()
        await asyncio.wait((sending,))


async def _next(wire: LiveTransport, limit_s: float | None) -> Event:
    try:
        async with asyncio.timeout(limit_s):
            event: Event = json.loads(await wire.recv())
    except TimeoutError:
        raise DeadlineError(f"the server has sent nothing for {limit_s:g} s") from None
    if event["type"] == "error":
        raise EarshotError(event["error"]["message"])
    return event


async def _until_all_is_text(
    wire: LiveTransport, sending: "asyncio.Task[None]", wait_s: float
) -> AsyncIterator[Event]:
    open_items, all_sent = set[str](), False
    while not all_sent or open_items:
        # While audio is sent, a pause between events may be long; a dead server fails a ping.
        event = await _next(wire, wait_s if sending.done() else None)
        kind = event["type"]
        if kind == "input_audio_buffer.speech_started":
            open_items.add(event["item_id"])
        if kind.rpartition(".")[2] in _ENDS:
            open_items.discard(event["item_id"])
        all_sent |= kind == "input_audio_buffer.cleared"
        yield event


async def _send(
    wire: LiveTransport, blocks: Iterable[Samples], pace: float, began_s: float
) -> None:
    now_s = asyncio.get_running_loop().time
    for count, piece in enumerate(_pieces(blocks), 1):
        if pace:  # send a piece at its last sample's time
            await asyncio.sleep(max(0.0, began_s + count * _PIECE_S / pace - now_s()))
        audio = base64.b64encode(piece).decode()
        await wire.send(to_json({"type": "input_audio_buffer.append", "audio": audio}))
    await wire.send(to_json({"type": "input_audio_buffer.clear"}))  # answered after the audio


def _pieces(blocks: Iterable[Samples]) -> Iterator[bytes]:
    """Yield the audio and the final silence as 16-bit samples, one message each."""
    resampler = soxr.ResampleStream(SAMPLE_RATE, _WIRE_RATE, 1, dtype="float32")
    quiet = np.zeros(round(_QUIET_S * SAMPLE_RATE), np.float32)
    resampled = map(resampler.resample_chunk, itertools.chain(blocks, [quiet]))
    for piece in regroup(resampled, round(_PIECE_S * _WIRE_RATE)):
        yield (piece.clip(-1, 1) * 32767).astype("<i2").tobytes()
