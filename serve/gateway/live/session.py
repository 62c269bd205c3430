"""One client's session: from the events that it sends to the events that it gets.

Two tasks share a session. One handles the client's events (`handle`): audio becomes frames, which
go to the open utterance. The other (`work`) decodes the first utterance that is not done, again and
again while it is open, one decoding at a time. If audio comes faster than it is decoded, `handle`
waits, and with it the client's connection.
"""

import asyncio
import collections
import contextlib
import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from serve.contract.errors import RequestError
from serve.contract.messages import Samples, SpeechOptions, Transcript
from serve.contract.server_config import LiveConfig
from serve.gateway.errors import ApiError
from serve.gateway.live import events
from serve.gateway.live.events import Event
from serve.gateway.live.hearing import Hearing, VadFrame, clock_s
from serve.gateway.live.settings import HYPOTHESIS, EventError, ServerVad, SessionSettings, updated
from serve.gateway.live.utterance import NOTHING, FinalText, LiveUtterance, UpdateWindow
from serve.gateway.observe.metrics import LiveMetrics
from serve.speech.rate import SAMPLE_RATE
from serve.speech.vad import VadModel

MAX_ERRORS = 100
"""Wrong events of one client after which the session ends."""
BEHIND_S = 10.0
"""Maximum seconds of audio that are not decoded; more audio waits on the connection."""
HOLD_S = 9.0, 24.0
"""Seconds of audio that are decoded again and again, minimum and maximum: a window has 30 s."""
_BUSY = 0.75  # share of `update_s`; after a longer decoding less audio is held
_LESS, _MORE_S = 0.8, 1.0  # the change of the audio that is held, after each decoding
_PAUSE_S = 0.2  # silence after which an utterance is decoded at once: it may be complete
_LONG_S = 5.0  # audio that is decoded even if it has no speech
_BLOCK_S = 0.5  # maximum audio that is handed to a thread
_TRIES = 3  # decodings of an utterance for which the server has no room
_MIN_SAMPLES = SAMPLE_RATE // 10  # an utterance that a client commits

Transcribe = Callable[[UpdateWindow], Awaitable[Transcript]]
"""Transcribes a window; raises an ApiError."""
Send = Callable[[Event], Awaitable[None]]


