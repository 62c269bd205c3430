"""The page's addresses for browsers.

    GET  /           the page itself
    GET  /page/…     the files that it loads
    GET  /state      the server's state, which it shows
    POST /subtitles  {"format": "srt", "duration": 2.5, "segments": [{"start": 0, "end": 2.5,
                     "text": " Hello.", "words": [{"start": 0, "end": 2.5, "word": "Hello."}]}]}

The page loads nothing from elsewhere, and its policy forbids that to any script that gets into it.
Browsers keep the files, and each time ask only whether they have changed.

The page keeps transcripts in the browser. To save one as subtitles, it sends the transcript to
`/subtitles`, which splits it as any other. This transcribes nothing, so of a key's limits only the
limit of requests at once applies.
"""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from serve.contract.codec import from_json
from serve.contract.errors import OptionError
from serve.contract.fields import Finite
from serve.contract.messages import Segment, Timings, Transcript, Word
from serve.gateway import errors
from serve.gateway.context import Services
from serve.gateway.edge.uploads import small_body
from serve.gateway.page.state import EngineStateReader
from serve.speech.formats import render

MAX_BYTES = 4 * 1024**2
"""Bytes of a transcript that becomes subtitles, at most."""
_MAX_CHARS = 300_000  # a quick speaker says 80,000 in an hour
_WEB = Path(__file__).parent / "web"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
}


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def page_routes(services: Services, state: EngineStateReader) -> list[BaseRoute]:
    """List the page's addresses."""
    files, subtitle_lock = _Files(directory=_WEB), asyncio.Lock()

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    async def state_as_json(request: Request) -> Response:
        services.keys.of_request(request)
        return JSONResponse(state.latest, headers={"Cache-Control": "no-store"})

    async def write_subtitles(request: Request) -> Response:
        api_key = services.keys.of_request(request)
        with services.admission.admit(api_key) as permit:
            body = await small_body(request, permit, MAX_BYTES, "the transcript")
            try:
                async with subtitle_lock:  # one at a time: rendering takes a whole CPU core
                    text = await asyncio.to_thread(_subtitles, body)
            except OptionError as error:
                raise errors.invalid(str(error)) from error
        return PlainTextResponse(text)

    return [
        Route("/", page),
        Route("/state", state_as_json),
        Route("/subtitles", write_subtitles, methods=["POST"]),
        Mount("/page", files),
    ]


@dataclasses.dataclass(frozen=True)
class _PageWord:
    start: Finite
    end: Finite
    word: str


@dataclasses.dataclass(frozen=True)
class _PageSegment:
    start: Finite
    end: Finite
    text: str
    words: tuple[_PageWord, ...] | None = None
    speaker: str | None = None


@dataclasses.dataclass(frozen=True)
class _PageTranscript:
    format: Literal["srt", "vtt"]
    duration: Finite
    segments: tuple[_PageSegment, ...]


def _subtitles(body: bytes) -> str:
    """Write a transcript of the page as subtitles.

    Raises:
        OptionError: it is no such transcript, or is too long.
    """
    page = from_json(_PageTranscript, body, "the transcript", error=OptionError)
    chars = sum(
        max(len(segment.text), sum(len(word.word) for word in segment.words or ()))
        + len(segment.speaker or "")
        for segment in page.segments
    )
    if chars > _MAX_CHARS:
        raise OptionError(f"the transcript has {chars} characters; expected at most {_MAX_CHARS}")
    segments = tuple(
        Segment(
            *(segment.start, segment.end, segment.text, (), None, None, 0.0, 0.0),
            words=tuple(_spaced(segment.text, segment.words)) if segment.words else None,
            speaker=segment.speaker,
        )
        for segment in page.segments
    )
    timings = Timings(0.0, 0.0, 0.0, 0.0)
    transcript = Transcript("", None, None, page.duration, segments, timings)
    return render(transcript, "", page.format)


def _spaced(text: str, words: Sequence[_PageWord]) -> Iterator[Word]:
    """Return words with the spaces before them in the text; the API's words have none."""
    end = 0
    for word in words:
        begin = text.find(word.word, end)
        space = text[end:begin] if begin >= 0 else " "
        end = max(end, begin + len(word.word))
        yield Word(word.start, word.end, f"{space}{word.word}", 1.0)
