"""Recordings composed of clips, with pauses, noise and tones, and the truth about them."""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import soundfile

from build.clips import Clip
from eval.long.plan import Kind, Planned
from eval.record import Say, made_once, read_jsonl, write_jsonl
from serve.contract.codec import from_json
from serve.contract.errors import ConfigError
from serve.contract.files import read_bytes, read_text
from serve.contract.messages import Samples
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE, WINDOW_S
from serve.speech.meter import Limits

KINDS: dict[Kind, str] = {
    "pauses": "one language, a quiet room, breaks of up to a minute",
    "noise": "one language, half of it under noise of 10 to 25 dB less, and noise alone",
    "tones": "one language, and between its sentences chords and melodies of 5 to 30 s",
    "languages": "changes its language every minute or so; breaks, noise and tones",
    "reading": "one speaker, sentence after sentence, with pauses of 0.1 to 1.5 s",
    "passage": "a recording as somebody made it",
}

What = Literal["speech", "silence", "noise", "tones"]
UNSPOKEN: tuple[What, ...] = ("silence", "noise", "tones")


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Some seconds of a recording; stretches follow each other without a gap."""

    what: What  # noise and tones are alone; speech is one sentence
    start_s: float
    end_s: float
    text: str = ""  # of speech
    language: str | None = None  # code, of speech
    snr_db: float | None = None  # speech or a pause under noise: how much less the noise is


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recording and all that is in it."""

    file: str  # relative to the manifest
    kind: Kind
    seed: int
    duration: float  # s
    stretches: tuple[Stretch, ...]
    text: str  # of all sentences
    language: str  # of the first sentence

    @property
    def sentences(self) -> tuple[Stretch, ...]:
        """Return the sentences, in order."""
        return tuple(stretch for stretch in self.stretches if stretch.what == "speech")

    def clip(self, folder: Path) -> Clip:
        """Return the recording, as systems are given it."""
        return Clip(self.file, folder / self.file, self.text, self.language, self.duration)


def recording(file: str, kind: Kind, seed: int, stretches: Sequence[Stretch]) -> Recording:
    """Make a recording of these stretches, at least one of them a sentence."""
    sentences = [stretch for stretch in stretches if stretch.what == "speech"]
    assert sentences[0].language is not None
    return Recording(
        file=file,
        kind=kind,
        seed=seed,
        duration=stretches[-1].end_s,
        stretches=tuple(stretches),
        text=" ".join(sentence.text for sentence in sentences),
        language=sentences[0].language,
    )


def read_manifest(path: Path) -> list[Recording]:
    """Read a manifest of recordings.

    Raises:
        FileError: it cannot be read.
        ConfigError: a line is not a recording; the message names the line.
    """
    return read_jsonl(path, Recording, "expected a manifest of recordings")


# ---------------------------------------------------------------- sound


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


# ---------------------------------------------------------------- script


PAUSE_S = (0.3, 8.0)  # between two sentences
READING_PAUSE_S = (0.1, 1.5)
SCENE = (6, 16)  # sentences
BREAK_S: dict[What, tuple[float, float]] = {
    "silence": (20.0, 60.0),
    "noise": (5.0, 20.0),
    "tones": (5.0, 30.0),
}
AROUND_S = (0.4, 2.5)  # quiet, before a break and after it
SNR_DB = (10.0, 25.0)
LANGUAGE_S = 45.0  # after which the language changes with the next scene

