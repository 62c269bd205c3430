"""Lets systems hear short clips in which nobody speaks or little is said, and counts.

clips/                       what they heard
predictions/<system>.jsonl   what they said, raw
"""

import dataclasses
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import soundfile

from build.clips import Clip
from eval.accuracy.data import TimedCall
from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.score import Counts, char_counts, compared_texts
from eval.accuracy.worker import measure_system
from eval.config import Config
from eval.corpora.find import find_clips
from eval.long.plan import HEARING_NOBODY
from eval.long.systems import open_system, prepare_names
from eval.long.without_speech import HARD, NOBODY, SPOKEN, Kind, make
from eval.record import Check, Result, Run, Section, Table, write_jsonl
from serve.contract.errors import EarshotError
from serve.speech.features import SAMPLE_RATE

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
