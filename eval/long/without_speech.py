"""Short clips without speech, or with little of it: the share for which a system writes text.

without-speech/clips/                       the clips
without-speech/predictions/<system>.jsonl   the answers, raw
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile

from build.clips import Clip
from eval.accuracy.passages import read_samples
from eval.accuracy.predictions import ClipSets, PredictionStore, TimedCall, keys_of
from eval.accuracy.run import transcribe_remaining
from eval.accuracy.score import Counts, all_answered, char_counts
from eval.accuracy.systems import check, prepare
from eval.corpora.find import find_clips
from eval.long import WITHOUT_SPEECH_SYSTEMS
from eval.long.compose import at_level, faded, music, n_samples, noise
from eval.record import Check, ReportSection, Result, Run, Table
from serve.contract.errors import ConfigError
from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE
from serve.speech.text import normalize_text
from serve.speech.vad import FRAME, VadModel

NOBODY = ("silence", "noise", "hum", "keys", "music", "rooms", "breaths")
"""Kinds of clips without speech: any text is invented."""
SPOKEN = ("in silence", "in noise")
"""Kinds of clips with known text."""

_LEVELS_DB = (-60.0, -45.0, -30.0, -20.0)
_SPEECH_DB = -25.0
_QUIET = 0.1  # a likelier frame is no pause
_SHORTEST_PAUSE = 9  # frames: 0.29 s
_EDGE = 3  # frames of a pause on either side that may still be speech
_LONGEST_S = 9.0  # longest recording: it fits into a window with the silence around it


@dataclasses.dataclass(frozen=True, eq=False)
class MadeClip:
    """A clip, and the text that is said in it."""

    kind: str
    samples: Samples  # (n,), 16 kHz
    text: str = ""
    language: str | None = None


def make_clips(speech: Sequence[Clip], seed: int) -> list[MadeClip]:
    """Make the clips of a seed.

    Args:
        speech: recordings with their text; some hundred give all clips that there can be.
        seed: the seed of all random draws.

    Raises:
        ConfigError: no recording has a text.
        EarshotError: a recording cannot be read.
    """
    spoken = [clip for clip in speech if clip.text.strip() and clip.duration_s <= _LONGEST_S]
    if not spoken:
        raise ConfigError(f"no clip of at most {_LONGEST_S:g} s has a text; expected some")
    rng = np.random.default_rng(seed)
    made = [MadeClip(kind, samples) for kind, samples in _synthesised(rng)]
    order = [spoken[i] for i in rng.permutation(len(spoken))]
    # Each source uses the first suitable recordings in its share.
    made += [*_rooms(order[::4], rng), *_breaths(order[1::4], rng)]
    made += [*_spoken("in silence", order[2::4], rng), *_spoken("in noise", order[3::4], rng)]
    return made


def _synthesised(rng: np.random.Generator) -> Iterator[tuple[str, Samples]]:
    def length(low: float, high: float) -> int:
        """Draw a number of samples; shorter ones are likelier."""
        return n_samples(float(np.exp(rng.uniform(np.log(low), np.log(high)))))

    for seconds in (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 29.9):
        yield "silence", np.zeros(n_samples(seconds), np.float32)
    for level_db in _LEVELS_DB:
        for slope in (0.0, 0.0, 1.0, 2.0):
            yield "noise", noise(length(0.05, 29.0), slope, level_db, rng)
        for hertz in (50.0, 60.0):
            yield "hum", _hum(length(0.05, 12.0), hertz, level_db, rng)
        for _ in range(3):
            yield "keys", _keyboard_noise(length(0.05, 12.0), level_db, rng)
    for _ in range(14):
        yield "music", music(length(2.0, 20.0), float(rng.uniform(-35.0, -15.0)), rng)


def _hum(length: int, hertz: float, level_db: float, rng: np.random.Generator) -> Samples:
    """Make the hum of mains, its harmonics, and a little noise."""
    times = np.arange(length) / SAMPLE_RATE
    waves = [
        rng.uniform(0.1, 1.0) / harmonic * np.sin(2 * np.pi * hertz * harmonic * times)
        for harmonic in range(1, 12)
    ]
    return at_level(np.sum(waves, axis=0), level_db) + noise(length, 1.0, level_db - 20.0, rng)


def _keyboard_noise(length: int, level_db: float, rng: np.random.Generator) -> Samples:
    """Make the noise of a keyboard: bursts of a few milliseconds with different spectra."""
    samples = noise(length, 1.0, -70.0, rng)
    start = 0
    while start < length:
        burst = noise(
            n_samples(float(rng.uniform(0.01, 0.05))), rng.uniform(-1, 1.5), level_db, rng
        )
        burst *= np.exp(-np.arange(len(burst)) / n_samples(float(rng.uniform(0.002, 0.01))))
        samples[start : start + len(burst)] += 4.0 * burst[: length - start]
        start += n_samples(float(rng.exponential(0.2) + 0.05))
    return samples.clip(-1.0, 1.0)


def _pauses(samples: Samples) -> list[Samples]:
    """Find pauses in speech that are not silent, and cut off their edges."""
    voice = VadModel().probabilities(np.pad(samples, (0, -len(samples) % FRAME)))
    quiet = np.concatenate(([False], voice < _QUIET, [False]))
    parts = (
        samples[(begin + _EDGE) * FRAME : (end - _EDGE) * FRAME]
        for begin, end in np.flatnonzero(np.diff(quiet)).reshape(-1, 2)
        if end - begin >= _SHORTEST_PAUSE
    )
    return [pause for pause in parts if pause.any()]


def _with_pauses(speech: Sequence[Clip]) -> Iterator[list[Samples]]:
    """Yield the pauses of the first recordings that have some."""
    pauses = (_pauses(read_samples(clip.path)) for clip in speech)
    return itertools.islice(filter(None, pauses), 15)


def _rooms(speech: Sequence[Clip], rng: np.random.Generator) -> Iterator[MadeClip]:
    """Yield a recording's pauses in a loop."""
    for pauses in _with_pauses(speech):
        tile = np.concatenate([faded(pause, 0.01) for pause in pauses])
        yield MadeClip("rooms", np.resize(tile, n_samples(float(np.exp(rng.uniform(0.0, 3.3))))))


