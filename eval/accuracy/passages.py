"""Clips of one speaker, joined to passages of nearly a window.

A window costs an encoder 30 s of audio however little is said in it, and the fewer characters a
system is given, the less sure is a difference of two systems. So passages tell more in less time.
"""

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import soundfile

from build.clips import Clip
from eval.record import replaced
from serve.contract.files import read_bytes
from serve.contract.messages import Samples
from serve.speech.audio import decode, join_blocks
from serve.speech.features import SAMPLE_RATE
from serve.speech.meter import AudioLimits

CACHE = Path(".cache") / "passages"
"""Joined audio, by a hash of the parts; relative to the project's root."""

PAUSES_S = (0.3, 0.8)  # between clips, each equally likely
_SEED = "1"  # of the pauses
_UNSPACED = ("zh", "ja")  # languages without a space between sentences
_LIMITS = AudioLimits(6 * 3600.0)


def read_samples(path: Path) -> Samples:
    """Decode a recording of at most six hours; raises FileError and AudioError."""
    return join_blocks(decode(read_bytes(path), _LIMITS))


def join_clips(clips: Sequence[Clip], longest_s: float) -> list[Clip]:
    """Join the clips of each speaker, in their order, to passages of at most `longest_s`.

    Clips without speech, and longer ones, stay as they are. Pauses count as a part of a passage.

    Raises:
        FileError, AudioError: a clip cannot be read.
    """
    joined = []
    by_speaker = sorted(clips, key=_speaker)
    for _, of_speaker in itertools.groupby(by_speaker, key=_speaker):
        for number, parts in enumerate(_pack(of_speaker, longest_s)):
            joined.append(parts[0] if len(parts) == 1 else _join(parts, number))
    return joined


def _speaker(clip: Clip) -> tuple[str, str, str, str]:
    return clip.group, clip.half, clip.language or "", clip.speaker


def _pack(clips: Iterable[Clip], longest_s: float) -> list[list[Clip]]:
    passages, length_s = list[list[Clip]](), 0.0
    for clip in clips:
        length_s += PAUSES_S[1] + clip.duration_s
        if not passages or length_s > longest_s or not (clip.text and passages[-1][-1].text):
            passages.append([])
            length_s = clip.duration_s
        passages[-1].append(clip)
    return passages


def _join(parts: Sequence[Clip], number: int) -> Clip:
    first, digest = parts[0], hashlib.sha256(f"{_SEED} {PAUSES_S}".encode())
    for part in parts:
        digest.update(hashlib.sha256(read_bytes(part.path)).digest())
    path = CACHE / f"{digest.hexdigest()[:24]}.flac"
    if not path.is_file():
        rng, pieces = random.Random(_SEED), [read_samples(first.path)]
        for part in parts[1:]:
            pause_s = rng.uniform(*PAUSES_S)
            pieces += [np.zeros(int(pause_s * SAMPLE_RATE), np.float32), read_samples(part.path)]
        with replaced(path) as partial:
            soundfile.write(partial, np.concatenate(pieces), SAMPLE_RATE, format="FLAC")
    speaker = "/".join(part for part in (first.group or "clips", first.speaker) if part)
    return dataclasses.replace(
        first,
        file=f"{speaker} {number:03} ({len(parts)} clips from {first.file})",
        path=path,
        text=("" if first.language in _UNSPACED else " ").join(part.text for part in parts),
        duration_s=float(soundfile.info(path).duration),
    )
