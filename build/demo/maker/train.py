"""Train the demo checkpoint from nothing: synthesise speech and learn from it at the same time.

    python -m build.demo.maker.train --out runs/demo --minutes 24

Needs a GPU, and Debian's packages for speech: `apt-get install espeak-ng flite`. Synthesis runs in
`--workers` processes all the while; what they speak is added to a store in the GPU's memory. Losses
go to standard output and OUT/log.jsonl, the best averaged weights to OUT/best.pt, the state to go
on from to OUT/last.pt: run the same command again to resume. Ctrl-C saves and ends. A second,
shorter run from finished weights made the ones in `checkpoint/` (see its README):

    python -m build.demo.maker.train --out runs/tuned --minutes 8 --learning-rate 3.5e-4 \\
        --first-hours 9 --init build/demo/checkpoint/model.safetensors

Afterwards:

    python -m build.demo.maker.export --weights runs/demo/best.pt
    python -m build.demo.maker.alignment && python -m build.demo.maker.evaluate
"""

import argparse
import copy
import json
import math
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from build.demo.maker.augment import corrupt, mask_mel, warp_mel
from build.demo.maker.export import open_or_train_tokenizer
from build.demo.maker.heldout import generate
from build.demo.maker.labels import IGNORE
from build.demo.maker.network import Geometry, Whisper
from build.demo.maker.sound import SAMPLE_RATE
from build.demo.maker.store import Store, Synthesisers, pack
from build.demo.maker.tokenizer import SpecialIds
from build.demo.maker.validate import Quick, quick_look
from build.demo.maker.windows import Batch, collate, draw_window, gather
from serve.engine import mel_filters
from serve.speech.features import WINDOW_SAMPLES, log_mel

# Share of the time at which a stage begins, and its windows' length in seconds.
STAGES: tuple[tuple[float, int], ...] = ((0.0, 5), (0.08, 10), (0.22, 20), (0.36, 30))
# Until here sound is left clean: attention finds its way earlier.
CLEAN_UNTIL = 0.04
QUIET_SHARE = 0.07
CTC_WEIGHT = 0.3
WARM_UP = 0.02
EMA_DECAY = 0.999
LOOK_EVERY_S = 150


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    out: Path
    tokenizer: Path
    minutes: float
    workers: int
    hours: float
    learning_rate: float
    batch_seconds: int
    validation: int
    seed: int
    compile: bool
    first_hours: float
    init: Path | None


class Stopper:
    """Turns Ctrl-C into a flag that the loop looks at between steps."""

    def __init__(self) -> None:
        self.stop = False
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stop = True


def stage_seconds(stages: tuple[tuple[float, int], ...], progress: float) -> int:
    """The windows' length at this share of the time."""
    return [seconds for begin, seconds in stages if progress >= begin][-1]


