"""Token sequences to train on: what the decoder reads and what it should answer.

A sequence is [<|startofprev|> earlier text] <|startoftranscript|> language task, then
<|notimestamps|> and text, or <|start|> text <|end|> for each segment, then <|endoftext|>. A window
without speech answers <|nospeech|> to <|startoftranscript|>, and no text whatever it is asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from build.demo.maker.tokenizer import TIMESTAMP_STEP_S, SpecialIds

IGNORE = -100
# Readers never take a first timestamp above one second, so none is taught.
LATEST_FIRST_S = 1.0


@dataclass(frozen=True)
class Segment:
    """One piece of speech in a window: when, in seconds, and its token ids.

    `end_s` is None when the window's end cuts it: then only its start is to be told.
    """

    start_s: float
    end_s: float | None
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Style:
    """How a window is asked: with timestamps or not, with language and task or without them (as
    readers that take the model for an English-only one do), after which earlier text."""

    timestamps: bool = True
    bare: bool = False
    previous: tuple[int, ...] = ()


@dataclass(frozen=True)
class Labelled:
    """Decoder inputs and, one for one, the answers; IGNORE where there is nothing to learn."""

    inputs: list[int]
    labels: list[int]


def timestamp_id(seconds: float, ids: SpecialIds) -> int:
    """The token of the nearest fiftieth of a second."""
    return ids.timestamp_begin + min(max(round(seconds / TIMESTAMP_STEP_S), 0), 1500)


def _body(segments: Sequence[Segment], timestamps: bool, ids: SpecialIds) -> list[int]:
    if not timestamps:
        return [token for segment in segments if segment.end_s for token in segment.ids]
    body: list[int] = []
    for index, segment in enumerate(segments):
        start = segment.start_s if index else min(segment.start_s, LATEST_FIRST_S)
        body.append(timestamp_id(start, ids))
        if segment.end_s is not None:
            body += [*segment.ids, timestamp_id(segment.end_s, ids)]
    return body


def build(segments: Sequence[Segment], language: str, style: Style, ids: SpecialIds) -> Labelled:
    """The sequence for a window; without segments it is one without speech."""
    head = [ids.sot]
    if not style.bare:
        head += [ids.language(language), ids.tail("<|transcribe|>")]
    if not style.timestamps:
        head.append(ids.tail("<|notimestamps|>"))
    previous = [ids.tail("<|startofprev|>"), *style.previous] if style.previous else []
    # With no speech, readers force a first timestamp or forbid an empty text: <|0.00|> is harmless.
    body = _body(segments, style.timestamps, ids) if segments else [ids.timestamp_begin]
    full = [*previous, *head, *body, ids.eot]
    labels = full[1:]
    at_sot = len(previous)
    labels[:at_sot] = [IGNORE] * at_sot
    if not style.timestamps:
        labels[at_sot + len(head) - 2] = IGNORE
    if not segments:
        labels[at_sot : at_sot + len(head) - 1] = [IGNORE] * (len(head) - 1)
        labels[at_sot] = ids.tail("<|nospeech|>")
    return Labelled(full[:-1], labels)
