"""Short clips in which nobody speaks or little is said: in how many is text?

clips/                       the clips
predictions/<system>.jsonl   the answers, raw
"""

import dataclasses
import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Literal, TypeVar, get_args

import numpy as np
import soundfile

from build.clips import Clip
from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.predictions import TimedCall
from eval.accuracy.score import Counts, char_counts, compared_texts
from eval.accuracy.worker import measure_system
from eval.config import Config
from eval.corpora.find import find_clips
from eval.long.compose import at_level, faded, music, noise
from eval.long.plan import HEARING_NOBODY
from eval.long.systems import open_system, prepare_names
from eval.record import Check, Result, Run, Section, Table, write_jsonl
from serve.contract.errors import ConfigError, EarshotError
from serve.contract.files import read_bytes
from serve.contract.messages import Samples
from serve.speech import audio
from serve.speech.activity import FRAME, Detector
from serve.speech.features import SAMPLE_RATE
from serve.speech.meter import Limits

Nobody = Literal[
    "silence",
    "moments",
    "noise",
    "hum",
    "keys",
    "music",
    "dialling",
    "rooms",
    "breaths",
]
Hard = Literal["cut words", "reversed"]
Spoken = Literal["in silence", "in noise"]
Kind = Literal[Nobody, Hard, Spoken]

NOBODY: tuple[Nobody, ...] = get_args(Nobody)
"""In these nobody speaks: any text is invented."""
HARD: tuple[Hard, ...] = get_args(Hard)
"""A voice, of which no text is right or none is sure."""
SPOKEN: tuple[Spoken, ...] = get_args(Spoken)
"""The text is known."""

_LEVELS_DB = (-60.0, -45.0, -30.0, -20.0)
_SPEECH_DB = -25.0
_QUIET = 0.1  # a likelier frame is no pause
_SHORTEST_PAUSE = 9  # frames: 0.29 s
_EDGE = 3  # frames of a pause on either side that may still be speech
_KEYPAD_HZ = ((697, 770, 852, 941), (1209, 1336, 1477))
_LONGEST_S = 9.0  # of a recording: with what is put around it, it fits into a window
_LIMITS = Limits(_LONGEST_S + 1.0)

T = TypeVar("T", bound=Sized)


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """A clip, and what is said in it."""

    kind: Kind
    samples: Samples  # (n,), 16 kHz
    text: str = ""
    language: str | None = None


def make(speech: Sequence[Clip], seed: int) -> list[Made]:
    """Make the clips of a seed.

    Args:
        speech: recordings with their text; some hundred give all clips that there can be.
        seed: of everything that is drawn.

    Raises:
        ConfigError: nobody speaks in any.
        EarshotError: a recording cannot be read.
    """
    spoken = [clip for clip in speech if clip.text.strip() and clip.duration_s <= _LONGEST_S]
    if not spoken:
        raise ConfigError(f"no clip of at most {_LONGEST_S:g} s has a text; expected some")
    rng = np.random.default_rng(seed)
    made = [Made(kind, samples) for kind, samples in _synthesised(rng)]
    order = [spoken[i] for i in rng.permutation(len(spoken))]
    for number, work in enumerate(_FROM_SPEECH):
        # Each takes the first recordings of its own share that are fit for it.
        made += work(order[number :: len(_FROM_SPEECH)], rng)
    return made


def _count(seconds: float) -> int:
    return round(seconds * SAMPLE_RATE)


def _level(rng: np.random.Generator) -> float:
    return float(rng.choice(_LEVELS_DB) + rng.uniform(-5.0, 5.0))


