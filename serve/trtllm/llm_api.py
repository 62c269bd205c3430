"""TensorRT-LLM 1.3 and later: its LLM API, in a process of its own, as an executor.

Those releases have no engines: their PyTorch backend runs the Hugging Face checkpoint that the
engine folder holds, in FP16. Written to NVIDIA's guide docs/source/models/encoder-decoder.md and to
tensorrt_llm/_torch/models/modeling_whisper.py. The library takes samples and makes the log-mel
itself; its prompt is text that must begin at start of transcript, so there is no previous text; it
finds no language and keeps no rules for timestamps; the suppress lists it applies by itself.

It wants another numpy than tritonserver's Python backend, so `serve.trtllm.worker` runs it, with
the interpreter that `runtime.tensorrt_llm.python` names, at the other end of a connection. Messages
are JSON. There go: first the settings; then requests, each with its samples as bytes after it
(float32), and cancels; at the end one that is empty. There come: first `ready` or `refused`; then
`ExecutorResponse`s by their fields, and `failed` if the library can do no more.
"""

import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
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
    take_all,
)

logger = logging.getLogger("earshot")

START_TIMEOUT_S = 600.0  # until the library has loaded the checkpoint
_STDERR = 2  # its number
_STATUS_S = 5.0  # from a connection's end to the process's
_ROOT = Path(__file__).resolve().parents[2]
# The folder comes last, so that nothing in it stands before what the environment has.
_BEGIN = "import sys; sys.path.append({root!r}); from serve.trtllm import worker; worker.run({fd})"
# What this environment would lead another interpreter to, and where the server keeps what it was.
_LIBRARIES, _LIBRARIES_BEFORE = "LD_LIBRARY_PATH", "EARSHOT_LD_LIBRARY_PATH"


def open_llm_api(engine: Engine, config: RuntimeConfig) -> TensorRTLLMRuntime:
    """Start the LLM API on an engine's checkpoint.

    Raises:
        UnavailableError: the interpreter, the library or the GPU is missing, or does not start.
        ConfigError: the configuration asks for what the LLM API cannot do.
        EngineError: the engine's tokenizer cannot be read.
    """
    check_config(config)
    return TensorRTLLMRuntime(engine, LlmApiExecutor(engine, config))


def check_config(config: RuntimeConfig) -> None:
    """Refuse settings that the LLM API cannot have.

    Raises:
        ConfigError: names the key and what to do.
    """
    if not config.device.startswith("cuda"):
        raise ConfigError(
            f"runtime.device = {config.device!r}, but TensorRT-LLM needs an NVIDIA GPU; expected "
            '"cuda" or "cuda:N"'
        )


