"""Recordings composed of clips, with pauses, noise and tones, and their reference."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import soundfile
from tqdm import tqdm

from build.clips import Clip
from eval.accuracy.passages import read_samples
from eval.record import made_once, read_jsonl, write_jsonl
from serve.contract.errors import ConfigError
from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE, WINDOW_S
from serve.speech.words import SPACELESS

Kind = Literal["pauses", "noise", "tones", "languages", "reading", "passage"]
"""The difficulty of a recording. All but the last two have pauses of up to 8 s."""

KINDS: dict[Kind, str] = {
    "pauses": "one language, a quiet room, breaks of up to a minute",
    "noise": "one language, half of it under noise of 10 to 25 dB less, and noise alone",
    "tones": "one language, and between its sentences chords and melodies of 5 to 30 s",
    "languages": "changes its language every minute or so; breaks, noise and tones",
    "reading": "one speaker, sentence after sentence, with pauses of 0.1 to 1.5 s",
    "passage": "a recording as it is",
}

Content = Literal["speech", "silence", "noise", "tones"]
"""The sound of a stretch; noise and tones are alone, speech is one sentence."""


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Some seconds of a recording; stretches follow each other without a gap."""

    what: Content
    start_s: float
    end_s: float
    text: str = ""  # the spoken sentence
    language: str | None = None  # code of the speech
    snr_db: float | None = None  # for speech or a pause under noise


@dataclasses.dataclass(frozen=True)
class AnnotatedRecording:
    """A recording and all that is in it."""

    file: str  # relative to the manifest
    kind: Kind
    duration: float  # s
    stretches: tuple[Stretch, ...]
    text: str  # all sentences
    language: str | None  # the first sentence's

    @property
    def sentences(self) -> tuple[Stretch, ...]:
        """Return the sentences, in order."""
        return tuple(stretch for stretch in self.stretches if stretch.what == "speech")


def recording(file: str, kind: Kind, stretches: Sequence[Stretch]) -> AnnotatedRecording:
    """Make a recording of these stretches, at least one of them a sentence."""
    sentences = [stretch for stretch in stretches if stretch.what == "speech"]
    text = " ".join(sentence.text for sentence in sentences)
    end_s = stretches[-1].end_s
    return AnnotatedRecording(file, kind, end_s, tuple(stretches), text, sentences[0].language)


def read_manifest(path: Path) -> list[AnnotatedRecording]:
    """Read a manifest of recordings.

    Raises:
        FileError: it cannot be read.
        ConfigError: a line is not a recording; the message names the line.
    """
    return read_jsonl(path, AnnotatedRecording, "expected a manifest of recordings")


# ---------------------------------------------------------------- sound


FADE_S = 0.05
_TILE_S = 30.0  # longer noise is repeated
_LOWEST_HZ = 40.0
_SCALES = ((0, 2, 4, 5, 7, 9, 11), (0, 2, 3, 5, 7, 8, 10), (0, 2, 4, 7, 9))  # semitones
_HARMONICS = 8
_ATTACK_S = 0.015


def n_samples(seconds: float) -> int:
    """Convert a time to a number of samples."""
    return round(seconds * SAMPLE_RATE)


def at_level(samples: npt.NDArray[np.floating[Any]], target_db: float) -> Samples:
    """Return the same sound, louder or quieter."""
    power = np.mean(np.square(samples, dtype=np.float64))
    return np.asarray(samples * (10.0 ** (target_db / 20.0) / np.sqrt(power)), dtype=np.float32)