def _synthesised(rng: np.random.Generator) -> Iterator[tuple[Kind, Samples]]:
    for seconds in (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 29.9):
        yield "silence", np.zeros(_count(seconds), np.float32)
    for sound in (_white, _tone, _keys, _white, _tone, _keys):
        yield "moments", sound(_count(0.05), _level(rng), rng)
    for slope in (0.0, 1.0, 2.0):
        for level in _LEVELS_DB:
            seconds = float(np.exp(rng.uniform(0.0, np.log(29.0))))
            yield "noise", noise(_count(seconds), slope, level, rng)
    for _ in range(6):
        yield "hum", _hum(_count(float(rng.uniform(1, 12))), _level(rng), rng)
    for _ in range(10):
        yield "keys", _keys(_count(float(rng.uniform(1, 12))), _level(rng), rng)
    for _ in range(14):
        level = float(rng.uniform(-35.0, -15.0))
        yield "music", music(_count(float(rng.uniform(2, 20))), level, rng)
    for _ in range(6):
        yield "dialling", _dialling(rng)


def _white(count: int, level: float, rng: np.random.Generator) -> Samples:
    return noise(count, 0.0, level, rng)


def _tone(count: int, level: float, rng: np.random.Generator) -> Samples:
    times = np.arange(count) / SAMPLE_RATE
    return faded(at_level(np.sin(2 * np.pi * rng.uniform(100, 2000) * times), level), 0.005)


def _hum(count: int, level: float, rng: np.random.Generator) -> Samples:
    """Make the hum of mains, its harmonics, and a little noise."""
    times, root = np.arange(count) / SAMPLE_RATE, float(rng.choice((50.0, 60.0)))
    waves = [
        rng.uniform(0.1, 1.0) / number * np.sin(2 * np.pi * (root * number * times + rng.uniform()))
        for number in range(1, 12)
    ]
    return at_level(np.sum(waves, axis=0), level) + noise(count, 1.0, level - 20.0, rng)


def _keys(count: int, level: float, rng: np.random.Generator) -> Samples:
    """Make typing: bursts of a few milliseconds, each of another colour, in a quiet room."""
    out = noise(count, 1.0, -70.0, rng)
    at = _count(float(rng.uniform(0.0, 0.02)))
    while at < count:
        burst = noise(_count(float(rng.uniform(0.01, 0.05))), rng.uniform(-1, 1.5), level, rng)
        burst = burst * np.exp(-np.arange(len(burst)) / _count(float(rng.uniform(0.002, 0.01))))
        out[at : at + len(burst)] += 4.0 * burst[: count - at].astype(np.float32)
        at += _count(float(rng.exponential(0.2) + 0.05))
    return out.clip(-1.0, 1.0)


def _dialling(rng: np.random.Generator) -> Samples:
    """Press keys of a telephone: two tones each."""
    times = np.arange(_count(float(rng.uniform(0.08, 0.25)))) / SAMPLE_RATE
    gap = np.zeros(_count(float(rng.uniform(0.05, 0.3))), np.float32)
    parts: list[Samples] = []
    for _ in range(int(rng.integers(1, 12))):
        pair = [np.sin(2 * np.pi * float(rng.choice(hertz)) * times) for hertz in _KEYPAD_HZ]
        parts += [faded(at_level(pair[0] + pair[1], -20.0), 0.005), gap]
    return np.concatenate(parts)


def _read(clip: Clip) -> Samples:
    return audio.whole(audio.decode(read_bytes(clip.path), _LIMITS))


def _voice(samples: Samples) -> Samples:
    """Return the probability of speech, float32 (frames,)."""
    return Detector().probabilities(np.pad(samples, (0, -len(samples) % FRAME)))


def _pauses(samples: Samples) -> list[Samples]:
    """Find where nobody is heard for a while, and yet something, without its edges."""
    quiet = np.concatenate(([False], _voice(samples) < _QUIET, [False]))
    runs = np.flatnonzero(np.diff(quiet)).reshape(-1, 2)
    parts = (
        samples[(first + _EDGE) * FRAME : (end - _EDGE) * FRAME]
        for first, end in runs
        if end - first >= _SHORTEST_PAUSE
    )
    return [pause for pause in parts if pause.any()]


def _some(speech: Sequence[Clip], count: int, work: Callable[[Samples], T]) -> list[T]:
    """Return the first results of work on recordings that are not empty."""
    results = (work(_read(clip)) for clip in speech)
    return list(itertools.islice((result for result in results if len(result)), count))


