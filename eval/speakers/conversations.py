"""Conversations made of clips of known speakers, so that the turns are known to the frame.

Every conversation follows from its plan, a seed and the clips. Speakers take turns, with pauses,
now and then before another has ended, in a room that is never silent.

.cache/speakers/<hash of all that>/NAME.wav, NAME.rttm, NAME.stm

Any folder of audio files is read the same way: NAME.rttm has the turns, NAME.stm (optional) the
texts.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import soundfile
from tqdm import tqdm

from build.clips import Clip
from eval.accuracy.passages import read_samples
from eval.long.compose import at_level, faded, noise
from eval.record import made_once, write_text
from serve.contract.errors import ConfigError
from serve.contract.files import read_text
from serve.contract.messages import Samples, SpeechOptions
from serve.speakers.diarize import SpeakerTurn
from serve.speech.rate import SAMPLE_RATE
from serve.speech.vad import SpeechFilter, VadModel

T = TypeVar("T")
AUDIO = (".wav", ".flac", ".ogg", ".mp3")


@dataclasses.dataclass(frozen=True)
class Utterance:
    """Speech of one speaker at a time, with its text."""

    speaker: str
    start_s: float
    end_s: float
    text: str


@dataclasses.dataclass(frozen=True)
class ConversationRecording:
    """An audio file and its reference turns."""

    name: str
    path: Path
    turns: tuple[SpeakerTurn, ...]
    utterances: tuple[Utterance, ...] = ()  # in order of time; () = not known


def read_recordings(folder: Path) -> list[ConversationRecording]:
    """Read a folder's recordings, by name.

    Raises:
        ConfigError: it has none, or an RTTM or an STM is malformed.
        FileError: an RTTM or an STM cannot be read.
    """
    recordings = [
        _recording(path)
        for path in sorted(folder.glob("*"))
        if path.suffix in AUDIO and path.with_suffix(".rttm").is_file()
    ]
    if not recordings:
        raise ConfigError(f"{folder} has no recordings; expected audio files, each with its .rttm")
    return recordings


def _recording(path: Path) -> ConversationRecording:
    stm = path.with_suffix(".stm")
    turns = _parse_lines(path.with_suffix(".rttm"), _turn, "a turn of a speaker in an RTTM")
    utterances = _parse_lines(stm, _utterance, "an utterance in an STM") if stm.is_file() else ()
    return ConversationRecording(
        path.stem, path, turns, tuple(sorted(utterances, key=lambda utterance: utterance.start_s))
    )


def _parse_lines(path: Path, parse: Callable[[str], T | None], expected: str) -> tuple[T, ...]:
    items = []
    for number, line in enumerate(read_text(path, f"expected {expected}").splitlines(), 1):
        try:
            items.append(parse(line))
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{path}:{number}: got {line!r}; expected {expected}") from error
    return tuple(item for item in items if item is not None)


def _turn(line: str) -> SpeakerTurn | None:
    """Parse a line of an RTTM; None for a line of another kind."""
    if not line.startswith("SPEAKER"):
        return None
    fields = line.split()
    start_s, length_s, speaker = float(fields[3]), float(fields[4]), fields[7]
    return SpeakerTurn(start_s, start_s + length_s, speaker)


def _utterance(line: str) -> Utterance | None:
    """Parse a line of an STM: file, channel, speaker, start, end and text; None for a comment."""
    if not line.strip() or line.startswith(";;"):
        return None
    fields = line.split(maxsplit=5)
    return Utterance(fields[2], float(fields[3]), float(fields[4]), "".join(fields[5:]))


def to_rttm(name: str, turns: Iterable[SpeakerTurn]) -> str:
    """Write the turns of a recording as RTTM."""
    return "".join(
        f"SPEAKER {name} 1 {turn.start_s:.3f} {turn.end_s - turn.start_s:.3f} <NA> <NA> "
        f"{turn.speaker} <NA> <NA>\n"
        for turn in turns
    )


def to_stm(name: str, utterances: Iterable[Utterance]) -> str:
    """Write the utterances of a recording as STM."""
    return "".join(
        f"{name} 1 {utterance.speaker} {utterance.start_s:.3f} {utterance.end_s:.3f} "
        f"{' '.join(utterance.text.split())}\n"
        for utterance in utterances
    )


CACHE = Path(".cache") / "speakers"
MIN_SPEECH_S = 8.0  # of a speaker's clips together; a speaker with less is not drawn

_SPEECH = SpeechOptions(vad_min_speech_s=0.0, vad_min_silence_s=0.25, vad_pad_s=0.0)
# VAD reports the start and the end of speech so much later than the level of a clip shows them;
# this is the median over clips.
_LATE = round(0.09 * SAMPLE_RATE)
_MARGIN = SAMPLE_RATE // 10  # of a clip that is heard around its speech
_PAUSE_S = (0.15, 1.2)  # between two clips
_LONG_PAUSE_S = (2.0, 8.0)
_OVERLAP_S = (0.2, 1.5)
_LONG_PAUSES, _OVERLAPS, _GOES_ON = 0.08, 0.2, 0.3  # share of the changes
_SPEECH_DB = (-27.0, -20.0)  # of a speaker
_ROOM_DB = (-65.0, -40.0)  # of a conversation
_EDGE_S = (0.3, 3.0)  # before the first clip and after the last


@dataclasses.dataclass(frozen=True)
class ConversationPlan:
    """A conversation to be made."""

    speakers: int
    minutes: float
    one_group: bool  # all speakers are of one corpus if possible, as if of one microphone

    @property
    def name(self) -> str:
        """Name it in files and reports."""
        return f"{self.speakers}-speakers-{self.minutes:g}-min{'-alike' * self.one_group}"


PLAN = (
    *(ConversationPlan(count, 1.0 + count / 4, one_group=False) for count in (2, 3, 4, 5, 6)),
    *(ConversationPlan(count, 1.0 + count / 4, one_group=True) for count in (2, 3, 4, 5, 6)),
    ConversationPlan(6, 60.0, one_group=False),
)


@dataclasses.dataclass(frozen=True, eq=False)
class _SpokenClip:
    """A clip's samples around its speech, the intervals of speech, and the text."""

    samples: Samples
    intervals: tuple[tuple[int, int], ...]  # of indices of `samples`
    text: str


