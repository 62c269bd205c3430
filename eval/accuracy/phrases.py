"""Names that somebody lists, as they come out: boosted, prompted, or by faster-whisper's prompt.

Of every clip the rare words are listed, and as many of other clips, of its language first, as a
list is to have. Of listed words that are said, errors count; of those that are not, every one that
is heard; of all other words, characters.

<way>-<size>.jsonl   what was heard
phrases.md           the figures
"""

import collections
import contextlib
import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jiwer

from build.clips import Clip
from eval.accuracy.data import Prediction, TimedCall
from eval.accuracy.load import System, driven
from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.ours import EarshotInProcess
from eval.accuracy.peers import FasterWhisper, fair_options
from eval.accuracy.prepare import engine_of, prepare_converted
from eval.accuracy.score import Counts, char_counts
from eval.config import Config
from eval.corpora.find import find_clips
from eval.files import write_text
from eval.measurement import Check, Result, Run, table
from serve.contract.codec import to_json
from serve.contract.engine import open_engine
from serve.contract.errors import ConfigError, EarshotError
from serve.contract.files import read_bytes
from serve.speech.tokenizer import Tokenizer

SIZES = (10, 100, 1000)
WAYS = ("nothing", "phrases", "hotwords", "faster-whisper")
LEAST_GONE = 40.0  # % of the errors in listed words
MOST_POINTS = 0.1  # of CER, that the other words may lose
MOST_INSERTED = 0.1  # % of the words that are heard, which boosting may add
_PROMPT_TOKENS = 200  # of a list that is a prompt; the rest of it is left out
_WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
_SPACELESS = ("zh", "ja")
_SHORTEST, _CLIPS = 4, 2  # letters of a rare word, at least; clips that it is in, at most


@dataclasses.dataclass(frozen=True)
class Score:
    """The outcome of one way with lists of one size."""

    way: str
    size: int
    said: int  # listed words
    found: int  # of these, heard where they are said
    heard: int  # words in all
    inserted: int  # listed words that are heard and not said
    rest: Counts  # characters of all words but those listed and said

    @property
    def errors(self) -> int:
        """Listed words that are said and not heard."""
        return self.said - self.found

    @property
    def inserted_percent(self) -> float:
        """Of the words that are heard."""
        return 100 * self.inserted / max(1, self.heard)

    @property
    def rest_percent(self) -> float:
        """CER of all other words."""
        return 100 * self.rest.errors / max(1, self.rest.length)


def measure_phrases(
    run: Run, *, ways: tuple[str, ...] | None, sizes: tuple[int, ...], weight: float
) -> Result:
    """Let each way hear the clips of `eval.manifest`'s half with lists of each size.

    Args:
        run: of a config whose engine is there.
        ways: of `WAYS`; None is all.
        sizes: of the lists.
        weight: of every phrase.

    Raises:
        ConfigError: a way is not known.
        EarshotError: a clip, the engine or a system is not to be had, or a call failed.
    """
    of, config = run.config.eval, run.config
    wanted = ways or WAYS
    if unknown := [way for way in wanted if way not in WAYS]:
        raise ConfigError(f"unknown way {unknown[0]!r}; known: {', '.join(WAYS)}")
    tokenizer = Tokenizer.open(open_engine(engine_of(config, config.build.precision)))
    everything = find_clips(of.manifest).clips
    rare = rare_words(everything, tokenizer)
    drawn = find_clips(of.manifest, limit=of.limit, seed=of.seed, half=of.half)
    clips = [clip for clip in drawn.clips if clip.language not in _SPACELESS]
    run.say(f"{drawn.summary}; {sum(len(rare[clip.file]) for clip in clips)} rare words are said")
    scores = list[Score]()
    for way in wanted:
        with contextlib.closing(_open(way, config)) as system:
            calls, before = list[TimedCall](), dict[str, dict[str, Any]]()
            for size in sizes:
                lists = {clip.file: listed(clip, everything, rare, size) for clip in clips}
                options = {
                    name: _options(way, some, weight, tokenizer) for name, some in lists.items()
                }
                if options != before:  # without phrases it is the same with every size
                    calls, before = _heard(system, clips, options, f"{way} {size}", config), options
                lines = "".join(to_json(call) + "\n" for call in calls)
                write_text(run.folder / f"{way}-{size}.jsonl", lines)
                scores.append(score(way, size, calls, lists))
    text = table_of(scores)
    write_text(run.folder / "phrases.md", f"{drawn.summary}\n\n{text}\n")
    return Result(scores, checks_of(scores), text)


