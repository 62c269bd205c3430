"""Sound that is not speech: noise of any colour, and tones that are like music. Pure, by a seed.

Samples are float32 (n,) at 16 kHz; levels are dB of the root mean square, 0 is a square wave.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE

FADE_S = 0.05
_TILE_S = 30.0  # noise that lasts longer comes again
_LOWEST_HZ = 40.0
_SCALES = ((0, 2, 4, 5, 7, 9, 11), (0, 2, 3, 5, 7, 8, 10), (0, 2, 4, 7, 9))  # semitones
_HARMONICS = 8
_ATTACK_S = 0.015


def level_db(samples: Samples) -> float:
    """Measure samples that are not all 0."""
    return float(10.0 * np.log10(np.mean(np.square(samples, dtype=np.float64))))


def at_level(samples: npt.NDArray[np.floating[Any]], wanted_db: float) -> Samples:
    """Return the same sound, louder or quieter."""
    power = np.mean(np.square(samples, dtype=np.float64))
    return np.asarray(samples * (10.0 ** (wanted_db / 20.0) / np.sqrt(power)), dtype=np.float32)


def faded(samples: Samples, seconds: float = FADE_S) -> Samples:
    """Return the same sound, which begins and ends softly."""
    count = min(round(seconds * SAMPLE_RATE), len(samples) // 2)
    ramp = np.linspace(0.0, 1.0, count, dtype=np.float32)
    out = samples.copy()
    out[:count] *= ramp
    out[len(out) - count :] *= ramp[::-1]
    return out


def noise(count: int, slope: float, wanted_db: float, rng: np.random.Generator) -> Samples:
    """Make stationary noise.

    Args:
        count: samples.
        slope: its power falls with frequency to this power: 0 white, 1 pink, 2 brown.
        wanted_db: its level.
        rng: draws it.
    """
    size = min(count, round(_TILE_S * SAMPLE_RATE))
    hertz = np.fft.rfftfreq(size, 1.0 / SAMPLE_RATE)
    phases = rng.standard_normal(len(hertz)) + 1j * rng.standard_normal(len(hertz))
    spectrum = phases * np.maximum(hertz, _LOWEST_HZ) ** (-slope / 2.0) * (hertz >= _LOWEST_HZ)
    return np.resize(at_level(np.fft.irfft(spectrum, size), wanted_db), count)


def music(count: int, wanted_db: float, rng: np.random.Generator) -> Samples:
    """Make chords, broken chords or a melody: notes of a scale, with harmonics that die away.

    Args:
        count: samples.
        wanted_db: its level.
        rng: draws it.
    """
    out = np.zeros(count, np.float32)
    scale = _SCALES[rng.integers(len(_SCALES))]
    root_hz = 110.0 * 2.0 ** (rng.integers(12) / 12.0)
    beat = round(float(rng.uniform(0.18, 0.6)) * SAMPLE_RATE)
    way = ("chords", "broken", "melody")[rng.integers(3)]
    degree = int(rng.integers(len(scale)))
    for number, start in enumerate(range(0, count, beat)):
        if number % 4 == 0:
            degree = int(rng.integers(len(scale)))
        if way == "melody":
            degree += int(rng.integers(-2, 3))
        notes = [degree, degree + 2, degree + 4]
        if way == "broken":
            notes = [notes[number % 3]]
        elif way == "melody":
            notes = [degree]
        elif number % 4:  # a chord lasts for four beats
            continue
        for note in notes:
            hertz = root_hz * 2.0 ** (_semitones(scale, note) / 12.0)
            _add_note(out[start : start + 6 * beat], hertz, rng)
    return at_level(out, wanted_db)


def _semitones(scale: tuple[int, ...], degree: int) -> int:
    octave, step = divmod(degree, len(scale))
    return 12 * min(max(octave, -1), 2) + scale[step]


def _add_note(out: Samples, hertz: float, rng: np.random.Generator) -> None:
    """Add a note that begins with `out`."""
    times = np.arange(len(out)) / SAMPLE_RATE
    fall = float(rng.uniform(1.5, 6.0))
    envelope = np.minimum(times / _ATTACK_S, 1.0) * np.exp(-fall * times)
    bright = float(rng.uniform(0.8, 2.0))
    for harmonic in range(1, _HARMONICS + 1):
        if hertz * harmonic < SAMPLE_RATE / 2:
            wave = np.sin(2.0 * np.pi * hertz * harmonic * times)
            out += (wave * envelope * np.exp(-0.5 * harmonic * times) / harmonic**bright).astype(
                np.float32
            )
