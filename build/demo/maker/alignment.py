"""Find which of the decoder's cross-attention heads follow the speech, by measurement.

    python -m build.demo.maker.alignment --checkpoint build/demo/checkpoint --n 128

Held-out utterances are put one after another into windows; a head is good when, for the tokens of
each utterance, its attention lies inside that utterance, and moves forward with the tokens. The
best heads are written to `alignment_heads` of generation_config.json (--dry-run: only printed).
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from build.demo.maker.evaluate import Decoder, Scene, full_windows
from build.demo.maker.heldout import generate
from build.demo.maker.tokenizer import SpecialIds

_FRAMES_PER_S = 50
_KEPT = 5


def _scores(
    attention: torch.Tensor, spans: Sequence[tuple[int, int, float, float]]
) -> torch.Tensor:
    """Per head of one layer, (heads,): attention inside the right span times its correlation of
    centre and token position. `attention` is (heads, tokens, frames)."""
    frames = torch.arange(attention.shape[2], device=attention.device).float()
    scores = []
    for first, last, start_s, end_s in spans:
        part = attention[:, first:last].float()
        low, high = int(start_s * _FRAMES_PER_S), int(end_s * _FRAMES_PER_S) + 1
        inside = part[:, :, low:high].sum(2).mean(1)
        centres = (part * frames).sum(2) / part.sum(2)
        steps = torch.arange(last - first, device=attention.device).float()
        centred, moved = steps - steps.mean(), centres - centres.mean(1, keepdim=True)
        norm = (centred.norm() * moved.norm(dim=1)).clamp_min(1e-6)
        scores.append(inside * ((moved * centred).sum(1) / norm).clamp_min(0))
    return torch.stack(scores).mean(0)


def _tokens(scene: Scene, decoder: Decoder) -> tuple[list[int], list[slice]]:
    ids: SpecialIds = decoder.ids
    row = [ids.sot, ids.language(scene.language), ids.tail("<|transcribe|>")]
    slices = []
    for (start, end), text in zip(scene.spans, scene.texts, strict=True):
        row.append(ids.timestamp_begin + round(start * 50))
        pieces = decoder.tokenizer.encode(" " + text, add_special_tokens=False).ids
        slices.append(slice(len(row), len(row) + len(pieces)))
        row += [*pieces, ids.timestamp_begin + round(end * 50)]
    return row, slices


@torch.no_grad()
def measure(decoder: Decoder, scenes: Sequence[Scene]) -> torch.Tensor:
    """Score of every head, (layers, heads)."""
    total: list[torch.Tensor] = []
    for scene in scenes:
        row, slices = _tokens(scene, decoder)
        ids = torch.tensor([row], device=decoder.device)
        out = decoder.model(
            input_features=decoder.features([scene]), decoder_input_ids=ids, output_attentions=True
        )
        # A token is spoken of where the token before it is read.
        spans = [
            (part.start - 1, part.stop - 1, start, end)
            for part, (start, end) in zip(slices, scene.spans, strict=True)
            if part.stop - part.start >= 4
        ]
        if spans:
            total.append(torch.stack([_scores(layer[0], spans) for layer in out.cross_attentions]))
    return torch.stack(total).mean(0)


def best_heads(scores: torch.Tensor) -> list[list[int]]:
    """The best heads, in order of layer and head."""
    heads = scores.shape[1]
    order = scores.flatten().argsort(descending=True)[:_KEPT].tolist()
    return sorted([index // heads, index % heads] for index in order)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("build/demo/checkpoint"))
    parser.add_argument("--n", type=int, default=128, help="held-out utterances")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = Decoder(arguments.checkpoint, device, half=False)
    decoder.model.set_attn_implementation("eager")
    items = generate(arguments.n, 31, "seen")
    scores = measure(decoder, full_windows(items))
    heads = best_heads(scores)
    print(json.dumps({"heads": heads, "scores": scores.tolist()}))  # noqa: T201
    if arguments.dry_run:
        return
    path = arguments.checkpoint / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["alignment_heads"] = heads
    text = re.sub(
        r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", json.dumps(config, indent=2, sort_keys=True)
    )
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