def spawn(config: RuntimeConfig, connection: Connection) -> "subprocess.Popen[bytes]":
    """Start the process that has the library, at its end of the connection.

    Raises:
        UnavailableError: the interpreter cannot be started.
    """
    python = config.tensorrt_llm.python or sys.executable
    environment = dict(os.environ)
    environment[_LIBRARIES] = environment.get(_LIBRARIES_BEFORE, environment.get(_LIBRARIES, ""))
    if (gpu := visible_gpu(config.device)) is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    begin = _BEGIN.format(root=str(_ROOT), fd=connection.fileno())
    try:
        return subprocess.Popen(
            [python, "-P", "-c", begin],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # what it says is no transcript
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
        engine: one whose manifest names the runtime "tensorrt_llm_api".
        config: one that passed `check_config`.
        stop_s: how long the library may take to shut down.

    Raises:
        UnavailableError: the process or the library does not start; the message is its own.
        EngineError: the engine's tokenizer cannot be read.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig, stop_s: float = 20.0) -> None:
        facts, dims = engine.manifest.tokenizer, engine.manifest.dims
        tokenizer = Tokenizer.open(engine)
        special = (facts.sot, facts.no_timestamps, facts.transcribe, facts.translate)
        self._names = {
            token: tokenizer.special_name(token)
            for token in (*special, *facts.languages.values())
            if token is not None
        }
        width = config.tensorrt_llm.beam_width
        self.lengths = SequenceLimits(
            max_prompt_tokens=dims.n_text_ctx - 1, max_seq_len=dims.n_text_ctx
        )
        self.capabilities = Capabilities(
            runtime="tensorrt_llm_api",
            timestamps=False,
            # One random generator serves all requests of a batch, or, since August 2026, the first
            # of them has its seed and the others do not: a seed would not repeat an answer.
            sampling=False,
            detect_language=False,
            no_speech_prob=False,
            streaming=width == 1,
            beam_width=width,
            max_windows=config.slots,
            takes="samples",
            previous_text=False,
            beam_sizes=(width,),
        )
        self._stop_s = stop_s
        self._ids = itertools.count()
        # None stands for a failure to look at.
        self._responses: queue.SimpleQueue[ExecutorResponse | None] = queue.SimpleQueue()
        self._failure = ""
        # Each the parts of a message; they wait here, because who sends must not wait.
        self._outbox: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = spawn(config, theirs)
        try:
            self.version = self._begin(start_settings(engine, config))
        except BaseException:  # Ctrl-C as well
            self._kill()
            self._connection.close()
            raise
        self._reader = threading.Thread(target=self._read, name="earshot-llm-api", daemon=True)
        self._writer = threading.Thread(target=self._write, name="earshot-llm-api", daemon=True)
        self._reader.start()
        self._writer.start()

    def _begin(self, settings: Mapping[str, Any]) -> str:
        """Have the library started; return its version."""
        try:
            self._connection.send_bytes(_to_json(settings))
            if not self._connection.poll(START_TIMEOUT_S):
                raise UnavailableError(
                    f"TensorRT-LLM did not start within {START_TIMEOUT_S:g} s; its log says what "
                    "it was at"
                )
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise UnavailableError(f"{self._end_of_process()}, before it was ready") from error
        if "refused" in answer:
            raise UnavailableError(answer["refused"])
        return str(answer["ready"])

    def _end_of_process(self) -> str:
        """Say how the process ended, whose end of the connection is gone."""
        status: Any = "unknown"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_STATUS_S)
        return f"the process of TensorRT-LLM ended with status {status}; its log says why"

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it
            self._process.wait(_STATUS_S)

    # ---------------------------------------------------------------- called by the device thread

    def enqueue(self, request: ExecutorRequest) -> int:
        """Hand over a request; see `Executor.enqueue`."""
        self._check()
        request_id = next(self._ids)
        head = {
            "id": request_id,
            "prompt": "".join(self._names[token] for token in request.prompt),
            "max_tokens": request.max_tokens,
            "beam_size": request.beam_size,
        }
        self._outbox.put([_to_json(head), request.features.numpy().tobytes()])
        return request_id

    def await_responses(self, timeout_s: float) -> list[ExecutorResponse]:
        """Wait for responses; see `Executor.await_responses`."""
        responses = take_all(self._responses, timeout_s)
        self._check()
        return [response for response in responses if response is not None]

    def cancel(self, request_id: int) -> None:
        """Abort a request; see `Executor.cancel`."""
        self._outbox.put([_to_json({"cancel": request_id})])

    def steps(self) -> tuple[int, int, float]:
        """Return zeros: the API tells of its steps only by waiting for them.

        Asked for where nothing is under way, too, and then finds out that the process is gone.
        """
        if not self._connection.closed:
            self._check()
        return 0, 0, 0.0

    def close(self) -> None:
        """Abort what runs and end the process; see `Executor.close`."""
        if self._connection.closed:
            return
        self._outbox.put([_to_json({})])
        self._outbox.put(None)
        try:
            self._process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            logger.error("TensorRT-LLM did not shut down within %g s and is killed", self._stop_s)
            self._kill()
        for thread in (self._reader, self._writer):
            thread.join(_STATUS_S)
        self._connection.close()

    def _check(self) -> None:
        if self._failure:
            raise DeviceError(f"TensorRT-LLM failed: {self._failure}")

    # ---------------------------------------------------------------- the connection's threads

    def _read(self) -> None:
        try:
            while True:
                self._take(json.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            self._fail(self._end_of_process())

    def _take(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._fail(message["failed"])
        else:
            tokens = tuple(message.pop("tokens", ()))
            self._responses.put(ExecutorResponse(tokens=tokens, **message))

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._responses.put(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the other side is gone, as the reader finds out
            while (parts := self._outbox.get()) is not None:
                for part in parts:
                    self._connection.send_bytes(part)


def start_settings(engine: Engine, config: RuntimeConfig) -> dict[str, Any]:
    """Make the first message: the settings that the library is started with."""
    own = config.tensorrt_llm
    return {
        "model": str((engine.path / CHECKPOINT_FOLDER).resolve()),
        "slots": config.slots,
        "beam_width": own.beam_width,
        "streaming": own.beam_width == 1,
        "length_penalty": LENGTH_PENALTY,
        "sample_rate": SAMPLE_RATE,
        "window_tokens": engine.manifest.dims.n_audio_ctx,
        "encoder_batch": config.encoder_batch,
        "cuda_graph": config.cuda_graph,
        "kv_cache_fraction": own.kv_cache_fraction,
        "cross_kv_fraction": CROSS_KV_FRACTION,
    }


def _to_json(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode()
