"""The peer vLLM: its offline engine, sound in, tokens out, with everything it would reuse off.

It computes log-mels itself, one window after another on one CPU thread of the process that hands
requests over, and that can bound its throughput; so it is measured a second time with them on the
GPU, which is one argument of its own.
"""

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.bench.peers.forced import Decode, batched, latency, mlperf, queued
from eval.bench.table import Measurement
from eval.bench.workloads import REQUEST_S
from eval.random_whisper.checkpoint import write_peer_checkpoint
from eval.random_whisper.shapes import Shape, prompt_ids
from eval.record import Say
from serve.contract.errors import UnavailableError
from serve.speech.features import SAMPLE_RATE, WINDOW_S, WINDOW_SAMPLES

FEW, MANY = 64, 256
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would compile kernels, and greedy decoding needs none
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit threads
}
SETTINGS: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 448,
    "max_num_seqs": MANY,
    "max_num_batched_tokens": 32_000,  # encodes up to 21 windows together
    "gpu_memory_utilization": 0.85,
    "limit_mm_per_prompt": {"audio": 1},
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0,
}
LOG_MELS = {"CPU": {}, "GPU": {"device": "cuda"}}  # where -> options of the feature extractor


def measure_vllm(shape: Shape, device: str, seconds: float, progress: Say) -> Iterator[Measurement]:
    """Measure one request, throughput with 64 and 256 windows, MLPerf-shaped; with both log-mels.

    Raises:
        UnavailableError: the device is not a GPU.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        raise UnavailableError(f"vLLM's wheel runs on GPUs only, and runtime.device is {device!r}")
    os.environ.update(ENVIRONMENT)
    if index:
        os.environ["CUDA_VISIBLE_DEVICES"] = _visible(int(index))
    import vllm  # noqa: PLC0415 - only a peer, and reads the environment

    with tempfile.TemporaryDirectory(prefix="earshot-vllm-") as folder:
        write_peer_checkpoint(Path(folder), shape)
        progress(f"vLLM {vllm.__version__}: starting, which takes a minute or two")
        model = vllm.LLM(model=folder, **SETTINGS)
        for where, options in LOG_MELS.items():
            system, note = f"vLLM fp16, log-mel on {where}", "log-mel timed"
            progress(system)
            request = _decoder(model, shape, options, REQUEST_S)
            yield latency(system, request, note)
            decode = _decoder(model, shape, options, WINDOW_S)
            yield batched(system, decode, FEW, seconds, note)
            yield queued(system, decode, MANY, seconds, note)
            yield mlperf(system, decode, MANY, seconds, note)


def _visible(index: int) -> str:
    """Return CUDA_VISIBLE_DEVICES with which that one of our GPUs is the only one."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ours.split(",")[index] if ours else str(index)


def _decoder(model: Any, shape: Shape, options: dict[str, str], seconds: float) -> Decode:
    """Return greedy decoding of windows of noise, each another piece, so that none is known."""
    import vllm  # noqa: PLC0415 - only a peer

    length, pieces = round(seconds * SAMPLE_RATE), 16 * WINDOW_SAMPLES
    noise = np.random.default_rng(0).standard_normal(length + pieces, np.float32) * 0.1
    prompt = {"prompt_token_ids": prompt_ids(shape)}
    starts = (i * 7919 % pieces for i in itertools.count())

    def decode(lengths: Sequence[int]) -> list[int]:
        sounds = [noise[start : start + length] for start in itertools.islice(starts, len(lengths))]
        prompts = [
            {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (s, SAMPLE_RATE)}},
                "decoder_prompt": prompt,
            }
            for s in sounds
        ]
        limits = [
            vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        results = model.generate(
            prompts, limits, use_tqdm=False, mm_processor_kwargs=options or None
        )
        return [len(result.outputs[0].token_ids) for result in results]

    return decode
