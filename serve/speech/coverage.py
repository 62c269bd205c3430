"""Find speech that a window's text does not cover, and cut it out as windows to decode.

Whisper may stop before the speech ends, or give 30 seconds to one short sentence. OpenAI's
`whisper/transcribe.py` and faster-whisper continue at the last timestamp. Here windows are cut in
advance, so the remainder becomes a separate window. It begins in the first gap between segments
that holds enough speech. If a segment has too few tokens for its speech, the window is cut in two
from that segment on. Pure functions; times are seconds from the start of the window.

The limits were measured with Whisper base on 32 long recordings of people. Timestamps were early by
less than `_SLACK_S`, and gaps with more speech than `_LEAST_S` always contained words. One of 1,499
segments had fewer than `_SPARSE` tokens per second of speech, and it lacked 30 words. No other
segment had fewer than 1.3.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE
from serve.speech.intervals import Stretch
from serve.speech.windows import AudioWindow, WindowSegment

_LEAST_S = 0.6  # minimum speech without text that is decoded again
_SLACK_S = 0.2  # maximum error of a timestamp
_LEAD_S = 0.2  # silence before the speech in a remainder
_SPARSE = 1.0  # minimum text tokens per second of speech; intelligible speech has more
_SPARSE_VOICE_S = 5.0  # minimum speech in a sparse segment; a drawl or a laugh is shorter
_FRAME = SAMPLE_RATE // 100  # samples: 10 ms
_SMOOTH_FRAMES = 5


def find_uncovered(
    window: AudioWindow, pieces: Sequence[WindowSegment]
) -> tuple[int, list[AudioWindow]]:
    """Find the first speech in a window that its text does not cover.

    Args:
        window: a window with `voice`; without it all speech counts as covered.
        pieces: the pieces of the window's text, in order.

    Returns:
        The number of pieces to keep, and the windows to decode after them: none if all speech is
        covered, one from a gap on, two if a piece has too little text.
    """
    following = [*(piece.start_s for piece in pieces[1:]), window.duration_s + _SLACK_S]
    for number, (piece, next_s) in enumerate(zip(pieces, following, strict=False)):
        if is_sparse(window, piece):
            return number, _halves(window, piece)
        gap = voice_in(window, piece.end_s + _SLACK_S, next_s - _SLACK_S)
        if _seconds(gap) >= _LEAST_S:
            return number + 1, [sub_window(window, _begin(window.samples, piece.end_s, gap[0][0]))]
    return len(pieces), []


def uncovered_s(window: AudioWindow, pieces: Sequence[WindowSegment]) -> float:
    """Sum the seconds of speech in a window outside all pieces, which are widened by the slack."""
    ends = [0.0, *(piece.end_s + _SLACK_S for piece in pieces)]
    starts = [*(piece.start_s - _SLACK_S for piece in pieces), window.duration_s]
    gaps = zip(ends, starts, strict=True)
    return sum(_seconds(voice_in(window, start_s, end_s)) for start_s, end_s in gaps)


def voice_in(window: AudioWindow, start_s: float, end_s: float) -> list[Stretch]:
    """Return the intervals of a window's speech between two times."""
    parts = [(max(start, start_s), min(end, end_s)) for start, end in window.voice or ()]
    return [(start, end) for start, end in parts if start < end]


def is_sparse(window: AudioWindow, piece: WindowSegment) -> bool:
    """Return whether a piece has too little text for its speech."""
    voice_s = _seconds(voice_in(window, piece.start_s, piece.end_s))
    return voice_s >= _SPARSE_VOICE_S and len(piece.tokens) < _SPARSE * voice_s


def sub_window(window: AudioWindow, begin: int, end: int | None = None) -> AudioWindow:
    """Return a part of a window as a window with `last` unset.

    Args:
        window: the whole window.
        begin: index of the part's first sample.
        end: index after its last sample; None: the window's end.
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


def _halves(window: AudioWindow, piece: WindowSegment) -> list[AudioWindow]:
    """Cut a window from a piece on in two, at the quietest place in the piece's middle half."""
    first, last = (round(at * SAMPLE_RATE) for at in (piece.start_s, piece.end_s))
    quarter = (last - first) // 4
    middle = quietest(window.samples, first + quarter, last - quarter)
    return [sub_window(window, first, middle), sub_window(window, middle)]


def _begin(samples: Samples, text_end_s: float, voice_s: float) -> int:
    """Return the first sample of a remainder: just before the speech, or between two words."""
    if voice_s - _LEAD_S > text_end_s + _SLACK_S:
        return round((voice_s - _LEAD_S) * SAMPLE_RATE)
    first_s, last_s = max(0.0, text_end_s - _SLACK_S), text_end_s + _SLACK_S
    return quietest(samples, round(first_s * SAMPLE_RATE), round(last_s * SAMPLE_RATE))


def quietest(samples: Samples, first: int, last: int) -> int:
    """Find the center of the quietest 50 ms between two samples at least 0.1 s apart."""
    frames = samples[first:last]
    frames = frames[: len(frames) // _FRAME * _FRAME].reshape(-1, _FRAME)
    power = np.square(frames, dtype=np.float64).mean(axis=1)
    smooth = np.convolve(power, np.ones(_SMOOTH_FRAMES), mode="valid")
    return first + _FRAME * (int(np.argmin(smooth)) + _SMOOTH_FRAMES // 2)


def _seconds(voice: Iterable[Stretch]) -> float:
    return sum(end - start for start, end in voice)