def rare_words(clips: Sequence[Clip], tokenizer: Tokenizer) -> dict[str, tuple[str, ...]]:
    """By file, the words that are in few clips and have several tokens, as somebody lists them."""
    words = {clip.file: _words(clip) for clip in clips}
    clips_with = collections.Counter(word.casefold() for some in words.values() for word in some)

    def is_rare(word: str) -> bool:
        several = len(tokenizer.phrases_ids("word", [word])[0][0]) > 1
        good = several and word.isalpha() and len(word) >= _SHORTEST
        return good and clips_with[word.casefold()] <= _CLIPS

    return {file: tuple(filter(is_rare, some)) for file, some in words.items()}


def _words(clip: Clip) -> list[str]:
    """The words of a clip, each once; of texts in capitals alone, in small letters."""
    if clip.language in _SPACELESS:
        return []
    text = clip.text.lower() if clip.text.isupper() else clip.text
    return list(dict.fromkeys(_WORD.findall(text)))


def listed(
    clip: Clip, clips: Sequence[Clip], rare: Mapping[str, tuple[str, ...]], size: int
) -> tuple[str, ...]:
    """The rare words of a clip among as many others as there is room for, in any order."""
    order = random.Random(clip.file)
    mine = {word.casefold(): word for word in rare[clip.file]}
    others = order.sample(list(clips), len(clips))
    others.sort(key=lambda other: other.language != clip.language)
    for word in (word for other in others for word in rare[other.file]):
        if len(mine) >= size:
            break
        mine.setdefault(word.casefold(), word)
    return tuple(order.sample(list(mine.values()), len(mine)))


class _Asking(System):
    """A system that is asked for each clip with options of its own, found by its audio."""

    def __init__(self, system: "EarshotInProcess | FasterWhisper") -> None:
        self.settings = system.settings
        self.options: dict[bytes, dict[str, Any]] = {}
        self._system = system

    def transcribe(self, audio: bytes, language: str | None = None) -> Prediction:
        """One call."""
        return self._system.transcribe(audio, language, **self.options[audio])

    def close(self) -> None:
        """Close it."""
        self._system.close()


def _open(way: str, config: Config) -> _Asking:
    if way != "faster-whisper":
        return _Asking(EarshotInProcess(config, config.build.precision))
    prepare_converted(config)
    beam = {"beam_size": config.transcriber.beam_size, **fair_options(config)}
    return _Asking(FasterWhisper(config, "int8", beam))


