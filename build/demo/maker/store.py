"""The store of speech: PCM in device memory, filled by processes while training runs."""

import multiprocessing
import queue
import random
import signal
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from build.demo.maker.sound import SAMPLE_RATE
from build.demo.maker.synth import Utterance, utter

_CHUNK = 48


@dataclass(frozen=True)
class Chunk:
    """Some utterances on their way to the store."""

    samples: NDArray[np.int16]
    sizes: list[int]
    texts: list[str]
    languages: list[str]


def pack(utterances: list[Utterance]) -> Chunk:
    """Utterances as one chunk."""
    return Chunk(
        np.concatenate([item.samples for item in utterances]),
        [item.samples.size for item in utterances],
        [item.text for item in utterances],
        [item.language for item in utterances],
    )


@dataclass
class Store:
    """Utterances by index: where their samples lie in `pcm`, and their token ids."""

    tokenizer: Tokenizer
    device: torch.device
    hours: float
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ids: list[tuple[int, ...]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    by_language: dict[str, list[int]] = field(default_factory=lambda: {"en": [], "es": []})
    used: int = 0

    def __post_init__(self) -> None:
        samples = int(self.hours * 3600 * SAMPLE_RATE)
        self.pcm = torch.zeros(samples, dtype=torch.int16, device=self.device)

    @property
    def filled_hours(self) -> float:
        """How much speech it holds."""
        return self.used / SAMPLE_RATE / 3600

    def add(self, chunk: Chunk) -> bool:
        """Take the chunk; False when it does not fit any more."""
        if self.used + chunk.samples.size > self.pcm.numel():
            return False
        stop = self.used + chunk.samples.size
        self.pcm[self.used : stop].copy_(torch.from_numpy(chunk.samples))
        encoded = self.tokenizer.encode_batch(
            [" " + text for text in chunk.texts], add_special_tokens=False
        )
        for size, encoding, text, language in zip(
            chunk.sizes, encoded, chunk.texts, chunk.languages, strict=True
        ):
            self.offsets.append(self.used)
            self.sizes.append(size)
            self.ids.append(tuple(encoding.ids))
            self.texts.append(text)
            self.by_language[language].append(len(self.sizes) - 1)
            self.used += size
        return True


def _produce(seed: int, out: "Queue[Chunk]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rng = random.Random(seed)
    while True:
        out.put(pack([utter(rng, "train", "train") for _ in range(_CHUNK)]))


class Synthesisers:
    """Processes that synthesise training speech without end."""

    def __init__(self, workers: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue: Queue[Chunk] = context.Queue(maxsize=4 * workers)
        self._processes: list[Any] = [
            context.Process(target=_produce, args=(seed * 1000 + index, self._queue), daemon=True)
            for index in range(workers)
        ]
        for process in self._processes:
            process.start()

    def pour(self, store: Store, limit: int, wait_s: float = 0.0) -> int:
        """Move up to `limit` waiting chunks into the store; how many there were."""
        for count in range(limit):
            try:
                chunk = self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            except queue.Empty:
                return count
            if not store.add(chunk):
                self.close()
                return count
        return limit

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        self._processes = []
