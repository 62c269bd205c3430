"""The facts of a request's window that stay once its samples are gone."""

import dataclasses
import math

from serve.speech.features import HOP_LENGTH, N_FRAMES, SAMPLE_RATE
from serve.speech.timeline import Timeline
from serve.speech.windows import Window
from serve.speech.words import FRAMES_PER_S

_SILENCE_S = 1.0  # that the encoder sees behind the audio, at least


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

    @classmethod
    def of(cls, window: Window, number: int, rests: int = 0) -> "Span":
        """Note the facts of a window."""
        times = window.timeline, window.duration_s
        return cls(*times, window.voice, window.voice_s, number, rests, window.channel)

    @property
    def word_frames(self) -> int:
        """The frames in which words are looked for: whole ones, by OpenAI's count."""
        # A little more than the division, which may fall short.
        return max(1, math.floor(self.duration_s * FRAMES_PER_S + 1e-6))

    @property
    def encoder_frames(self) -> int:
        """The frames of log-mel that hold the window and a second of silence."""
        seconds = math.ceil(self.duration_s + _SILENCE_S)
        return min(N_FRAMES, seconds * SAMPLE_RATE // HOP_LENGTH)
