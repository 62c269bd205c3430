"""Distil the demo checkpoint's decoder into one layer, whose guesses the whole decoder verifies.

    python -m build.demo.maker.draft --out runs/draft --minutes 6 --workers 14

The encoder is the checkpoint's and stays as it is. Speech is synthesised while training runs, as in
`train`; what is learnt is not what was said, but what the checkpoint's decoder (the teacher) makes
of it: its likeliest tokens and its distribution over them, after Sanh et al., "DistilBERT" (2019),
and Gandhi et al., "Distil-Whisper" (2023). OUT gets model.safetensors (FP16, the decoder alone) and
config.json, which `build engine --draft OUT` reads, and log.jsonl. Ctrl-C ends it with what it has.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional as F

from build.demo.maker.export import config, hugging_face_state
from build.demo.maker.labels import IGNORE
from build.demo.maker.network import Decoder, Geometry, Whisper
from build.demo.maker.store import Store, Synthesisers
from build.demo.maker.tokenizer import SpecialIds
from build.demo.maker.train import (
    EMA_DECAY,
    Stopper,
    draw_batch,
    features,
    learning_rate,
    report,
    validation_stores,
)
from build.demo.maker.windows import Batch
from serve.engine import mel_filters

_SECONDS = 30
_ROUNDS = 12
_KL_WEIGHT = 1.0
_DRAFT_SIZES = (2, 4, 6, 8)
_LOOK_EVERY_S = 60


@dataclass(frozen=True)
class Lesson:
    """What the teacher says of a batch of windows.

    source: encoder states (windows, 1500, d).
    inputs: token ids (windows, t), each window's prompt and the teacher's own tokens after it.
    labels: (windows, t) the teacher's likeliest token after each input; IGNORE in prompts, after
        the end of text, and where `inputs` may not be what the teacher would have said.
    logits: (windows, t, vocab) the teacher's.
    """

    source: torch.Tensor
    inputs: torch.Tensor
    labels: torch.Tensor
    logits: torch.Tensor

    @property
    def settled(self) -> float:
        """Share of windows that are known to their end."""
        return float((self.labels == SpecialIds().eot).any(1).float().mean())


def prompt_size(inputs: list[int], ids: SpecialIds) -> int:
    """How many of a window's tokens come before the first that is to be told."""
    at = inputs.index(ids.sot) + 1
    while at < len(inputs) and ids.eot < inputs[at] < ids.timestamp_begin:
        at += 1
    return at