def _breaths(speech: Sequence[Clip], rng: np.random.Generator) -> Iterator[MadeClip]:
    """Yield a recording's loudest pause, in its room or alone."""
    for pauses in _with_pauses(speech):
        loudest = faded(max(pauses, key=lambda pause: float(np.square(pause).mean())), 0.02)
        yield MadeClip("breaths", np.pad(loudest, n_samples(float(rng.choice((0.0, 0.5, 3.0))))))


def _spoken(kind: str, speech: Sequence[Clip], rng: np.random.Generator) -> Iterator[MadeClip]:
    """Yield words between 1 to 10 s of silence, maybe with noise of 15 to 30 dB less."""
    for clip in speech[:20]:
        silence = [n_samples(float(seconds)) for seconds in rng.uniform(1, 10, 2)]
        samples = read_samples(clip.path)
        if kind == "in noise":
            samples = np.pad(at_level(samples, _SPEECH_DB), silence)
            samples += noise(len(samples), 1.0, _SPEECH_DB - float(rng.uniform(15, 30)), rng)
        else:
            samples = np.pad(samples, silence)
        yield MadeClip(kind, samples, clip.text, clip.language)


# ---------------------------------------------------------------- run


MAX_INVENTED = 1.0  # % of the clips without speech


@dataclasses.dataclass(frozen=True)
class InventedTextScore:
    """Counts of the clips in which one system wrote text."""

    system: str
    clips: dict[str, int]  # by kind
    with_text: dict[str, int]  # clips with text, by kind
    spoken: Counts  # characters of clips of `SPOKEN`

    def invented(self) -> tuple[int, int]:
        """Count the clips without speech that have text, and all clips without speech."""
        return sum(self.with_text[kind] for kind in NOBODY), sum(self.clips[k] for k in NOBODY)


