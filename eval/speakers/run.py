"""`python -m eval speakers`: turns of speakers, and their words, beside the reference.

Recordings are conversations made of clips, and meetings with RTTMs. Settings were chosen on one
half of the clips and of the meetings; figures are of the other unless `--half` says otherwise.
"""

import dataclasses
import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import numpy.typing as npt
import soundfile
from tqdm import tqdm

from build.clips import load_clips
from eval.accuracy.passages import read_samples
from eval.accuracy.score import Counts, word_counts
from eval.accuracy.systems import prepare_engine
from eval.config import EvaluationProduct
from eval.record import Check, ReportSection, Result, Run, Table
from eval.speakers.conversations import PLAN, ConversationRecording, compose, read_recordings
from serve.contract.errors import ConfigError
from serve.contract.files import read_bytes
from serve.contract.messages import Request
from serve.speakers.diarize import Diarizer, SpeakerTurn
from serve.speech.text import normalize_text
from serve.transcriber.open import open_transcriber


@dataclasses.dataclass(frozen=True)
class SpeakerErrors:
    """Seconds of speech of each speaker, and of errors."""

    speech_s: float = 0.0  # of the reference
    missed_s: float = 0.0
    invented_s: float = 0.0
    confused_s: float = 0.0  # another speaker's

    @property
    def rate(self) -> float:
        """Return the diarization error rate, % of the speech."""
        wrong = self.missed_s + self.invented_s + self.confused_s
        return 100 * wrong / self.speech_s if self.speech_s else float(wrong > 0) * 100

    def __add__(self, other: "SpeakerErrors") -> "SpeakerErrors":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return SpeakerErrors(*(seconds + more for seconds, more in pairs))


def compare_turns(
    reference: Sequence[SpeakerTurn], hypothesis: Sequence[SpeakerTurn]
) -> SpeakerErrors:
    """Compare turns with the reference, each speaker with the one that fits best."""
    edges = sorted(
        {edge for turn in (*reference, *hypothesis) for edge in (turn.start_s, turn.end_s)}
    )
    lengths = np.diff(np.asarray(edges, np.float64))
    true, claimed = (_activity(turns, edges) for turns in (reference, hypothesis))
    shared = (true * lengths) @ claimed.T
    matched = sum(shared[i, j] for i, j in best_pairs(shared))
    # Numbers of speakers between two edges.
    true_count, claimed_count = true.sum(0), claimed.sum(0)
    return SpeakerErrors(
        speech_s=float(lengths @ true_count),
        missed_s=float(lengths @ np.maximum(true_count - claimed_count, 0)),
        invented_s=float(lengths @ np.maximum(claimed_count - true_count, 0)),
        confused_s=float(lengths @ np.minimum(true_count, claimed_count) - matched),
    )


def _activity(turns: Sequence[SpeakerTurn], edges: Sequence[float]) -> npt.NDArray[np.float64]:
    """Mark each active speaker between two edges with 1, (speakers, edges - 1)."""
    speakers = sorted({turn.speaker for turn in turns})
    active = np.zeros((len(speakers), max(0, len(edges) - 1)))
    for turn in turns:
        begin, end = np.searchsorted(edges, (turn.start_s, turn.end_s))
        active[speakers.index(turn.speaker), begin:end] = 1.0
    return active


