"""The session of one client: handle its events.

The first error ends the connection, after an event `error`: Home Assistant would otherwise keep
waiting for a transcript.
"""

import asyncio
import dataclasses
import logging
from typing import Any

from serve.contract.errors import DeadlineError, EarshotError, RequestError
from serve.wyoming.events import WyomingEvent, data_of, read_event
from serve.wyoming.upstream import SpeechApiAnswer, SpeechApiClient
from serve.wyoming.utterance import AudioFormat, TranscribeOptions, WyomingUtterance

logger = logging.getLogger("earshot.wyoming")

_WRITE_S = 10.0
_WHISPER_ATTRIBUTION = {"name": "OpenAI", "url": "https://github.com/openai/whisper"}


@dataclasses.dataclass(frozen=True)
class BridgeSettings:
    """The settings that all sessions share."""

    upstream: SpeechApiClient
    languages: tuple[str, ...]  # codes that clients may choose from
    language: str | None  # if the client names none; None: detect it
    idle_s: float  # timeout between a client's events


class WyomingSession:
    """A client's connection.

    Args:
        reader: a reader with the limit `serve.wyoming.events.MAX_LINE_BYTES`.
        writer: the writer of the same connection.
        settings: the settings of all sessions.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, settings: BridgeSettings
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._settings = settings
        self._read_task: asyncio.Task[WyomingEvent | None] | None = None
        self._options = TranscribeOptions()
        self._utterance: WyomingUtterance | None = None
        self._finishing = False

    @property
    def busy(self) -> bool:
        """Return whether an utterance has started and has no transcript yet."""
        return self._utterance is not None

    def finish(self) -> None:
        """End the session after the current utterance."""
        self._finishing = True

    async def run(self) -> None:
        """Handle events until the client disconnects or an error ends the session."""
        try:
            while (self.busy or not self._finishing) and (event := await self._next()) is not None:
                await self._handle(event)
        except EarshotError as error:
            logger.warning("%s", error)
            await self.refuse(error)
        finally:
            self._utterance = None
            if self._read_task is not None:
                self._read_task.cancel()
                await asyncio.wait((self._read_task,))

    async def refuse(self, error: EarshotError) -> None:
        """Send an error to the client, if it is still connected."""
        try:
            await self._send("error", {"text": str(error), "code": error.status.grpc})
        except EarshotError as send_error:
            logger.warning("%s", send_error)

    async def _next(self) -> WyomingEvent | None:
        self._read_task = self._read_task or asyncio.create_task(read_event(self._reader))
        try:
            async with asyncio.timeout(self._settings.idle_s):
                event = await self._read_task
        except TimeoutError:
            raise DeadlineError(
                f"no complete event within {self._settings.idle_s:g} s; connect again to continue"
            ) from None
        self._read_task = None
        return event

    async def _send(self, kind: str, data: dict[str, Any]) -> None:
        try:
            self._writer.write(WyomingEvent(kind, data).write())
            async with asyncio.timeout(_WRITE_S):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise DeadlineError(f"the client has read nothing for {_WRITE_S:g} s") from None
        except ConnectionError:
            pass  # the next read reports the disconnection

    # ---------------------------------------------------------------- events

    async def _handle(self, event: WyomingEvent) -> None:
        """Handle an event; ignore events of an unknown type."""
        match event.type:
            case "describe":
                await self._describe()
            case "ping":
                await self._send("pong", {"text": event.data.get("text")})
            case "transcribe":
                self._options = data_of(event, TranscribeOptions)
            case "audio-start":
                self._utterance = WyomingUtterance(data_of(event, AudioFormat))
            case "audio-chunk":
                format = data_of(event, AudioFormat)
                self._utterance = self._utterance or WyomingUtterance(format)
                self._utterance.add(format, event.payload)
            case "audio-stop":
                await self._transcribe()

    async def _describe(self) -> None:
        artifact_fields = {"installed": True, "version": None}
        models = [
            {
                **artifact_fields,
                "name": name,
                "description": f"Whisper ({name})",
                "attribution": _WHISPER_ATTRIBUTION,
                "languages": list(self._settings.languages),
            }
            for name in await self._settings.upstream.models()
        ]
        program = {
            **artifact_fields,
            "name": "Earshot",
            "description": "Whisper, served by Earshot",
            "attribution": {"name": "Earshot", "url": ""},
            "models": models,
            "prefers_auto_gain_enabled": False,
            "prefers_noise_reduction_enabled": False,
        }
        await self._send("info", {"asr": [program]})

    async def _transcribe(self) -> None:
        """Transcribe the utterance, which has ended, and send its transcript."""
        if self._utterance is None:
            raise RequestError("found audio-stop without audio; expected audio-start before it")
        options = self._options
        if not options.language:
            options = dataclasses.replace(options, language=self._settings.language)
        if (answer := await self._while_client_waits(self._utterance, options)) is not None:
            await self._send("transcript", {"text": answer.text, "language": answer.language})
        self._options, self._utterance = TranscribeOptions(), None

    async def _while_client_waits(
        self, utterance: WyomingUtterance, options: TranscribeOptions
    ) -> SpeechApiAnswer | None:
        """Return the server's answer; if the client disconnects, cancel and return None."""
        if not utterance.seconds:
            return SpeechApiAnswer("")  # no audio
        answer = asyncio.create_task(self._settings.upstream.transcribe(utterance, options))
        self._read_task = read = self._read_task or asyncio.create_task(read_event(self._reader))
        try:
            await asyncio.wait((answer, read), return_when=asyncio.FIRST_COMPLETED)
            disconnected = read.done() and not read.exception() and read.result() is None
            return None if disconnected and not answer.done() else await answer
        finally:
            answer.cancel()
