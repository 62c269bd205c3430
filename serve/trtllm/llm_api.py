"""TensorRT-LLM 1.3 and later in this process: its LLM API as an executor.

Those releases have no engines: their PyTorch backend runs the Hugging Face checkpoint that the
engine folder holds, in FP16. Written to NVIDIA's guide docs/source/models/encoder-decoder.md and to
tensorrt_llm/_torch/models/modeling_whisper.py. The library takes samples and makes the log-mel
itself; its prompt is text that must begin at start of transcript, so there is no previous text; it
finds no language and keeps no rules for timestamps; the suppress lists it applies by itself.

The API is asynchronous: an event loop, on a thread of its own, follows every request.
"""

import asyncio
import functools
import importlib
import itertools
import logging
import os
import queue
import threading
from typing import Any

from serve.config import RuntimeConfig
from serve.engine import Dims, Engine
from serve.errors import ConfigError, DeviceError, UnavailableError
from serve.runtime.protocol import Capabilities, FinishReason
from serve.speech.features import SAMPLE_RATE
from serve.speech.tokenizer import Tokenizer
from serve.trtllm.limits import CHECKPOINT_FOLDER, Lengths, api_version, find_gpu
from serve.trtllm.runtime import (
    LENGTH_PENALTY,
    ExecutorRequest,
    ExecutorResponse,
    TensorRTLLMRuntime,
    take_all,
)

logger = logging.getLogger(__name__)

_STOP_S = 20.0  # how long the library may take to shut down
_REASONS: dict[str, FinishReason] = {"stop": "eot", "length": "length", "cancelled": "cancelled"}


def open_llm_api(engine: Engine, config: RuntimeConfig) -> TensorRTLLMRuntime:
    """Start the LLM API on an engine's checkpoint.

    Raises:
        UnavailableError: the library or GPU is missing, or the library does not start.
        ConfigError: the configuration asks for what the LLM API cannot do.
        EngineError: the engine's tokenizer cannot be read.
    """
    check_config(config)
    api_version()
    find_gpu(config.device)
    return TensorRTLLMRuntime(engine, LlmApiExecutor(engine, config))


def check_config(config: RuntimeConfig) -> None:
    """Refuse settings that only compiled engines have.

    Raises:
        ConfigError: names the key and what to do.
    """
    for key in ("no_speech_probe", "triton_backend"):
        if getattr(config.tensorrt_llm, key):
            raise ConfigError(
                f"runtime.tensorrt_llm.{key} = true needs engines of TensorRT-LLM 1.2, and this "
                "one is for the LLM API; set it to false"
            )
    _, _, index = config.device.partition(":")
    if index not in ("", "0"):
        raise ConfigError(
            f"runtime.device = {config.device!r}, but TensorRT-LLM's LLM API takes the first GPU "
            f'that it sees; set CUDA_VISIBLE_DEVICES={index} and runtime.device = "cuda"'
        )


