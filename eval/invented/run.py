"""Lets systems hear short clips in which nobody speaks or little is said, and counts.

clips/                       what they heard
predictions/<system>.jsonl   what they said, raw
invented.json, invented.md   the figures
"""

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import soundfile

from eval.accuracy.data import TimedCall
from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.score import Counts, char_counts, compared_texts
from eval.accuracy.systems import check_specs, prepare_specs
from eval.accuracy.worker import measure_system
from eval.config import Config
from eval.corpora.find import find_clips
from eval.files import write_json, write_text
from eval.invented.clips import HARD, NOBODY, SPOKEN, Kind, make
from eval.long import systems
from eval.machine import machine_facts
from serve.clips import Clip
from serve.codec import to_json
from serve.errors import EarshotError
from serve.speech.features import SAMPLE_RATE

MOST_INVENTED = 1.0  # % of the clips in which nobody speaks

_AS_THEY_ARE = "as they are"


@dataclasses.dataclass(frozen=True)
class Score:
    """What one system said."""

    system: str
    clips: dict[str, int]  # by kind
    with_text: dict[str, int]  # of these
    spoken: Counts  # characters of clips of `SPOKEN`
    people: Counts  # and of recordings as they are

    def invented(self) -> tuple[int, int]:
        """Clips with text in which nobody speaks, and all in which nobody does."""
        return sum(self.with_text[kind] for kind in NOBODY), sum(self.clips[k] for k in NOBODY)


def run_invented(
    config: Config,
    config_path: str,
    names: tuple[str, ...],
    *,
    speech: str,
    half: str,
    limit: int,
    seed: int,
    folder: Path,
    tell: Callable[[str], None],
) -> list[Score]:
    """Make the clips, let systems hear them, write the figures.

    Args:
        config: the product; `eval.threads` is what every system gets.
        config_path: for those who build what is missing.
        names: of the systems, which are `eval.long`'s.
        speech: recordings of people, as `find_clips` takes them.
        half: of a manifest's two; "" is both.
        limit: so many of them are heard as they are.
        seed: of everything that is drawn.
        folder: of the run.
        tell: gets a line on each system.

    Raises:
        EarshotError: a system, a recording, or something that they need is missing or failed.
    """
    known = systems.specs(config)
    check_specs(names, known)
    prepare_specs([known[name] for name in names], config, config_path)
    clips = _written(find_clips(speech, seed=seed, half=half).clips, seed, folder / "clips")
    clips += [
        dataclasses.replace(clip, file=f"{_AS_THEY_ARE}/{clip.file}")
        for clip in find_clips(speech, limit=limit, seed=seed, half=half).clips
    ]
    scores = []
    for name in names:
        tell(f"{name}: {len(clips)} clips …")
        scores.append(score(name, _heard(name, config, clips, folder)))
    write_json(
        folder / "invented.json",
        {"config": config.name, "seed": seed, "machine": machine_facts(), "systems": scores},
    )
    write_text(folder / "invented.md", "\n".join(table(scores)) + "\n")
    return scores


def _written(speech: Sequence[Clip], seed: int, folder: Path) -> list[Clip]:
    """The clips of a seed, each a file named after its kind."""
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
        open_system=systems.open_system,
        on_call=calls.append,
        log=folder / "logs" / f"{name}.log",
    )
    if failed := [call for call in calls if call.error is not None]:
        raise EarshotError(f"{name} failed with {failed[0].file}: {failed[0].error}")
    lines = (to_json(call) for call in sorted(calls, key=lambda call: call.file))
    write_text(folder / "predictions" / f"{name}.jsonl", "\n".join(lines) + "\n")
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


def table(scores: Sequence[Score]) -> list[str]:
    """The figures, as Markdown."""
    kinds = (*NOBODY, *HARD)
    lines = [
        "| | invented | "
        + " | ".join(kinds)
        + " | around words: lost, added | people: lost, CER |",
        "|---" * (len(kinds) + 4) + "|",
    ]
    for one in scores:
        text, of = one.invented()
        by_kind = (f"{one.with_text[kind]} of {one.clips[kind]}" for kind in kinds)
        lines.append(
            f"| {one.system} | **{100 * text / max(1, of):.1f} %** | {' | '.join(by_kind)} "
            f"| {_share(one.spoken, one.spoken.deletions)}, "
            f"{_share(one.spoken, one.spoken.insertions)} "
            f"| {_share(one.people, one.people.deletions)}, "
            f"{_share(one.people, one.people.errors)} |"
        )
    return lines


def _share(counts: Counts, edits: int) -> str:
    return f"{100 * edits / max(1, counts.length):.2f} %"


def complaints(scores: Sequence[Score]) -> list[str]:
    """What is not as it should be of the first system, which is ours as configured."""
    text, of = scores[0].invented()
    if 100 * text <= MOST_INVENTED * of:
        return []
    return [
        f"{scores[0].system} wrote text of {text} of {of} clips in which nobody speaks; expected "
        f"at most {MOST_INVENTED:g} %"
    ]
