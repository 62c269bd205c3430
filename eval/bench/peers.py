"""Peers on the same GPU with the same forced lengths, each in a separate process.

A peer frees its memory when its process ends, and a crash costs only its own rows. faster-whisper
is measured through CTranslate2, which computes everything but log-mels and text: faster-whisper
itself cannot force the length of a text. vLLM computes log-mels one by one on one CPU thread, which
can limit its throughput. So it is measured a second time with log-mels on the GPU.
"""

import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.bench.table import Measurement, measure_latency, refused
from eval.bench.workloads import (
    REQUEST_S,
    REQUEST_TOKENS,
    THROUGHPUT_TOKENS,
    measure_sustained,
    mlperf_lengths,
)
from eval.processes import ChildProcess, Send
from eval.random_whisper import END, Shape, prompt_ids, special_ids, write_peer_checkpoint
from eval.record import Say, missing_packages
from serve.contract.errors import EarshotError
from serve.speech.features import SAMPLE_RATE, WINDOW_S, WINDOW_SAMPLES

Decode = Callable[[Sequence[int]], list[int]]
"""Decodes one window of 30 s for each length in tokens; returns the number of tokens that each got,
once all are on the host."""

REQUESTS = 30


def seconds_of(decode: Decode, lengths: Sequence[int]) -> float:
    """Time one call.

    Raises:
        EarshotError: a window has another length, so the figure would mean nothing.
    """
    began = time.perf_counter()
    decoded = decode(lengths)
    wall_s = time.perf_counter() - began
    if list(decoded) != list(lengths):
        raise EarshotError(
            f"forced {len(lengths)} windows to {sorted(set(lengths))[:8]} tokens, got "
            f"{sorted(set(decoded))[:8]} for {len(decoded)}; this version of the peer does not "
            "keep forced lengths"
        )
    return wall_s


def latency(system: str, decode: Decode, note: str) -> Measurement:
    """Measure one window at a time; `decode` makes its 10 s of sound itself."""
    detail = f"10 s of sound in 30 s, {REQUEST_TOKENS} tokens; {note}"
    send = functools.partial(seconds_of, decode, [REQUEST_TOKENS])
    return measure_latency(system, send, REQUESTS, None, detail)


def throughput(
    system: str, decode: Decode, in_flight: int, seconds: float, note: str
) -> Measurement:
    """Measure throughput: one call decodes all windows, which are enough for `seconds`."""
    run = functools.partial(seconds_of, decode)
    _, figures = measure_sustained(run, itertools.repeat(THROUGHPUT_TOKENS), in_flight, seconds)
    rtfx = figures["windows_per_s"] * WINDOW_S
    detail = f"30 s of sound, {THROUGHPUT_TOKENS} tokens; {note}"
    return Measurement("throughput", system, rtfx, "RTFx", None, detail, figures)


def mlperf(system: str, decode: Decode, in_flight: int, seconds: float, note: str) -> Measurement:
    """Measure as `throughput`, with lengths as in MLPerf's set."""
    run = functools.partial(seconds_of, decode)
    _, figures = measure_sustained(run, mlperf_lengths(), in_flight, seconds)
    rate, detail = figures["windows_per_s"], f"windows queued at the start; {note}"
    return Measurement("MLPerf-shaped", system, rate, "samples/s", None, detail, figures)


# ---------------------------------------------------------------- CTranslate2


_BATCH = 64
_COMPUTE_TYPES = {"cuda": ("float16", "int8_float16"), "cpu": ("float32", "int8")}


def measure_ctranslate2(
    shape: Shape, device: str, seconds: float, say: Say
) -> Iterator[Measurement]:
    """Measure, for each compute type, one request, then throughput in batches."""
    import ctranslate2  # noqa: PLC0415 - only a peer
    from ctranslate2.converters import TransformersConverter  # noqa: PLC0415 - only a peer

    with tempfile.TemporaryDirectory(prefix="earshot-ctranslate2-") as folder:
        source, converted = Path(folder) / "checkpoint", Path(folder) / "converted"
        say(f"CTranslate2 {ctranslate2.__version__}: converting random weights")
        write_peer_checkpoint(source, shape)
        converter = TransformersConverter(str(source), load_as_float16=True)
        converter.convert(str(converted), quantization="float16")
        kind, _, index = device.partition(":")
        for compute_type in _COMPUTE_TYPES[kind]:
            model = ctranslate2.models.Whisper(
                str(converted), device=kind, device_index=int(index or 0), compute_type=compute_type
            )
            system = f"CTranslate2 {compute_type}"
            say(system)
            decode = _ctranslate2_decoder(model, shape, device)
            yield latency(system, decode, "log-mel at hand on the device, not timed")
            note = f"batches of {_BATCH}; log-mel at hand on the device, not timed"
            yield throughput(system, decode, _BATCH, seconds, note)
            del model, decode  # frees its memory before the next is loaded


