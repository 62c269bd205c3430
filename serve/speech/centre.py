"""Select the front centre channel of surround sound while only that channel has speech.

Films have dialogue in the centre, and music and effects in the other channels, so a downmix is
mostly music. VAD runs on the centre and on the rest. The decision is made for each block, so speech
may start late, and speech in the other channels is not lost.
"""

import contextlib
from collections.abc import Callable, Generator

import numpy as np

from serve.contract.messages import Samples
from serve.speech.rate import SAMPLE_RATE
from serve.speech.vad import FRAME, Probabilities, VadModel

_BLOCK = 250 * FRAME  # samples per decision: 8 s
_MIX, _CENTRE, _REST = range(3)  # columns from `serve.speech.downmix`
_VOICE = 0.5  # minimum probability of speech in the centre
_OTHER_VOICE = 0.6  # the same in the rest, higher because music may look like speech
_NEAR = 10  # frames around speech in the centre in which the rest may have its echo
_MIN_CENTRE = 8  # minimum frames of speech in the centre for a decision
_MIN_OTHER = 25  # minimum frames of other speech that keep the mix: 0.8 s
_CLEARER = 0.15  # minimum lead of the centre's mean probability


def chosen(
    blocks: Generator[Samples, None, None], warn: Callable[[str], None]
) -> Generator[Samples, None, None]:
    """Convert blocks to mono: the centre or the mix of three columns; mono blocks do not change.

    Args:
        blocks: float32 (n,) or (n, 3) each, 16 kHz; closed together with this generator.
        warn: called at the end if channels were dropped.

    Yields:
        float32 (n,).

    Raises:
        EarshotError: VAD cannot be loaded.
    """
    with contextlib.closing(blocks):
        choice: _Choice | None = None
        for block in blocks:
            if block.ndim == 1:
                yield block
                continue
            choice = choice or _Choice()
            yield from choice.push(block)
        if choice is not None:
            yield from choice.finish()
            if text := choice.warning():
                warn(text)


class _Choice:
    """A selector between the centre and the mix for one file."""

    def __init__(self) -> None:
        self._detectors = {column: VadModel() for column in (_CENTRE, _REST)}
        self._held = np.zeros((0, 3), np.float32)
        self._column = _MIX
        self._taken = {_MIX: 0, _CENTRE: 0}  # samples

    def push(self, block: Samples) -> list[Samples]:
        self._held = np.concatenate([self._held, block])
        given = []
        while len(self._held) >= _BLOCK:
            given.append(self._choose(self._held[:_BLOCK]))
            self._held = self._held[_BLOCK:]
        return given

    def finish(self) -> list[Samples]:
        return [self._choose(self._held)] if len(self._held) else []

    def warning(self) -> str:
        alone, all_of_it = self._taken[_CENTRE], sum(self._taken.values())
        if not alone:
            return ""
        return (
            "only the front centre channel has speech in "
            f"{alone / SAMPLE_RATE:.1f} of {all_of_it / SAMPLE_RATE:.1f} s; the other channels are "
            "dropped there"
        )

    def _choose(self, block: Samples) -> Samples:
        centre, rest = (self._listen(column, block) for column in (_CENTRE, _REST))
        self._column = _decided(centre, rest, self._column)
        self._taken[self._column] += len(block)
        return block[:, self._column].copy()

    def _listen(self, column: int, block: Samples) -> Probabilities:
        samples = np.pad(block[:, column], (0, -len(block) % FRAME))
        return self._detectors[column].probabilities(samples)


def _decided(centre: Probabilities, rest: Probabilities, before: int) -> int:
    """Choose a block's column from the speech probabilities of the centre and the rest."""
    voice, other = centre >= _VOICE, rest >= _OTHER_VOICE
    near = np.convolve(voice, np.ones(2 * _NEAR + 1))[_NEAR : _NEAR + len(voice)] > 0
    if np.count_nonzero(other & ~near) >= _MIN_OTHER:
        return _MIX
    n_voice = np.count_nonzero(voice)
    if n_voice < _MIN_CENTRE:
        return before
    only_there = 2 * np.count_nonzero(other & voice) <= n_voice
    clearer = centre[voice].mean() > rest[voice].mean() + _CLEARER
    return _CENTRE if only_there or clearer else _MIX