# Of the breaks and scenes of a kind: how many are what.
_BREAKS: dict[Kind, dict[What, float]] = {
    "pauses": {"silence": 1.0},
    "noise": {"silence": 0.3, "noise": 0.7},
    "tones": {"silence": 0.2, "tones": 0.8},
    "languages": {"silence": 0.4, "noise": 0.3, "tones": 0.3},
}
_UNDER_NOISE: dict[Kind, float] = {"noise": 0.5, "languages": 0.3}


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A sentence that somebody has spoken: where its sound is, and what it says."""

    file: str
    start_s: float  # in the file
    end_s: float
    text: str
    language: str
    speaker: str = ""  # with the group; "" = unknown


@dataclasses.dataclass(frozen=True)
class Event:
    """A stretch of a script, and the sentence that is its sound if it is speech."""

    stretch: Stretch
    sentence: Sentence | None = None


class Deck:
    """Sentences of one language, drawn so that none comes back soon.

    Args:
        sentences: all there are; of some several recordings may be there.
    """

    def __init__(self, sentences: Sequence[Sentence]) -> None:
        by_text: dict[str, list[Sentence]] = {}
        for sentence in sentences:
            by_text.setdefault(sentence.text, []).append(sentence)
        self._waiting = list(by_text.values())  # whose turn was longest ago is first

    def draw(self, rng: np.random.Generator) -> Sentence:
        """Draw any of the half that was not said for longest."""
        spoken = self._waiting.pop(int(rng.integers(math.ceil(len(self._waiting) / 2))))
        self._waiting.append(spoken)
        return spoken[int(rng.integers(len(spoken)))]


def write_script(
    kind: Kind, languages: Sequence[str], decks: Mapping[str, Deck], seconds: float, seed: int
) -> list[Event]:
    """Draw what happens in a recording.

    Args:
        kind: what it is about.
        languages: codes; with more than one they take turns.
        decks: the sentences of each; they remember what was drawn.
        seconds: how long it is to be; it ends after the scene that reaches them.
        seed: decides everything else, together with what was drawn before.
    """
    script = _Script(kind, decks, np.random.default_rng(seed))
    turn, changed_s = 0, 0.0
    script.quiet(AROUND_S)
    while True:
        script.scene(languages[turn % len(languages)])
        if script.end_s >= seconds:
            script.quiet(AROUND_S)
            return script.events
        if script.end_s - changed_s >= LANGUAGE_S:
            turn, changed_s = turn + 1, script.end_s
        script.pause()


class _Script:
    """A script as far as it is written."""

    def __init__(self, kind: Kind, decks: Mapping[str, Deck], rng: np.random.Generator) -> None:
        self._kind = kind
        self._decks = decks
        self._rng = rng
        self.events: list[Event] = []
        self.end_s = 0.0

    def scene(self, language: str) -> None:
        """Add some sentences with pauses between them, perhaps under noise."""
        under_noise = self._rng.random() < _UNDER_NOISE.get(self._kind, 0.0)
        snr_db = round(float(self._rng.uniform(*SNR_DB)), 1) if under_noise else None
        for number in range(int(self._rng.integers(*SCENE, endpoint=True))):
            if number:
                low, high = READING_PAUSE_S if self._kind == "reading" else PAUSE_S
                share = float(self._rng.random()) ** 2  # most are short
                self._add("silence", low * (high / low) ** share, snr_db)
            sentence = self._decks[language].draw(self._rng)
            start_s, self.end_s = self.end_s, self.end_s + sentence.end_s - sentence.start_s
            spoken = Stretch("speech", start_s, self.end_s, sentence.text, language, snr_db)
            self.events.append(Event(spoken, sentence))

    def pause(self) -> None:
        """Add a break between two scenes; a reading has none."""
        if self._kind == "reading":
            self.quiet(READING_PAUSE_S)
            return
        chances = _BREAKS[self._kind]
        what = self._rng.choice(list(chances), p=list(chances.values()))
        self.quiet(AROUND_S)
        self._add(what, float(self._rng.uniform(*BREAK_S[what])))
        self.quiet(AROUND_S)

    def quiet(self, seconds: tuple[float, float]) -> None:
        """Add nothing but the room."""
        self._add("silence", float(self._rng.uniform(*seconds)))

    def _add(self, what: What, seconds: float, snr_db: float | None = None) -> None:
        start_s, self.end_s = self.end_s, self.end_s + seconds
        what = "noise" if snr_db is not None else what  # what one hears in a pause under noise
        self.events.append(Event(Stretch(what, start_s, self.end_s, snr_db=snr_db)))


# ---------------------------------------------------------------- compose


CACHE = Path(".cache") / "long"
MANIFEST = "manifest.jsonl"

_SPEECH_DB = (-27.0, -20.0)  # of a sentence
_ROOM_DB = (-75.0, -55.0)  # of a recording; pink
_TONES_DB = (-30.0, -20.0)
_LIMITS = Limits(600.0)  # of a clip of speech


@dataclasses.dataclass(frozen=True)
class Composed:
    """Recordings on the disk."""

    folder: Path
    recordings: tuple[Recording, ...]


def compose(
    planned: Sequence[Planned],
    seed: int,
    sentences: Sequence[Sentence],
    tell: Say,
) -> Composed:
    """Make recordings, unless they are there.

    Args:
        planned: what each is like.
        seed: of everything that is drawn.
        sentences: that are spoken; see `read_sentences`.
        tell: gets a line on each that is made.

    Raises:
        FileError: speech cannot be read.
        ConfigError: a manifest lists no speech in a language that is planned.
    """
    folder = CACHE / _key(planned, seed, sentences)
    made_once(folder, lambda partial: _make(planned, seed, sentences, partial, tell))
    return Composed(folder, tuple(read_manifest(folder / MANIFEST)))


def _key(planned: Sequence[Planned], seed: int, sentences: Sequence[Sentence]) -> str:
    """Hash everything that recordings depend on; a clip does not change without its manifest."""
    digest = hashlib.sha256(repr((list(planned), seed, list(sentences))).encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:24]


@dataclasses.dataclass(frozen=True)
class _Span:
    start: float
    end: float
    text: str


@dataclasses.dataclass(frozen=True)
class _Line:
    file: str
    text: str
    language: str | None
    duration: float
    segments: tuple[_Span, ...] | None = None  # None: the clip is one sentence
    group: str = ""
    speaker: str | None = None
    half: str = ""


def read_sentences(manifest: str | Path, half: str = "") -> Iterator[Sentence]:
    """Yield the sentences of a manifest's clips: each a clip of its own, or a segment of a clip.

    Args:
        manifest: its path.
        half: of whose clips alone, beside those that are of none; "" is all.

    Raises:
        FileError: the manifest cannot be read.
        ConfigError: a line is malformed.
    """
    manifest = Path(manifest)
    for number, text in enumerate(read_text(manifest, "expected clips").splitlines(), 1):
        line = from_json(_Line, text, f"{manifest}:{number}", extra="ignore")
        if half and line.half not in ("", half):
            continue
        spans = line.segments
        if spans is None:
            spans = (_Span(0.0, line.duration, line.text),)
        speaker = f"{line.group}/{line.speaker}" if line.speaker else ""
        for span in spans if line.language is not None else ():
            assert line.language is not None
            file = str(manifest.parent / line.file)
            yield Sentence(file, span.start, span.end, span.text, line.language, speaker)


def _make(
    planned: Sequence[Planned],
    seed: int,
    sentences: Sequence[Sentence],
    folder: Path,
    tell: Say,
) -> None:
    passages = [each for each in sentences if each.end_s - each.start_s > WINDOW_S]
    decks = {code: Deck(some) for code, some in _by_language(sentences, passages).items()}
    library = _Library()
    recordings = []
    for number, plan in enumerate(planned):
        own_seed = seed * 1000 + number
        for code in plan.languages:
            if code not in decks:
                raise ConfigError(f"no speech in {code}; expected one of {', '.join(decks)}")
        events = write_script(plan.kind, plan.languages, decks, 60.0 * plan.minutes, own_seed)
        file = f"{number:02}-{plan.kind}-{'-'.join(plan.languages)}.flac"
        made = recording(file, plan.kind, own_seed, [event.stretch for event in events])
        tell(f"composing {file}: {made.duration / 60:.1f} minutes, {len(made.sentences)} sentences")
        samples = render(events, library.samples, np.random.default_rng((own_seed, 1)))
        soundfile.write(folder / file, samples, SAMPLE_RATE, subtype="PCM_16")
        recordings.append(made)
    for number, passage in enumerate(passages, len(planned)):
        file = f"{number:02}-passage-{passage.language}.flac"
        soundfile.write(folder / file, library.samples(passage), SAMPLE_RATE, subtype="PCM_16")
        whole = Stretch("speech", 0.0, passage.end_s, passage.text, passage.language)
        recordings.append(recording(file, "passage", seed, [whole]))
    write_jsonl(folder / MANIFEST, recordings)


def _by_language(
    sentences: Sequence[Sentence], passages: Sequence[Sentence]
) -> dict[str, list[Sentence]]:
    """Choose what is said in each language: where speakers are known, by whoever said the most."""
    speakers = collections.Counter((sentence.language, sentence.speaker) for sentence in sentences)
    by_language: dict[str, list[Sentence]] = {}
    by_most = [who for who, _ in speakers.most_common()]
    for code, speaker in sorted(by_most, key=lambda who: not who[1]):  # the unknown last
        of_speaker = [
            sentence
            for sentence in sentences
            if (sentence.language, sentence.speaker) == (code, speaker)
        ]
        if short := [sentence for sentence in of_speaker if sentence not in passages]:
            by_language.setdefault(code, short)
    return by_language


class _Library:
    """The sound of sentences; each file is decoded once."""

    def __init__(self) -> None:
        self._files: dict[str, Samples] = {}

    def samples(self, sentence: Sentence) -> Samples:
        """Return its sound, with soft ends."""
        if sentence.file not in self._files:
            blocks = audio.decode(read_bytes(Path(sentence.file)), _LIMITS)
            self._files[sentence.file] = np.concatenate(list(blocks))
        whole = self._files[sentence.file]
        first, last = (round(at * SAMPLE_RATE) for at in (sentence.start_s, sentence.end_s))
        return faded(whole[first:last], 0.01)


def render(
    events: Sequence[Event],
    spoken: Callable[[Sentence], Samples],
    rng: np.random.Generator,
) -> Samples:
    """Make the sound of a script.

    Args:
        events: of the script.
        spoken: the sound of a sentence.
        rng: draws levels, noise and tones.
    """
    out = np.zeros(_sample(events[-1].stretch.end_s), np.float32)
    out += noise(len(out), 1.0, float(rng.uniform(*_ROOM_DB)), rng)
    for event in events:
        stretch, sentence = event.stretch, event.sentence
        place = out[_sample(stretch.start_s) : _sample(stretch.end_s)]
        if sentence is not None:
            samples = at_level(spoken(sentence), float(rng.uniform(*_SPEECH_DB)))
            place[: len(samples)] += samples[: len(place)]
        elif stretch.what == "tones":
            place += faded(music(len(place), float(rng.uniform(*_TONES_DB)), rng))
        elif stretch.what == "noise" and stretch.snr_db is None:
            place += _noise(len(place), float(rng.uniform(*SNR_DB)), rng)
    for start_s, end_s, snr_db in _under_noise(events):
        place = out[_sample(start_s) : _sample(end_s)]
        place += _noise(len(place), snr_db, rng)
    return np.clip(out, -1.0, 1.0)


def _noise(count: int, snr_db: float, rng: np.random.Generator) -> Samples:
    """Make noise that is so much less than speech usually is."""
    usual_db = sum(_SPEECH_DB) / 2.0
    return faded(noise(count, float(rng.uniform(0.0, 2.0)), usual_db - snr_db, rng))


def _under_noise(events: Sequence[Event]) -> Iterator[tuple[float, float, float]]:
    """Yield from when to when noise goes on beneath speech, and how much less it is."""
    start_s, before = 0.0, None
    for event in events:
        snr_db = event.stretch.snr_db
        if snr_db != before and before is not None:
            yield start_s, event.stretch.start_s, before
        if snr_db != before:
            start_s, before = event.stretch.start_s, snr_db
    assert before is None, "a script ends quietly"


def _sample(seconds: float) -> int:
    return round(seconds * SAMPLE_RATE)
