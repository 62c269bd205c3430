"""The peer faster-whisper: CTranslate2, which does all of its computing but log-mels and text.

faster-whisper itself stops where the model says so; only the core below it can be told a length.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.bench.peers.forced import Decode, batched, latency
from eval.bench.table import Measurement
from eval.random_whisper.checkpoint import write_peer_checkpoint
from eval.random_whisper.shapes import END, Shape, prompt_ids, special_ids
from eval.record import Say

BATCH = 64
COMPUTE_TYPES = {"cuda": ("float16", "int8_float16"), "cpu": ("float32", "int8")}
NOTE = "log-mel at hand on the device, not timed"


def measure_ctranslate2(
    shape: Shape, device: str, seconds: float, progress: Say, batch: int = BATCH
) -> Iterator[Measurement]:
    """Measure, for each compute type, one request, then throughput in batches."""
    import ctranslate2  # noqa: PLC0415 - only a peer
    from ctranslate2.converters import TransformersConverter  # noqa: PLC0415 - only a peer

    with tempfile.TemporaryDirectory(prefix="earshot-ctranslate2-") as folder:
        source, converted = Path(folder) / "checkpoint", Path(folder) / "converted"
        progress(f"CTranslate2 {ctranslate2.__version__}: converting random weights")
        write_peer_checkpoint(source, shape)
        converter = TransformersConverter(str(source), load_as_float16=True)
        converter.convert(str(converted), quantization="float16")
        kind, _, index = device.partition(":")
        for compute_type in COMPUTE_TYPES[kind]:
            model = ctranslate2.models.Whisper(
                str(converted), device=kind, device_index=int(index or 0), compute_type=compute_type
            )
            system = f"CTranslate2 {compute_type}"
            progress(system)
            decode = _decoder(model, shape, device, batch)
            yield latency(system, decode, NOTE)
            yield batched(system, decode, batch, seconds, NOTE)
            del model, decode  # frees its memory before the next is loaded


def _decoder(model: Any, shape: Shape, device: str, batch: int) -> Decode:
    """Return greedy decoding of at most `batch` windows of noise, all to the same length."""
    import ctranslate2  # noqa: PLC0415 - only a peer

    prompt, end = prompt_ids(shape), special_ids(shape)[END]
    noise: Any = np.random.default_rng(0).standard_normal((batch, shape.n_mels, 3000), np.float32)
    if device != "cpu":  # CTranslate2 takes tensors of the GPU, and arrays of the host
        noise = torch.from_numpy(noise).to(device)
        torch.cuda.synchronize(device)  # it computes on a stream of its own

    def decode(lengths: Sequence[int]) -> list[int]:
        count, (tokens,) = len(lengths), set(lengths)
        results = model.generate(
            ctranslate2.StorageView.from_array(noise[:count]),
            [prompt] * count,
            beam_size=1,
            max_length=2 * tokens,  # half of it may be new
            suppress_tokens=[end],
            suppress_blank=False,
        )
        return [len(result.sequences_ids[0]) for result in results]

    return decode
