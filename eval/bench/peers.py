"""Peers on the same GPU, told the same lengths; each in a process of its own.

So its memory is free afterwards, and its crash costs only its own rows. faster-whisper is measured
by CTranslate2, which does all of its computing but log-mels and text, because faster-whisper itself
stops where the model says so. vLLM computes log-mels one after another on one CPU thread, which can
bound its throughput; so it is measured a second time with them on the GPU.
"""

import dataclasses
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.bench.table import Measurement, refused
from eval.bench.workloads import REQUEST_S, REQUEST_TOKENS, THROUGHPUT_TOKENS, mlperf_lengths
from eval.processes import ChildProcess, Send
from eval.random_whisper import END, Shape, prompt_ids, special_ids, write_peer_checkpoint
from eval.record import Say, missing_packages
from serve.contract.errors import EarshotError, UnavailableError
from serve.speech.features import SAMPLE_RATE, WINDOW_S, WINDOW_SAMPLES

Decode = Callable[[Sequence[int]], list[int]]
"""Decodes one window of 30 s for each length in tokens; returns, when all are done and on the host,
how many tokens each got."""

REQUESTS = 30


def seconds_of(decode: Decode, lengths: Sequence[int]) -> float:
    """Time one call.

    Raises:
        EarshotError: a length was not reached or exceeded, so the figure would mean nothing.
    """
    began = time.perf_counter()
    decoded = decode(lengths)
    wall_s = time.perf_counter() - began
    if list(decoded) != list(lengths):
        raise EarshotError(
            f"forced {len(lengths)} windows to {_few(lengths)} tokens, got {_few(decoded)} for "
            f"{len(decoded)}; this version of the peer does not keep forced lengths"
        )
    return wall_s


def _few(lengths: Sequence[int]) -> str:
    return ", ".join(str(length) for length in sorted(set(lengths))[:8])


def latency(system: str, decode: Decode, note: str) -> Measurement:
    """Measure one at a time; `decode` is given one length and makes the 10 s of sound itself."""
    for _ in range(3):
        seconds_of(decode, [REQUEST_TOKENS])
    times = sorted(1e3 * seconds_of(decode, [REQUEST_TOKENS]) for _ in range(REQUESTS))
    p50 = statistics.median(times)
    return Measurement(
        "latency",
        system,
        p50,
        "ms",
        None,
        f"p50 of {REQUESTS}, worst {times[-1]:.1f}; 10 s of sound in 30 s, {REQUEST_TOKENS} "
        f"tokens; {note}",
        {"p50_ms": p50, "worst_ms": times[-1], "requests": REQUESTS},
    )


def batched(system: str, decode: Decode, batch: int, seconds: float, note: str) -> Measurement:
    """Measure the throughput of batch after batch, each waited for, for at least `seconds`."""
    lengths = [THROUGHPUT_TOKENS] * batch
    seconds_of(decode, lengths)
    count, wall_s = 0, 0.0
    while wall_s < seconds or not count:
        wall_s += seconds_of(decode, lengths)
        count += 1
    return _throughput(system, count * batch, wall_s, f"batches of {batch}; {note}")


def queued(system: str, decode: Decode, in_flight: int, seconds: float, note: str) -> Measurement:
    """Measure throughput with all windows handed over at once, enough of them for `seconds`."""
    lengths, wall_s = offline(decode, itertools.repeat(THROUGHPUT_TOKENS), in_flight, seconds)
    return _throughput(system, len(lengths), wall_s, f"{in_flight} in flight, rest queued; {note}")


def mlperf(system: str, decode: Decode, in_flight: int, seconds: float, note: str) -> Measurement:
    """Measure as `queued`, with lengths as in MLPerf's set."""
    lengths, wall_s = offline(decode, mlperf_lengths(), in_flight, seconds)
    return Measurement(
        "MLPerf-shaped",
        system,
        len(lengths) / wall_s,
        "samples/s",
        None,
        f"{len(lengths)} windows queued at the start, {statistics.mean(lengths):.1f} tokens on "
        f"average, {in_flight} in flight, {wall_s:.1f} s; {note}",
        {"windows": len(lengths), "seconds": wall_s},
    )


