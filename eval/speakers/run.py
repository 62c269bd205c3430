"""`python -m eval speakers`: turns of speakers, and their words, beside the reference.

Recordings are conversations made of clips, and meetings with RTTMs. Settings were chosen on one
half of the clips and of the meetings; figures are of the other unless `--half` says otherwise.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import soundfile

from build.clips import load_clips
from eval.accuracy.prepare import prepare_engine
from eval.accuracy.score import Counts
from eval.config import EvaluationProduct
from eval.record import Check, ReportSection, Result, Run, Say, Table
from eval.speakers.conversations import PLAN, compose
from eval.speakers.recordings import ConversationRecording, read_recordings
from eval.speakers.score import Errors, counts_as_one, cp_counts, errors
from serve.contract.files import read_bytes
from serve.contract.messages import Request
from serve.speakers.diarize import Diarizer
from serve.speech.audio import decode, whole
from serve.speech.meter import AudioLimits
from serve.transcriber.open import open_transcriber

CLIPS = ("tests/data/human/manifest.jsonl", "tests/data/human-sharealike/manifest.jsonl")
HALVES = ("choose", "report")
MAX_ERROR_RATE = 8.0  # % of the speech of conversations
MIN_COUNTED = 0.8  # of the conversations have the right number of speakers
HEADER = ("", "DER", "missed", "invented", "confused", "speakers right", "RTFx")
TEXTS_HEADER = ("texts", "cpWER", "WER, whoever speaks", "words")
_LIMITS = AudioLimits(6 * 3600.0)
_MAX_TEXT_S = 600.0  # longer recordings are not transcribed


@dataclasses.dataclass(frozen=True)
class Scored:
    """The turns that were found in one recording."""

    recording: str
    audio_s: float
    speakers: int  # of the reference
    told: int  # by the diarizer
    seconds: float  # that it took
    errors: Errors


@dataclasses.dataclass(frozen=True)
class DiarizationResult:
    """The figures of a set of recordings, weighed by their speech."""

    recordings: str  # name of the set
    count: int
    rate: float  # diarization error rate, %
    missed: float  # % of the speech, as the following
    invented: float
    confused: float
    counted: int  # recordings with the right number of speakers
    rtfx: float


def result_of(recordings: str, scored: Sequence[Scored]) -> DiarizationResult:
    """Pool the scores of a set of recordings."""
    total = sum((score.errors for score in scored), Errors())
    points = 100 / max(total.speech_s, 1e-9)
    return DiarizationResult(
        recordings=recordings,
        count=len(scored),
        rate=total.rate,
        missed=points * total.missed_s,
        invented=points * total.invented_s,
        confused=points * total.confused_s,
        counted=sum(score.speakers == score.told for score in scored),
        rtfx=sum(score.audio_s for score in scored) / sum(score.seconds for score in scored),
    )


def _row(result: DiarizationResult) -> list[str]:
    shares = (result.rate, result.missed, result.invented, result.confused)
    percents = [f"{share:.1f} %" for share in shares]
    counted = f"{result.counted} of {result.count}"
    return [result.recordings, *percents, counted, f"{result.rtfx:.1f}"]


@dataclasses.dataclass(frozen=True)
class Texts:
    """The word errors of our engine in one recording, or in all."""

    recording: str
    by_speaker: Counts  # as cpWER has it
    as_one: Counts  # whoever says them


def _text_row(texts: Texts) -> list[str]:
    words = texts.as_one.length
    rates = (100 * counts.errors / max(words, 1) for counts in (texts.by_speaker, texts.as_one))
    return [texts.recording, *(f"{rate:.1f} %" for rate in rates), str(words)]


def speakers(
    run: Run, *, recordings: Path | None, half: str, seed: int, device: str, texts: bool
) -> Result:
    """Measure who speaks when.

    Args:
        run: its record is kept anew with each set and system.
        recordings: a folder of audio files and RTTMs, such as of meetings.
        half: "choose" or "report", of these and of the clips.
        seed: of the conversations.
        device: that our networks compute on.
        texts: whether the config's engine also transcribes recordings that have texts.

    Raises:
        EarshotError: a recording cannot be read.
    """
    sets = {"conversations": _conversations(half, seed, run.say)}
    if recordings is not None:
        sets["recordings"] = read_recordings(recordings)[HALVES.index(half) :: 2]
    scored, results = list[Scored](), list[DiarizationResult]()
    result = Result()
    for name, some in sets.items():
        of_set = _scored(device, some, run.say)
        scored += of_set
        results.append(result_of(name, of_set))
        shown = ReportSection("Speakers", [Table(HEADER, [_row(one) for one in results])])
        kept = {"sets": results, "recordings": scored}
        result = Result(kept, _checks(results[0]), (shown,))
        run.keep(result)
    if texts:
        prepare_engine(run.config, run.config_path, run.config.build.precision)
        some = [recording for of_set in sets.values() for recording in of_set]
        transcribed = list(_texts(run.config, some, run.say))
        rows = ReportSection(
            "Texts", [Table(TEXTS_HEADER, [_text_row(one) for one in transcribed])]
        )
        with_texts = {**result.figures, "texts": transcribed}
        result = Result(with_texts, result.checks, (*result.sections, rows))
    return result


def _texts(
    config: EvaluationProduct, recordings: Sequence[ConversationRecording], say: Say
) -> Iterator[Texts]:
    """Yield the errors of each recording that has texts, then of all."""
    total = Texts("all", Counts(), Counts())
    with open_transcriber(config) as transcriber:
        for recording in recordings:
            if not recording.utterances or soundfile.info(recording.path).duration > _MAX_TEXT_S:
                continue
            request = Request(read_bytes(recording.path), diarize=True, multilingual=True)
            hypothesis = [
                (s.speaker or "", s.text) for s in transcriber.transcribe(request).segments
            ]
            reference = [(u.speaker, u.text) for u in recording.utterances]
            by_speaker = cp_counts(reference, hypothesis)
            texts = Texts(recording.name, by_speaker, counts_as_one(reference, hypothesis))
            say(f"  {' '.join(_text_row(texts))} words")
            total = Texts("all", total.by_speaker + texts.by_speaker, total.as_one + texts.as_one)
            yield texts
    yield total


def _conversations(half: str, seed: int, say: Say) -> list[ConversationRecording]:
    clips = [clip for place in CLIPS for clip in load_clips(place) if clip.half == half]
    return compose(PLAN, seed, clips, say)


def _scored(device: str, recordings: Sequence[ConversationRecording], say: Say) -> list[Scored]:
    """Diarize recordings and compare the turns with the reference."""
    diarizer, scored = Diarizer(device), list[Scored]()
    say(f"{len(recordings)} recordings …")
    for recording in recordings:
        samples = whole(decode(read_bytes(recording.path), _LIMITS))
        begin = time.perf_counter()
        turns = diarizer.diarize(samples)
        seconds = time.perf_counter() - begin
        count = len({turn.speaker for turn in turns})
        audio_s = float(soundfile.info(recording.path).duration)
        wrong = errors(recording.turns, turns)
        score = Scored(recording.name, audio_s, recording.speakers, count, seconds, wrong)
        say(f"  {score.recording}: {wrong.rate:.1f} %, {count} of {score.speakers} speakers")
        scored.append(score)
    return scored


def _checks(conversations: DiarizationResult) -> tuple[Check, ...]:
    return (
        Check(
            f"at most {MAX_ERROR_RATE:g} % of conversations are wrong",
            conversations.rate <= MAX_ERROR_RATE,
            f"{conversations.rate:.1f} %",
        ),
        Check(
            f"{MIN_COUNTED:.0%} of conversations have the right number of speakers",
            conversations.counted >= MIN_COUNTED * conversations.count,
            f"{conversations.counted} of {conversations.count}",
        ),
    )