class Teacher:
    """The checkpoint: its encoder, and its decoder's own greedy output."""

    def __init__(self, checkpoint: Path, vocab_size: int, device: torch.device) -> None:
        self.ids, self.device = SpecialIds(), device
        self.dtype = torch.float16 if device.type == "cuda" else torch.float32
        network = Whisper(Geometry(vocab_size=vocab_size, dropout=0.0), ctc_labels=1)
        state = load_file(checkpoint / "model.safetensors")
        missing, surplus = network.load_state_dict(state, strict=False)
        if surplus or set(missing) != {"ctc_head.weight", "ctc_head.bias"}:
            raise ValueError(f"{checkpoint}: surplus {surplus}, missing {missing}")
        self.network = network.to(device, self.dtype).eval().requires_grad_(False)
        self.mel_filters = mel_filters(network.geometry.n_mels).to(device)

    def logits(self, inputs: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """(windows, t, vocab) after each of `inputs` (windows, t)."""
        decoder = self.network.model.decoder
        return F.linear(decoder(inputs, source), decoder.embed_tokens.weight)

    @torch.no_grad()
    def teach(self, batch: Batch, store: Store, clean: bool = False) -> Lesson:
        """Decode the batch greedily; the first guess is what was really said."""
        mel = features(store, batch, clean, self.mel_filters).to(self.dtype)
        source = self.network.model.encoder(mel)
        rows = [prompt_size(window.labelled.inputs, self.ids) for window in batch.windows]
        sizes = torch.tensor(rows, device=self.device)
        inputs = batch.inputs.to(self.device)
        told = greedy(lambda ids: self.logits(ids, source), inputs, sizes, self.ids.eot)
        return Lesson(source, *told)


def greedy(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    sizes: torch.Tensor,
    eot: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greedy decoding of all tokens at once, by Jacobi iteration.

    Each round puts the decoder's answers in the guess's place, which settles at least one more
    token of each row; where the guess was right, all at the first round.

    Args:
        logits_of: ids (rows, t) -> logits (rows, t, vocab), causal.
        inputs: (rows, t) prompts and, after them, guesses.
        sizes: (rows,) of the prompts.
        eot: the token after which a row ends.

    Returns:
        Inputs, labels and logits as a `Lesson` has them.
    """
    columns, sizes = torch.arange(inputs.shape[1], device=inputs.device), sizes[:, None]
    for _ in range(_ROUNDS):
        told = F.pad(logits_of(inputs).argmax(-1)[:, :-1], (1, 0))
        told = torch.where(columns < sizes, inputs, told)
        if torch.equal(told, inputs):
            break
        inputs = told
    logits = logits_of(inputs)
    labels = logits.argmax(-1)
    right = (F.pad(labels[:, :-1], (1, 0)) == inputs) | (columns < sizes)
    ended = (inputs == eot) & (columns >= sizes)
    known = (right & ~ended).cumprod(1).bool() & (columns >= sizes - 1)
    return inputs, labels.masked_fill(~known, IGNORE), logits


def first_draft(teacher: Decoder, geometry: Geometry) -> Decoder:
    """A decoder of one layer that begins as the teacher's embeddings and last layer."""
    state = teacher.state_dict()
    last = f"layers.{len(teacher.layers) - 1}."
    kept = {name: value for name, value in state.items() if not name.startswith("layers.")}
    kept |= {
        name.replace(last, "layers.0."): value
        for name, value in state.items()
        if name.startswith(last)
    }
    draft = Decoder(replace(geometry, decoder_layers=1))
    draft.load_state_dict(kept)
    return draft


class Pupil:
    """The draft in training: its weights, their running average, one step of learning."""

    def __init__(self, teacher: Teacher, top_rate: float) -> None:
        geometry = teacher.network.geometry
        self.draft = first_draft(teacher.network.model.decoder, geometry).to(teacher.device)
        self.average = copy.deepcopy(self.draft).requires_grad_(False)
        self.top_rate, self.steps = top_rate, 0
        self.optimiser = torch.optim.AdamW(
            self.draft.parameters(), lr=top_rate, betas=(0.9, 0.98), weight_decay=0.01,
            fused=teacher.device.type == "cuda",
        )  # fmt: skip

    def learn(self, lesson: Lesson, progress: float) -> torch.Tensor:
        """One step; cross-entropy and divergence from the teacher, (2,), on the device."""
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(progress, self.top_rate)
        known = lesson.labels != IGNORE
        with torch.autocast(lesson.inputs.device.type, torch.bfloat16):
            states = self.draft(lesson.inputs, lesson.source)[known]
            logits = F.linear(states, self.draft.embed_tokens.weight)
        log_probs = logits.float().log_softmax(-1)
        taught = lesson.logits[known].float().log_softmax(-1)
        entropy = F.nll_loss(log_probs, lesson.labels[known])
        divergence = F.kl_div(log_probs, taught, reduction="batchmean", log_target=True)
        self.optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(entropy + _KL_WEIGHT * divergence)
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimiser.step()
        self.steps += 1
        decay = min(EMA_DECAY, self.steps / (self.steps + 20))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.draft.parameters()), 1 - decay
            )
        return torch.stack([entropy, divergence]).detach()


def tokens_per_check(agreed: list[bool], size: int) -> tuple[int, int]:
    """Tokens gained, and the teacher's steps that they took, when `size` tokens at a time are
    drafted and every one is (`agreed`) or is not what the teacher says."""
    at = checks = 0
    while at < len(agreed):
        taken = 0
        while taken < size and at + taken < len(agreed) and agreed[at + taken]:
            taken += 1
        at += taken + 1
        checks += 1
    return len(agreed), checks


@torch.no_grad()
def acceptance(draft: Decoder, teacher: Teacher, store: Store, windows: int) -> dict[str, float]:
    """On windows of the store's speech: the share of tokens guessed right, `right`, and by the
    number of tokens drafted at a time, how many tokens a step of the teacher then gives."""
    rng, told = random.Random(5), list[list[bool]]()
    while len(told) < windows:
        count = min(64, windows - len(told))
        lesson = teacher.teach(draw_batch(store, rng, _SECONDS, count, teacher.ids), store, True)
        states = draft(lesson.inputs, lesson.source.float())
        guesses = F.linear(states, draft.embed_tokens.weight).argmax(-1)
        for agreed, known in zip(guesses == lesson.labels, lesson.labels != IGNORE, strict=True):
            told.append(agreed[known].tolist())
    figures = {"right": sum(map(sum, told)) / max(sum(map(len, told)), 1)}
    for size in _DRAFT_SIZES:
        gained, checks = map(sum, zip(*(tokens_per_check(row, size) for row in told), strict=True))
        figures[f"by_{size}"] = gained / max(checks, 1)
    return {name: round(value, 4) for name, value in figures.items()}


