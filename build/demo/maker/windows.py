"""Windows to train on: which utterances where, with which labels, and their sound on the device."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from build.demo.maker.labels import IGNORE, Labelled, Segment, Style, build
from build.demo.maker.sound import SAMPLE_RATE
from build.demo.maker.store import Store
from build.demo.maker.tokenizer import SpecialIds

MAX_TOKENS = 320
_BUCKET = 32


@dataclass(frozen=True)
class Placed:
    """One utterance in a window: its index in the store, its first sample and its size there.

    `cut` when the window ends in the midst of it.
    """

    index: int
    start: int
    size: int
    cut: bool = False


@dataclass(frozen=True)
class Window:
    """A window's utterances, in order, its tokens, and the sample where its sound ends."""

    placed: list[Placed]
    language: str
    labelled: Labelled
    end: int


@dataclass(frozen=True)
class Batch:
    """Windows ready for the device; sound is gathered there by `gather`."""

    windows: list[Window]
    length: int
    inputs: torch.Tensor
    labels: torch.Tensor
    ctc_targets: torch.Tensor
    ctc_sizes: torch.Tensor


def _lead_s(rng: random.Random) -> float:
    kind = rng.random()
    if kind < 0.3:
        return rng.uniform(0.0, 0.05)
    return rng.uniform(0.0, 1.0) if kind < 0.85 else rng.uniform(0.0, 4.0)


def _gap_s(rng: random.Random) -> float:
    return rng.uniform(3.0, 8.0) if rng.random() < 0.04 else rng.triangular(0.1, 2.5, 0.4)


def place(store: Store, rng: random.Random, language: str, length: int) -> list[Placed]:
    """Utterances one after another up to a random fill of the window, often to its very end."""
    pool = store.by_language[language]
    full = rng.random() < 0.4
    target = length if full else int(rng.uniform(0.5 * SAMPLE_RATE, length))
    now, misses, placed = int(_lead_s(rng) * SAMPLE_RATE), 0, list[Placed]()
    while now < target and misses < 3:
        index = pool[int(rng.random() * len(pool))]
        if now + store.sizes[index] > length:
            misses += 1
            continue
        placed.append(Placed(index, now, store.sizes[index]))
        now += store.sizes[index] + int(_gap_s(rng) * SAMPLE_RATE)
    if full and placed:
        return _ending(store, rng, placed, language, length)
    return placed


def _ending(
    store: Store, rng: random.Random, placed: list[Placed], language: str, length: int
) -> list[Placed]:
    """A full window's end: as it is, or the last utterance close to it, or one more, cut by it."""
    last, kind = placed[-1], rng.random()
    if kind < 0.4:
        start = length - last.size - int(rng.uniform(0.03, 0.3) * SAMPLE_RATE)
        return [*placed[:-1], Placed(last.index, max(start, last.start), last.size)]
    now = last.start + last.size + int(rng.uniform(0.2, 1.0) * SAMPLE_RATE)
    index = rng.choice(store.by_language[language])
    missing = now + store.sizes[index] - length
    if kind > 0.6 and length - now > SAMPLE_RATE // 4 and missing > SAMPLE_RATE // 4:
        return [*placed, Placed(index, now, length - now, cut=True)]
    return placed


def style(rng: random.Random, store: Store, language: str) -> Style:
    """How this window is asked."""
    previous: tuple[int, ...] = ()
    if rng.random() < 0.14:
        pool = store.by_language[language]
        for _ in range(rng.randint(1, 4)):
            previous += store.ids[rng.choice(pool)]
    return Style(rng.random() < 0.7, rng.random() < 0.12, previous[-100:])


def segments(store: Store, placed: Sequence[Placed]) -> list[Segment]:
    """The placed utterances as labelled segments."""
    return [
        Segment(
            item.start / SAMPLE_RATE,
            None if item.cut else (item.start + item.size) / SAMPLE_RATE,
            store.ids[item.index],
        )
        for item in placed
    ]


def draw_window(
    store: Store, rng: random.Random, length: int, ids: SpecialIds, quiet_share: float
) -> Window:
    """One window at random; without speech in `quiet_share` of cases."""
    while True:
        language = "en" if rng.random() < 0.52 else "es"
        speech = rng.random() >= quiet_share
        placed = place(store, rng, language, length) if speech else []
        if speech and not placed:
            continue
        asked = style(rng, store, language)
        if placed and placed[-1].cut:
            asked = replace(asked, timestamps=True)
        labelled = build(segments(store, placed), language, asked, ids)
        if len(labelled.inputs) <= MAX_TOKENS:
            last = placed[-1].start + placed[-1].size if placed else 0
            end = length
            if rng.random() < 0.6:
                end = min(last + int(rng.uniform(0, 2) * SAMPLE_RATE), length)
            return Window(placed, language, labelled, end if placed else length)


def _pad(rows: list[list[int]], width: int, value: int) -> torch.Tensor:
    out = np.full((len(rows), width), value, dtype=np.int64)
    for row, tokens in zip(out, rows, strict=True):
        row[: len(tokens)] = tokens
    return torch.from_numpy(out)


def collate(store: Store, windows: list[Window], length: int, ids: SpecialIds) -> Batch:
    """Windows as padded tensors."""
    longest = max(len(window.labelled.inputs) for window in windows)
    width = -(-longest // _BUCKET) * _BUCKET
    ctc = [
        [token for item in window.placed if not item.cut for token in store.ids[item.index]]
        for window in windows
    ]
    return Batch(
        windows=windows,
        length=length,
        inputs=_pad([window.labelled.inputs for window in windows], width, ids.eot),
        labels=_pad([window.labelled.labels for window in windows], width, IGNORE),
        ctc_targets=_pad(ctc, max(max(map(len, ctc)), 1), 0),
        ctc_sizes=torch.tensor([len(row) for row in ctc]),
    )


def gather(store: Store, batch: Batch) -> torch.Tensor:
    """The windows' clean sound, float32 (batch, length) on the store's device."""
    rows = [
        (store.offsets[item.index], row * batch.length + item.start, item.size)
        for row, window in enumerate(batch.windows)
        for item in window.placed
    ]
    out = torch.zeros(len(batch.windows) * batch.length, device=store.device)
    if not rows:
        return out.view(len(batch.windows), batch.length)
    table = torch.tensor(rows).to(store.device, non_blocking=True)
    sizes = table[:, 2]
    total = sum(row[2] for row in rows)
    begins = sizes.cumsum(0) - sizes
    which = torch.repeat_interleave(
        torch.arange(len(rows), device=store.device), sizes, output_size=total
    )
    within = torch.arange(total, device=store.device) - begins[which]
    gains = torch.empty(len(rows), device=store.device).uniform_(0.35, 1.0)
    out[table[which, 1] + within] = store.pcm[table[which, 0] + within] * gains[which] / 32768
    return out.view(len(batch.windows), batch.length)