def offline(
    decode: Decode, endless: Iterator[int], in_flight: int, seconds: float
) -> tuple[list[int], float]:
    """Time a call with so many windows that it lasts `seconds`; returns their lengths, too.

    The call before it, with `in_flight` windows, warms up and tells how many that may be.
    """
    lengths = list(itertools.islice(endless, in_flight))
    wall_s = seconds_of(decode, lengths)
    while True:
        count = max(2 * in_flight, math.ceil(1.2 * len(lengths) * seconds / wall_s))
        lengths += itertools.islice(endless, max(0, count - len(lengths)))
        wall_s = seconds_of(decode, lengths)
        if wall_s >= seconds:
            return lengths, wall_s


def _throughput(system: str, windows: int, wall_s: float, note: str) -> Measurement:
    return Measurement(
        "throughput",
        system,
        windows * WINDOW_S / wall_s,
        "RTFx",
        None,
        f"30 s of sound, {THROUGHPUT_TOKENS} tokens; {windows} windows in {wall_s:.1f} s, {note}",
        {"windows_per_s": windows / wall_s, "seconds": wall_s},
    )


# ---------------------------------------------------------------- ctranslate2


CTRANSLATE2_BATCH = 64
COMPUTE_TYPES = {"cuda": ("float16", "int8_float16"), "cpu": ("float32", "int8")}
CTRANSLATE2_NOTE = "log-mel at hand on the device, not timed"


def measure_ctranslate2(
    shape: Shape, device: str, seconds: float, progress: Say, batch: int = CTRANSLATE2_BATCH
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
            decode = _ctranslate2_decoder(model, shape, device, batch)
            yield latency(system, decode, CTRANSLATE2_NOTE)
            yield batched(system, decode, batch, seconds, CTRANSLATE2_NOTE)
            del model, decode  # frees its memory before the next is loaded


def _ctranslate2_decoder(model: Any, shape: Shape, device: str, batch: int) -> Decode:
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


# ---------------------------------------------------------------- vllm


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


# ---------------------------------------------------------------- run


START_S = 900.0  # to convert weights, load and compile
SUSTAINED = 10  # a figure is told after at most so many times as long as it is sustained
LOG_LINES = 20  # told of a child that failed

Run = Callable[[Shape, str, float, Say], Iterator[Measurement]]
"""Takes shape, device, how long to sustain a throughput figure, and what gets a line on each
stage."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """The measurement of a peer, and the packages that it needs."""

    run: Run
    packages: tuple[str, ...]  # by import name


PEERS: dict[str, Peer] = {
    "faster-whisper": Peer(measure_ctranslate2, ("ctranslate2", "transformers")),
    "vllm": Peer(measure_vllm, ("vllm", "transformers")),
}


def check_peers(names: Sequence[str]) -> None:
    """Refuse peers that are not installed before anything is measured.

    Raises:
        UnavailableError: a package is missing; the message names it.
    """
    for name in names:
        for package in missing_packages(PEERS[name].packages):
            raise UnavailableError(
                f"the peer {name} needs the package {package}, which is not installed; "
                "install it, or leave the peer out of --peers"
            )


def measure_peer(
    name: str, shape: Shape, device: str, seconds: float, progress: Say
) -> Iterator[Measurement]:
    """Yield the lines of one peer that is installed; where it fails, the last one says why."""
    arguments = (PEERS[name].run, shape, device, seconds)
    silence_s = START_S + SUSTAINED * seconds
    with ChildProcess(f"the peer {name}", _send_measurements, arguments, log=None) as child:
        try:
            while (message := child.receive(silence_s)) is not None:
                if isinstance(message, Measurement):
                    yield message
                else:
                    progress(message)
        except EarshotError as error:
            for line in child.last_lines(LOG_LINES):
                progress(f"{name}: {line}")
            yield refused("throughput", name, "RTFx", error)


def _send_measurements(send: Send, run: Run, shape: Shape, device: str, seconds: float) -> None:
    """Do a peer process's work: send its figures, and its lines of progress as plain text."""
    for measurement in run(shape, device, seconds, send):
        send(measurement)
