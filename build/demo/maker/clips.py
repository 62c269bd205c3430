"""Make the test clips of `tests/data/` and their manifest, with voices that training never hears.

    python -m build.demo.maker.clips --out tests/data

Needs `apt-get install espeak-ng flite` and the `soundfile` package. The sentences are written for
the clips, not drawn from the grammar, from words that the grammar knows.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from build.demo.maker.grammar import Sentence
from build.demo.maker.sound import SAMPLE_RATE, Samples, resample
from build.demo.maker.synth import speak
from build.demo.maker.voices import Voice

ENGLISH = (
    "Good morning, my name is Helen Carter and I live in Boston.",
    "The train from Chicago arrived at half past nine on Monday.",
    "My grandmother baked a delicious cherry cake last night.",
    "There were twenty-seven children in the library.",
    "Where is the key to the garden gate?",
    "When the storm began, the fisherman closed the window.",
    "The doctor will visit our village in September.",
    "Please bring two bottles of milk and some fresh bread.",
    "The museum opens at ten o'clock, but the ticket office closes early.",
    "Everyone was waiting outside the theater in the cold wind.",
    "My brother sold his old bicycle for eighty-five dollars.",
    "The young teacher explained the problem slowly and carefully.",
    "Don't forget your umbrella, because the weather is terrible.",
    "A small bird was singing in the orange tree behind the house.",
    "The number is four seven nine one two.",
    "Can you repair this broken clock, please?",
    "They traveled from London to Edinburgh for three weeks.",
    "The tired soldier wrote a long letter to his sister.",
    "Our neighbors have a gray cat and two friendly dogs.",
    "Thank you, see you tomorrow.",
)
SPANISH = (
    "Buenos días, me llamo Elena García y vivo en Sevilla.",
    "El tren de Madrid llegó a las nueve y media.",
    "Mi abuela preparó una tarta de manzana para la fiesta.",
    "Hay veintisiete alumnos en la biblioteca.",
    "¿Dónde está la llave del jardín?",
    "Cuando llegó la tormenta, el marinero limpiaba el barco.",
    "La médica visitará nuestro pueblo en septiembre.",
    "Compramos dos botellas de leche y unas naranjas.",
    "El museo abre a las diez, pero mi hermana prefiere la playa.",
    "Mi vecino vendió su bicicleta por ochenta y cinco euros.",
    "La profesora explicó el problema lentamente.",
    "El número es cuatro siete nueve uno dos.",
    "¿Puedes reparar este reloj, por favor?",
    "Los soldados cantaban una canción triste cerca del río.",
    "Nos vemos el lunes por la mañana.",
)
RMS = ("flite", "rms")
CARIBBEAN = ("espeak", "en-029")
CARIBBEAN_F4 = ("espeak", "en-029+f4")
SPANISH_F4 = ("espeak", "es+f4")
SPANISH_M5 = ("espeak", "es-419+m5")
FORMATS = {".wav": "PCM_16", ".flac": "PCM_16", ".mp3": "MPEG_LAYER_III", ".ogg": "VORBIS"}


@dataclass(frozen=True)
class Clip:
    """One file to make: which sentences, by whom, how long if not by its speech, and stored how."""

    file: str
    language: str
    voice: tuple[str, str]
    sentences: tuple[str, ...]
    sample_rate: int = SAMPLE_RATE
    channels: int = 1
    noise: float = 0.0
    length_s: float = 0.0
    pause_s: float = 0.6


CLIPS = (
    Clip("en_question.wav", "en", RMS, ENGLISH[4:5]),
    Clip("en_thanks.flac", "en", CARIBBEAN, ("Thank you.",), length_s=1.0, pause_s=0.1),
    Clip("en_two.wav", "en", CARIBBEAN_F4, ENGLISH[0:2], 24_000, 2),
    Clip("en_three.mp3", "en", RMS, ENGLISH[2:5], 44_100, 2),
    Clip("en_telephone.wav", "en", RMS, ENGLISH[5:7], 8_000),
    Clip("en_numbers.ogg", "en", CARIBBEAN, (ENGLISH[10], ENGLISH[14]), 48_000),
    Clip("en_noisy.flac", "en", RMS, ENGLISH[7:10], 22_050, noise=0.01),
    Clip("en_half_minute.ogg", "en", RMS, ENGLISH[5:12], 32_000, pause_s=0.4),
    Clip("en_long.mp3", "en", RMS, ENGLISH[:18], 24_000, length_s=75.0, pause_s=0.75),
    Clip("es_question.wav", "es", SPANISH_F4, SPANISH[4:5], 11_025),
    Clip("es_two.flac", "es", SPANISH_M5, SPANISH[0:2]),
    Clip("es_three.ogg", "es", SPANISH_F4, SPANISH[5:8], 44_100, 2),
    Clip("es_noisy.mp3", "es", SPANISH_M5, SPANISH[8:11], 16_000, noise=0.01),
    Clip("es_long.mp3", "es", SPANISH_F4, SPANISH, 22_050, 2, pause_s=0.7),
    Clip("silence.wav", "", ("", ""), (), 16_000, length_s=5.0),
    Clip("noise.flac", "", ("", ""), (), 16_000, noise=0.03, length_s=8.0),
)


def _compose(clip: Clip) -> tuple[Samples, list[dict[str, object]]]:
    """The clip at 16 kHz, and where each sentence begins and ends in it."""
    parts: list[Samples] = [np.zeros(round(0.1 * SAMPLE_RATE), dtype=np.float32)]
    segments: list[dict[str, object]] = []
    now = parts[0].size
    for text in clip.sentences:
        voice = Voice(clip.voice[0], clip.voice[1], 165, 50, 1.0)
        speech = speak(Sentence(text, clip.language), voice)
        start, end = now / SAMPLE_RATE, (now + speech.size) / SAMPLE_RATE
        segments.append({"start": round(start, 2), "end": round(end, 2), "text": text})
        parts += [speech, np.zeros(round(clip.pause_s * SAMPLE_RATE), dtype=np.float32)]
        now += parts[-1].size + speech.size
    samples = np.concatenate(parts)
    wanted = max(round(clip.length_s * SAMPLE_RATE), samples.size)
    return np.pad(samples, (0, wanted - samples.size)), segments


def _write(clip: Clip, samples: Samples, folder: Path) -> float:
    """Add noise, bring to the clip's rate and channels, store; return the duration in seconds."""
    noise = np.random.default_rng(7).standard_normal(samples.size).astype(np.float32)
    out = resample(samples + clip.noise * noise, clip.sample_rate / SAMPLE_RATE)
    out = np.clip(out, -1.0, 1.0)
    frames = out if clip.channels == 1 else np.stack([out, 0.6 * out], axis=1)
    path = folder / clip.file
    soundfile.write(path, frames, clip.sample_rate, subtype=FORMATS[path.suffix])
    return out.size / clip.sample_rate


def make(clip: Clip, folder: Path) -> dict[str, object]:
    """Write the clip's file and return its line of the manifest."""
    samples, segments = _compose(clip)
    duration = _write(clip, samples, folder)
    return {
        "file": clip.file,
        "text": " ".join(clip.sentences),
        "language": clip.language or None,
        "duration": round(duration, 3),
        "segments": segments,
        "voice": "/".join(clip.voice) if clip.sentences else None,
        "format": Path(clip.file).suffix[1:],
        "sample_rate": clip.sample_rate,
        "channels": clip.channels,
    }


def main() -> None:
    """Write all clips and the manifest."""
    parser = argparse.ArgumentParser(description="Make the test clips and their manifest.")
    parser.add_argument("--out", type=Path, default=Path("tests/data"))
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(make(clip, folder), ensure_ascii=False) for clip in CLIPS]
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    size = sum((folder / clip.file).stat().st_size for clip in CLIPS)
    print(f"{len(CLIPS)} clips, {size / 1e6:.2f} MB, in {folder}")  # noqa: T201


if __name__ == "__main__":
    main()
