"""Make the held-out clips of `tests/data/heldout/` and their manifest: short utterances, as Opus.

    python -m build.demo.maker.heldout_clips --out tests/data/heldout

Every voice is one that training never heard. Two thirds of the sentences are those of
`sentences.py`, the rest the grammar's held-out split; every fourth clip has mild noise. The same
versions of espeak-ng, flite and libopus (`apt-get install espeak-ng flite`; PyAV brings the last)
make the same bytes.
"""

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from build.demo.maker.grammar import Sentence
from build.demo.maker.sentences import ENGLISH, SPANISH
from build.demo.maker.sound import SAMPLE_RATE, Samples
from build.demo.maker.synth import speak
from build.demo.maker.text import draw
from build.demo.maker.voices import unseen_voice

SEED = 9
FROM_GRAMMAR = {"en": 80, "es": 70}
SHORTEST_S, LONGEST_S = 2.0, 8.0
NOISY_ONE_IN = 4
SNR_DB = (14.0, 24.0)
BIT_RATE = 20_000
_SILENCE_S = (0.1, 0.4)  # before and after the speech
_LOUDEST = 0.9  # of full scale


@dataclass(frozen=True)
class Line:
    """A clip's line of the manifest, in the order of its keys."""

    file: str
    text: str
    language: str
    duration: float  # s
    voice: str
    source: str  # "written" for the clip, or "grammar"
    snr_db: float | None  # None without noise


def make(folder: Path) -> list[Line]:
    """Write every clip; returns the lines of the manifest."""
    lines = []
    for language, written in (("en", ENGLISH), ("es", SPANISH)):
        rng = random.Random(f"{SEED} {language}")
        drawn = (draw(rng, "heldout", language).text for _ in itertools.count())
        texts = [(text, "written") for text in written]
        for number in range(len(written) + FROM_GRAMMAR[language]):
            snr_db = round(rng.uniform(*SNR_DB), 1) if number % NOISY_ONE_IN == 0 else None
            while True:  # until a sentence and a voice have the right length
                text, source = texts[number] if number < len(texts) else (next(drawn), "grammar")
                voice = unseen_voice(rng, language)
                samples = _padded(speak(Sentence(text, language), voice), rng)
                if SHORTEST_S <= samples.size / SAMPLE_RATE <= LONGEST_S:
                    break
            if snr_db is not None:
                samples = _with_noise(samples, snr_db, number)
            name = f"{language}_{number:03d}.opus"
            write_opus(folder / name, samples)
            duration_s = round(samples.size / SAMPLE_RATE, 3)
            speaker = f"{voice.engine}/{voice.name}"
            lines.append(Line(name, text, language, duration_s, speaker, source, snr_db))
    return lines


def _padded(speech: Samples, rng: random.Random) -> Samples:
    before, after = (round(rng.uniform(*_SILENCE_S) * SAMPLE_RATE) for _ in range(2))
    return np.pad(speech, (before, after))


def _with_noise(samples: Samples, snr_db: float, seed: int) -> Samples:
    """Add noise whose power falls with frequency, as that of rooms and streets does."""
    draw_noise = np.random.default_rng(seed)
    spectrum = np.fft.rfft(draw_noise.standard_normal(samples.size))
    spectrum[1:] /= np.sqrt(np.arange(1, spectrum.size))
    spectrum[0] = 0
    noise = np.fft.irfft(spectrum, samples.size)
    spoken = samples[samples != 0]
    level = np.sqrt(np.mean(np.square(spoken)) / 10 ** (snr_db / 10))
    mixed = samples + noise * (level / noise.std())
    loudest = float(np.abs(mixed).max())
    out: Samples = (mixed * min(1.0, _LOUDEST / loudest)).astype(np.float32)
    return out


def write_opus(path: Path, samples: Samples) -> None:
    """Write 16 kHz mono as Ogg Opus; nothing in the file depends on when it was written."""
    with av.open(str(path), "w", format="ogg", options={"fflags": "bitexact"}) as file:
        stream = file.add_stream("libopus", rate=SAMPLE_RATE, layout="mono", bit_rate=BIT_RATE)
        stream.codec_context.options = {"application": "voip"}
        stream.codec_context.format = "flt"
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


def main() -> None:
    """Write all clips and the manifest."""
    parser = argparse.ArgumentParser(description="Make the held-out clips and their manifest.")
    parser.add_argument("--out", type=Path, default=Path("tests/data/heldout"))
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    lines = make(folder)
    text = "".join(json.dumps(vars(line), ensure_ascii=False) + "\n" for line in lines)
    (folder / "manifest.jsonl").write_text(text, encoding="utf-8")
    size = sum((folder / line.file).stat().st_size for line in lines)
    seconds = sum(line.duration for line in lines)
    print(f"{len(lines)} clips, {seconds:.0f} s, {size / 1e6:.2f} MB, in {folder}")  # noqa: T201


if __name__ == "__main__":
    main()
