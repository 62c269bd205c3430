"""The peer transformers: `generate` in FP16, greedy, with the attention that it picks itself."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eval.bench.peers.forced import batched, latency
from eval.bench.table import Measurement
from eval.measurement import Say
from eval.random_whisper.checkpoint import hugging_face_config
from eval.random_whisper.shapes import Shape, prompt_ids

BATCHES = (32, 64)
SYSTEM = "Hugging Face generate, fp16"
NOTE = "log-mel at hand on the device, not timed"


def measure_hugging_face(
    shape: Shape, device: str, seconds: float, progress: Say, sizes: Sequence[int] = BATCHES
) -> Iterator[Measurement]:
    """Measure one request, then throughput with each batch size."""
    import transformers  # noqa: PLC0415 - heavy, and only a peer

    with torch.device(device):
        model: Any = transformers.WhisperForConditionalGeneration(hugging_face_config(shape))
    model = model.half().eval()
    progress(f"transformers {transformers.__version__}: WhisperForConditionalGeneration.generate")
    windows = max(sizes)
    features = torch.randn(windows, shape.n_mels, 3000, device=device).half()
    prompt = torch.tensor([prompt_ids(shape)] * windows, device=device)

    @torch.inference_mode()
    def decode(lengths: Sequence[int]) -> list[int]:
        count, (tokens,) = len(lengths), set(lengths)
        # Not the model's own generate, which cuts and stitches windows around this one.
        ids: Any = transformers.GenerationMixin.generate(
            model,
            features[:count],
            decoder_input_ids=prompt[:count],
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )
        return [len(row) - prompt.shape[1] for row in ids.tolist()]

    yield latency(SYSTEM, decode, NOTE)
    for batch in sizes:
        yield batched(SYSTEM, decode, batch, seconds, NOTE)
