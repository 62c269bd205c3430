"""The facts of a request's window that stay once its samples are gone."""

import dataclasses
import math

from serve.contract.fields import ShortEncoder
from serve.speech.features import HOP_LENGTH, N_FRAMES, SAMPLE_RATE, WINDOW_S
from serve.speech.timeline import Timeline
from serve.speech.windows import Window
from serve.speech.words import FRAMES_PER_S

_SILENCE_S = 1.0  # that the encoder sees behind the audio, at least
# Of a window that lasts no less the encoder may see so much, the least that holds it. Measured with
# base: in shorter ones it hears more wrong than in whole windows.
_SHORTEST_S = 3.0
_SEEN_S = (10, 15, 20)
WINDOW_LENGTHS = tuple(seconds * SAMPLE_RATE for seconds in (*_SEEN_S, WINDOW_S))
"""Samples of windows as the encoder sees them, unless it is to see as little as there is."""


@dataclasses.dataclass(frozen=True)
class Span:
    """The facts that stay known of a window."""

    timeline: Timeline
    duration_s: float
    voice: tuple[tuple[float, float], ...] | None  # see `Window`
    voice_s: float | None
    number: int  # of the windows that the audio was cut into; a rest has that of its window
    rests: int  # so many times it is what was left of a window
    channel: int  # see `Window`
    narrow: bool  # see `Window`

    @classmethod
    def of(cls, window: Window, number: int, rests: int = 0) -> "Span":
        """Note the facts of a window."""
        times = window.timeline, window.duration_s
        heard = window.voice, window.voice_s
        return cls(*times, *heard, number, rests, window.channel, window.narrow)

    @property
    def word_frames(self) -> int:
        """The frames in which words are looked for: whole ones, by OpenAI's count."""
        # A little more than the division, which may fall short.
        return max(1, math.floor(self.duration_s * FRAMES_PER_S + 1e-6))

    def encoder_frames(self, short: ShortEncoder) -> int:
        """Count the frames of log-mel that the encoder sees of the window."""
        rest = self.rests and short == "auto"
        return N_FRAMES if rest else encoder_frames(self.duration_s, short)


def encoder_frames(duration_s: float, short: ShortEncoder) -> int:
    """Count the frames of log-mel that the encoder sees of a window that lasts so long."""
    if short == "off" or (short == "auto" and duration_s < _SHORTEST_S):
        return N_FRAMES
    seconds = math.ceil(duration_s + _SILENCE_S)
    if short == "auto":
        seconds = next((seen for seen in _SEEN_S if seen >= seconds), WINDOW_S)
    return min(N_FRAMES, seconds * SAMPLE_RATE // HOP_LENGTH)
