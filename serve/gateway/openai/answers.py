"""Transcripts in the formats of OpenAI's API: whole, or as server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Send

from serve.contract.codec import to_json
from serve.contract.messages import Segment, Transcript
from serve.gateway.openai.fields import FormFields
from serve.speech.formats import render, word_fields
from serve.speech.languages import LANGUAGE_NAMES

_SEEKS_PER_S = 100  # Whisper's frames of 10 ms
_AUDIO_TOKENS_PER_S = 50  # positions of Whisper's encoder
_NO_LANGUAGE = "unknown"  # no speech was found, so nothing was decoded
_NOBODY = "unknown"  # words without a detected voice
_EVENTS_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies would buffer it
}


def render_transcript(transcript: Transcript, fields: FormFields) -> tuple[str, str]:
    """Return the body of an answer, and its media type."""
    if fields.format == "json":
        answer = {"text": transcript.text, **_languages(transcript)}
        answer |= _logprobs(transcript.segments, fields)
    elif fields.format == "verbose_json":
        answer = _whole(transcript, fields) | {"text": transcript.text}
        if fields.segments:
            answer["segments"] = list(itertools.starmap(_segment, enumerate(transcript.segments)))
        if fields.words:
            answer["words"] = _words(transcript.segments)
    elif fields.format == "diarized_json":
        answer = {
            "task": fields.request.task,
            "duration": _seconds(transcript),
            "text": transcript.text,
            "segments": list(itertools.starmap(segment_event, enumerate(transcript.segments))),
        }
    elif fields.format == "text" and not any(segment.speaker for segment in transcript.segments):
        return f"{transcript.text}\n", "text/plain"
    else:
        return render(transcript, "", fields.format, fields.cues), "text/plain"
    usage = {"type": "duration", "seconds": _seconds(transcript)}
    return to_json({**answer, **_warnings(transcript, fields), "usage": usage}), "application/json"


def delta_event(delta: str, index: int, segment: Segment, fields: FormFields) -> dict[str, Any]:
    """Return the event of a segment; verbose_json has the segment and its words.

    Args:
        delta: the text as a piece of the whole.
        index: the segment's number.
        segment: the segment.
        fields: the fields of the request's form.
    """
    event: dict[str, Any] = {"type": "transcript.text.delta", "delta": delta}
    if fields.format == "diarized_json":
        event["segment_id"] = f"seg_{index}"
    event |= _logprobs((segment,), fields)
    if fields.format == "verbose_json":
        if fields.segments:
            event["segment"] = _segment(index, segment)
        if fields.words:
            event["words"] = _words((segment,))
    return event


def segment_event(index: int, segment: Segment) -> dict[str, Any]:
    """Return a segment of diarized_json, which is also an event if the answer is a stream."""
    return {
        "type": "transcript.text.segment",
        "id": f"seg_{index}",
        "start": segment.start,
        "end": segment.end,
        "text": segment.text.strip(),
        "speaker": segment.speaker or _NOBODY,
    }


def done_event(transcript: Transcript, fields: FormFields) -> dict[str, Any]:
    """Return the last event of a stream; verbose_json has the fields of the whole."""
    audio_tokens = math.ceil(transcript.duration * _AUDIO_TOKENS_PER_S)
    text_tokens = sum(len(segment.tokens) for segment in transcript.segments)
    usage = {
        "type": "tokens",
        "input_tokens": audio_tokens,
        "input_token_details": {"audio_tokens": audio_tokens},
        "output_tokens": text_tokens,
        "total_tokens": audio_tokens + text_tokens,
    }
    verbose = fields.format == "verbose_json"
    whole = _whole(transcript, fields) if verbose else _languages(transcript)
    whole |= _logprobs(transcript.segments, fields) | _warnings(transcript, fields)
    return {"type": "transcript.text.done", **whole, "text": transcript.text, "usage": usage}


def added_text(before: str, text: str) -> str:
    """Return what a segment adds to the text, which has no space at either end.

    Args:
        before: the texts of all segments before it.
        text: the segment's text.
    """
    return (before + text).strip()[len(before.strip()) :]


def _whole(transcript: Transcript, fields: FormFields) -> dict[str, Any]:
    """Return the fields of verbose_json about the whole, except its text."""
    translated = fields.request.task == "translate"
    language = "en" if translated else transcript.language
    return {
        "task": fields.request.task,
        "language": _NO_LANGUAGE if language is None else LANGUAGE_NAMES[language],
        "duration": _seconds(transcript),
    }


def _languages(transcript: Transcript) -> dict[str, Any]:
    """Return the languages, the main one first, as OpenAI's gpt-transcribe does."""
    codes = [transcript.language, *(segment.language for segment in transcript.segments)]
    return {"languages": [{"code": code} for code in dict.fromkeys(codes) if code]}


def _warnings(transcript: Transcript, fields: FormFields) -> dict[str, Any]:
    warnings = transcript.warnings + fields.warnings
    return {"warnings": warnings} if warnings else {}


def _seconds(transcript: Transcript) -> float:
    """Return the duration without the rounding errors of sums."""
    return round(transcript.duration, 6)


def _segment(index: int, segment: Segment) -> dict[str, Any]:
    fields = dataclasses.asdict(segment)
    del fields["words"], fields["token_logprobs"]  # words are a separate list
    for name in ("language", "speaker"):
        if fields[name] is None:
            del fields[name]
    return {"id": index, "seek": round(segment.start * _SEEKS_PER_S), **fields}


def _logprobs(segments: Iterable[Segment], fields: FormFields) -> dict[str, Any]:
    """Return the field that `include[]=logprobs` adds."""
    if not fields.request.token_logprobs:
        return {}
    return {
        "logprobs": [
            {"token": piece.token, "bytes": list(piece.token.encode()), "logprob": piece.logprob}
            for segment in segments
            for piece in segment.token_logprobs or ()
        ]
    }


def _words(segments: Iterable[Segment]) -> list[dict[str, Any]]:
    """Return the words of segments, with their speakers if these are known."""
    words = []
    for segment in segments:
        speaker = {} if segment.speaker is None else {"speaker": segment.speaker}
        for word in segment.words or ():
            words.append({**word_fields(word), "word": word.word.strip(), **speaker})
    return words


class Events:
    """A response of server-sent events, which begins with the first event.

    Until then headers can be added to `headers`.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: dict[str, str] = {}
        self.begun = False

    async def send(self, event: dict[str, Any]) -> None:
        """Send an event.

        Raises:
            SlowClientError: the client does not take it.
        """
        if not self.begun:
            self.begun = True
            headers = Headers(_EVENTS_HEADERS | self.headers).raw
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        data = f"data: {to_json(event)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
