"""The random checkpoint that peers are measured with: nothing suppressed, with a processor."""

from pathlib import Path

from eval.random_whisper.checkpoint import (
    generation_config,
    random_weights,
    write_checkpoint,
    write_json,
    write_processor,
)
from eval.random_whisper.shapes import END, Shape, special_ids

SPREAD = 0.02


def write_peer_checkpoint(folder: Path, shape: Shape) -> None:
    """Write everything that vLLM, CTranslate2's converter and transformers read."""
    write_checkpoint(folder, shape, random_weights(shape, spread=SPREAD))
    write_processor(folder, shape)
    free: dict[str, list[int]] = {"suppress_tokens": [], "begin_suppress_tokens": []}
    pad = {"pad_token_id": special_ids(shape)[END]}
    write_json(folder / "generation_config.json", {**generation_config(shape), **free, **pad})
