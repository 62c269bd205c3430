"""Measure a checkpoint on held-out speech with transformers' greedy decoding under Whisper's rules.

    python -m build.demo.maker.evaluate --n 1000 --out figures.json

Sentences are held out; sets differ in voices: `seen` are voices of the training set as their
synthesisers give them, `unseen` are voices that training never heard. Every utterance is alone in a
30 s window, language detected. `windows` are full 30 s windows of several utterances (boundaries);
`quiet` are windows of silence or noise. Error rates are given raw and normalised (`scoring.py`).
Needs `apt-get install espeak-ng flite`.
"""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import WhisperForConditionalGeneration

from build.demo.maker.heldout import generate
from build.demo.maker.scoring import error_rate, normalise
from build.demo.maker.synth import Utterance
from build.demo.maker.tokenizer import TIMESTAMP_STEP_S, SpecialIds
from serve.engine import mel_filters
from serve.speech.features import WINDOW_SAMPLES, log_mel

_RATE = WINDOW_SAMPLES // 30
_LEAD = 3200
_GAP_S = (0.3, 1.5)


@dataclass(frozen=True)
class Scene:
    """A window and what is in it: (start, end) in seconds and text of each utterance."""

    samples: NDArray[np.float32]
    spans: list[tuple[float, float]]
    texts: tuple[str, ...]
    language: str

    @property
    def text(self) -> str:
        """All that is said."""
        return " ".join(self.texts)


def single(item: Utterance) -> Scene:
    """One utterance, 0.2 s into a window."""
    return sequence([item], random.Random(0))


def sequence(items: Sequence[Utterance], rng: random.Random) -> Scene:
    """As many of the utterances, which are of one language, as fit into a window, with pauses."""
    out, now, spans, texts = np.zeros(WINDOW_SAMPLES, np.float32), _LEAD, [], []
    for item in items:
        stop = now + item.samples.size
        if stop > WINDOW_SAMPLES:
            break
        out[now:stop] = item.samples.astype(np.float32) / 32768
        spans.append((now / _RATE, stop / _RATE))
        texts.append(item.text)
        now = stop + int(rng.uniform(*_GAP_S) * _RATE)
    return Scene(out, spans, tuple(texts), items[0].language)


def full_windows(items: Sequence[Utterance]) -> list[Scene]:
    """Ten utterances at a time, by language, into windows of 30 s."""
    rng, scenes = random.Random(5), []
    for language in ("en", "es"):
        own = [item for item in items if item.language == language]
        scenes += [sequence(own[at : at + 10], rng) for at in range(0, len(own) - 9, 10)]
    return scenes


