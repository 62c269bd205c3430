"""Transcripts that the page keeps, as subtitles: where they are split stands in one place alone.

    POST /subtitles   {"format": "srt", "duration": 2.5, "segments": [{"start": 0, "end": 2.5,
                       "text": " Hello.", "words": [{"start": 0, "end": 2.5, "word": "Hello."}]}]}

Nothing is transcribed, so that it counts for no limit of a key but that of requests at once.
"""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from serve.contract.codec import from_json
from serve.contract.errors import OptionError
from serve.contract.fields import Finite
from serve.contract.messages import Segment, Timings, Transcript, Word
from serve.gateway import errors
from serve.gateway.context import Services
from serve.gateway.edge.uploads import whole_body
from serve.speech.formats import render

MOST_BYTES = 4 * 1024**2
_MOST_CHARS = 300_000  # somebody who speaks quickly says 80,000 in an hour


@dataclasses.dataclass(frozen=True)
class _Word:
    start: Finite
    end: Finite
    word: str


@dataclasses.dataclass(frozen=True)
class _Segment:
    start: Finite
    end: Finite
    text: str
    words: tuple[_Word, ...] | None = None
    speaker: str | None = None


@dataclasses.dataclass(frozen=True)
class _Transcript:
    format: Literal["srt", "vtt"]
    duration: Finite
    segments: tuple[_Segment, ...]


class Subtitles:
    """The address, as an endpoint."""

    def __init__(self, door: Services) -> None:
        self._door = door
        self._one = asyncio.Lock()  # at a time: it is work for a processor

    async def answer(self, request: Request) -> Response:
        """Answer with the file's text.

        Raises:
            ApiError: whoever it is may not come in, or it is too large, or nothing of the kind.
        """
        caller = self._door.keys.identify(request.headers.get("authorization"))
        limit_s = self._door.config.server.upload_timeout_s
        with self._door.admission.admit(caller) as permit:
            body = await whole_body(request, permit, limit_s, _check_size)
            try:
                async with self._one:
                    text = await asyncio.to_thread(_write, body)
            except OptionError as error:
                raise errors.invalid(str(error)) from error
        return PlainTextResponse(text)


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise errors.too_large(
            f"the transcript has {size} bytes or more; expected at most {MOST_BYTES}"
        )


def _write(body: bytes) -> str:
    """Write the subtitles; raises OptionError."""
    transcript = from_json(_Transcript, body, "the transcript", error=OptionError)
    chars = sum(
        max(len(segment.text), sum(len(word.word) for word in segment.words or ()))
        + len(segment.speaker or "")
        for segment in transcript.segments
    )
    if chars > _MOST_CHARS:
        raise OptionError(f"the transcript has {chars} characters; expected at most {_MOST_CHARS}")
    segments = tuple(
        Segment(
            segment.start,
            segment.end,
            segment.text,
            tokens=(),
            avg_logprob=None,
            no_speech_prob=None,
            temperature=0.0,
            compression_ratio=0.0,
            words=tuple(_spaced(segment.text, segment.words)) if segment.words else None,
            speaker=segment.speaker,
        )
        for segment in transcript.segments
    )
    nothing = Timings(0.0, 0.0, 0.0, 0.0)
    return render(
        Transcript("", None, None, transcript.duration, segments, nothing), "", transcript.format
    )


def _spaced(text: str, words: Sequence[_Word]) -> Iterator[Word]:
    """Return words with what stands before them in the text: answers have them without spaces."""
    at = 0
    for word in words:
        place = text.find(word.word, at)
        before = text[at:place] if place >= 0 else " "
        at = max(at, place + len(word.word))
        yield Word(word.start, word.end, f"{before}{word.word}", 1.0)
