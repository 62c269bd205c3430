"""Run a checkpoint with the LLM API of TensorRT-LLM 1.3 and later, in a separate process.

These releases have no engines. Their PyTorch backend runs the Hugging Face checkpoint in the engine
folder, in BF16. This module follows NVIDIA's guide docs/source/models/encoder-decoder.md and
tensorrt_llm/_torch/models/modeling_whisper.py. The library computes the log-mel from samples. It
applies the suppress lists, but no timestamp rules, and it does not detect the language. Its prompt
must begin at start of transcript, so there is no previous text.

The library needs another numpy than tritonserver's Python backend. `serve.trtllm.worker` therefore
runs it with the interpreter `runtime.tensorrt_llm.python`, at the other end of a connection.
Messages are JSON, because a pickle could run code of the other side:

- To the worker: the settings; then requests, each followed by its samples as float32 bytes, and
  cancellations; an empty message ends it.
- From the worker: `ready` or `refused`; then the fields of `ExecutorResponse`s; `failed` if the
  library has stopped working.
"""

import functools
import itertools
import json
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError, UnavailableError
from serve.runtime.child import RuntimeProcess, start_python
from serve.runtime.protocol import Capabilities
from serve.speech.features import SAMPLE_RATE
from serve.speech.tokenizer import Tokenizer
from serve.trtllm.limits import CHECKPOINT_FOLDER, CROSS_KV_FRACTION, SequenceLimits, visible_gpu
from serve.trtllm.runtime import (
    LENGTH_PENALTY,
    ExecutorRequest,
    ExecutorResponse,
    TensorRTLLMRuntime,
)

START_TIMEOUT_S = 600.0  # for the library to load the checkpoint
_ROOT = Path(__file__).resolve().parents[2]
# The folder is last in the path, so that the environment's own packages win.
_BOOTSTRAP = (
    "import sys; sys.path.append({root!r}); from serve.trtllm import worker; worker.run({fd})"
)


def open_llm_api(engine: Engine, config: RuntimeConfig) -> TensorRTLLMRuntime:
    """Start the LLM API on an engine's checkpoint.

    Raises:
        UnavailableError: the interpreter, the library or the GPU is missing, or does not start.
        ConfigError: the LLM API does not support the configuration.
        EngineError: the engine's tokenizer cannot be read.
    """
    if not config.device.startswith("cuda"):
        raise ConfigError(
            f"runtime.device = {config.device!r}, but TensorRT-LLM needs an NVIDIA GPU; expected "
            '"cuda" or "cuda:N"'
        )
    return TensorRTLLMRuntime(engine, LlmApiExecutor(engine, config))


def spawn(config: RuntimeConfig, connection: Connection) -> "subprocess.Popen[bytes]":
    """Start the process that runs the library at the other end of a connection.

    Raises:
        UnavailableError: the interpreter cannot be started.
    """
    python = config.tensorrt_llm.python or sys.executable
    gpu = visible_gpu(config.device)
    environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    code = _BOOTSTRAP.format(root=str(_ROOT), fd=connection.fileno())
    try:
        return start_python(python, code, (connection.fileno(),), **environment)
    except OSError as error:
        raise UnavailableError(
            f"runtime.tensorrt_llm.python = {config.tensorrt_llm.python!r} cannot be started: "
            f"{error.strerror}; expected the python of an environment that has TensorRT-LLM"
        ) from error


class LlmApiExecutor:
    """`tensorrt_llm.llmapi.LLM` as a `serve.trtllm.runtime.Executor`.

    Args:
        engine: an engine with the runtime "tensorrt_llm_api" in its manifest.
        config: a config with a GPU.
        stop_s: seconds that the library may take to shut down.

    Raises:
        UnavailableError: the process or the library does not start; the message has its reason.
        EngineError: the engine's tokenizer cannot be read.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig, stop_s: float = 20.0) -> None:
        facts, context = engine.manifest.tokenizer, engine.manifest.dims.n_text_ctx
        tokenizer = Tokenizer(engine)
        special = (facts.sot, facts.no_timestamps, facts.transcribe, facts.translate)
        self._token_texts = {
            token: tokenizer.special_name(token)
            for token in (*special, *facts.languages.values())
            if token is not None
        }
        width = config.tensorrt_llm.beam_width
        self.lengths = SequenceLimits(max_prompt_tokens=context - 1, max_seq_len=context)
        self.capabilities = Capabilities(
            runtime="tensorrt_llm_api",
            timestamps=False,
            # All requests of a batch share one random generator. Since August 2026 it has the seed
            # of the first request. A seed would therefore not repeat an answer.
            sampling=False,
            detect_language=False,
            streaming=width == 1,
            beam_width=width,
            max_windows=config.slots,
            input_kind="samples",
            previous_text=False,
            beam_sizes=(width,),
        )
        self._ids = itertools.count()
        self._received: list[ExecutorResponse] = []
        settings = json.dumps(start_settings(engine, config)).encode()
        start = functools.partial(spawn, config)
        self._process = RuntimeProcess("TensorRT-LLM", start, settings, START_TIMEOUT_S, stop_s)
        answer = json.loads(self._process.answer)
        if "refused" in answer:
            self._process.kill()
            raise UnavailableError(answer["refused"])
        self.version = str(answer["ready"])

    def enqueue(self, request: ExecutorRequest) -> int:
        self._process.check()
        request_id = next(self._ids)
        message = {
            "id": request_id,
            "prompt": "".join(self._token_texts[token] for token in request.prompt),
            "max_tokens": request.max_tokens,
            "beam_size": request.beam_size,
        }
        self._process.send(json.dumps(message).encode(), request.features.numpy().tobytes())
        return request_id

    def await_responses(self, timeout_s: float) -> list[ExecutorResponse]:
        self._receive(0.0 if self._received else timeout_s)
        responses, self._received = self._received, []
        return responses

    def cancel(self, request_id: int) -> None:
        self._process.send(json.dumps({"cancel": request_id}).encode())

    def steps(self) -> tuple[int, int, float]:
        """Return zeros, since the API reports its steps only to a blocking call.

        The runtime calls this without requests too, and then notices a lost process.
        """
        if not self._process.closed:
            self._receive(0.0)
        return 0, 0, 0.0

    def close(self) -> None:
        self._process.close()

    def _receive(self, timeout_s: float) -> None:
        """Receive every response that has arrived; wait at most `timeout_s` for the first one.

        Raises:
            DeviceError: the library or its process has failed.
        """
        for text in self._process.receive(timeout_s):
            message = json.loads(text)
            if "failed" in message:
                self._process.fail(message["failed"])
            tokens = tuple(message.pop("tokens", ()))
            self._received.append(ExecutorResponse(tokens=tokens, **message))


def start_settings(engine: Engine, config: RuntimeConfig) -> dict[str, Any]:
    """Make the first message, the settings of the library."""
    trtllm = config.tensorrt_llm
    return {
        "model": str((engine.path / CHECKPOINT_FOLDER).resolve()),
        "slots": config.slots,
        "beam_width": trtllm.beam_width,
        "length_penalty": LENGTH_PENALTY,
        "sample_rate": SAMPLE_RATE,
        "window_tokens": engine.manifest.dims.n_audio_ctx,
        "encoder_batch": config.encoder_batch,
        "cuda_graph": config.cuda_graph,
        "dtype": "float32" if config.compute_type == "float32" else "bfloat16",
        "kv_cache_fraction": trtllm.kv_cache_fraction,
        "cross_kv_fraction": CROSS_KV_FRACTION,
    }