def quiet_windows(count: int) -> list[Scene]:
    """A third digital silence, the rest noise of several colours and levels."""
    rng, scenes = np.random.default_rng(11), []
    frequencies = np.maximum(np.arange(WINDOW_SAMPLES // 2 + 1), 600)
    for index in range(count):
        samples = np.zeros(WINDOW_SAMPLES, np.float32)
        if index % 3:
            spectrum = np.fft.rfft(rng.standard_normal(WINDOW_SAMPLES))
            noise = np.fft.irfft(spectrum * frequencies ** -rng.uniform(0, 1))
            samples += (noise / noise.std() * 10 ** rng.uniform(-4, -1)).astype(np.float32)
        scenes.append(Scene(samples, [], (), ""))
    return scenes


class Decoder:
    """A checkpoint opened by transformers."""

    def __init__(self, folder: Path, device: torch.device, half: bool) -> None:
        dtype = torch.float16 if half else torch.float32
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self.model: Any = model.to(device).eval()
        self.device, self.dtype, self.ids = device, dtype, SpecialIds()
        self._mel_filters = mel_filters(self.model.config.num_mel_bins).to(device)

    def features(self, scenes: Sequence[Scene]) -> torch.Tensor:
        """Log-mel (scenes, n_mels, 3000) as the model takes it."""
        samples = torch.from_numpy(np.stack([scene.samples for scene in scenes]))
        return log_mel(samples.to(self.device), self._mel_filters).to(self.dtype)

    @torch.no_grad()
    def languages(self, mel: torch.Tensor) -> list[int]:
        """The likeliest language token of each window."""
        start = torch.full((mel.shape[0], 1), self.ids.sot, device=self.device)
        logits = self.model(input_features=mel, decoder_input_ids=start).logits[:, 0]
        first, last = self.ids.language("en"), self.ids.language("yue")
        found: list[int] = (logits[:, first : last + 1].argmax(1) + first).tolist()
        return found

    def run(self, scenes: Sequence[Scene], batch: int = 64) -> list[tuple[int, list[int]]]:
        """Language token and generated ids of every window, decoded with timestamps."""
        results: list[tuple[int, list[int]]] = []
        for at in range(0, len(scenes), batch):
            mel = self.features(scenes[at : at + batch])
            rows = self.model.generate(
                mel, return_timestamps=True, task="transcribe", max_new_tokens=440
            ).tolist()
            results += zip(self.languages(mel), rows, strict=True)
        return results

    def text(self, row: Sequence[int]) -> str:
        """Plain text of generated ids."""
        kept = [token for token in row if token < self.ids.eot]
        return str(self.tokenizer.decode(kept)).strip()


def _rates(scenes: Sequence[Scene], said: Sequence[str]) -> dict[str, float]:
    raw = [(scene.text, text) for scene, text in zip(scenes, said, strict=True)]
    plain = [(normalise(one), normalise(other)) for one, other in raw]
    return {
        "cer": error_rate(plain),
        "wer": error_rate(plain, words=True),
        "cer_raw": error_rate(raw),
        "wer_raw": error_rate(raw, words=True),
    }


def speech_figures(decoder: Decoder, scenes: Sequence[Scene]) -> dict[str, Any]:
    """Error rates, overall and by language, and how often the language was right."""
    results = decoder.run(scenes)
    said = [decoder.text(row) for _, row in results]
    right = [
        token == decoder.ids.language(scene.language)
        for (token, _), scene in zip(results, scenes, strict=True)
    ]
    figures: dict[str, Any] = {"windows": len(scenes), "language": sum(right) / len(right)}
    figures |= _rates(scenes, said)
    for language in ("en", "es"):
        own = [at for at, scene in enumerate(scenes) if scene.language == language]
        figures[language] = _rates([scenes[at] for at in own], [said[at] for at in own])
    return figures


def boundary_errors(decoder: Decoder, scenes: Sequence[Scene]) -> dict[str, Any]:
    """Distance of timestamps from true boundaries, in windows with the right number of segments."""
    errors: list[float] = []
    counted = 0
    for (_, row), scene in zip(decoder.run(scenes), scenes, strict=True):
        begin = decoder.ids.timestamp_begin
        times = [(token - begin) * TIMESTAMP_STEP_S for token in row if token >= begin]
        truth = [moment for span in scene.spans for moment in span]
        if len(times) == len(truth):
            counted += 1
            errors += [abs(one - other) for one, other in zip(times, truth, strict=True)]
    if not errors:
        return {"windows": len(scenes), "same_segments": 0.0}
    return {
        "windows": len(scenes),
        "same_segments": counted / len(scenes),
        "median_s": statistics.median(errors),
        "p95_s": float(np.percentile(errors, 95)),
    }


def main() -> None:
    """Measure and print; write the figures as JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("build/demo/checkpoint"))
    parser.add_argument("--n", type=int, default=1000, help="utterances per set")
    parser.add_argument("--quiet", type=int, default=300, help="windows of silence and noise")
    parser.add_argument("--seed", type=int, default=4242)
    parser.add_argument("--half", action="store_true", help="compute in FP16")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = Decoder(arguments.checkpoint, device, arguments.half)
    figures: dict[str, Any] = {}
    for voices in ("seen", "unseen"):
        items = generate(arguments.n, arguments.seed, voices)
        figures[voices] = speech_figures(decoder, [single(item) for item in items])
        figures[f"{voices}_windows"] = speech_figures(decoder, full_windows(items))
        figures[f"{voices}_boundaries"] = boundary_errors(decoder, full_windows(items))
    quiet = [decoder.text(row) for _, row in decoder.run(quiet_windows(arguments.quiet))]
    empty = sum(not text for text in quiet) / max(len(quiet), 1)
    figures["quiet"] = {"windows": len(quiet), "no_text": empty}
    text = json.dumps(figures, indent=1)
    print(text)  # noqa: T201
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