def _ctranslate2_decoder(model: Any, shape: Shape, device: str) -> Decode:
    """Return greedy decoding of noise windows of one length, in batches."""
    import ctranslate2  # noqa: PLC0415 - only a peer

    prompt, end = prompt_ids(shape), special_ids(shape)[END]
    noise: Any = np.random.default_rng(0).standard_normal((_BATCH, shape.n_mels, 3000), np.float32)
    if device != "cpu":  # CTranslate2 takes tensors of the GPU, and arrays of the host
        noise = torch.from_numpy(noise).to(device)
        torch.cuda.synchronize(device)  # it computes on its own stream

    def decode(lengths: Sequence[int]) -> list[int]:
        (tokens,), decoded = set(lengths), list[int]()
        while (count := min(_BATCH, len(lengths) - len(decoded))) > 0:
            results = model.generate(
                ctranslate2.StorageView.from_array(noise[:count]),
                [prompt] * count,
                beam_size=1,
                max_length=2 * tokens,  # half of it may be new
                suppress_tokens=[end],
                suppress_blank=False,
            )
            decoded += [len(result.sequences_ids[0]) for result in results]
        return decoded

    return decode


# ---------------------------------------------------------------- vLLM


_IN_FLIGHT = 256
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would compile kernels, and greedy decoding needs none
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit threads
}
_SETTINGS: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 448,
    "max_num_seqs": _IN_FLIGHT,
    "max_num_batched_tokens": 32_000,  # encodes up to 21 windows together
    "gpu_memory_utilization": 0.85,
    "limit_mm_per_prompt": {"audio": 1},
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0,
}
_LOG_MELS = {"CPU": {}, "GPU": {"device": "cuda"}}  # where -> options of the feature extractor


def measure_vllm(shape: Shape, device: str, seconds: float, say: Say) -> Iterator[Measurement]:
    """Measure one request, throughput and MLPerf-shaped load, with log-mels on CPU and GPU."""
    os.environ.update(ENVIRONMENT)
    if index := device.partition(":")[2]:  # leaves only one of the visible GPUs
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)] if visible else index
    import vllm  # noqa: PLC0415 - only a peer, and reads the environment

    with tempfile.TemporaryDirectory(prefix="earshot-vllm-") as folder:
        write_peer_checkpoint(Path(folder), shape)
        say(f"vLLM {vllm.__version__}: starting, which takes a minute or two")
        model = vllm.LLM(model=folder, **_SETTINGS)
        for where, options in _LOG_MELS.items():
            system, note = f"vLLM fp16, log-mel on {where}", "log-mel timed"
            say(system)
            request = _decoder(model, shape, options, REQUEST_S)
            yield latency(system, request, note)
            decode = _decoder(model, shape, options, WINDOW_S)
            yield throughput(system, decode, _IN_FLIGHT, seconds, note)
            yield mlperf(system, decode, _IN_FLIGHT, seconds, note)


def _decoder(model: Any, shape: Shape, options: dict[str, str], seconds: float) -> Decode:
    """Return greedy decoding of noise; each window is another piece, so no cache knows it."""
    import vllm  # noqa: PLC0415 - only a peer

    length, pieces = round(seconds * SAMPLE_RATE), 16 * WINDOW_SAMPLES
    noise = np.random.default_rng(0).standard_normal(length + pieces, np.float32) * 0.1
    prompt = {"prompt_token_ids": prompt_ids(shape)}
    starts = (i * 7919 % pieces for i in itertools.count())

    def decode(lengths: Sequence[int]) -> list[int]:
        sounds = [noise[start : start + length] for start in itertools.islice(starts, len(lengths))]
        prompts = [
            {
                "encoder_prompt": {
                    "prompt": "",
                    "multi_modal_data": {"audio": (sound, SAMPLE_RATE)},
                },
                "decoder_prompt": prompt,
            }
            for sound in sounds
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


# ---------------------------------------------------------------- run


START_S = 900.0  # to convert weights, load and compile
SUSTAINED = 10  # the longest wait for a figure, in multiples of `seconds`
_LOG_LINES = 20  # shown of a child that failed

Measure = Callable[[Shape, str, float, Say], Iterator[Measurement]]
"""Measures a shape on a device, each throughput for some seconds; the last argument receives lines
of progress."""

PEERS: dict[str, tuple[Measure, tuple[str, ...]]] = {
    "faster-whisper": (measure_ctranslate2, ("ctranslate2", "transformers")),
    "vllm": (measure_vllm, ("vllm", "transformers")),
}
"""The measurement of each peer, and the packages that it needs."""


def missing_for(name: str) -> str:
    """Tell which packages a peer lacks; "" if it can be measured."""
    _, packages = PEERS[name]
    if missing := missing_packages(packages):
        lacks = f"the peer {name} needs {', '.join(missing)}"
        return f"{lacks}; install it, or leave the peer out of --peers"
    return ""


def measure_peer(
    name: str, shape: Shape, device: str, seconds: float, say: Say
) -> Iterator[Measurement]:
    """Yield the rows of one installed peer; if it fails, the last row has the reason."""
    measure, _ = PEERS[name]
    arguments = (measure, shape, device, seconds)
    silence_s = START_S + SUSTAINED * seconds
    with ChildProcess(f"the peer {name}", _send_measurements, arguments, log=None) as child:
        try:
            while (message := child.receive(silence_s)) is not None:
                if isinstance(message, Measurement):
                    yield message
                else:
                    say(message)
        except EarshotError as error:
            for line in child.last_lines(_LOG_LINES):
                say(f"{name}: {line}")
            yield refused("throughput", name, "RTFx", error)


def _send_measurements(
    send: Send, measure: Measure, shape: Shape, device: str, seconds: float
) -> None:
    """Measure a peer in its process and send its rows; `measure` sends lines of progress."""
    for measurement in measure(shape, device, seconds, send):
        send(measurement)
