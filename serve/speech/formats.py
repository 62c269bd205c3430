"""Render transcripts: plain text, SubRip (srt), WebVTT (vtt), columns (tsv), or JSON."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

from serve.contract.messages import Segment, Transcript, Word
from serve.speech.cues import DEFAULT, Cue, CueOptions, Lines, Piece, split

Format = Literal["text", "srt", "vtt", "tsv", "json"]
SUBTITLES: tuple[Format, ...] = ("srt", "vtt")  # the formats with cues


def render(transcript: Transcript, file: str, format: Format, cues: CueOptions = DEFAULT) -> str:
    """Render a transcript in a format; the text ends with a line break unless it is empty.

    Args:
        transcript: the transcript.
        file: the audio's name, for json.
        format: text has a line per segment, with the speaker's name at each change of speaker. json
            is a single line. tsv is as in OpenAI's `whisper` command: a header, then each segment's
            start and end in ms and its text.
        cues: the layout of srt and vtt; `highlight_words` needs segments with words.
    """
    if format == "json":
        return _json(transcript, file)
    if format == "tsv":
        return _tsv(transcript.segments)
    if format in SUBTITLES:
        shown = split(transcript.segments, cues, transcript.duration)
        return _subtitles(shown, cues.highlight_words, format == "vtt")
    lines, previous_speaker = list[str](), None
    for segment in transcript.segments:
        lines.append(f"{_name(segment.speaker, previous_speaker)}{_one_line(segment.text)}\n")
        previous_speaker = segment.speaker
    return "".join(lines)


def timestamp(seconds: float, decimal_mark: str = ".") -> str:
    """Format a time as hh:mm:ss.mmm, rounded to milliseconds."""
    total_ms = round(seconds * 1000)
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{ms // 1000:02d}{decimal_mark}{ms % 1000:03d}"


def _json(transcript: Transcript, file: str) -> str:
    fields: dict[str, Any] = {
        "file": file,
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.duration,
        "segments": [_fields(segment) for segment in transcript.segments],
    }
    if transcript.warnings:
        fields["warnings"] = transcript.warnings
    return json.dumps(fields, ensure_ascii=False) + "\n"


def word_fields(word: Word) -> dict[str, Any]:
    """Return a word's JSON fields, without fields that are None."""
    return {name: value for name, value in vars(word).items() if value is not None}


def _fields(segment: Segment) -> dict[str, object]:
    """Return a segment's JSON fields, without those that were not requested."""
    fields = dataclasses.asdict(segment)
    fields["words"] = segment.words and [word_fields(word) for word in segment.words]
    for name in ("words", "language", "token_logprobs", "speaker"):
        if fields[name] is None:
            del fields[name]
    return fields


def _tsv(segments: Sequence[Segment]) -> str:
    """Write a header, then start and end in milliseconds and the text of each segment."""
    lines = [
        f"{round(segment.start * 1000)}\t{round(segment.end * 1000)}\t{_one_line(segment.text)}\n"
        for segment in segments
    ]
    return "".join(["start\tend\ttext\n", *lines])


def _subtitles(cues: Sequence[Cue], highlighted: bool, vtt: bool) -> str:
    """Write numbered blocks (srt), or a header and blocks with `&` and `<` escaped (vtt)."""
    blocks, speakers = ["WEBVTT\n"] if vtt else list[str](), list[str | None]([None])
    for cue in cues:
        previous = speakers[0] if len(speakers) == len(cue.turns) == 1 else None
        speakers = [speaker for speaker, _ in cue.turns]
        for start, end, marked in _highlights(cue) if highlighted else [(cue.start, cue.end, ())]:
            number, decimal_mark = ("", ".") if vtt else (f"{len(blocks) + 1}\n", ",")
            times = f"{timestamp(start, decimal_mark)} --> {timestamp(end, decimal_mark)}"
            turns = [
                _voice(speaker, _text(lines, _without_markup, marked), len(cue.turns) > 1)
                if vtt
                else _name(speaker, previous) + _text(lines, str, marked)
                for speaker, lines in cue.turns
            ]
            text = "\n".join(turns)
            blocks.append(f"{number}{times}\n{text}\n")
    return "\n".join(blocks)


def _without_markup(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _name(speaker: str | None, previous: str | None) -> str:
    """Return the prefix with the speaker's name if the speaker changes, else ""."""
    if speaker is None or speaker == previous:
        return ""
    return f"{_plain(speaker)}: "


def _voice(speaker: str | None, text: str, closed: bool) -> str:
    """Put a text into WebVTT's voice tag, if its speaker is known."""
    if speaker is None:
        return text
    name = _without_markup(_plain(speaker)).replace(">", "&gt;")
    return f"<v {name}>{text}{'</v>' if closed else ''}"


def _plain(name: str) -> str:
    """Return a name as one line without the arrow of a cue's times."""
    return _one_line(name).replace("-->", "->")


def _highlights(cue: Cue) -> Iterator[tuple[float, float, Sequence[Piece]]]:
    """Yield (start, end, spoken words) of each interval in which the same words are spoken."""
    pieces = list(itertools.chain(*cue.lines))
    times = {cue.start, cue.end} | {time for one in pieces for time in (one.start, one.end)}
    for start, end in itertools.pairwise(sorted(t for t in times if cue.start <= t <= cue.end)):
        yield start, end, [one for one in pieces if one.start <= start < one.end]


def _text(lines: Lines, escape: Callable[[str], str], marked: Sequence[Piece]) -> str:
    """Join lines, and underline the marked pieces."""
    texts = [
        "".join(
            " " * piece.space
            + (f"<u>{escape(piece.text)}</u>" if piece in marked else escape(piece.text))
            for piece in line
        )
        for line in lines
    ]
    # No text may look like a cue's times.
    return "\n".join(text.strip().replace("-->", "->") for text in texts)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def suffix_of(format: Format) -> str:
    """Return the suffix of a format's files."""
    return ".txt" if format == "text" else f".{format}"


def output_paths(paths: Sequence[str]) -> list[str]:
    """Return the output paths of files' transcripts, without suffixes: talk for talk.mp3.

    If two files would have the same output path, such as talk.mp3 and talk.wav, both keep their
    suffix.

    Args:
        paths: distinct paths, with /.
    """
    with_suffix: set[str] = set()  # paths that keep their suffix
    while True:
        outputs = [
            path if path in with_suffix else path.removesuffix(PurePosixPath(path).suffix)
            for path in paths
        ]
        counts = Counter(outputs)
        pairs = zip(paths, outputs, strict=True)
        shared = {path for path, output in pairs if counts[output] > 1} - with_suffix
        if not shared:
            return outputs
        with_suffix |= shared
