"""Speech that a window's text leaves untold, and the windows that are decoded for it.

Whisper may end a window's text where speech goes on: it writes a last timestamp and stops, or it
gives half a minute to one short sentence. OpenAI's `whisper/transcribe.py` and faster-whisper
decode from left to right and go on at the last timestamp, so they lose little by it. Here windows
are cut beforehand; so what is left of one becomes a window of its own. It is left where voice is
heard that no segment covers. Pure functions; times are seconds of the window.

The limits were looked at with Whisper base on 32 long recordings of people. A timestamp is early by
less than `_SLACK_S`, so gaps of more voice than `_LEAST_S` held words every time. Of 1,499 segments
one had fewer tokens than `_SPARSE` for each second of voice, and it lacked 30 words; no other had
fewer than 1.3.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE
from serve.speech.stretches import Stretch
from serve.speech.windows import Piece, Window

_LEAST_S = 0.6  # voice without text that is worth another decoding
_SLACK_S = 0.2  # by which a timestamp may be early or late
_LEAD_S = 0.2  # of quiet with which a window begins before the voice
_SPARSE = 1.0  # text tokens for each second of voice; nobody who is understood speaks slower
_SPARSE_VOICE_S = 5.0  # in a segment, at least; a drawl or a laugh is shorter
_FRAME = SAMPLE_RATE // 100  # samples: 10 ms
_SMOOTH_FRAMES = 5


def untold(window: Window, pieces: Sequence[Piece]) -> tuple[int, list[Window]]:
    """Find where a window's text begins to leave voice untold.

    Args:
        window: with its `voice`; without, nothing is known to be untold.
        pieces: of its text, in order.

    Returns:
        How many of the pieces are kept, and the windows in which what comes after them is decoded
        again: none where all is told, one from a gap on, two where a piece says too little.
    """
    following = [*(piece.start_s for piece in pieces[1:]), window.duration_s + _SLACK_S]
    for number, (piece, next_s) in enumerate(zip(pieces, following, strict=False)):
        if is_sparse(window, piece):
            return number, _halves(window, piece)
        gap = voice_in(window, piece.end_s + _SLACK_S, next_s - _SLACK_S)
        if _seconds(gap) >= _LEAST_S:
            return number + 1, [part(window, _begin(window.samples, piece.end_s, gap[0][0]))]
    return len(pieces), []


def untold_s(window: Window, pieces: Sequence[Piece]) -> float:
    """Count a window's seconds of voice that no piece covers, but for the slack of timestamps."""
    ends = [0.0, *(piece.end_s + _SLACK_S for piece in pieces)]
    starts = [*(piece.start_s - _SLACK_S for piece in pieces), window.duration_s]
    gaps = zip(ends, starts, strict=True)
    return sum(_seconds(voice_in(window, start_s, end_s)) for start_s, end_s in gaps)


def voice_in(window: Window, start_s: float, end_s: float) -> list[Stretch]:
    """Return the parts of a window's voice that lie between two times."""
    parts = [(max(start, start_s), min(end, end_s)) for start, end in window.voice or ()]
    return [(start, end) for start, end in parts if start < end]


def is_sparse(window: Window, piece: Piece) -> bool:
    """Tell whether a piece has so little text for so much voice that some must be missing."""
    voice_s = _seconds(voice_in(window, piece.start_s, piece.end_s))
    return voice_s >= _SPARSE_VOICE_S and len(piece.tokens) < _SPARSE * voice_s


def part(window: Window, begin: int, end: int | None = None) -> Window:
    """Return a part of a window as a window, which is not the audio's last.

    Args:
        window: the whole.
        begin, end: its samples; None: to the window's end.
    """
    samples = window.samples[begin:end]
    begin_s, end_s = begin / SAMPLE_RATE, (begin + len(samples)) / SAMPLE_RATE
    before = [pause.length_s for pause in window.pauses if pause.at_s <= begin_s]
    return dataclasses.replace(
        window,
        start_s=window.start_s + begin_s + sum(before),
        samples=samples,
        last=False,
        pauses=tuple(
            dataclasses.replace(pause, at_s=pause.at_s - begin_s)
            for pause in window.pauses[len(before) :]
            if pause.at_s < end_s
        ),
        left_out_s=0.0,
        voice=tuple((a - begin_s, b - begin_s) for a, b in voice_in(window, begin_s, end_s)),
    )


def _halves(window: Window, piece: Piece) -> list[Window]:
    """Cut a window from a piece on in two, at the quietest place of the piece's middle."""
    first, last = (round(at * SAMPLE_RATE) for at in (piece.start_s, piece.end_s))
    quarter = (last - first) // 4
    middle = quietest(window.samples, first + quarter, last - quarter)
    return [part(window, first, middle), part(window, middle)]


def _begin(samples: Samples, text_end_s: float, voice_s: float) -> int:
    """Return the sample with which a rest begins: just before the voice, or between two words."""
    if voice_s - _LEAD_S > text_end_s + _SLACK_S:
        return round((voice_s - _LEAD_S) * SAMPLE_RATE)
    first_s, last_s = max(0.0, text_end_s - _SLACK_S), text_end_s + _SLACK_S
    return quietest(samples, round(first_s * SAMPLE_RATE), round(last_s * SAMPLE_RATE))


def quietest(samples: Samples, first: int, last: int) -> int:
    """Find the sample between two, at least 0.1 s apart, around which 50 ms are the quietest."""
    frames = samples[first:last]
    frames = frames[: len(frames) // _FRAME * _FRAME].reshape(-1, _FRAME)
    power = np.square(frames, dtype=np.float64).mean(axis=1)
    smooth = np.convolve(power, np.ones(_SMOOTH_FRAMES), mode="valid")
    return first + _FRAME * (int(np.argmin(smooth)) + _SMOOTH_FRAMES // 2)


def _seconds(voice: Iterable[Stretch]) -> float:
    return sum(end - start for start, end in voice)
