"""Sentences to speech through espeak-ng and flite, one process a sentence, many at a time.

Needs Debian's packages: `apt-get install espeak-ng flite`. To hear what training hears:

    python -m build.demo.maker.synth --seed 1 --count 8 --out /tmp/speech
"""

import argparse
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from build.demo.maker.grammar import Sentence
from build.demo.maker.sound import SAMPLE_RATE, Samples, pauses, read_wav, resample, trim
from build.demo.maker.text import draw
from build.demo.maker.voices import Voice, plain_seen_voice, seen_voice, unseen_voice

FRAGMENT_SHARE = 0.5
SHORTEST_S, LONGEST_S = 0.25, 14.0
_TIMEOUT_S = 20.0
VOICE_CHOICES: dict[str, Callable[[random.Random, str], Voice]] = {
    "train": seen_voice,
    "seen": plain_seen_voice,
    "unseen": unseen_voice,
}


@dataclass(frozen=True)
class Utterance:
    """One trimmed piece of speech, at 16 kHz, and what was said by whom."""

    samples: NDArray[np.int16]
    text: str
    language: str
    voice: str

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.samples.size / SAMPLE_RATE


def _require(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise FileNotFoundError(f"{program} not found: apt-get install espeak-ng flite")
    return path


def _run_espeak(text: str, voice: Voice) -> bytes:
    rate, pitch = str(voice.words_per_minute), str(voice.pitch)
    command = [_require("espeak-ng"), "-v", voice.name, "-s", rate, "-p", pitch, "--stdout", text]
    return subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True).stdout


def _run_flite(text: str, voice: Voice) -> bytes:
    shift = 0.75 + 0.5 * voice.pitch / 100
    stretch = 170 / max(voice.words_per_minute, 120)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(suffix=".wav", dir=folder) as out:
        command = [_require("flite"), "-voice", voice.name, "-o", out.name]
        command += ["--setf", f"duration_stretch={stretch:.3f}", "--setf", f"f0_shift={shift:.3f}"]
        if voice.name.startswith("kal"):
            command += ["--setf", f"int_f0_target_mean={105 * shift:.1f}"]
        command += ["-t", text]
        subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
        return Path(out.name).read_bytes()


def speak(sentence: Sentence, voice: Voice) -> Samples:
    """The sentence spoken by the voice: trimmed, 16 kHz, peak 0.7."""
    run = _run_espeak if voice.engine == "espeak" else _run_flite
    samples, rate = read_wav(run(sentence.text, voice))
    samples = trim(resample(samples, SAMPLE_RATE / (rate * voice.resample)))
    peak = float(np.abs(samples).max()) if samples.size else 0.0
    return samples * (0.7 / peak) if peak > 0 else samples


def _fragment(samples: Samples, text: str, rng: random.Random) -> tuple[Samples, str]:
    """One side of a sentence's only comma, where speech has exactly one pause: long audio is cut
    at such places, so windows begin and end there."""
    gaps = pauses(samples)
    if text.count(",") != 1 or len(gaps) != 1:
        return samples, text
    (start, end), (head, tail) = gaps[0], text.split(", ")
    return (samples[:start], head + ",") if rng.random() < 0.5 else (samples[end:], tail)


def utter(rng: random.Random, split: str, voices: str, language: str | None = None) -> Utterance:
    """Draw a sentence and a voice and speak it; draw again when the result is too short or long."""
    while True:
        sentence = draw(rng, split, language)
        voice = VOICE_CHOICES[voices](rng, sentence.language)
        try:
            samples, text = speak(sentence, voice), sentence.text
        except (subprocess.SubprocessError, OSError):
            if shutil.which("espeak-ng") is None or shutil.which("flite") is None:
                raise
            continue
        if voices == "train" and rng.random() < FRAGMENT_SHARE:
            samples, text = _fragment(samples, text, rng)
        if SHORTEST_S <= samples.size / SAMPLE_RATE <= LONGEST_S:
            pcm = np.clip(samples * 32767, -32768, 32767).astype(np.int16)
            return Utterance(pcm, text, sentence.language, f"{voice.engine}/{voice.name}")


def write_wav(path: Path, samples: NDArray[np.int16], rate: int = SAMPLE_RATE) -> None:
    """Write mono 16-bit WAV."""
    soundfile.write(path, samples, rate, format="WAV", subtype="PCM_16")


def main() -> None:
    """Write a few utterances and print what they say."""
    parser = argparse.ArgumentParser(description="Synthesise a few utterances.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--split", choices=["train", "heldout"], default="train")
    parser.add_argument("--voices", choices=sorted(VOICE_CHOICES), default="train")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(arguments.seed)
    for index in range(arguments.count):
        item = utter(rng, arguments.split, arguments.voices)
        write_wav(arguments.out / f"{index:04d}.wav", item.samples)
        print(f"{index:04d}\t{item.duration_s:.2f}\t{item.voice}\t{item.text}")  # noqa: T201


if __name__ == "__main__":
    main()