def learning_rate(progress: float, top: float) -> float:
    """Warm up, then a cosine down to a fiftieth."""
    if progress < WARM_UP:
        return top * (progress + 0.001) / WARM_UP
    done = (progress - WARM_UP) / (1 - WARM_UP)
    return top * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def features(store: Store, batch: Batch, clean: bool, filters: torch.Tensor) -> torch.Tensor:
    """Log-mel (batch, n_mels, 100 * seconds), augmented unless `clean`."""
    speech = gather(store, batch)
    ends = torch.tensor([window.end for window in batch.windows]).to(store.device)
    sound = speech if clean else corrupt(speech, ends)
    sound = F.pad(sound, (0, WINDOW_SAMPLES - batch.length))
    mel = log_mel(sound, filters)[:, :, : batch.length // 160]
    return mel if clean else mask_mel(warp_mel(mel))


def draw_batch(
    store: Store, rng: random.Random, seconds: int, count: int, ids: SpecialIds
) -> Batch:
    """`count` windows of that length."""
    length = seconds * SAMPLE_RATE
    windows = [draw_window(store, rng, length, ids, QUIET_SHARE) for _ in range(count)]
    return collate(store, windows, length, ids)


class Trainer:
    """The network, its average, its optimiser, and one step of learning."""

    def __init__(self, options: Options, geometry: Geometry, store: Store) -> None:
        self.options, self.store, self.ids = options, store, SpecialIds()
        self.network = Whisper(geometry, self.ids.pieces + 1).to(store.device)
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        self.mel_filters = mel_filters(geometry.n_mels).to(store.device)
        decayed = [p for p in self.network.parameters() if p.requires_grad and p.ndim > 1]
        plain = [p for p in self.network.parameters() if p.requires_grad and p.ndim <= 1]
        self.optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            fused=store.device.type == "cuda",
        )
        if options.compile:
            for layer in self.network.model.encoder.layers:
                layer.compile(dynamic=False)
        self.steps, self.spent_s, self.best = 0, 0.0, math.inf
        self.stages = ((0.0, 30),) if options.init else STAGES
        self.clean_until = 0.0 if options.init else CLEAN_UNTIL
        self.ctc_weight = 0.0 if options.init else CTC_WEIGHT
        if options.init:
            missing, surplus = self.network.load_state_dict(load_file(options.init), strict=False)
            if surplus or set(missing) != {"ctc_head.weight", "ctc_head.bias"}:
                raise ValueError(f"{options.init}: surplus {surplus}, missing {missing}")
            self.average.load_state_dict(self.network.state_dict())

    @property
    def progress(self) -> float:
        """Share of the time that is over."""
        return self.spent_s / (60 * self.options.minutes)

    def draw(self, seed: int, seconds: int) -> Batch:
        """A batch for the current stage; only Python's own work, so that a thread can do it."""
        count = max(self.options.batch_seconds // seconds, 1)
        return draw_batch(self.store, random.Random(seed), seconds, count, self.ids)

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy of the decoder and CTC of the encoder."""
        device = self.store.device
        clean = self.progress < self.clean_until
        mel = features(self.store, batch, clean, self.mel_filters)
        inputs, labels = batch.inputs.to(device), batch.labels.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits, ctc_logits = self.network(mel, inputs)
        entropy = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE
        )
        log_probs = ctc_logits.float().log_softmax(-1).transpose(0, 1)
        frames = torch.full((log_probs.shape[1],), log_probs.shape[0])
        ctc = F.ctc_loss(
            log_probs, batch.ctc_targets.to(device), frames, batch.ctc_sizes,
            blank=self.ids.pieces, zero_infinity=True,
        )  # fmt: skip
        return entropy, ctc

    def step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Learn from one batch; the losses stay on the device."""
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.progress, self.options.learning_rate)
        entropy, ctc = self.losses(batch)
        weight = self.ctc_weight if self.progress < 0.8 else self.ctc_weight / 3
        self.optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(entropy + weight * ctc)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimiser.step()
        self.steps += 1
        decay = min(EMA_DECAY, self.steps / (self.steps + 20))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.network.parameters()), 1 - decay
            )
        return entropy.detach(), ctc.detach()

    def save(self, name: str) -> None:
        """Write OUT/name whole or not at all."""
        state: dict[str, Any] = {"geometry": asdict(self.network.geometry)}
        state |= {"model": self.average.state_dict(), "steps": self.steps, "best": self.best}
        if name == "last.pt":
            state |= {
                "network": self.network.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "spent_s": self.spent_s,
            }
        path = self.options.out / name
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def resume(self) -> None:
        """Go on from OUT/last.pt if it is there."""
        path = self.options.out / "last.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.store.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.average.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.steps, self.spent_s, self.best = state["steps"], state["spent_s"], state["best"]


def validation_stores(count: int, store: Store) -> dict[str, Store]:
    """`count` held-out utterances of voices that training hears, and of voices that it does not."""
    stores = {}
    for voices in ("seen", "unseen"):
        items = generate(count, 77, voices)
        hours = sum(item.duration_s for item in items) / 3600 + 0.001
        stores[voices] = Store(store.tokenizer, store.device, hours)
        stores[voices].add(pack(items))
    return stores


