"""Turns of speakers beside the right ones: in meetings, and in conversations made of clips.

With texts, the words of each speaker are held against what he says, too.

Settings were chosen on one half of the recordings and on conversations of one half of the clips;
figures are of the others, unless another half is asked for.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import soundfile

from build.clips import load_clips
from eval.accuracy.prepare import prepare_engine
from eval.accuracy.score import Counts
from eval.config import Config
from eval.record import Check, Result, Run, Say, Section, Table
from eval.speakers.conversations import PLAN, compose
from eval.speakers.recordings import Recording, halves, read_recordings
from eval.speakers.score import Errors, counts_as_one, cp_counts, errors
from serve.contract.files import read_bytes
from serve.contract.messages import Request
from serve.speakers.diarize import open_diarizer
from serve.speech.audio import decode, whole
from serve.speech.meter import Limits
from serve.transcriber.open import open_transcriber

CLIPS = ("tests/data/human/manifest.jsonl", "tests/data/human-sharealike/manifest.jsonl")
MOST_WRONG = 8.0  # % of the speech of conversations
LEAST_COUNTED = 0.8  # of the conversations have the right number of speakers
_LIMITS = Limits(6 * 3600.0)
_TEXT_S = 600.0  # of a longer recording no text is made


@dataclasses.dataclass(frozen=True)
class Scored:
    """One system and one recording."""

    system: str
    recording: str
    audio_s: float
    speakers: int  # of the reference
    told: int  # by the system
    seconds: float  # that it took
    errors: Errors


@dataclasses.dataclass(frozen=True)
class Figures:
    """One system and a set of recordings."""

    system: str
    recordings: str
    count: int
    rate: float  # diarization error rate, %
    missed: float  # % of the speech, as the following
    invented: float
    confused: float
    counted: int  # recordings with the right number of speakers
    rtfx: float

    @classmethod
    def of(cls, recordings: str, scored: Sequence[Scored]) -> "Figures":
        """Of all recordings of a set, weighed by their speech."""
        total = sum((score.errors for score in scored), Errors())
        points = 100 / max(total.speech_s, 1e-9)
        return cls(
            system=scored[0].system,
            recordings=recordings,
            count=len(scored),
            rate=total.rate,
            missed=points * total.missed_s,
            invented=points * total.invented_s,
            confused=points * total.confused_s,
            counted=sum(score.speakers == score.told for score in scored),
            rtfx=sum(score.audio_s for score in scored) / sum(score.seconds for score in scored),
        )

    def row(self) -> list[str]:
        """Of the table."""
        shares = (self.rate, self.missed, self.invented, self.confused)
        return [
            f"{self.recordings}: {self.system}",
            *(f"{share:.1f} %" for share in shares),
            f"{self.counted} of {self.count}",
            f"{self.rtfx:.1f}",
        ]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Words of our engine in one recording, or in all."""

    recording: str
    by_speaker: Counts  # as cpWER has it
    as_one: Counts  # whoever says them

    def row(self) -> list[str]:
        """Write a row of the table."""
        words = self.as_one.length
        rates = (100 * counts.errors / max(words, 1) for counts in (self.by_speaker, self.as_one))
        return [self.recording, *(f"{rate:.1f} %" for rate in rates), str(words)]


TEXTS_HEADER = ("texts", "cpWER", "WER, whoever speaks", "words")
HEADER = ("", "DER", "missed", "invented", "confused", "speakers right", "RTFx")


def speakers(
    run: Run,
    *,
    recordings: Path | None,
    half: str,
    seed: int,
    device: str,
    texts: bool,
) -> Result:
    """Measure who speaks when.

    Args:
        run: its record is kept anew with each set and system.
        recordings: a folder of audio files and RTTMs, such as of meetings.
        half: "choose" or "report", of these and of the clips.
        seed: of the conversations.
        device: that our networks compute on.
        texts: whether the config's engine transcribes recordings of which is known what is said.

    Raises:
        EarshotError: a recording cannot be read.
    """
    sets = {"conversations": _conversations(half, seed, run.say)}
    if recordings is not None:
        sets["recordings"] = halves(read_recordings(recordings))[half]
    scored, figures = list[Scored](), list[Figures]()
    result = Result()
    for name, some in sets.items():
        of_set = _scored(device, some, run.say)
        scored += of_set
        figures.append(Figures.of(name, of_set))
        shown = Section("Speakers", [Table(HEADER, [figure.row() for figure in figures])])
        kept = {"sets": figures, "recordings": scored}
        result = Result(kept, _checks(figures[0]), (shown,))
        run.keep(result)
    if texts:
        prepare_engine(run.config, run.config_path, run.config.build.precision)
        some = [recording for of_set in sets.values() for recording in of_set]
        transcribed = list(_texts(run.config, some, run.say))
        rows = Section("Texts", [Table(TEXTS_HEADER, [words.row() for words in transcribed])])
        with_texts = {**result.figures, "texts": transcribed}
        result = Result(with_texts, result.checks, (*result.sections, rows))
        run.keep(result)
    return result


def _texts(config: Config, recordings: Sequence[Recording], say: Say) -> Iterator[Texts]:
    """Yield the words of each recording of which is known what is said, then of all."""
    total = Texts("all", Counts(), Counts())
    with open_transcriber(config) as transcriber:
        for recording in recordings:
            if not recording.utterances or soundfile.info(recording.path).duration > _TEXT_S:
                continue
            request = Request(read_bytes(recording.path), diarize=True, multilingual=True)
            hypothesis = [
                (s.speaker or "", s.text) for s in transcriber.transcribe(request).segments
            ]
            reference = [(u.speaker, u.text) for u in recording.utterances]
            texts = Texts(
                recording.name,
                cp_counts(reference, hypothesis),
                counts_as_one(reference, hypothesis),
            )
            say(f"  {' '.join(texts.row())} words")
            total = Texts("all", total.by_speaker + texts.by_speaker, total.as_one + texts.as_one)
            yield texts
    yield total


def _conversations(half: str, seed: int, say: Say) -> list[Recording]:
    clips = [clip for place in CLIPS for clip in load_clips(place) if clip.half == half]
    return compose(PLAN, seed, clips, say)


def _scored(device: str, recordings: Sequence[Recording], say: Say) -> list[Scored]:
    """Diarize recordings and hold the turns against the right ones."""
    diarizer, scored = open_diarizer(device), list[Scored]()
    say(f"{len(recordings)} recordings …")
    for recording in recordings:
        samples = whole(decode(read_bytes(recording.path), _LIMITS))
        begin = time.perf_counter()
        turns = diarizer.diarize(samples)
        seconds = time.perf_counter() - begin
        count = len({turn.speaker for turn in turns})
        audio_s = float(soundfile.info(recording.path).duration)
        wrong = errors(recording.turns, turns)
        score = Scored(
            "Earshot", recording.name, audio_s, recording.speakers, count, seconds, wrong
        )
        say(f"  {score.recording}: {wrong.rate:.1f} %, {count} of {score.speakers} speakers")
        scored.append(score)
    return scored


def _checks(conversations: Figures) -> tuple[Check, ...]:
    return (
        Check(
            f"at most {MOST_WRONG:g} % of conversations are wrong",
            conversations.rate <= MOST_WRONG,
            f"{conversations.rate:.1f} %",
        ),
        Check(
            f"{LEAST_COUNTED:.0%} of conversations have the right number of speakers",
            conversations.counted >= LEAST_COUNTED * conversations.count,
            f"{conversations.counted} of {conversations.count}",
        ),
    )
