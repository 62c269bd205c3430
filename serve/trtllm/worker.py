"""Run TensorRT-LLM's LLM API in a separate process, in an environment that has the library.

`serve.trtllm.llm_api` starts this process and documents the messages of the connection. The
environment needs only the library and its dependencies. This module therefore imports only two
other modules of `serve`, which import little themselves.

The API is asynchronous: an event loop follows every request, and a thread reads the messages.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from serve.contract.errors import EarshotError
from serve.trtllm.release import api_version

EXIT_LIMIT_S = 60
"""Seconds after which the kernel ends this process once its parent is gone."""

_REASONS = {"stop": "eot", "length": "length", "cancelled": "cancelled"}


def run(descriptor: int) -> None:
    """Serve the connection of a file descriptor; the entry point of this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # Use one process, as NVIDIA's own tests of Whisper do.
    os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    serve(Connection(descriptor), functools.partial(signal.alarm, EXIT_LIMIT_S))


def serve(connection: Connection, on_disconnect: Callable[[], object]) -> None:
    """Start the library with the settings of the first message, and answer requests until the end.

    Args:
        connection: the connection to `serve.trtllm.llm_api`.
        on_disconnect: called on another thread when the other side closes or asks to end.
    """
    settings = json.loads(connection.recv_bytes())
    try:
        version = api_version()
        # Import it only now: it is large, and the version check gives a clearer error.
        api = importlib.import_module("tensorrt_llm.llmapi")
        llm = _start(api, settings)
    except EarshotError as error:
        _send_message(connection, refused=str(error))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = f"TensorRT-LLM cannot run the checkpoint in {settings['model']}: {error}"
        _send_message(connection, refused=reason)
    else:
        session = _Session(connection, on_disconnect, api, llm, settings)
        asyncio.run(session.serve(version))
    connection.close()


def _send_message(connection: Connection, **message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _start(api: Any, settings: Mapping[str, Any]) -> Any:
    sequences = settings["slots"] * settings["beam_width"]
    graphs = api.CudaGraphConfig(max_batch_size=sequences, enable_padding=True)
    return api.LLM(
        model=settings["model"],
        backend="pytorch",
        attn_backend="TRTLLM",
        dtype=settings["dtype"],
        model_kwargs={"torch_dtype": settings["dtype"]},  # config.json's would win over `dtype`
        max_batch_size=settings["slots"],
        max_beam_width=settings["beam_width"],
        # It sets the size of the pool for encoder output; the default is less than a window.
        max_input_len=settings["window_tokens"],
        # The tokens of one iteration: the windows to encode, and the decoder's tokens.
        max_num_tokens=settings["window_tokens"] * (settings["encoder_batch"] + 1),
        enable_chunked_prefill=False,
        disable_overlap_scheduler=True,  # the first release with Whisper cannot overlap
        cuda_graph_config=graphs if settings["cuda_graph"] else None,
        kv_cache_config=api.KvCacheConfig(
            enable_block_reuse=False,  # blocks are found by tokens, and all prompts are equal
            free_gpu_memory_fraction=settings["kv_cache_fraction"],
            cross_kv_cache_fraction=settings["cross_kv_fraction"],
        ),
        scheduler_config=api.SchedulerConfig(use_python_scheduler=True),
    )


@dataclasses.dataclass
class _Session:
    """Runs the requests of a connection with the library."""

    connection: Connection
    on_disconnect: Callable[[], object]
    api: Any
    llm: Any
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._closing = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, version: str) -> None:
        """Report that the library is ready, and answer requests until the connection ends."""
        self._loop = asyncio.get_running_loop()
        self._send(ready=version)
        threading.Thread(target=self._read, name="earshot-requests", daemon=True).start()
        await self._closing.wait()
        for request_id in self._tasks:
            self._abort(request_id)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.llm.shutdown()  # NOTE: before the loop closes, since its threads post to the loop

    def _read(self) -> None:
        """Read messages and pass them to the event loop; runs on its own thread."""
        try:
            while message := json.loads(self.connection.recv_bytes()):
                if "cancel" in message:
                    self._loop.call_soon_threadsafe(self._abort, message["cancel"])
                else:
                    message["samples"] = self.connection.recv_bytes()
                    self._loop.call_soon_threadsafe(self._begin, message)
        except (EOFError, OSError):
            pass  # a lost connection means the same as a request to end
        self.on_disconnect()
        with contextlib.suppress(RuntimeError):  # a failed answer may have closed the loop
            self._loop.call_soon_threadsafe(self._closing.set)

    def _send(self, **message: Any) -> None:
        try:
            _send_message(self.connection, **message)
        except OSError:
            self._closing.set()

    def _begin(self, request: Mapping[str, Any]) -> None:
        task = self._loop.create_task(self._stream_tokens(request))
        self._tasks[request["id"]] = task
        task.add_done_callback(functools.partial(self._end, request["id"]))

    async def _stream_tokens(self, request: Mapping[str, Any]) -> None:
        """Send a request's tokens as they arrive, and its last message."""
        samples = np.frombuffer(request["samples"], np.float32).copy()
        output = self.llm.generate_async(
            {
                "prompt": request["prompt"],
                "multi_modal_data": {"audio": [(samples, self.settings["sample_rate"])]},
            },
            sampling_params=self._sampling(request["max_tokens"], request["beam_size"]),
            streaming=self.settings["beam_width"] == 1,
        )
        sent = 0
        try:
            async for update in output:
                if update.finished:
                    break
                tokens = tuple(update.outputs[0].token_ids[sent:])
                sent += len(tokens)
                self._send(id=request["id"], tokens=tokens)
        except asyncio.CancelledError:
            output.abort()
            raise
        self._send(id=request["id"], **last_message(output.outputs[0], sent))

    def _sampling(self, max_tokens: int, beam_size: int) -> Any:
        options: dict[str, Any] = {"temperature": 0.0}
        if beam_size > 1:
            options |= {"use_beam_search": True, "best_of": beam_size, "n": 1}
            options["length_penalty"] = self.settings["length_penalty"]
        else:
            options["logprobs"] = 1  # of the likeliest token and of the sampled one
        # The library reads the end-of-text token from the checkpoint.
        return self.api.SamplingParams(max_tokens=max_tokens, detokenize=False, **options)

    def _abort(self, request_id: int) -> None:
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    def _end(self, request_id: int, task: asyncio.Task[None]) -> None:
        """Report a failed task: a rejected request alone ends, any other error ends the library."""
        del self._tasks[request_id]
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, (ValueError, TypeError, self.api.RequestError)):
            self._send(id=request_id, finished="error", error=str(error))
        else:
            self._send(failed=repr(error))


def last_message(result: Any, sent: int) -> dict[str, Any]:
    """Make a request's last message from its `CompletionOutput`; skip the first `sent` tokens."""
    reason = _REASONS.get(result.finish_reason, "error")
    return {
        "tokens": tuple(result.token_ids[sent:]),
        "finished": reason,
        "logprob_sum": _logprob_sum(result),
        "error": "" if reason != "error" else f"unexpected end {result.finish_reason!r}",
    }


def _logprob_sum(result: Any) -> float | None:
    """Return the sum over all sampled tokens; None if the library does not report each."""
    logprobs = result.logprobs or []
    if len(logprobs) != len(result.token_ids):
        return None
    return sum(
        float(by_token[token].logprob)
        for by_token, token in zip(logprobs, result.token_ids, strict=True)
    )