def measure_without_speech(
    run: Run, *, systems: tuple[str, ...] | None, seed: int, again: bool
) -> Result:
    """Make clips from the speech of `eval.manifest`, transcribe them, and count the texts.

    Args:
        run: its `config.eval` says the speech, its half, and the CPU threads of every system.
        systems: their names; None is `WITHOUT_SPEECH_SYSTEMS`.
        seed: the seed of all random draws.
        again: whether the former answers of these systems are dropped.

    Raises:
        EarshotError: a system, a recording, or something that they need is missing or failed.
    """
    config, names = run.config.eval, systems or WITHOUT_SPEECH_SYSTEMS
    folder = run.folder / "without-speech"
    check(names, run.config)
    prepare(names, run.config, run.config_path)
    speech = find_clips(config.manifest, half=config.half).clips
    sets: ClipSets = {"timed": _written(speech, seed, folder / "clips")}
    keys = keys_of(sets)
    conditions = dict.fromkeys(names, f"{run.config.name}, {config.threads} threads")
    transcribe_remaining(conditions, run.config, sets, keys, folder, run.say, again=again)
    calls = {name: PredictionStore(folder, name).scored_calls(keys) for name in names}
    scores = [score(name, some) for name, some in calls.items()]
    errors = {name: [call.error for call in some if call.error] for name, some in calls.items()}
    sections = (ReportSection("Invented text", [table_of(scores)]),)
    checks = (check_of(scores[0]), all_answered(errors))
    return Result(scores, checks, sections, f"clips without speech: {run.config.name}")


def _written(speech: Sequence[Clip], seed: int, folder: Path) -> list[Clip]:
    """Write the clips of a seed, each to a file named after its kind."""
    clips = []
    for number, made in enumerate(make_clips(speech, seed)):
        file = f"{made.kind}/{number:03}.wav"
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, made.samples, SAMPLE_RATE, subtype="PCM_16")
        duration_s = len(made.samples) / SAMPLE_RATE
        clips.append(Clip(file, path, made.text, made.language, duration_s))
    return clips


def score(name: str, calls: Sequence[TimedCall]) -> InventedTextScore:
    """Count the texts of a system; the kind of a clip is the name's first part."""
    clips, with_text = (dict.fromkeys([*NOBODY, *SPOKEN], 0) for _ in range(2))
    spoken = Counts()
    for call in calls:
        kind = call.file.partition("/")[0]
        clips[kind] += 1
        with_text[kind] += bool(call.text.strip())
        if kind in SPOKEN:
            spoken += char_counts(normalize_text(call.reference), normalize_text(call.text))
    return InventedTextScore(name, clips, with_text, spoken)


def table_of(scores: Sequence[InventedTextScore]) -> Table:
    """Tabulate the figures."""
    header = ("", "invented", *NOBODY, "lost", "added")
    rows = []
    for score in scores:
        (invented, clips), length = score.invented(), max(1, score.spoken.length)
        shares = [f"{score.with_text[kind]} of {score.clips[kind]}" for kind in NOBODY]
        edits = (score.spoken.deletions, score.spoken.insertions)
        rates = [f"{100 * count / length:.2f} %" for count in edits]
        rows.append((score.system, f"{100 * invented / max(1, clips):.1f} %", *shares, *rates))
    note = "Clips with text, by kind; and characters lost and added in clips with speech."
    return Table(header, rows, note=note)


def check_of(ours: InventedTextScore) -> Check:
    """Check the limit of our system as it is configured."""
    invented, clips = ours.invented()
    name = f"{ours.system} writes text of at most {MAX_INVENTED:g} % of the clips without speech"
    return Check(name, 100 * invented <= MAX_INVENTED * clips, f"{invented} of {clips} clips")