def write(draft: Decoder, geometry: Geometry, out: Path) -> None:
    """model.safetensors and config.json, for a decoder alone."""
    state = {f"model.decoder.{name}": value for name, value in draft.state_dict().items()}
    save_file(hugging_face_state(state), out / "model.part", metadata={"format": "pt"})
    (out / "model.part").rename(out / "model.safetensors")
    content = config(replace(geometry, decoder_layers=1), SpecialIds())
    (out / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def batches(
    store: Store, speech: Synthesisers, count: int, ids: SpecialIds
) -> Generator[Batch, None, None]:
    """Batches without end, drawn by threads, while speech flows into the store."""
    with ThreadPoolExecutor(4) as threads:
        poured = threads.submit(speech.pour, store, 8)
        waiting: list[Future[Batch]] = []
        while True:
            if poured.done():
                poured.result()
                poured = threads.submit(speech.pour, store, 8)
            while len(waiting) < 4:
                rng = random.Random(random.randrange(2**40))
                waiting.append(threads.submit(draw_batch, store, rng, _SECONDS, count, ids))
            yield waiting.pop(0).result()


def train(
    pupil: Pupil, teacher: Teacher, store: Store, speech: Synthesisers, options: argparse.Namespace
) -> None:
    """Steps until the time or their number is over, or Ctrl-C."""
    stopper, began, written, progress = Stopper(), time.monotonic(), time.monotonic(), 0.0
    drawn = batches(store, speech, options.windows, teacher.ids)
    while progress < 1 and not stopper.stop:
        lesson = teacher.teach(next(drawn), store)
        losses = pupil.learn(lesson, progress)
        now = time.monotonic()
        progress = (now - began) / (60 * options.minutes)
        if options.steps:
            progress = max(progress, pupil.steps / options.steps)
        if pupil.steps % (50 if not options.steps else 5) == 0:
            entropy, divergence = (round(value, 4) for value in losses.tolist())
            report(options.out, {
                "step": pupil.steps, "progress": round(progress, 3), "entropy": entropy,
                "divergence": divergence, "hours": round(store.filled_hours, 2),
                "settled": round(lesson.settled, 3),
                "steps_per_s": round(pupil.steps / (now - began), 2),
            })  # fmt: skip
        if now - written > _LOOK_EVERY_S:
            write(pupil.average, teacher.network.geometry, options.out)
            written = now
    drawn.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the draft and the log go")
    parser.add_argument("--checkpoint", type=Path, default=Path("build/demo/checkpoint"))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it out")
    parser.add_argument("--minutes", type=float, default=6.0, help="time of training")
    parser.add_argument("--steps", type=int, default=0, help="at most so many; 0: no such limit")
    parser.add_argument("--windows", type=int, default=96, help="windows of 30 s in a batch")
    parser.add_argument("--workers", type=int, default=14, help="processes that synthesise")
    parser.add_argument("--hours", type=float, default=250.0, help="most speech to hold")
    parser.add_argument(
        "--first-hours", type=float, default=6.0, help="speech before the first step"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--validation", type=int, default=512, help="held-out utterances a set")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Set everything up, train, measure, write."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    device = torch.device(options.device)
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    teacher = Teacher(options.checkpoint, tokenizer.get_vocab_size(), device)
    pupil = Pupil(teacher, options.learning_rate)
    store = Store(tokenizer, device, options.hours)
    validation = validation_stores(options.validation, store)
    speech = Synthesisers(options.workers, options.seed + 500)
    try:
        while store.filled_hours < options.first_hours:
            speech.pour(store, 1, wait_s=60.0)
        train(pupil, teacher, store, speech, options)
    finally:
        speech.close()
    write(pupil.average, teacher.network.geometry, options.out)
    for voices, heldout in validation.items():
        found = acceptance(pupil.average, teacher, heldout, options.validation // 2)
        report(options.out, {"voices": voices, "step": pupil.steps, **found})


if __name__ == "__main__":
    main()
