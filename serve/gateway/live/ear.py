"""From the audio of a stream to frames that say whether somebody speaks.

A stream counts samples of 16 kHz from its beginning.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from serve.contract.messages import Samples
from serve.speech.activity import FRAME, Detector, Options, Voice


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """The next samples of a stream."""

    samples: Samples  # (n,)
    speech: bool  # somebody speaks in them
    ends: bool = False  # speech has ended before them for good


class Ear:
    """Listens to one stream.

    Args:
        detector: of this stream.
        options: what counts as speech; `pad` has no part in it.
    """

    def __init__(self, detector: Detector, options: Options) -> None:
        self._detector = detector
        self._voice = Voice(options)
        self._held = np.zeros(0, np.float32)  # less than a frame
        self._judged = 0  # samples

    def tune(self, options: Options, speaking: bool) -> None:
        """Judge by other options from here on.

        Args:
            options: what counts as speech.
            speaking: whether there is an utterance that has an end.
        """
        before, self._voice = self._voice, Voice(options)
        self._voice.speaking, self._voice.quiet_since = before.speaking, before.quiet_since
        if speaking and not before.speaking:
            self._voice.speaking, self._voice.quiet_since = True, self._judged

    def push(self, block: Samples) -> Iterator[Frame]:
        """Take one more block, and yield the frames that are whole with it."""
        held = np.concatenate([self._held, block])
        whole = held[: len(held) // FRAME * FRAME]
        self._held = held[len(whole) :].copy()
        if not len(whole):
            return
        for samples, probability in zip(
            whole.reshape(-1, FRAME), self._detector.probabilities(whole), strict=True
        ):
            spoke = self._voice.speaking
            self._voice.step(float(probability), self._judged)
            self._judged += FRAME
            speaks = self._voice.speaking
            speech = speaks and self._voice.quiet_since is None
            yield Frame(samples, speech, ends=spoke and not speaks)

    def rest(self) -> Samples:
        """Give out what is left of a frame, without judging it."""
        held, self._held = self._held, np.zeros(0, np.float32)
        self._judged += len(held)
        return held