class LlmApiExecutor:
    """`tensorrt_llm.llmapi.LLM` as a `serve.trtllm.runtime.Executor`.

    Args:
        engine: one whose manifest names the runtime "tensorrt_llm_api".
        config: one that passed `check_config`.

    Raises:
        UnavailableError: the library does not start; the message is its own.
        EngineError: the engine's tokenizer cannot be read.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        facts, dims = engine.manifest.tokenizer, engine.manifest.dims
        tokenizer = Tokenizer.open(engine)
        special = (facts.sot, facts.no_timestamps, facts.transcribe, facts.translate)
        self._names = {
            token: tokenizer.special_name(token)
            for token in (*special, *facts.languages.values())
            if token is not None
        }
        width = config.tensorrt_llm.beam_width
        self.lengths = Lengths(max_prompt_tokens=dims.n_text_ctx - 1, max_seq_len=dims.n_text_ctx)
        self.capabilities = Capabilities(
            runtime="tensorrt_llm_api",
            timestamps=False,
            suppression=True,  # by the library, from the checkpoint's generation_config.json
            # One random generator serves all requests of a batch, or, since August 2026, the first
            # of them has its seed and the others do not: a seed would not repeat an answer.
            sampling=False,
            detect_language=False,
            no_speech_prob=False,
            token_logprobs=width == 1,
            streaming=width == 1,
            cancel=True,
            beam_width=width,
            max_windows=config.slots,
            takes="samples",
            previous_text=False,
            beam_sizes=(width,),
        )
        # One process: nothing to spawn from inside Triton's Python stub, as in NVIDIA's own tests.
        os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
        try:
            # Imported here because it is heavy, and absent on most machines.
            self._api: Any = importlib.import_module("tensorrt_llm.llmapi")
            self._llm = self._start(str(engine.path / CHECKPOINT_FOLDER), dims, config)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise UnavailableError(
                f"TensorRT-LLM cannot run the checkpoint in {engine.path}: {error}"
            ) from error
        self._ids = itertools.count()
        # None stands for a failure to look at.
        self._responses: queue.SimpleQueue[ExecutorResponse | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        # Of the loop's thread:
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outputs: dict[int, Any] = {}
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="earshot-llm-api", daemon=True)
        self._thread.start()

    def _start(self, model: str, dims: Dims, config: RuntimeConfig) -> Any:
        api, trtllm = self._api, config.tensorrt_llm
        graphs = None
        if config.cuda_graph:
            sequences = config.slots * trtllm.beam_width
            graphs = api.CudaGraphConfig(max_batch_size=sequences, enable_padding=True)
        return api.LLM(
            model=model,
            backend="pytorch",
            attn_backend="TRTLLM",
            dtype="float16",
            model_kwargs={"torch_dtype": "float16"},  # config.json's would win over `dtype`
            max_batch_size=config.slots,
            max_beam_width=trtllm.beam_width,
            # The pool for the encoder's output is sized by it; the default is less than a window.
            max_input_len=dims.n_audio_ctx,
            # What one iteration may hold: windows to encode, and room for the decoder's tokens.
            max_num_tokens=dims.n_audio_ctx * (config.encoder_batch + 1),
            enable_chunked_prefill=False,
            disable_overlap_scheduler=True,  # the first release with Whisper cannot overlap
            cuda_graph_config=graphs,
            kv_cache_config=api.KvCacheConfig(
                enable_block_reuse=False,  # blocks are found by tokens, and all prompts are alike
                free_gpu_memory_fraction=trtllm.kv_cache_fraction,
                cross_kv_cache_fraction=trtllm.cross_kv_fraction,
            ),
            scheduler_config=api.SchedulerConfig(use_python_scheduler=True),
        )

    # ---------------------------------------------------------------- called by the device thread

    def enqueue(self, request: ExecutorRequest) -> int:
        """Hand over a request; see `Executor.enqueue`."""
        self._check()
        request_id = next(self._ids)
        self._loop.call_soon_threadsafe(self._begin, request_id, request)
        return request_id

    def await_responses(self, timeout_s: float) -> list[ExecutorResponse]:
        """Wait for responses; see `Executor.await_responses`."""
        responses = take_all(self._responses, timeout_s)
        self._check()
        return [response for response in responses if response is not None]

    def cancel(self, request_id: int) -> None:
        """Abort a request; see `Executor.cancel`."""
        self._loop.call_soon_threadsafe(self._abort, request_id)

    def steps(self) -> tuple[int, int, float]:
        """Nothing: the API tells of its steps only by waiting for them."""
        return 0, 0, 0.0

    def close(self) -> None:
        """Abort what runs and shut the library down; see `Executor.close`."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            logger.error("TensorRT-LLM did not shut down within %g s", _STOP_S)

    def _check(self) -> None:
        if self._failure is not None:
            raise DeviceError(f"TensorRT-LLM failed: {self._failure!r}") from self._failure

    # ---------------------------------------------------------------- the loop's thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._closing.wait()
        for request_id in list(self._tasks):
            self._abort(request_id)
        self._llm.shutdown()  # NOTE: before the loop closes, for its threads post to it

    def _begin(self, request_id: int, request: ExecutorRequest) -> None:
        task = self._loop.create_task(self._follow(request_id, request))
        self._tasks[request_id] = task
        task.add_done_callback(functools.partial(self._end, request_id))

    async def _follow(self, request_id: int, request: ExecutorRequest) -> None:
        """Put out a request's tokens as they come, and its end."""
        prompt = "".join(self._names[token] for token in request.prompt)
        output = self._llm.generate_async(
            {
                "prompt": prompt,
                "multi_modal_data": {"audio": [(request.features.numpy(), SAMPLE_RATE)]},
            },
            sampling_params=self._sampling(request),
            streaming=self.capabilities.streaming,
        )
        self._outputs[request_id] = output
        sent = 0
        async for part in output:
            if part.finished:
                break
            tokens = tuple(part.outputs[0].token_ids[sent:])
            sent += len(tokens)
            self._responses.put(ExecutorResponse(request_id, tokens))
        self._responses.put(_last(request_id, output.outputs[0], sent))

    def _sampling(self, request: ExecutorRequest) -> Any:
        options: dict[str, Any] = {"temperature": 0.0}
        if request.beam_size > 1:
            options |= {"use_beam_search": True, "best_of": request.beam_size, "n": 1}
            options["length_penalty"] = LENGTH_PENALTY
        else:
            options["logprobs"] = 1  # the likeliest, and the one that was sampled
        # The end of text is the library's to know, from the checkpoint.
        return self._api.SamplingParams(max_tokens=request.max_tokens, detokenize=False, **options)

    def _abort(self, request_id: int) -> None:
        if request_id in self._outputs:
            self._outputs[request_id].abort()
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    def _end(self, request_id: int, task: asyncio.Task[None]) -> None:
        """Pass on what went wrong: a refused request ends alone, all else ends the executor."""
        del self._tasks[request_id]
        self._outputs.pop(request_id, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, (ValueError, TypeError, self._api.RequestError)):
            self._responses.put(ExecutorResponse(request_id, finished="error", error=str(error)))
        else:
            self._failure = error
            self._responses.put(None)


def _last(request_id: int, result: Any, sent: int) -> ExecutorResponse:
    """The response that ends a request, from its finished `CompletionOutput`."""
    reason = _REASONS.get(result.finish_reason, "error")
    error = "" if reason != "error" else f"unexpected end {result.finish_reason!r}"
    tokens = tuple(result.token_ids[sent:])
    return ExecutorResponse(
        request_id, tokens, reason, logprob_sum=_logprob_sum(result), error=error
    )


def _logprob_sum(result: Any) -> float | None:
    """Over every sampled token; None where the library does not tell all of them."""
    told = result.logprobs or []
    if len(told) != len(result.token_ids):
        return None
    return sum(
        float(by_token[token].logprob)
        for by_token, token in zip(told, result.token_ids, strict=True)
    )