@dataclasses.dataclass(eq=False)
class LiveSession:
    """One client's session. For one event loop."""

    config: LiveConfig
    check_model: Callable[[str], object]  # refuses the name of a model that is not served
    transcribe: Transcribe
    send: Send  # sends the client an event; returns once the connection has taken it
    charge: Callable[[float], None]  # counts seconds of audio; refuses those beyond a key's limit
    detector: VadModel  # the stream's own
    pool: Executor  # the threads in which all streams resample audio and detect speech
    metrics: LiveMetrics
    streams: Callable[[], int]  # returns the number of open streams, with this one
    settings: SessionSettings

    def __post_init__(self) -> None:
        settings = self.settings
        self.id = events.new_id("sess")
        self._hearing = Hearing(settings.input.format, _options(settings), self.detector, self.pool)
        self._position = 0  # samples that have come
        self._recent = collections.deque[Samples]()  # before an utterance
        self._open: LiveUtterance | None = None
        self._queue = collections.deque[LiveUtterance]()  # not done; the open one is the last
        self._previous: LiveUtterance | None = None  # the latest that is done
        self._last_id: str | None = None  # the last item
        self._spoken_until = 0  # the end of speech in the last utterance
        self._changed = asyncio.Event()  # for `work`
        self._progress = asyncio.Event()  # for `handle`
        self._pace = UpdatePacer(self.config.update_s * settings.input.transcription.delay_factor)
        self._errors = 0
        self._closing = False

    # ------------------------------------------------------------ events of the client

    async def handle(self, text: str) -> None:
        """Handle one message.

        Raises:
            ApiError: too many messages were wrong, or the key may send no more audio now.
        """
        event_id = None
        try:
            event = events.read_event(text)
            event_id = event.get("event_id")
            events.check_event(event, len(text))
            await self._do(event)
        except EventError as error:
            self._errors += 1
            told_id = event_id if isinstance(event_id, str) else None
            await self.send(events.error(error, error.status.code, told_id))
            if self._errors >= MAX_ERRORS:
                text = f"{MAX_ERRORS} events were wrong; the session is closed"
                raise ApiError(RequestError(text), "too_many_errors") from None

    async def _do(self, event: Event) -> None:
        if event["type"] == events.UPDATE:
            await self._update(event["session"])
        elif event["type"] == events.APPEND:
            await self._append(events.read_audio(event["audio"]))
        elif event["type"] == events.COMMIT:
            await self._commit()
        else:
            await self._clear()
            await self.send(events.event(f"{events.BUFFER}.cleared"))

    async def _update(self, changes: object) -> None:
        await self._take(await self._hearing.flush())
        begun = self._position > 0
        settings, warnings = updated(self.settings, changes, self.check_model, begun)
        self.settings = settings
        self._pace.update_s = self.config.update_s * settings.input.transcription.delay_factor
        speaking = self._open is not None
        self._hearing.tune(settings.input.format, _options(settings), speaking)
        told = events.session("session.updated", self.id, settings)
        await self.send(events.with_warnings(told, warnings))

    # ------------------------------------------------------------ audio

    async def _append(self, data: bytes) -> None:
        """Take audio, as soon as little enough waits to be decoded."""
        step = round(self._hearing.bytes_per_s * _BLOCK_S)
        for begin in range(0, len(data), step):
            while sum(utterance.undecoded_s for utterance in self._queue) > BEHIND_S:
                self._progress.clear()
                await self._progress.wait()  # for a decoding, also one that fails
            block = data[begin : begin + step]
            self.charge(len(block) / self._hearing.bytes_per_s)
            await self._take(await self._hearing.hear(block))
            await asyncio.sleep(0)  # `work` looks at each block

    async def _take(self, frames: Sequence[VadFrame]) -> None:
        """Add frames to the open utterance, which they may begin or end."""
        vad = self.settings.input.turn_detection
        for frame in frames:
            if self._open is None and (vad is None or frame.speech):
                await self._begin(vad)
            if self._open is not None:
                self._open.add(frame.samples, frame.speech)
            self._position += len(frame.samples)
            if vad is None:
                self._recent.clear()
                continue
            self._recent.append(frame.samples)
            padding = _samples(vad.prefix_padding_ms)
            while sum(map(len, self._recent)) - len(self._recent[0]) > padding:
                self._recent.popleft()
            if frame.ends and self._open is not None:
                stopped = {"item_id": self._open.item_id, "audio_end_ms": _ms(self._position)}
                await self.send(events.event(f"{events.BUFFER}.speech_stopped", **stopped))
                await self._end()
        if frames:
            self._changed.set()

    async def _begin(self, vad: ServerVad | None) -> None:
        """Open an utterance at the next frame, or at the silence before it."""
        padding = np.zeros(0, np.float32)
        if vad is not None:
            length = min(_samples(vad.prefix_padding_ms), self._position - self._spoken_until)
            if length and self._recent:
                padding = np.concatenate(list(self._recent))[-length:]
        start, settings = self._position - len(padding), self.settings.input.transcription
        short_encoder = self.config.asks_short_encoder
        self._open = LiveUtterance(events.new_id("item"), start, settings, short_encoder)
        self._open.add(padding, speech=False)
        self._queue.append(self._open)
        self._pace.speech(clock_s())
        if vad is not None:
            started = {"item_id": self._open.item_id, "audio_start_ms": _ms(start)}
            await self.send(events.event(f"{events.BUFFER}.speech_started", **started))

    async def _commit(self) -> None:
        client_commits = self.settings.input.turn_detection is None
        await self._take(await self._hearing.flush(end=client_commits))
        if self._open is not None and len(samples := self._hearing.take_partial_frame()):
            self._open.add(samples, speech=False)
            self._position += len(samples)
        if self._open is None or self._open.end - self._open.start < _MIN_SAMPLES:
            found_s = 0.0 if self._open is None else self._open.duration_s
            message = f"the buffer holds {1000 * found_s:.0f} ms of audio; expected at least 100 ms"
            raise EventError(message, "input_audio_buffer_commit_empty")
        await self._end()

    async def _end(self) -> None:
        """End the open utterance, which becomes an item."""
        utterance, self._open = self._open, None
        assert utterance is not None
        for event in events.committed(utterance.item_id, self._last_id):
            await self.send(event)
        self._last_id = utterance.item_id
        self._spoken_until = utterance.spoken_until
        utterance.ended = True
        self._changed.set()

    async def _clear(self) -> None:
        """Forget the open utterance and the audio before it."""
        await self._take(await self._hearing.flush())
        if self._open is not None:
            self._done(self._open)
            self._spoken_until = self._position
            self._open = None
        self._recent.clear()
        self._position += self._hearing.clear()
        self._changed.set()

    # ------------------------------------------------------------ text

    async def drain(self) -> None:
        """End the open utterance. `work` returns once all audio has become text."""
        await self._take(await self._hearing.flush())
        self._closing = True
        if self._open is not None:
            await self._end()
        self._changed.set()

    async def work(self) -> None:
        """Send the client the session's first event, then transcribe as long as it lasts."""
        await self.send(events.session("session.created", self.id, self.settings))
        while self._queue or not self._closing:
            self._changed.clear()
            utterance = self._queue[0] if self._queue else None
            wait_s = math.inf if utterance is None else self._wait_s(utterance)
            if utterance is None or wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if wait_s == math.inf else wait_s):
                        await self._changed.wait()
            elif utterance.ended and utterance.decoded:
                await self._complete(utterance)
            else:
                await self._decode(utterance)

    def _wait_s(self, utterance: LiveUtterance) -> float:
        """Return the seconds until the next decoding; infinite: more audio has to come."""
        due_s = self._pace.due_s - clock_s()
        if self._pace.tries:
            return due_s
        if utterance.ended or utterance.undecoded_s >= _LONG_S:
            return 0.0
        if utterance.decoded_until >= utterance.spoken_until:
            return math.inf
        quiet = utterance.end - utterance.spoken_until
        paused = quiet >= _PAUSE_S * SAMPLE_RATE and utterance.spoken_until > utterance.start
        return 0.0 if paused else due_s

    async def _decode(self, utterance: LiveUtterance) -> None:
        self._pace.began(clock_s())
        # The previous utterance is decoded again, together with the next one that has speech.
        if self._previous is not None and not utterance.silent:
            utterance.prepend(self._previous, self._pace.hold_s)
            self._previous = None
        window = utterance.window()
        try:
            transcript = NOTHING if utterance.silent else await self.transcribe(window)
        except ApiError as error:
            self.metrics.updates.labels("failed").inc()
            self._pace.failed(clock_s())
            if not error.status.retryable or self._pace.tries >= _TRIES:
                await self._fail(utterance, error)
            return
        self.metrics.updates.labels("ok").inc()
        self._pace.ended(clock_s(), self.streams())
        if utterance in self._queue:  # the client has not cleared it
            await self._send_text(utterance, utterance.take(window, transcript, self._pace.hold_s))
            if HYPOTHESIS in (self.settings.include or ()):
                guess = {"item_id": utterance.item_id, "text": utterance.agreement.guess}
                await self.send(events.event(HYPOTHESIS, **guess))
        self._progress.set()

    async def _complete(self, utterance: LiveUtterance) -> None:
        await self._send_text(utterance, utterance.finish())
        self._done(utterance)
        if not utterance.silent:
            self._previous = utterance
        self.metrics.changed.inc(utterance.agreement.changed)
        await self.send(events.completed(utterance.item_id, utterance.text, utterance.duration_s))

    async def _fail(self, utterance: LiveUtterance, error: ApiError) -> None:
        """Give up an utterance, and tell the client why."""
        self._pace.tries = 0
        if utterance is self._open:
            self._open = None
        self._done(utterance)
        await self.send(events.failed(utterance.item_id, error))

    def _done(self, utterance: LiveUtterance) -> None:
        with contextlib.suppress(ValueError):
            self._queue.remove(utterance)
        self._progress.set()

    async def _send_text(self, utterance: LiveUtterance, final: FinalText) -> None:
        if not final.text:
            return
        for word in final.words:
            arrived_s = self._hearing.arrived_s(round(word.end * SAMPLE_RATE))
            self.metrics.word_seconds.observe(max(0.0, clock_s() - arrived_s))
        about = {"item_id": utterance.item_id, "content_index": events.CONTENT}
        await self.send(events.event(events.DELTA, **about, delta=final.text))


