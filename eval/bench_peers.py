"""Peers of the native runtime, measured beside it with the same forced lengths."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from eval.bench_table import Row
from serve.engine import Dims
from serve.features import WINDOW_S

REQUEST_TOKENS, THROUGHPUT_TOKENS = 40, 128


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def hugging_face(dims: Dims, device: str, batch: int, say: Callable[[str], None]) -> Iterator[Row]:
    """Hugging Face generate, FP16, SDPA attention, greedy, features at hand on the device."""
    import transformers  # noqa: PLC0415 - heavy, and only a peer

    config = transformers.WhisperConfig(
        vocab_size=dims.n_vocab, num_mel_bins=dims.n_mels, d_model=dims.n_audio_state,
        encoder_layers=dims.n_audio_layer, decoder_layers=dims.n_text_layer,
        encoder_attention_heads=dims.n_audio_head, decoder_attention_heads=dims.n_text_head,
        encoder_ffn_dim=dims.n_audio_ffn, decoder_ffn_dim=dims.n_text_ffn,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    with torch.device(device):
        model: Any = transformers.WhisperForConditionalGeneration(config)
    model = model.half().eval()
    say(f"transformers {transformers.__version__}: WhisperForConditionalGeneration.generate")

    @torch.inference_mode()
    def generate(windows: int, tokens: int) -> float:
        features = torch.randn(windows, dims.n_mels, 3000, device=device, dtype=torch.float16)
        prompt = torch.tensor([[50258, 50259, 50360]] * windows, device=device)
        _wait(device)
        began = time.perf_counter()
        ids: Any = transformers.GenerationMixin.generate(
            model, features, decoder_input_ids=prompt, do_sample=False,
            min_new_tokens=tokens, max_new_tokens=tokens,
        )  # fmt: skip
        _wait(device)
        assert ids.shape[1] == 3 + tokens
        return time.perf_counter() - began

    generate(1, 4)
    times = [generate(1, REQUEST_TOKENS) for _ in range(10)]
    yield Row("one request", "Hugging Face", 1e3 * statistics.median(times), "ms", None, "n 10")
    generate(batch, 4)
    wall = statistics.median(generate(batch, THROUGHPUT_TOKENS) for _ in range(3))
    yield Row(
        "throughput", "Hugging Face", batch * WINDOW_S / wall, "RTFx", None, f"batches of {batch}"
    )
