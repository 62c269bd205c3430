"""Diarize requests on one worker thread per engine process.

The networks are loaded with the first request that asks for diarization. The audio is decoded a
second time, block by block, so that hours of audio never occupy memory.
"""

import contextlib
import functools
from collections.abc import Callable, Generator

from serve.contract.errors import AudioError, EarshotError, RequestError
from serve.contract.fresh_thread import run_in_fresh_thread
from serve.contract.messages import Request, Samples
from serve.speakers.diarize import REFERENCE_S, Diarizer, KnownSpeaker, SpeakerTurn
from serve.speech import audio
from serve.speech.meter import AudioLimits
from serve.transcriber.active import ActiveRequest
from serve.transcriber.guard import GuardedPool

Blocks = Callable[[ActiveRequest, Request, Callable[[], bool]], Generator[Samples, None, None]]
"""A function that yields a request's samples until it is stopped; see `AudioDecoderPool.blocks`."""


class SpeakerWorker:
    """A worker that diarizes one request after another. Thread-safe.

    Args:
        device: the networks' device, such as "cpu" or "cuda:0".
        blocks: decodes a request's audio.
        on_turns: called on the worker with a request's speaker turns; must not block.
        on_error: called on the worker if diarization fails; must not block.
    """

    def __init__(
        self,
        device: str,
        blocks: Blocks,
        on_turns: Callable[[ActiveRequest, tuple[SpeakerTurn, ...]], None],
        on_error: Callable[[ActiveRequest, EarshotError], None],
    ) -> None:
        self._device = device
        self._blocks = blocks
        self._on_turns = on_turns
        self._pool = GuardedPool("speakers", 1, on_error)

    def add(self, active: ActiveRequest, request: Request) -> None:
        """Queue a request for diarization; returns at once."""
        work = functools.partial(self._diarize, active, request)
        self._pool.add(
            active,
            f"diarizing request {active.id}",
            functools.partial(run_in_fresh_thread, work),
            functools.partial(self._on_turns, active),
        )

    def close(self) -> None:
        """Start no more work; work in progress ends with its next block."""
        self._pool.close()

    def _diarize(self, active: ActiveRequest, request: Request) -> tuple[SpeakerTurn, ...]:
        speakers = active.plan.speakers
        assert speakers is not None
        known = [KnownSpeaker(name, _reference(name, file)) for name, file in speakers.known]
        with contextlib.closing(self._blocks(active, request, lambda: active.ended)) as samples:
            return self._diarizer.diarize(
                samples,
                num_speakers=speakers.num,
                min_speakers=speakers.least,
                max_speakers=speakers.most,
                known=known,
            )

    @functools.cached_property
    def _diarizer(self) -> Diarizer:
        return Diarizer(self._device)


def _reference(name: str, file: bytes) -> Samples:
    """Decode a known speaker's reference audio.

    Raises:
        RequestError: the file is not audio, or is too long.
    """
    try:
        return audio.whole(audio.decode(file, AudioLimits(REFERENCE_S[1])))
    except AudioError as error:
        raise RequestError(f"the reference of {name}: {error}") from error
