"""Held-out utterances by the thousand: sentences and, if asked, voices that training never met.

    python -m build.demo.maker.heldout --n 2000 --voices unseen --out DIR

writes DIR/*.wav (16 kHz mono) and DIR/manifest.jsonl: file, text, language, duration, voice.
"""

import argparse
import json
import multiprocessing
import os
import random
from pathlib import Path

from build.demo.maker.synth import Utterance, utter, write_wav


def _one(job: tuple[int, int, str, str | None]) -> Utterance:
    seed, index, voices, language = job
    return utter(random.Random(seed * 1_000_003 + index), "heldout", voices, language)


def generate(
    count: int, seed: int, voices: str, language: str | None = None, workers: int | None = None
) -> list[Utterance]:
    """`count` held-out utterances, the same for the same seed, spoken by many processes at once."""
    jobs = [(seed, index, voices, language) for index in range(count)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers or os.cpu_count() or 1) as pool:
        return pool.map(_one, jobs, chunksize=16)


def main() -> None:
    """Write held-out utterances and their manifest."""
    parser = argparse.ArgumentParser(description="Synthesise held-out utterances.")
    parser.add_argument("--n", type=int, default=2000, help="how many utterances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--voices", choices=["seen", "unseen"], default="unseen")
    parser.add_argument("--language", choices=["en", "es"], help="both without it")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    items = generate(arguments.n, arguments.seed, arguments.voices, arguments.language)
    with (arguments.out / "manifest.jsonl").open("w", encoding="utf-8") as manifest:
        for index, item in enumerate(items):
            name = f"{index:05d}.wav"
            write_wav(arguments.out / name, item.samples)
            line = {"file": name, "text": item.text, "language": item.language,
                    "duration": round(item.duration_s, 3), "voice": item.voice}  # fmt: skip
            manifest.write(json.dumps(line, ensure_ascii=False) + "\n")
    hours = sum(item.duration_s for item in items) / 3600
    print(f"{len(items)} utterances, {hours:.2f} h, in {arguments.out}")  # noqa: T201


if __name__ == "__main__":
    main()
