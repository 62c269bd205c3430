"""Build engines for TensorRT-LLM 1.2: write its checkpoint and run its `trtllm-build` twice.

The flags follow TensorRT-LLM's Whisper example for release 1.2. They also set the lengths and the
encoder's token budget, which limits its batch; the example's defaults are wrong for serving.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import shlex
import shutil
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from build.checkpoint import Checkpoint
from build.config import BuildProduct
from build.trtllm.weights import CONFIG_FILE, write_checkpoint
from build.writer import BuiltEngineFacts, Log, disk_errors
from serve.contract.devices import first_of
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError, EngineError, UnavailableError
from serve.contract.manifest import Dims
from serve.trtllm.limits import ENGINES_FOLDER, EngineLimits, find_gpu, visible_gpu
from serve.trtllm.release import library_version

BUILDER = "trtllm-build"
_ENGINE_FILE = "rank0.engine"
_WORK = "work"  # in the staged folder: the checkpoint and the builder's working directory
_PROMPT_BESIDE_TEXT = 5  # start of previous text, start of transcript, language, task, timestamps
_STOP_S = 10.0  # time that an interrupted builder gets to end by itself


def planned_limits(dims: Dims, config: BuildProduct, version: str, gpu: Any) -> EngineLimits:
    """Return the limits that the engine is compiled for.

    A prompt may have special tokens and n_text_ctx / 2 - 1 tokens of previous text, as in OpenAI's
    `whisper/decoding.py`.
    """
    runtime = config.runtime
    return EngineLimits(
        tensorrt_llm=version,
        gpu=gpu.name,
        compute_capability=f"{gpu.major}.{gpu.minor}",
        max_batch_size=runtime.slots,
        encoder_batch=runtime.encoder_batch,
        max_beam_width=runtime.tensorrt_llm.beam_width,
        max_prompt_tokens=dims.n_text_ctx // 2 - 1 + _PROMPT_BESIDE_TEXT,
        max_seq_len=dims.n_text_ctx,
    )


def flags(dims: Dims, limits: EngineLimits) -> dict[str, dict[str, str | int]]:
    """Return the flags of `trtllm-build` for each half, without the dashes.

    The encoder's lengths and the decoder's `max_encoder_input_len` count mel frames, 3000 per
    window, because the decoder gets the length of the encoder's input. Only `max_num_tokens` counts
    encoder outputs, 1500 per window; its default of 8192 allows a batch of only five windows.
    """
    frames = 2 * dims.n_audio_ctx
    return {
        "encoder": {
            "max_batch_size": limits.max_batch_size,
            "max_input_len": frames,
            "max_seq_len": frames,
            "max_num_tokens": dims.n_audio_ctx * limits.encoder_batch,
            "gemm_plugin": "disable",
            "bert_attention_plugin": "float16",
            "moe_plugin": "disable",
            "remove_input_padding": "enable",
        },
        "decoder": {
            "max_batch_size": limits.max_batch_size,
            "max_beam_width": limits.max_beam_width,
            "max_input_len": limits.max_prompt_tokens,
            "max_seq_len": limits.max_seq_len,
            "max_encoder_input_len": frames,
            "gemm_plugin": "float16",
            "bert_attention_plugin": "float16",
            "gpt_attention_plugin": "float16",
            "moe_plugin": "disable",
            "remove_input_padding": "enable",
            "kv_cache_type": "paged",
        },
    }


def commands_for(dims: Dims, limits: EngineLimits, device: str) -> dict[str, list[str]]:
    """Return the command of each half, with paths relative to the working directory.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES hides the device.
    """
    gpu = visible_gpu(device)
    environment = [] if gpu is None else ["env", f"CUDA_VISIBLE_DEVICES={gpu}"]
    return {
        half: [
            *environment,
            BUILDER,
            *("--checkpoint_dir", f"checkpoint/{half}"),
            *("--output_dir", f"../{ENGINES_FOLDER}/{half}"),
            *(word for name, value in options.items() for word in (f"--{name}", str(value))),
        ]
        for half, options in flags(dims, limits).items()
    }


def check(config: BuildProduct) -> None:
    """Check the limits.

    Raises:
        ConfigError: the encoder's batch exceeds the slots.
    """
    runtime = config.runtime
    if runtime.encoder_batch > runtime.slots:
        raise ConfigError(
            f"runtime.encoder_batch = {runtime.encoder_batch} exceeds runtime.slots = "
            f"{runtime.slots}; TensorRT-LLM compiles the encoder and the decoder for the same "
            "number of windows; lower runtime.encoder_batch"
        )


def fill(folder: Path, checkpoint: Checkpoint, config: BuildProduct, log: Log) -> BuiltEngineFacts:
    """Compile the encoder and the decoder into an engine folder.

    Args:
        folder: the engine folder; it holds the builder's checkpoint until the build is done.
        checkpoint: full-precision tensors.
        config: `runtime` sets the limits. The precision "int8" is TensorRT-LLM's W8A16. Its loader
            quantises the weights, and does not report the quantisation error.
        log: called with each line of the builder's log at once.

    Raises:
        UnavailableError: the library, its builder or the GPU is missing or has a wrong version.
        CheckpointError: a tensor is not finite in float16, or the library cannot run the
            encoder.
        EngineError: the builder or the disk failed.
    """
    device = first_of(config.runtime).device
    precision, dims = config.build.precision, checkpoint.dims
    version, gpu = library_version(), find_gpu(device)
    if precision == "int8" and 10 <= gpu.major < 12:  # trtllm-build checks it late
        raise UnavailableError(
            f"TensorRT-LLM has no INT8 weight-only kernels for {gpu.name} (compute capability "
            f"{gpu.major}.{gpu.minor}); build with PRECISION=fp16"
        )
    if shutil.which(BUILDER) is None:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, but {BUILDER} is not on the PATH; activate its "
            "environment, or use the image of deploy/images/trtllm.Dockerfile"
        )
    limits = planned_limits(dims, config, version, gpu)
    work = folder / _WORK
    with disk_errors(folder):
        (work / "checkpoint").mkdir(parents=True)
        (folder / ENGINES_FOLDER).mkdir()
        write_checkpoint(dims, checkpoint.tensors, precision, work / "checkpoint")
    for half, command in commands_for(dims, limits, device).items():
        log(shlex.join(command))
        _run(half, command, work, log)
    check_built(folder, dims, limits)
    with disk_errors(folder):
        shutil.rmtree(work)
    versions = {"tensorrt_llm": version}
    for library in importlib.metadata.distributions(name="tensorrt"):
        versions["tensorrt"] = library.version
    return BuiltEngineFacts(versions=versions, runtime_options=dataclasses.asdict(limits))


def is_current(engine: Engine, checkpoint: Checkpoint, config: BuildProduct) -> bool:
    """Return whether a build on this machine would give an engine with the same limits.

    Raises:
        UnavailableError: the library or the GPU is missing.
    """
    version, gpu = library_version(), find_gpu(first_of(config.runtime).device)
    planned = planned_limits(checkpoint.dims, config, version, gpu)
    return engine.manifest.runtime_options == dataclasses.asdict(planned)


def _run(half: str, command: list[str], work: Path, log: Log) -> None:
    """Run the builder and log its output line by line; end it if this call is interrupted."""
    with Popen(
        command, cwd=work, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log(line.rstrip())
        except BaseException:  # including Ctrl-C
            process.terminate()
            with contextlib.suppress(TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()
            raise
    if process.returncode != 0:
        raise EngineError(
            f"{BUILDER} failed on the {half} with status {process.returncode}, see its log above; "
            "nothing was changed"
        )


def check_built(folder: Path, dims: Dims, planned: EngineLimits) -> None:
    """Check that the builder kept the planned limits, which it writes to its config.json.

    Raises:
        EngineError: a half is missing, or was built for less.
    """
    for half, options in flags(dims, planned).items():
        path = folder / ENGINES_FOLDER / half / CONFIG_FILE
        try:
            built = json.loads(path.read_text(encoding="utf-8"))["build_config"]
            limits = {key: (built[key], options[key]) for key in options if key.startswith("max_")}
            lower = {key: found for key, found in limits.items() if found[0] < found[1]}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"{BUILDER} wrote no usable build_config to {path}: {error!r}"
            ) from error
        for key, (found, expected) in lower.items():
            raise EngineError(
                f"{BUILDER} built the {half} with {key} = {found}, expected {expected}; lower "
                "runtime.slots or runtime.encoder_batch"
            )
        if not path.with_name(_ENGINE_FILE).is_file():
            raise EngineError(f"{BUILDER} succeeded but wrote no {_ENGINE_FILE} for the {half}")