def compose(
    planned: Sequence[ConversationPlan], seed: int, clips: Sequence[Clip]
) -> list[ConversationRecording]:
    """Make conversations, unless they are there.

    Args:
        planned: the conversations; their names differ.
        seed: the seed of all random draws.
        clips: to be spoken, of enough speakers; clips of unknown speakers are left out.

    Raises:
        FileError, AudioError: a clip cannot be read.
    """
    digest = hashlib.sha256(repr((list(planned), seed, list(clips))).encode())
    digest.update(Path(__file__).read_bytes())
    folder = CACHE / digest.hexdigest()[:24]

    def make(partial: Path) -> None:
        for number, plan in enumerate(tqdm(planned, "composing", unit="conversation")):
            rng = np.random.default_rng((seed, number))
            speakers = _draw_speakers(plan, rng, clips)
            clips_by_speaker = {
                name: [_speech_of(clip) for clip in own] for name, own in speakers.items()
            }
            samples, turns, utterances = _conversation(plan, rng, clips_by_speaker)
            soundfile.write(partial / f"{plan.name}.wav", samples, SAMPLE_RATE, subtype="PCM_16")
            write_text(partial / f"{plan.name}.rttm", to_rttm(plan.name, turns))
            write_text(partial / f"{plan.name}.stm", to_stm(plan.name, utterances))

    made_once(folder, make)
    return read_recordings(folder)


def _draw_speakers(
    plan: ConversationPlan, rng: np.random.Generator, clips: Sequence[Clip]
) -> dict[str, list[Clip]]:
    """Draw the speakers, and return the clips of each."""
    own = collections.defaultdict[str, list[Clip]](list)
    for clip in clips:
        if clip.speaker:
            own[f"{clip.group}/{clip.speaker}"].append(clip)
    names = [
        name for name in sorted(own) if sum(clip.duration_s for clip in own[name]) >= MIN_SPEECH_S
    ]
    if plan.one_group:
        sizes = collections.Counter(own[name][0].group for name in names)
        large = sorted(group for group, size in sizes.items() if size >= plan.speakers)
        if large:
            group = large[rng.integers(len(large))]
            names = [name for name in names if own[name][0].group == group]
    drawn = rng.choice(len(names), plan.speakers, replace=False)
    return {names[i]: own[names[i]] for i in drawn}