def faded(samples: Samples, seconds: float = FADE_S) -> Samples:
    """Return the same sound, which begins and ends softly."""
    count = min(round(seconds * SAMPLE_RATE), len(samples) // 2)
    ramp = np.linspace(0.0, 1.0, count, dtype=np.float32)
    out = samples.copy()
    out[:count] *= ramp
    out[len(out) - count :] *= ramp[::-1]
    return out


def noise(count: int, slope: float, target_db: float, rng: np.random.Generator) -> Samples:
    """Make stationary noise.

    Args:
        count: samples.
        slope: its power falls with frequency to this power: 0 white, 1 pink, 2 brown.
        target_db: its level.
        rng: draws it.
    """
    size = min(count, round(_TILE_S * SAMPLE_RATE))
    hertz = np.fft.rfftfreq(size, 1.0 / SAMPLE_RATE)
    phases = rng.standard_normal(len(hertz)) + 1j * rng.standard_normal(len(hertz))
    spectrum = phases * np.maximum(hertz, _LOWEST_HZ) ** (-slope / 2.0) * (hertz >= _LOWEST_HZ)
    return np.resize(at_level(np.fft.irfft(spectrum, size), target_db), count)


def music(count: int, target_db: float, rng: np.random.Generator) -> Samples:
    """Make a chord every four beats, whole or one note after another.

    Args:
        count: samples.
        target_db: its level.
        rng: draws key, tempo, chords and the timbre of each note.
    """
    out = np.zeros(count, np.float32)
    scale = _SCALES[rng.integers(len(_SCALES))]
    root_hz = 110.0 * 2.0 ** (rng.integers(12) / 12.0)
    beat = round(float(rng.uniform(0.18, 0.6)) * SAMPLE_RATE)
    apart = beat * int(rng.integers(2))  # between the notes of a chord
    for start in range(0, count, 4 * beat):
        degree = int(rng.integers(len(scale)))
        for number in range(3):
            octave, step = divmod(degree + 2 * number, len(scale))
            hertz = root_hz * 2.0 ** (octave + scale[step] / 12.0)
            onset = start + number * apart
            _add_note(out[onset : onset + 6 * beat], hertz, rng)
    return at_level(out, target_db)


def _add_note(out: Samples, hertz: float, rng: np.random.Generator) -> None:
    """Add a note that begins with `out` and dies away."""
    times = np.arange(len(out)) / SAMPLE_RATE
    envelope = np.minimum(times / _ATTACK_S, 1.0) * np.exp(-rng.uniform(1.5, 6.0) * times)
    bright = rng.uniform(0.8, 2.0)
    for harmonic in range(1, _HARMONICS + 1):
        wave = envelope * np.sin(2.0 * np.pi * hertz * harmonic * times)
        out += (wave * np.exp(-0.5 * harmonic * times) / harmonic**bright).astype(np.float32)


# ---------------------------------------------------------------- script


PAUSE_S = (0.3, 8.0)  # between two sentences
READING_PAUSE_S = (0.1, 1.5)
SCENE = (6, 16)  # sentences
BREAK_S: dict[Content, tuple[float, float]] = {
    "silence": (20.0, 60.0),
    "noise": (5.0, 20.0),
    "tones": (5.0, 30.0),
}
AROUND_S = (0.4, 2.5)  # quiet, before a break and after it
SNR_DB = (10.0, 25.0)
LANGUAGE_S = 45.0  # after which the language changes with the next scene

# The share of each content in the breaks of a kind, and the share of scenes under noise.
_BREAKS: dict[Kind, dict[Content, float]] = {
    "pauses": {"silence": 1.0},
    "noise": {"silence": 0.3, "noise": 0.7},
    "tones": {"silence": 0.2, "tones": 0.8},
    "languages": {"silence": 0.4, "noise": 0.3, "tones": 0.3},
}
_UNDER_NOISE: dict[Kind, float] = {"noise": 0.5, "languages": 0.3}

ScriptItem = tuple[Stretch, Clip | None]
"""A stretch, and the clip that is its sound if it is speech."""


def write_script(
    kind: Kind,
    languages: Sequence[str],
    sentences: Mapping[str, Sequence[Clip]],
    seconds: float,
    rng: np.random.Generator,
) -> list[ScriptItem]:
    """Draw the sequence of events in a recording.

    Args:
        kind: decides pauses and breaks.
        languages: codes; with more than one they take turns.
        sentences: clips by language; each is used once before one is used again.
        seconds: how long it is to be; it ends after the scene that reaches them.
        rng: draws everything.
    """
    shuffled = {
        code: itertools.cycle([sentences[code][i] for i in rng.permutation(len(sentences[code]))])
        for code in languages
    }
    items: list[ScriptItem] = []
    end_s = changed_s = 0.0

    def add(
        what: Content, seconds: float, snr_db: float | None = None, clip: Clip | None = None
    ) -> None:
        nonlocal end_s
        text, language = (clip.text, clip.language) if clip else ("", None)
        items.append((Stretch(what, end_s, end_s + seconds, text, language, snr_db), clip))
        end_s += seconds

    def add_quiet(bounds_s: tuple[float, float]) -> None:
        """Add nothing but the room."""
        add("silence", float(rng.uniform(*bounds_s)))

    def add_scene(language: str) -> None:
        """Add some sentences with pauses between them, perhaps under noise."""
        under_noise = rng.random() < _UNDER_NOISE.get(kind, 0.0)
        snr_db = round(float(rng.uniform(*SNR_DB)), 1) if under_noise else None
        min_s, max_s = READING_PAUSE_S if kind == "reading" else PAUSE_S
        for number in range(int(rng.integers(*SCENE, endpoint=True))):
            if number:
                pause_s = min_s * (max_s / min_s) ** float(rng.random()) ** 2  # most are short
                add("noise" if under_noise else "silence", pause_s, snr_db)
            clip = next(shuffled[language])
            add("speech", clip.duration_s, snr_db, clip)

    turns = itertools.cycle(languages)
    language = next(turns)
    add_quiet(AROUND_S)
    add_scene(language)
    while end_s < seconds:
        if kind == "reading":
            add_quiet(READING_PAUSE_S)
        else:
            shares = _BREAKS[kind]
            what = rng.choice(list(shares), p=list(shares.values()))
            add_quiet(AROUND_S)
            add(what, float(rng.uniform(*BREAK_S[what])))
            add_quiet(AROUND_S)
        if end_s - changed_s >= LANGUAGE_S:
            language, changed_s = next(turns), end_s
        add_scene(language)
    add_quiet(AROUND_S)
    return items


# ---------------------------------------------------------------- compose


CACHE = Path(".cache") / "long"
MANIFEST = "manifest.jsonl"

_SPEECH_DB = (-27.0, -20.0)  # level of a sentence
_ROOM_DB = (-75.0, -55.0)  # level of a recording's room; pink noise
_TONES_DB = (-30.0, -20.0)


@dataclasses.dataclass(frozen=True)
class PlannedRecording:
    """A recording that is to be made."""

    kind: Kind
    languages: tuple[str, ...]  # that take turns
    minutes: float


def plan(languages: Sequence[str], minutes: float | None = None) -> list[PlannedRecording]:
    """Return the recordings that are to be made.

    Args:
        languages: codes; the first of them are used.
        minutes: how long they last together, at least; None: every kind once, about half an hour.
    """
    each_kind = [PlannedRecording("reading", (code,), 5.0) for code in languages[:3]]
    if len(languages) > 1:
        each_kind.append(PlannedRecording("languages", tuple(languages[:2]), 8.0))
    kinds: tuple[Kind, ...] = ("noise", "tones", "pauses")
    each_kind += [PlannedRecording(kind, (languages[0],), 5.0) for kind in kinds]
    if minutes is None:
        return each_kind
    planned: list[PlannedRecording] = []
    while sum(row.minutes for row in planned) < minutes:
        planned.append(each_kind[len(planned) % len(each_kind)])
    return planned


def compose(speech: Sequence[Clip], minutes: float | None, seed: int) -> Path:
    """Make recordings, unless they are there.

    Args:
        speech: clips of sentences, some of them with speech. One speaker is chosen for each
            language. Clips longer than a window become separate recordings.
        minutes: as in `plan`.
        seed: the seed of all random draws.

    Returns:
        The folder of the recordings, with `MANIFEST`. Equal arguments give the same folder.

    Raises:
        FileError: speech cannot be read.
        ConfigError: no clip is a sentence.
    """
    sentences = _by_language(speech)
    if not sentences:
        raise ConfigError("no clip of less than 30 s has a text and a language; expected some")
    planned = plan(list(sentences), minutes)
    # A clip does not change without its manifest, so this is all that recordings depend on.
    digest = hashlib.sha256(repr((planned, seed, list(speech))).encode())
    digest.update(Path(__file__).read_bytes())
    folder = CACHE / digest.hexdigest()[:24]

    @functools.cache
    def sound(clip: Clip) -> Samples:
        return faded(read_samples(clip.path), 0.01)

    def make(partial: Path) -> None:
        recordings = []

        def keep(file: str, kind: Kind, stretches: Sequence[Stretch], samples: Samples) -> None:
            soundfile.write(partial / file, samples, SAMPLE_RATE, subtype="PCM_16")
            recordings.append(recording(file, kind, stretches))

        for number, row in enumerate(tqdm(planned, "composing", unit="recording")):
            rng = np.random.default_rng((seed, number))
            items = write_script(row.kind, row.languages, sentences, 60.0 * row.minutes, rng)
            samples = render(items, sound, rng)
            file = f"{number:02}-{row.kind}-{'-'.join(row.languages)}.flac"
            keep(file, row.kind, [stretch for stretch, _ in items], samples)
        passages = [clip for clip in speech if clip.text and clip.duration_s > WINDOW_S]
        for number, clip in enumerate(passages, len(planned)):
            passage = Stretch("speech", 0.0, clip.duration_s, clip.text, clip.language)
            keep(f"{number:02}-passage-{clip.language}.flac", "passage", [passage], sound(clip))
        write_jsonl(partial / MANIFEST, recordings)

    made_once(folder, make)
    return folder


def _by_language(speech: Sequence[Clip]) -> dict[str, list[Clip]]:
    """Choose one speaker's sentences for each language: the known speaker with the most speech.

    Languages written without spaces are left out, because the scores count words.
    """
    by_speaker: dict[tuple[str, str, str], list[Clip]] = {}
    for clip in speech:
        code = clip.language or ""
        if clip.text and code and code not in SPACELESS and clip.duration_s <= WINDOW_S:
            key = code, clip.speaker and clip.group, clip.speaker
            by_speaker.setdefault(key, []).append(clip)

    chosen: dict[str, list[Clip]] = {}
    duration_s = {key: sum(one.duration_s for one in clips) for key, clips in by_speaker.items()}
    for key in sorted(by_speaker, key=lambda key: (not key[2], -duration_s[key])):
        by_text = {clip.text: clip for clip in by_speaker[key]}
        chosen.setdefault(key[0], list(by_text.values()))
    return chosen


def render(
    items: Sequence[ScriptItem], sound: Callable[[Clip], Samples], rng: np.random.Generator
) -> Samples:
    """Make the sound of a script.

    Args:
        items: the script's items.
        sound: returns the samples of a clip.
        rng: draws levels, noise and tones.
    """
    length = n_samples(items[-1][0].end_s)
    out = noise(length, 1.0, float(rng.uniform(*_ROOM_DB)), rng)
    for stretch, clip in items:
        part = out[n_samples(stretch.start_s) : n_samples(stretch.end_s)]
        if clip is not None:
            samples = at_level(sound(clip), float(rng.uniform(*_SPEECH_DB)))
            part[: len(samples)] += samples[: len(part)]
        elif stretch.what == "tones":
            part += faded(music(len(part), float(rng.uniform(*_TONES_DB)), rng))
        elif stretch.what == "noise" and stretch.snr_db is None:
            part += _noise(len(part), float(rng.uniform(*SNR_DB)), rng)
    stretches = [stretch for stretch, _ in items]
    for snr_db, together in itertools.groupby(stretches, lambda stretch: stretch.snr_db):
        if snr_db is not None:
            scene = list(together)
            part = out[n_samples(scene[0].start_s) : n_samples(scene[-1].end_s)]
            part += _noise(len(part), snr_db, rng)
    return np.clip(out, -1.0, 1.0)


def _noise(count: int, snr_db: float, rng: np.random.Generator) -> Samples:
    """Make noise `snr_db` below the usual level of speech."""
    usual_db = sum(_SPEECH_DB) / 2.0
    return faded(noise(count, float(rng.uniform(0.0, 2.0)), usual_db - snr_db, rng))
