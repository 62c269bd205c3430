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

import concurrent.futures
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError, DeviceError, UnavailableError
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

logger = logging.getLogger("earshot")

START_TIMEOUT_S = 600.0  # for the library to load the checkpoint
_STDERR = 2  # file descriptor
_EXIT_TIMEOUT_S = 5.0  # from the end of the connection to the end of the process
_POLL_S = 0.05  # between reads of messages while the process shuts down
_ROOT = Path(__file__).resolve().parents[2]
# The folder is last in the path, so that the environment's own packages win.
_BOOTSTRAP = (
    "import sys; sys.path.append({root!r}); from serve.trtllm import worker; worker.run({fd})"
)
# This process's library path is wrong for another interpreter; the server keeps the original one.
_LIBRARIES, _LIBRARIES_BEFORE = "LD_LIBRARY_PATH", "EARSHOT_LD_LIBRARY_PATH"


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
    environment = dict(os.environ)
    environment[_LIBRARIES] = environment.get(_LIBRARIES_BEFORE, environment.get(_LIBRARIES, ""))
    if (gpu := visible_gpu(config.device)) is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    begin = _BOOTSTRAP.format(root=str(_ROOT), fd=connection.fileno())
    try:
        return subprocess.Popen(
            [python, "-P", "-c", begin],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # stdout is for transcripts
            pass_fds=[connection.fileno()],
        )
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
        self._stop_s = stop_s
        self._ids = itertools.count()
        self._failure = ""
        self._received: list[ExecutorResponse] = []
        # Samples may fill the connection's buffer, and `enqueue` must not block.
        self._sender = concurrent.futures.ThreadPoolExecutor(1, "earshot-llm-api")
        self._connection, worker_end = multiprocessing.Pipe()
        with worker_end:
            self._process = spawn(config, worker_end)
        try:
            self.version = self._start(start_settings(engine, config))
        except BaseException:  # including Ctrl-C
            self._kill()
            self._connection.close()
            raise

    def _start(self, settings: Mapping[str, Any]) -> str:
        """Send the settings, wait until the library has started, and return its version."""
        try:
            self._connection.send_bytes(json.dumps(settings).encode())
            if not self._connection.poll(START_TIMEOUT_S):
                raise UnavailableError(
                    f"TensorRT-LLM did not start within {START_TIMEOUT_S:g} s; see its log"
                )
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise UnavailableError(f"before it was ready, {self._exit_message()}") from error
        if "refused" in answer:
            raise UnavailableError(answer["refused"])
        return str(answer["ready"])

    def _exit_message(self) -> str:
        """Return a message on how the process ended, after its connection was lost."""
        status: Any = "unknown"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_EXIT_TIMEOUT_S)
        return f"the TensorRT-LLM process ended with status {status}; see its log"

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
            self._process.wait(_EXIT_TIMEOUT_S)

    def enqueue(self, request: ExecutorRequest) -> int:
        self._check()
        request_id = next(self._ids)
        message = {
            "id": request_id,
            "prompt": "".join(self._token_texts[token] for token in request.prompt),
            "max_tokens": request.max_tokens,
            "beam_size": request.beam_size,
        }
        self._sender.submit(self._send, message, request.features.numpy().tobytes())
        return request_id

    def await_responses(self, timeout_s: float) -> list[ExecutorResponse]:
        self._receive(timeout_s)
        responses, self._received = self._received, []
        return responses

    def cancel(self, request_id: int) -> None:
        self._sender.submit(self._send, {"cancel": request_id})

    def steps(self) -> tuple[int, int, float]:
        """Return zeros, since the API reports its steps only to a blocking call.

        The runtime calls this without requests too, and then notices a lost process.
        """
        if not self._connection.closed:
            self._receive(0.0)
        return 0, 0, 0.0

    def close(self) -> None:
        if self._connection.closed:
            return
        self._sender.submit(self._send, {})
        deadline_s = time.monotonic() + self._stop_s
        while not self._has_ended():
            if time.monotonic() > deadline_s:
                logger.error("TensorRT-LLM did not shut down within %g s; killing it", self._stop_s)
                self._kill()
                break
            with contextlib.suppress(DeviceError):  # the process waits if its messages are not read
                self._receive(0.0)
        self._sender.shutdown()
        self._connection.close()

    def _has_ended(self) -> bool:
        """Return whether the process ends within `_POLL_S`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLL_S)
            return True
        return False

    def _check(self) -> None:
        if self._failure:
            raise DeviceError(f"TensorRT-LLM failed: {self._failure}")

    def _receive(self, timeout_s: float) -> None:
        """Receive every response that has arrived; wait at most `timeout_s` for the first one.

        Raises:
            DeviceError: the library or its process has failed.
        """
        self._check()
        try:
            while self._connection.poll(0.0 if self._received else timeout_s):
                message = json.loads(self._connection.recv_bytes())
                if "failed" in message:
                    self._failure = message["failed"]
                    break
                tokens = tuple(message.pop("tokens", ()))
                self._received.append(ExecutorResponse(tokens=tokens, **message))
        except (EOFError, OSError):
            self._failure = self._exit_message()
        self._check()

    def _send(self, message: Mapping[str, Any], *samples: bytes) -> None:
        with contextlib.suppress(OSError):  # `_receive` reports a lost connection
            for part in (json.dumps(message).encode(), *samples):
                self._connection.send_bytes(part)


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
