"""Transcripts as text: plain, SubRip (srt), WebVTT (vtt), and one JSON object per file."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from serve.messages import Segment, Transcript, Word

Format = Literal["text", "srt", "vtt", "json"]
Escape = Callable[[str], str]

_SHORTEST_CUE_S = 0.02


@dataclasses.dataclass(frozen=True)
class CueOptions:
    """How srt and vtt show words, by the names that OpenAI's command gives it."""

    highlight_words: bool = False  # a cue for each word, in which it is underlined
    max_words_per_line: int | None = None  # cues of so many words; None: a cue is a segment


def render(
    transcript: Transcript, file: str, format: Format, cues: CueOptions = CueOptions()
) -> str:
    """A transcript in a format; ends with a line break unless it is empty.

    Args:
        transcript: what to write.
        file: the audio's name, for json.
        format: text holds a line per segment; json is a single line.
        cues: of srt and vtt, for segments with words.
    """
    if format == "json":
        return _json(transcript, file)
    if format == "srt":
        return _srt(transcript.segments, cues)
    if format == "vtt":
        return _vtt(transcript.segments, cues)
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
        "segments": [_fields(segment) for segment in transcript.segments],
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _fields(segment: Segment) -> dict[str, object]:
    """A segment for json; without what was not asked for."""
    fields = dataclasses.asdict(segment)
    for name in ("words", "language", "token_logprobs"):
        if fields[name] is None:
            del fields[name]
    return fields


def _srt(segments: Sequence[Segment], options: CueOptions) -> str:
    """Numbered blocks with a comma before the milliseconds."""
    blocks = [
        f"{number}\n{timestamp(start, ',')} --> {timestamp(end, ',')}\n{text}\n"
        for number, (start, end, text) in enumerate(_cues(segments, options, str), start=1)
    ]
    return "\n".join(blocks)


def _vtt(segments: Sequence[Segment], options: CueOptions) -> str:
    """A header, then blocks; `&` and `<` would be markup."""
    blocks = [
        f"{timestamp(start)} --> {timestamp(end)}\n{text}\n"
        for start, end, text in _cues(segments, options, _without_markup)
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def _without_markup(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _cues(
    segments: Sequence[Segment], options: CueOptions, escape: Escape
) -> Iterator[tuple[float, float, str]]:
    """(start, end, text) of every cue."""
    for segment in segments:
        if not segment.words or options == CueOptions():
            yield segment.start, segment.end, escape(_cue(segment.text))
            continue
        each = options.max_words_per_line or len(segment.words)
        for begin in range(0, len(segment.words), each):
            words = segment.words[begin : begin + each]
            if options.highlight_words:
                yield from _highlights(words, escape)
            else:
                end = max(words[-1].end, words[0].start + _SHORTEST_CUE_S)
                yield words[0].start, end, escape(_cue("".join(word.word for word in words)))


def _highlights(words: Sequence[Word], escape: Escape) -> Iterator[tuple[float, float, str]]:
    """A cue for each word, in which it is underlined, and one for each pause between two."""
    texts = [escape(_cue(word.word)) for word in words]
    spaces = [" " if word.word.startswith(" ") else "" for word in words]

    def line(marked: int | None) -> str:
        shown = [f"<u>{text}</u>" if i == marked else text for i, text in enumerate(texts)]
        return "".join(itertools.chain(*zip(spaces, shown, strict=True))).strip()

    shown_until = words[0].start
    for i, word in enumerate(words):
        if word.start > shown_until:
            yield shown_until, word.start, line(None)
        if word.end > word.start:
            yield word.start, word.end, line(i)
        shown_until = max(shown_until, word.end)


def _cue(text: str) -> str:
    """Text that cannot be taken for a cue's times or for the end of its block."""
    return _one_line(text).replace("-->", "->")


def _one_line(text: str) -> str:
    return " ".join(text.split())
