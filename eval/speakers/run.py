"""Turns of speakers beside the right ones: in meetings, and in conversations made of clips.

With texts, the words of each speaker are held against what he says, too.

Settings were chosen on one half of the recordings and on conversations of one half of the clips;
figures are of the others, unless another half is asked for.
"""

import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import soundfile

from build.clips import load_clips
from eval.accuracy.prepare import prepare_engine
from eval.accuracy.score import Counts
from eval.config import Config
from eval.measurement import Check, Result, Run, Say, table
from eval.speakers import peer
from eval.speakers.conversations import PLAN, compose
from eval.speakers.recordings import Recording, halves, read_recordings
from eval.speakers.score import Errors, errors
from eval.speakers.words import counts_as_one, cp_counts
from serve.contract.errors import ConfigError, EarshotError
from serve.contract.files import read_bytes
from serve.contract.messages import Request, Samples
from serve.speakers.diarize import Turn, open_diarizer
from serve.speech.audio import decode, whole
from serve.speech.meter import Limits
from serve.speech.rate import SAMPLE_RATE
from serve.transcriber.open import open_transcriber

CLIPS = ("tests/data/human/manifest.jsonl", "tests/data/human-sharealike/manifest.jsonl")
MOST_WRONG = 8.0  # % of the speech of conversations
LEAST_COUNTED = 0.8  # of the conversations have the right number of speakers
_LIMITS = Limits(6 * 3600.0)
_TEXT_S = 600.0  # of a longer recording no text is made

Found = tuple[float, tuple[Turn, ...]]  # seconds that it took, and who speaks when


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
    peers: Sequence[str],
    texts: bool,
) -> Result:
    """Measure turns of speakers, and peers' beside them.

    Args:
        run: its record is kept anew with each set and system.
        recordings: a folder of audio files and RTTMs, such as of meetings.
        half: "choose" or "report", of these and of the clips.
        seed: of the conversations.
        device: that our networks compute on.
        peers: NAME=PYTHON, of `eval.speakers.peer.PEERS`.
        texts: whether the config's engine transcribes recordings of which is known what is said.

    Raises:
        EarshotError: something cannot be read, or a peer fails.
    """
    sets = {"conversations": _conversations(half, seed, run.say)}
    if recordings is not None:
        sets["recordings"] = halves(read_recordings(recordings))[half]
    systems = {"Earshot": _ours(device), **{name: _peer(name, at) for name, at in _named(peers)}}
    scored, figures = list[Scored](), list[Figures]()
    result = Result()
    for name, some in sets.items():
        for system, hear in systems.items():
            of_set = _scored(system, hear, some, run.say)
            scored += of_set
            figures.append(Figures.of(name, of_set))
            text = table(HEADER, [figure.row() for figure in figures])
            result = Result({"sets": figures, "recordings": scored}, _checks(figures), text)
            run.keep(result)
    if texts:
        prepare_engine(run.config, run.config_path, run.config.build.precision)
        some = [recording for of_set in sets.values() for recording in of_set]
        transcribed = list(_texts(run.config, some, run.say))
        rows = table(TEXTS_HEADER, [words.row() for words in transcribed])
        with_texts = {**result.figures, "texts": transcribed}
        result = Result(with_texts, result.checks, f"{result.text}\n\n{rows}")
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


def _named(peers: Sequence[str]) -> list[tuple[str, str]]:
    named = [text.partition("=") for text in peers]
    for name, _, python in named:
        if name not in peer.PEERS or not python:
            raise ConfigError(
                f"{name}={python} is no peer; expected NAME=PYTHON of {', '.join(peer.PEERS)}"
            )
    return [(name, python) for name, _, python in named]


def _conversations(half: str, seed: int, say: Say) -> list[Recording]:
    clips = [clip for place in CLIPS for clip in load_clips(place) if clip.half == half]
    return compose(PLAN, seed, clips, say)


def _ours(device: str) -> Callable[[Sequence[Path]], list[Found]]:
    diarizer = open_diarizer(device)

    def hear(paths: Sequence[Path]) -> list[Found]:
        answers = []
        for path in paths:
            samples = _samples(path)
            begin = time.perf_counter()
            turns = diarizer.diarize(samples)
            answers.append((time.perf_counter() - begin, turns))
        return answers

    return hear


def _peer(name: str, python: str) -> Callable[[Sequence[Path]], list[Found]]:
    def hear(paths: Sequence[Path]) -> list[Found]:
        with tempfile.TemporaryDirectory(prefix="speakers-") as folder:
            waves = [Path(folder) / f"{number}.wav" for number in range(len(paths))]
            for path, wave in zip(paths, waves, strict=True):
                soundfile.write(wave, _samples(path), SAMPLE_RATE, subtype="PCM_16")
            command = [python, peer.__file__, name, *map(str, waves)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EarshotError(f"{name} failed: {done.stderr.strip()[-500:]}")
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return [
            (answer["seconds"], tuple(Turn(*turn) for turn in answer["turns"]))
            for answer in answers
        ]

    return hear


def _samples(path: Path) -> Samples:
    return whole(decode(read_bytes(path), _LIMITS))


def _scored(
    system: str,
    hear: Callable[[Sequence[Path]], list[Found]],
    recordings: Sequence[Recording],
    say: Say,
) -> list[Scored]:
    say(f"{system} hears {len(recordings)} recordings …")
    scored = []
    answers = hear([recording.path for recording in recordings])
    for recording, (seconds, turns) in zip(recordings, answers, strict=True):
        count = len({turn.speaker for turn in turns})
        audio_s = float(soundfile.info(recording.path).duration)
        wrong = errors(recording.turns, turns)
        score = Scored(system, recording.name, audio_s, recording.speakers, count, seconds, wrong)
        say(f"  {score.recording}: {wrong.rate:.1f} %, {count} of {score.speakers} speakers")
        scored.append(score)
    return scored


def _checks(figures: Sequence[Figures]) -> tuple[Check, ...]:
    """Check that few errors are in conversations, and in recordings no more than peers'."""
    by: Mapping[tuple[str, str], Figures] = {
        (figure.recordings, figure.system): figure for figure in figures
    }
    checks, ours = [], by["conversations", "Earshot"]
    checks.append(
        Check(
            f"at most {MOST_WRONG:g} % of conversations are wrong",
            ours.rate <= MOST_WRONG,
            f"{ours.rate:.1f} %",
        )
    )
    checks.append(
        Check(
            f"{LEAST_COUNTED:.0%} of conversations have the right number of speakers",
            ours.counted >= LEAST_COUNTED * ours.count,
            f"{ours.counted} of {ours.count}",
        )
    )
    for (recordings, system), theirs in by.items():
        mine = by.get((recordings, "Earshot"))
        if recordings == "recordings" and system != "Earshot" and mine is not None:
            detail = f"{mine.rate:.1f} %, {system} {theirs.rate:.1f} %"
            checks.append(
                Check(f"no more is wrong than by {system}", mine.rate <= theirs.rate, detail)
            )
    return tuple(checks)
