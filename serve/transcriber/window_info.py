"""Describe a request's window after its samples are freed."""

import dataclasses
import math

from serve.contract.fields import ShortEncoder
from serve.speech.features import HOP_LENGTH, N_FRAMES, SAMPLE_RATE, WINDOW_S
from serve.speech.timeline import WindowTimeline
from serve.speech.windows import AudioWindow
from serve.speech.words import FRAMES_PER_S

_SILENCE_S = 1.0  # minimum silence that the encoder sees behind the audio
# With short_encoder = "auto", a window of at least `_SHORTEST_S` is padded to the smallest length
# that holds it. Measured with base: shorter windows give more errors than padding to 30 s.
_SHORTEST_S = 3.0
_SEEN_S = (10, 15, 20)
WINDOW_LENGTHS = tuple(seconds * SAMPLE_RATE for seconds in (*_SEEN_S, WINDOW_S))
"""Lengths in samples to which windows are padded, unless short_encoder is "on"."""


@dataclasses.dataclass(frozen=True)
class WindowInfo:
    """A window's description without its samples."""

    timeline: WindowTimeline
    duration_s: float
    voice: tuple[tuple[float, float], ...] | None  # see `AudioWindow`
    voice_s: float | None
    number: int  # index among the windows cut from the audio; a remainder has its window's
    remainder_depth: int  # 0: cut from the audio; n: the remainder of a window with n - 1
    channel: int  # see `AudioWindow`
    narrow: bool  # see `AudioWindow`

    @classmethod
    def of(cls, window: AudioWindow, number: int, remainder_depth: int = 0) -> "WindowInfo":
        times = window.timeline, window.duration_s
        speech = window.voice, window.voice_s
        return cls(*times, *speech, number, remainder_depth, window.channel, window.narrow)

    @property
    def word_frames(self) -> int:
        """The number of whole encoder frames in which words are timed, as OpenAI counts them."""
        # The epsilon corrects quotients that round to just below a whole number.
        return max(1, math.floor(self.duration_s * FRAMES_PER_S + 1e-6))

    def encoder_frames(self, short: ShortEncoder) -> int:
        """Count the log-mel frames of this window that the encoder sees."""
        rest = self.remainder_depth and short == "auto"
        return N_FRAMES if rest else encoder_frames(self.duration_s, short)


def encoder_frames(duration_s: float, short: ShortEncoder) -> int:
    """Count the log-mel frames that the encoder sees of a window of `duration_s` seconds."""
    if short == "off" or (short == "auto" and duration_s < _SHORTEST_S):
        return N_FRAMES
    seconds = math.ceil(duration_s + _SILENCE_S)
    if short == "auto":
        seconds = next((seen for seen in _SEEN_S if seen >= seconds), WINDOW_S)
    return min(N_FRAMES, seconds * SAMPLE_RATE // HOP_LENGTH)