def _rooms(speech: Sequence[Clip], rng: np.random.Generator) -> Iterator[Made]:
    """Yield a recording's pauses, one after another, again and again."""
    for pauses in _some(speech, 15, _pauses):
        tile = np.concatenate([faded(pause, 0.01) for pause in pauses])
        yield Made("rooms", np.resize(tile, _count(float(np.exp(rng.uniform(0.0, 3.3))))))


def _breaths(speech: Sequence[Clip], rng: np.random.Generator) -> Iterator[Made]:
    """Yield a recording's loudest pause, in its room or alone."""
    for pauses in _some(speech, 15, _pauses):
        loudest = faded(max(pauses, key=lambda pause: float(np.square(pause).mean())), 0.02)
        around = np.zeros(_count(float(rng.choice((0.0, 0.5, 3.0)))), np.float32)
        yield Made("breaths", np.concatenate([around, loudest, around]))


def _cut_words(speech: Sequence[Clip], rng: np.random.Generator) -> Iterator[Made]:
    """Yield the first or last moment of a sentence."""
    for samples in _some(speech, 12, _spoken_part):
        count = _count(float(rng.uniform(0.1, 0.3)))
        yield Made("cut words", samples[:count] if rng.integers(2) else samples[-count:])


def _spoken_part(samples: Samples) -> Samples:
    """Cut from the first frame that is likely speech to the last."""
    spoken = np.flatnonzero(_voice(samples) >= 0.5)
    return samples[spoken[0] * FRAME : (spoken[-1] + 1) * FRAME] if len(spoken) else samples[:0]


def _reversed(speech: Sequence[Clip], _rng: np.random.Generator) -> Iterator[Made]:
    for samples in _some(speech, 10, lambda samples: samples[: _count(8.0)]):
        yield Made("reversed", samples[::-1].copy())


def _in_silence(speech: Sequence[Clip], rng: np.random.Generator) -> Iterator[Made]:
    for clip in speech[:20]:
        before, after = (np.zeros(_count(float(s)), np.float32) for s in rng.uniform(1, 10, 2))
        samples = np.concatenate([before, _read(clip), after])
        yield Made("in silence", samples, clip.text, clip.language)


def _in_noise(speech: Sequence[Clip], rng: np.random.Generator) -> Iterator[Made]:
    """Yield words with noise beneath them, 15 to 30 dB below."""
    for clip in speech[:20]:
        words = at_level(_read(clip), _SPEECH_DB)
        before, after = (_count(float(s)) for s in rng.uniform(1, 10, 2))
        samples = np.pad(words, (before, after))
        samples += noise(len(samples), 1.0, _SPEECH_DB - float(rng.uniform(15, 30)), rng)
        yield Made("in noise", samples, clip.text, clip.language)


_FROM_SPEECH: tuple[Callable[[Sequence[Clip], np.random.Generator], Iterator[Made]], ...] = (
    _rooms,
    _breaths,
    _cut_words,
    _reversed,
    _in_silence,
    _in_noise,
)


# ---------------------------------------------------------------- invented


PEOPLE_CLIPS = 60  # recordings of people that are heard as they are
MOST_INVENTED = 1.0  # % of the clips in which nobody speaks

_AS_THEY_ARE = "as they are"


@dataclasses.dataclass(frozen=True)
class Score:
    """Counts of the clips in which one system wrote text."""

    system: str
    clips: dict[str, int]  # by kind
    with_text: dict[str, int]  # of these
    spoken: Counts  # characters of clips of `SPOKEN`
    people: Counts  # and of recordings as they are

    def invented(self) -> tuple[int, int]:
        """Count clips with text in which nobody speaks, and all in which nobody does."""
        return sum(self.with_text[kind] for kind in NOBODY), sum(self.clips[k] for k in NOBODY)