def best_pairs(gain: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pair rows with columns, each once, so that the sum of the gains is highest.

    Args:
        gain: (rows, columns).

    Returns:
        (row, column) of each pair; the number of pairs is the smaller of the two dimensions.
    """
    graph, rows = networkx.Graph(), len(gain)
    for (row, column), weight in np.ndenumerate(gain):
        graph.add_edge(row, rows + column, weight=weight)
    pairs = networkx.max_weight_matching(graph, maxcardinality=True)
    return [(min(pair), max(pair) - rows) for pair in pairs]


# ---------------------------------------------------------------- words


SpeakerTexts = Sequence[tuple[str, str]]
"""Speakers and their texts, in order of time."""

_SPACELESS = re.compile(r"([\u3040-\u30ff\u3400-\u9fff])")


def cp_counts(reference: SpeakerTexts, hypothesis: SpeakerTexts) -> Counts:
    """Count word errors by speaker, with the pairing of speakers that gives the fewest (cpWER)."""
    references, hypotheses = _by_speaker(reference), _by_speaker(hypothesis)
    size = max(len(references), len(hypotheses))
    references += [""] * (size - len(references))
    hypotheses += [""] * (size - len(hypotheses))
    counts = [[word_counts(text, other) for other in hypotheses] for text in references]
    errors = np.array([[pair.errors for pair in row] for row in counts], np.float64)
    pairs = best_pairs(-errors.reshape(size, size))
    return sum((counts[i][j] for i, j in pairs), Counts())


def _by_speaker(texts: SpeakerTexts) -> list[str]:
    """Join the words of each speaker."""
    by_speaker = dict[str, list[str]]()
    for speaker, text in texts:
        by_speaker.setdefault(speaker, []).append(text)
    words = (normalize_text(" ".join(some)) for some in by_speaker.values())
    return [" ".join(_SPACELESS.sub(r" \1 ", some).split()) for some in words]


# ---------------------------------------------------------------- command


CLIPS = ("tests/data/human/manifest.jsonl", "tests/data/human-sharealike/manifest.jsonl")
HALVES = ("choose", "report")
MAX_ERROR_RATE = 8.0  # % of the speech of conversations
MIN_COUNTED = 0.8  # of the conversations have the right number of speakers
HEADER = ("", "DER", "missed", "invented", "confused", "speakers right", "RTFx")
_MAX_TEXT_S = 600.0  # longer recordings are not transcribed


@dataclasses.dataclass(frozen=True)
class DiarizationScore:
    """The turns that were found in one recording."""

    recording: str
    audio_s: float
    speakers: int  # of the reference
    told: int  # by the diarizer
    seconds: float  # that it took
    errors: SpeakerErrors


def figures_of(recordings: str, scored: Sequence[DiarizationScore]) -> dict[str, Any]:
    """Pool the scores of a set of recordings; the error rate and its parts are % of the speech."""
    total = sum((score.errors for score in scored), SpeakerErrors())
    points = 100 / max(total.speech_s, 1e-9)
    return {
        "recordings": recordings,
        "count": len(scored),
        "rate": total.rate,
        "missed": points * total.missed_s,
        "invented": points * total.invented_s,
        "confused": points * total.confused_s,
        "counted": sum(score.speakers == score.told for score in scored),
        "rtfx": sum(score.audio_s for score in scored) / sum(score.seconds for score in scored),
    }


def _row(figures: dict[str, Any]) -> list[str]:
    shares = [f"{figures[key]:.1f} %" for key in ("rate", "missed", "invented", "confused")]
    counted = f"{figures['counted']} of {figures['count']}"
    return [figures["recordings"], *shares, counted, f"{figures['rtfx']:.1f}"]


def speakers(
    run: Run, *, recordings: Path | None, half: str, seed: int, device: str, texts: bool
) -> Result:
    """Measure who speaks when.

    Args:
        run: its config has the engine.
        recordings: a folder of audio files and RTTMs, such as of meetings.
        half: "choose" or "report", of these and of the clips.
        seed: the seed of the conversations.
        device: the device of the diarization networks.
        texts: whether the config's engine also transcribes recordings that have texts.

    Raises:
        ConfigError: the folder has no recording of the half.
        EarshotError: a recording cannot be read.
    """
    # Read before conversations are composed, which takes minutes.
    meetings = read_recordings(recordings)[HALVES.index(half) :: 2] if recordings else []
    if recordings and not meetings:
        raise ConfigError(f"{recordings} has no recording of the half {half}; expected two or more")
    clips = [clip for place in CLIPS for clip in load_clips(place) if clip.half == half]
    sets = {"conversations": compose(PLAN, seed, clips)}
    if meetings:
        sets["recordings"] = meetings
    scored = {name: _scored(device, members) for name, members in sets.items()}
    totals = [figures_of(name, scores) for name, scores in scored.items()]
    scores = list(itertools.chain(*scored.values()))
    rows = [_row(figures_of(score.recording, [score])) for score in scores]
    tables = (
        Table(HEADER, list(map(_row, totals))),
        Table(HEADER, rows, "By recording", folded="closed"),
    )
    figures: dict[str, Any] = {"sets": totals, "recordings": scores}
    sections = [ReportSection("Speakers", tables)]
    if texts:
        prepare_engine(run.config, run.config_path, run.config.build.precision)
        counts = _transcribe(run.config, list(itertools.chain(*sets.values())))
        counts["all"] = sum(counts.values(), Counts())
        text_rows = [
            (name, f"{100 * edits.errors / max(edits.length, 1):.1f} %", str(edits.length))
            for name, edits in counts.items()
        ]
        figures["texts"] = counts
        sections.append(ReportSection("Texts", [Table(("texts", "cpWER", "words"), text_rows)]))
    return Result(figures, _checks(totals[0]), tuple(sections))


def _transcribe(
    config: EvaluationProduct, recordings: Sequence[ConversationRecording]
) -> dict[str, Counts]:
    """Count the word errors of each recording that has texts."""
    counts = {}
    with open_transcriber(config) as transcriber:
        for recording in tqdm(recordings, "transcribing", unit="recording"):
            if not recording.utterances or soundfile.info(recording.path).duration > _MAX_TEXT_S:
                continue
            request = Request(read_bytes(recording.path), diarize=True, multilingual=True)
            segments = transcriber.transcribe(request).segments
            hypothesis = [(segment.speaker or "", segment.text) for segment in segments]
            reference = [(one.speaker, one.text) for one in recording.utterances]
            counts[recording.name] = cp_counts(reference, hypothesis)
    return counts


def _scored(device: str, recordings: Sequence[ConversationRecording]) -> list[DiarizationScore]:
    """Diarize recordings and compare the turns with the reference."""
    diarizer, scored = Diarizer(device), list[DiarizationScore]()
    for recording in tqdm(recordings, "diarizing", unit="recording"):
        samples = read_samples(recording.path)
        began_s = time.perf_counter()
        turns = diarizer.diarize(samples)
        seconds = time.perf_counter() - began_s
        audio_s = float(soundfile.info(recording.path).duration)
        expected, told = (len({turn.speaker for turn in some}) for some in (recording.turns, turns))
        errors = compare_turns(recording.turns, turns)
        scored.append(DiarizationScore(recording.name, audio_s, expected, told, seconds, errors))
    return scored


def _checks(conversations: dict[str, Any]) -> tuple[Check, ...]:
    rate, counted, count = (conversations[name] for name in ("rate", "counted", "count"))
    wrong = f"the DER of conversations is at most {MAX_ERROR_RATE:g} %"
    right = f"{100 * MIN_COUNTED:g} % of conversations have the right number of speakers"
    return (
        Check(wrong, rate <= MAX_ERROR_RATE, f"{rate:.1f} %"),
        Check(right, counted >= MIN_COUNTED * count, f"{counted} of {count}"),
    )