def _speech_of(clip: Clip) -> _SpokenClip:
    samples = read_samples(clip.path)
    listener = SpeechFilter(_SPEECH, VadModel())
    speech = [*listener.push(samples), *listener.finish()]
    intervals = list[tuple[int, int]]()
    for start, end in [(s.start, s.start + len(s.samples)) for s in speech] or [(0, len(samples))]:
        if intervals and intervals[-1][1] == start:
            start = intervals.pop()[0]
        intervals.append((start, end))
    begin = max(0, intervals[0][0] - _LATE - _MARGIN)
    samples = samples[begin : intervals[-1][1] + _MARGIN]
    moved = ((max(0, start - _LATE - begin), end - _LATE - begin) for start, end in intervals)
    return _SpokenClip(samples, tuple((a, b) for a, b in moved if b > a), clip.text)


def _conversation(
    plan: ConversationPlan,
    rng: np.random.Generator,
    clips_by_speaker: Mapping[str, Sequence[_SpokenClip]],
) -> tuple[Samples, list[SpeakerTurn], list[Utterance]]:
    """Return samples, turns and utterances, both in order of time."""
    names = list(clips_by_speaker)
    levels = rng.uniform(*_SPEECH_DB, len(clips_by_speaker))
    undrawn: list[list[int]] = [[] for _ in clips_by_speaker]  # numbers of clips by speaker
    out = np.zeros(round((plan.minutes + 1) * 60 * SAMPLE_RATE), np.float32)
    turns, utterances = list[SpeakerTurn](), list[Utterance]()
    start, last_end, speaker = _draw_samples(rng, _EDGE_S), 0, -1
    ends = [0] * len(clips_by_speaker)  # of each speaker's last clip
    while last_end < plan.minutes * 60 * SAMPLE_RATE:
        before, speaker = speaker, _draw_next(rng, speaker, len(clips_by_speaker))
        if before not in (speaker, -1) and rng.random() < _OVERLAPS:
            start = max(last_end - _draw_samples(rng, _OVERLAP_S), ends[speaker])
        elif before != -1:
            long = rng.random() < _LONG_PAUSES
            start = last_end + _draw_samples(rng, _LONG_PAUSE_S if long else _PAUSE_S)
        name, clips = names[speaker], clips_by_speaker[names[speaker]]
        undrawn[speaker] = undrawn[speaker] or rng.permutation(len(clips)).tolist()
        clip = clips[undrawn[speaker].pop()]
        end = start + len(clip.samples)
        out[start:end] += at_level(faded(clip.samples, 0.005), levels[speaker])
        turns += [
            SpeakerTurn((start + first) / SAMPLE_RATE, (start + last) / SAMPLE_RATE, name)
            for first, last in clip.intervals
        ]
        utterances.append(Utterance(name, start / SAMPLE_RATE, end / SAMPLE_RATE, clip.text))
        ends[speaker], last_end = end, max(last_end, end)
    out = out[: last_end + _draw_samples(rng, _EDGE_S)]
    out += noise(len(out), 1.0, rng.uniform(*_ROOM_DB), rng)
    turns.sort(key=lambda turn: (turn.start_s, turn.end_s))
    return np.clip(out, -1.0, 1.0), turns, utterances


def _draw_next(rng: np.random.Generator, speaker: int, count: int) -> int:
    """Draw who speaks next: now and then the same again."""
    if speaker >= 0 and (count == 1 or rng.random() < _GOES_ON):
        return speaker
    others = [other for other in range(count) if other != speaker]
    return int(others[rng.integers(len(others))])


def _draw_samples(rng: np.random.Generator, range_s: tuple[float, float]) -> int:
    return round(rng.uniform(*range_s) * SAMPLE_RATE)