def invented(run: Run, *, systems: tuple[str, ...] | None, seed: int) -> Result:
    """Make the clips of `eval.manifest`'s speech, let systems hear them, count.

    Args:
        run: its `config.eval` says the speech, its half, and the CPU threads of every system.
        systems: their names; None is `HEARING_NOBODY`.
        seed: of everything that is drawn.

    Raises:
        EarshotError: a system, a recording, or something that they need is missing or failed.
    """
    half, limit = run.config.eval.half, PEOPLE_CLIPS
    names, speech = systems or HEARING_NOBODY, run.config.eval.manifest
    prepare_names(names, run)
    clips = _written(find_clips(speech, seed=seed, half=half).clips, seed, run.folder / "clips")
    clips += [
        dataclasses.replace(clip, file=f"{_AS_THEY_ARE}/{clip.file}")
        for clip in find_clips(speech, limit=limit, seed=seed, half=half).clips
    ]
    scores = []
    for name in names:
        run.say(f"{name}: {len(clips)} clips …")
        scores.append(score(name, _heard(name, run.config, clips, run.folder)))
    return Result(scores, (check_of(scores[0]),), (Section("Invented text", [table_of(scores)]),))


def _written(speech: Sequence[Clip], seed: int, folder: Path) -> list[Clip]:
    """Write the clips of a seed, each to a file named after its kind."""
    clips = []
    for number, made in enumerate(make(speech, seed)):
        file = f"{made.kind}/{number:03}.wav"
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, made.samples, SAMPLE_RATE, subtype="PCM_16")
        duration_s = len(made.samples) / SAMPLE_RATE
        clips.append(Clip(file, path, made.text, made.language, duration_s))
    return clips


def _heard(name: str, config: Config, clips: list[Clip], folder: Path) -> list[TimedCall]:
    calls: list[TimedCall] = []
    measure_system(
        name,
        config,
        {"timed": clips},
        run_id=uuid.uuid4().hex,
        open_system=open_system,
        on_call=calls.append,
        log=folder / "logs" / f"{name}.log",
    )
    if failed := [call for call in calls if call.error is not None]:
        raise EarshotError(f"{name} failed with {failed[0].file}: {failed[0].error}")
    by_file = sorted(calls, key=lambda call: call.file)
    write_jsonl(folder / "predictions" / f"{name}.jsonl", by_file)
    return calls


def score(name: str, calls: Sequence[TimedCall]) -> Score:
    """Count what a system said of clips whose kind is the first part of their names."""
    normalize = normalizer(DEFAULT)
    clips, with_text = (dict.fromkeys(get_args(Kind), 0) for _ in range(2))
    spoken = people = Counts()
    for call in calls:
        kind = call.file.partition("/")[0]
        counts = char_counts(*compared_texts(call, normalize))
        if kind == _AS_THEY_ARE:
            people += counts
            continue
        clips[kind] += 1
        with_text[kind] += bool(call.text.strip())
        if kind in SPOKEN:
            spoken += counts
    return Score(name, clips, with_text, spoken, people)


def table_of(scores: Sequence[Score]) -> Table:
    """Tabulate the figures."""
    kinds = (*NOBODY, *HARD)
    header = ["", "invented", *kinds, "around words: lost, added", "people: lost, CER"]
    rows = []
    for score in scores:
        text, of = score.invented()
        spoken, people = score.spoken, score.people
        rows.append(
            [
                score.system,
                f"{100 * text / max(1, of):.1f} %",
                *(f"{score.with_text[kind]} of {score.clips[kind]}" for kind in kinds),
                f"{_share(spoken, spoken.deletions)}, {_share(spoken, spoken.insertions)}",
                f"{_share(people, people.deletions)}, {_share(people, people.errors)}",
            ]
        )
    return Table(header, rows)


def _share(counts: Counts, edits: int) -> str:
    return f"{100 * edits / max(1, counts.length):.2f} %"


def check_of(ours: Score) -> Check:
    """Check what must hold of our system as it is configured."""
    text, of = ours.invented()
    name = f"{ours.system} writes text of at most {MOST_INVENTED:g} % of the clips without speech"
    return Check(name, 100 * text <= MOST_INVENTED * of, f"{text} of {of} clips")
