"""Scripts -> recordings on the disk, made of the speech that ships with the project.

What a recording is depends on the plan, the speech and this code alone. It is made once:

.cache/long/<hash of all that>/manifest.jsonl, NN-kind-language.flac
"""

import collections
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile

from eval.long import script, sound, truth
from eval.long.plan import Planned
from eval.long.script import SNR_DB, Deck, Event, Sentence, write_script
from eval.long.truth import Recording, Stretch, read_manifest, recording
from eval.record import Say, made_once, write_jsonl
from serve.contract.codec import from_json
from serve.contract.errors import ConfigError
from serve.contract.files import read_bytes, read_text
from serve.contract.messages import Samples
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE, WINDOW_S
from serve.speech.meter import Limits

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
    for module in (inspect.getmodule(_key), script, sound, truth):
        assert module is not None
        digest.update(inspect.getsource(module).encode())
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
        return sound.faded(whole[first:last], 0.01)


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
    out += sound.noise(len(out), 1.0, float(rng.uniform(*_ROOM_DB)), rng)
    for event in events:
        stretch, sentence = event.stretch, event.sentence
        place = out[_sample(stretch.start_s) : _sample(stretch.end_s)]
        if sentence is not None:
            samples = sound.at_level(spoken(sentence), float(rng.uniform(*_SPEECH_DB)))
            place[: len(samples)] += samples[: len(place)]
        elif stretch.what == "tones":
            place += sound.faded(sound.music(len(place), float(rng.uniform(*_TONES_DB)), rng))
        elif stretch.what == "noise" and stretch.snr_db is None:
            place += _noise(len(place), float(rng.uniform(*SNR_DB)), rng)
    for start_s, end_s, snr_db in _under_noise(events):
        place = out[_sample(start_s) : _sample(end_s)]
        place += _noise(len(place), snr_db, rng)
    return np.clip(out, -1.0, 1.0)


def _noise(count: int, snr_db: float, rng: np.random.Generator) -> Samples:
    """Make noise that is so much less than speech usually is."""
    usual_db = sum(_SPEECH_DB) / 2.0
    return sound.faded(sound.noise(count, float(rng.uniform(0.0, 2.0)), usual_db - snr_db, rng))


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