class UpdatePacer:
    """The times of one stream's decodings, and how much audio they hold.

    Two decodings begin at least `update_s` apart. If there are several streams, each also rests
    after a decoding, the longer the more there are, at most as long as the decoding took. A server
    answers streams that take turns sooner than streams that always wait in its queue.

    Args:
        update_s: seconds between the beginnings of two decodings, at least.
    """

    def __init__(self, update_s: float) -> None:
        self.update_s = update_s
        self._began_s = -math.inf
        self.due_s = -math.inf
        """The time at which the next decoding may begin."""
        self.hold_s = HOLD_S[0]
        """Seconds of audio that the next decoding should have at most, within `HOLD_S`."""
        self.tries = 0
        """The decodings that have failed in a row."""

    def speech(self, now_s: float) -> None:
        """Note that speech begins; the first decoding comes `update_s` later."""
        self.due_s = max(self.due_s, now_s + self.update_s)

    def began(self, now_s: float) -> None:
        """Note that a decoding begins."""
        self._began_s = now_s

    def ended(self, now_s: float, streams: int) -> None:
        """Note that a decoding has ended while this many streams were open."""
        self.tries = 0
        took_s = now_s - self._began_s
        rest_s = took_s * (1 - 1 / streams)
        self.due_s = max(self._began_s + self.update_s, now_s + rest_s)
        if took_s > _BUSY * self.update_s:
            self.hold_s = max(HOLD_S[0], _LESS * self.hold_s)
        else:
            self.hold_s = min(HOLD_S[1], self.hold_s + _MORE_S)

    def failed(self, now_s: float) -> None:
        """Note that a decoding has failed; each one in a row waits longer for the next."""
        self.tries += 1
        self.due_s = now_s + self.update_s * self.tries


def _options(settings: SessionSettings) -> SpeechOptions:
    """Return the bounds of speech; the defaults if the client commits itself."""
    vad = settings.input.turn_detection or ServerVad()
    return SpeechOptions(vad.threshold, vad_min_silence_s=vad.silence_duration_ms / 1000)


def _samples(ms: int) -> int:
    return ms * SAMPLE_RATE // 1000


def _ms(samples: int) -> int:
    return samples * 1000 // SAMPLE_RATE