def _options(
    way: str, phrases: Sequence[str], weight: float, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Make the options by which a way gets a list."""
    if way == "nothing":
        return {}
    if way == "phrases":
        return {"phrases": tuple(f"{phrase}^{weight:g}" for phrase in phrases)}
    kept, room = list[str](), _PROMPT_TOKENS
    for phrase, ways in zip(phrases, tokenizer.phrases_ids("word", phrases), strict=True):
        room -= len(ways[0]) + 1  # and a comma
        if room < 0:
            break
        kept.append(phrase)
    return {"hotwords": ", ".join(kept)}


def _heard(
    system: _Asking,
    clips: Sequence[Clip],
    options: Mapping[str, dict[str, Any]],
    title: str,
    config: Config,
) -> list[TimedCall]:
    system.options = {read_bytes(clip.path): options[clip.file] for clip in clips}
    of = config.eval
    calls = driven(
        system,
        clips,
        f"{title:20}",
        phase="accuracy",
        concurrency=of.concurrency,
        tell_language=of.tell_language,
    )
    if failed := [call for call in calls if call.error is not None]:
        raise EarshotError(f"{title} failed with {failed[0].file}: {failed[0].error}")
    return calls


def score(
    way: str, size: int, calls: Sequence[TimedCall], lists: Mapping[str, tuple[str, ...]]
) -> Score:
    """Count what was heard of lists, by jiwer's alignment of words."""
    normalize, whole = normalizer(DEFAULT), Score(way, size, 0, 0, 0, 0, Counts())
    for call in calls:
        language = call.language
        words = {normalize(word, language) for word in lists[call.file]}
        reference, hypothesis = (
            normalize(text, language).split() for text in (call.reference, call.text)
        )
        mine = [i for i, word in enumerate(reference) if word in words]
        hits, aligned = _alignment(reference, hypothesis)
        rest = [word for i, word in enumerate(reference) if i not in mine]
        left_out = {aligned[i] for i in mine if i in aligned}
        others = [word for i, word in enumerate(hypothesis) if i not in left_out]
        whole = dataclasses.replace(
            whole,
            said=whole.said + len(mine),
            found=whole.found + sum(i in hits for i in mine),
            heard=whole.heard + len(hypothesis),
            inserted=whole.inserted
            + sum(word in words and word not in reference for word in hypothesis),
            rest=whole.rest + char_counts(" ".join(rest), " ".join(others)) if rest else whole.rest,
        )
    return whole


def _alignment(
    reference: Sequence[str], hypothesis: Sequence[str]
) -> tuple[set[int], dict[int, int]]:
    """Find the words that were heard, and the place where each was heard, right or not."""
    hits, aligned = set[int](), dict[int, int]()
    for part in jiwer.process_words([" ".join(reference)], [" ".join(hypothesis)]).alignments[0]:
        if part.type in ("equal", "substitute"):
            for i in range(part.ref_end_idx - part.ref_start_idx):
                aligned[part.ref_start_idx + i] = part.hyp_start_idx + i
                if part.type == "equal":
                    hits.add(part.ref_start_idx + i)
    return hits, aligned


def checks_of(scores: Sequence[Score]) -> tuple[Check, ...]:
    """Check what must hold of lists that are boosted, beside none."""
    plain = {score.size: score for score in scores if score.way == "nothing"}
    checks = list[Check]()
    for score in scores:
        if score.way != "phrases":
            continue
        name = f"with {score.size} phrases"
        few = f"{name} boosting adds at most {MOST_INSERTED} % of the words as false inserts"
        if (before := plain.get(score.size)) is None:
            checks.append(Check(few, None, "what is heard without was not measured"))
            continue
        added = score.inserted_percent - before.inserted_percent
        checks.append(Check(few, added <= MOST_INSERTED, f"{added:+.3f} %"))
        if not before.errors:
            continue
        gone, lost = _gone(score, before), score.rest_percent - before.rest_percent
        right = f"{name} {LEAST_GONE:g} % of the errors in them are gone"
        checks.append(Check(right, gone >= LEAST_GONE, f"{gone:.0f} %"))
        others = f"{name} all other words lose at most {MOST_POINTS} points of CER"
        checks.append(Check(others, lost <= MOST_POINTS, f"{lost:+.2f}"))
    return tuple(checks)


def _gone(score: Score, before: Score) -> float:
    """Return how many percent fewer errors in listed words a way has."""
    return 100 * (before.errors - score.errors) / max(1, before.errors)


def table_of(scores: Sequence[Score]) -> str:
    """The figures, as Markdown."""
    plain = {score.size: score for score in scores if score.way == "nothing"}
    header = [
        "",
        "phrases",
        "listed words right",
        "errors gone",
        "false inserts",
        "CER of the rest",
    ]
    rows = [
        [
            score.way,
            str(score.size),
            f"{score.found} of {score.said}",
            f"{_gone(score, plain[score.size]):.0f} %" if score.size in plain else "",
            f"{score.inserted} ({score.inserted_percent:.2f} %)",
            f"{score.rest_percent:.2f} %",
        ]
        for score in scores
    ]
    return table(header, rows)