def report(out: Path, entry: dict[str, object]) -> None:
    """One line of progress, also in OUT/log.jsonl."""
    line = json.dumps(entry)
    print(line, flush=True)  # noqa: T201
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(line + "\n")


def look(trainer: Trainer, validation: dict[str, Store]) -> None:
    """Measure the averaged weights on held-out speech and keep them if they are the best so far."""
    found: dict[str, Quick] = {
        voices: quick_look(trainer.average, store, store.tokenizer)
        for voices, store in validation.items()
    }
    score = sum(quick.cer for quick in found.values())
    if score <= trainer.best:
        trainer.best = score
        trainer.save("best.pt")
    trainer.save("last.pt")
    entry: dict[str, object] = {"step": trainer.steps, "progress": round(trainer.progress, 3)}
    for voices, quick in found.items():
        entry[f"cer_{voices}"] = round(quick.cer, 4)
        entry[f"language_{voices}"] = round(quick.language, 4)
    report(trainer.options.out, entry)


def train(trainer: Trainer, speech: Synthesisers, validation: dict[str, Store]) -> None:
    """Steps until the time is over or Ctrl-C."""
    stopper, looked, told = Stopper(), time.monotonic(), time.monotonic()
    told_steps = trainer.steps
    with ThreadPoolExecutor(4) as threads:
        waiting: list[Future[Batch]] = []
        poured = threads.submit(speech.pour, trainer.store, 8)
        while trainer.progress < 1 and not stopper.stop:
            began = time.monotonic()
            if poured.done():
                poured.result()
                poured = threads.submit(speech.pour, trainer.store, 8)
            while len(waiting) < 4:
                seed = random.randrange(2**40)
                seconds = stage_seconds(trainer.stages, trainer.progress)
                waiting.append(threads.submit(trainer.draw, seed, seconds))
            losses = trainer.step(waiting.pop(0).result())
            if trainer.steps % 50 == 0:
                entropy, ctc = (round(float(loss), 4) for loss in losses)
                now = time.monotonic()
                rate = (trainer.steps - told_steps) / (now - told)
                told, told_steps = now, trainer.steps
                report(trainer.options.out, {
                    "step": trainer.steps, "progress": round(trainer.progress, 3), "loss": entropy,
                    "ctc": ctc, "hours": round(trainer.store.filled_hours, 1),
                    "steps_per_s": round(rate, 2),
                })  # fmt: skip
            if time.monotonic() - looked > LOOK_EVERY_S:
                look(trainer, validation)
                looked = time.monotonic()
            trainer.spent_s += time.monotonic() - began
    look(trainer, validation)


def _options() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where states and the log go")
    parser.add_argument("--tokenizer", type=Path, default=Path("build/demo/checkpoint"))
    parser.add_argument("--minutes", type=float, default=24.0, help="time of training")
    parser.add_argument("--workers", type=int, default=13, help="processes that synthesise")
    parser.add_argument("--hours", type=float, default=400.0, help="most speech to hold")
    parser.add_argument(
        "--first-hours", type=float, default=3.0, help="speech before the first step"
    )
    parser.add_argument("--learning-rate", type=float, default=1.2e-3)
    parser.add_argument("--batch-seconds", type=int, default=2048, help="audio in a batch")
    parser.add_argument("--validation", type=int, default=256, help="utterances of a quick look")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--init", type=Path, help="fine-tune this model.safetensors: 30 s windows only"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Set everything up, train, save."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = open_or_train_tokenizer(options.tokenizer)
    store = Store(tokenizer, device, options.hours)
    trainer = Trainer(options, Geometry(vocab_size=tokenizer.get_vocab_size()), store)
    trainer.resume()
    validation = validation_stores(options.validation, store)
    speech = Synthesisers(options.workers, options.seed + trainer.steps)
    try:
        while store.filled_hours < min(options.first_hours, options.hours / 2):
            speech.pour(store, 1, wait_s=60.0)
        train(trainer, speech, validation)
    finally:
        speech.close()


if __name__ == "__main__":
    main()
