"""Triton's C++ `tensorrt_llm` model as an executor: one call from model to model per request.

The `whisper` model, in Triton, reaches its neighbour by business-logic scripting. The neighbour
runs the same engines with its own in-flight batching; `serve.trtllm.triton_model`
configures it. It is not decoupled, for decoupled it is reported to stall after the first request;
so nothing streams, and a call cannot be cancelled once it is made.
"""

import concurrent.futures
import itertools
import queue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError
from serve.contract.runtimes import Infer
from serve.runtime.protocol import Capabilities
from serve.trtllm.limits import Lengths, Limits, check_config, limits_of
from serve.trtllm.runtime import (
    FORBIDDEN,
    LENGTH_PENALTY,
    ExecutorRequest,
    ExecutorResponse,
    TensorRTLLMRuntime,
    suppression_bias,
    take_all,
)

Tensor = npt.NDArray[Any]
OUTPUTS = ["output_ids", "sequence_length", "cum_log_probs"]
_CALLS_PER_WINDOW = 2  # the transcriber keeps as many jobs in a runtime as twice its windows


def open_backend(engine: Engine, config: RuntimeConfig, infer: Infer) -> TensorRTLLMRuntime:
    """Start the runtime behind which Triton's `tensorrt_llm` model decodes.

    Raises:
        EngineError: the engine is of another runtime or malformed.
        ConfigError: the configuration asks for what the engine or this way cannot do.
    """
    limits = limits_of(engine)
    check_config(limits, config)
    if config.tensorrt_llm.no_speech_probe:
        raise ConfigError(
            "runtime.tensorrt_llm.no_speech_probe needs the logits, which Triton's tensorrt_llm "
            "model does not give; set it or runtime.tensorrt_llm.triton_backend to false"
        )
    return TensorRTLLMRuntime(engine, TritonModelExecutor(engine, limits, config, infer))


class TritonModelExecutor:
    """`Infer` as a `serve.trtllm.runtime.Executor`; each request waits on a thread of its own.

    Args:
        engine: a TensorRT-LLM engine, the one that the model behind `infer` runs.
        limits: its limits.
        config: one that passed `check_config`.
        infer: called from many threads at once.
    """

    def __init__(self, engine: Engine, limits: Limits, config: RuntimeConfig, infer: Infer) -> None:
        facts, dims = engine.manifest.tokenizer, engine.manifest.dims
        self.lengths: Lengths = limits
        self._infer = infer
        self._eot = facts.eot
        self._n_audio_ctx = dims.n_audio_ctx
        self._bias = suppression_bias(facts, dims.n_vocab, torch.float32)
        self._languages = torch.full((dims.n_vocab,), FORBIDDEN)
        self._languages[list(facts.languages.values())] = 0.0
        windows = min(config.slots, limits.max_batch_size)
        self._pool = concurrent.futures.ThreadPoolExecutor(
            _CALLS_PER_WINDOW * windows, thread_name_prefix="earshot-trtllm"
        )
        self._ids = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future[ExecutorResponse]] = {}
        self._responses: queue.SimpleQueue[ExecutorResponse] = queue.SimpleQueue()
        self.capabilities = Capabilities(
            runtime="tensorrt_llm",
            timestamps=False,
            suppression=False,  # a bias cannot hold the list for the first token
            sampling=True,
            detect_language=facts.multilingual,
            no_speech_prob=False,
            token_logprobs=True,
            streaming=False,
            cancel=False,
            beam_width=config.tensorrt_llm.beam_width,
            max_windows=windows,
            beam_sizes=tuple(sorted({1, config.tensorrt_llm.beam_width})),
        )

    def enqueue(self, request: ExecutorRequest) -> int:
        """Hand a request to a thread; see `Executor.enqueue`."""
        request_id = next(self._ids)
        future = self._pool.submit(self._run, request_id, request)
        self._waiting[request_id] = future
        future.add_done_callback(lambda future: self._put(request_id, future))
        return request_id

    def _put(self, request_id: int, future: "concurrent.futures.Future[ExecutorResponse]") -> None:
        """Pass on a call's response, or what went wrong, so that every request ends."""
        if future.cancelled():
            return
        error = future.exception()
        failed = ExecutorResponse(request_id, finished="error", error=str(error) or repr(error))
        self._responses.put(future.result() if error is None else failed)

    def _run(self, request_id: int, request: ExecutorRequest) -> ExecutorResponse:
        outputs = self._infer(self._inputs(request), OUTPUTS)
        length = int(outputs["sequence_length"].reshape(-1)[0])
        tokens = tuple(int(token) for token in outputs["output_ids"].reshape(-1)[:length])
        if request.probe and not tokens:
            return ExecutorResponse(
                request_id, finished="error", error="no token at start of transcript"
            )
        # The model says nothing about the reason: a short answer is a finished one.
        ended = not request.probe and (len(tokens) < request.max_tokens or tokens[-1] == self._eot)
        logprob_sum = float(outputs["cum_log_probs"].reshape(-1)[0])
        return ExecutorResponse(request_id, tokens, "eot" if ended else "length", logprob_sum)

    def _inputs(self, request: ExecutorRequest) -> dict[str, Tensor]:
        """Make the model's inputs for one request; the first dimension is the batch of one."""
        numbers: dict[str, int] = {
            "encoder_output_lengths": self._n_audio_ctx,
            "input_lengths": request.features.shape[0],
            "decoder_input_lengths": len(request.prompt),
            "request_output_len": request.max_tokens,
            "end_id": self._eot,
            "pad_id": self._eot,
            "beam_width": request.beam_size,
        }
        flags = {"return_log_probs": True, "exclude_input_in_output": True, "streaming": False}
        bias = self._languages if request.probe else self._bias
        inputs: dict[str, Tensor] = {
            "encoder_input_features": request.features.cpu().numpy()[None],
            "decoder_input_ids": np.array([request.prompt], np.int32),
            "embedding_bias": bias.numpy()[None],
            **{name: np.array([[value]], np.int32) for name, value in numbers.items()},
            **{name: np.array([[value]], np.bool_) for name, value in flags.items()},
        }
        if request.temperature > 0:
            inputs["runtime_top_p"] = np.array([[1.0]], np.float32)
            inputs["temperature"] = np.array([[request.temperature]], np.float32)
            inputs["seed"] = np.array([[request.seed]], np.uint64)
        elif request.beam_size > 1:
            inputs["len_penalty"] = np.array([[LENGTH_PENALTY]], np.float32)
        else:
            inputs["runtime_top_k"] = np.array([[1]], np.int32)
        return inputs

    def await_responses(self, timeout_s: float) -> list[ExecutorResponse]:
        """Wait for responses; see `Executor.await_responses`."""
        responses = take_all(self._responses, timeout_s)
        for response in responses:
            self._waiting.pop(response.id, None)
        return responses

    def cancel(self, request_id: int) -> None:
        """Forget a request; one that was already called runs on to its end in the model."""
        future = self._waiting.pop(request_id, None)
        if future is not None:
            future.cancel()

    def steps(self) -> tuple[int, int, float]:
        """Return zeros: the model counts its own steps, in Triton's metrics."""
        return 0, 0, 0.0

    def close(self) -> None:
        """Take no more; calls under way end with the server."""
        self._pool.shutdown(wait=False, cancel_futures=True)
