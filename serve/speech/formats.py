"""Transcripts as text: plain, SubRip (srt), WebVTT (vtt), and one JSON object per file."""

import dataclasses
import json
from typing import Literal

from serve.messages import Segment, Transcript

Format = Literal["text", "srt", "vtt", "json"]


def render(transcript: Transcript, file: str, format: Format) -> str:
    """A transcript in a format; ends with a line break unless it is empty.

    Args:
        transcript: what to write.
        file: the audio's name, for json.
        format: text holds a line per segment; json is a single line.
    """
    if format == "json":
        return _json(transcript, file)
    if format == "srt":
        return _srt(transcript.segments)
    if format == "vtt":
        return _vtt(transcript.segments)
    return "".join(f"{_one_line(segment.text)}\n" for segment in transcript.segments)


def timestamp(seconds: float, decimal_mark: str = ".") -> str:
    """hh:mm:ss.mmm, rounded to milliseconds."""
    total_ms = round(seconds * 1000)
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{ms // 1000:02d}{decimal_mark}{ms % 1000:03d}"


def _json(transcript: Transcript, file: str) -> str:
    fields = {
        "file": file,
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.duration,
        "segments": [dataclasses.asdict(segment) for segment in transcript.segments],
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _srt(segments: tuple[Segment, ...]) -> str:
    """Numbered blocks with a comma before the milliseconds."""
    blocks = [
        f"{number}\n{timestamp(segment.start, ',')} --> {timestamp(segment.end, ',')}\n"
        f"{_cue(segment.text)}\n"
        for number, segment in enumerate(segments, start=1)
    ]
    return "\n".join(blocks)


def _vtt(segments: tuple[Segment, ...]) -> str:
    """A header, then blocks; `&` and `<` would be markup."""
    blocks = ["WEBVTT\n"]
    for segment in segments:
        text = _cue(segment.text).replace("&", "&amp;").replace("<", "&lt;")
        blocks.append(f"{timestamp(segment.start)} --> {timestamp(segment.end)}\n{text}\n")
    return "\n".join(blocks)


def _cue(text: str) -> str:
    """Text that cannot be taken for a cue's times or for the end of its block."""
    return _one_line(text).replace("-->", "->")


def _one_line(text: str) -> str:
    return " ".join(text.split())
