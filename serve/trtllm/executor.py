"""Run TensorRT-LLM 1.2 engines with the library's C++ executor, in this process.

It follows the bindings of release 1.2 (cpp/tensorrt_llm/nanobind/executor), which compiles engines
with `trtllm-build` and runs them with in-flight batching. Candidates from 1.3.0rc21 on have
neither; use `serve.trtllm.llm_api` for 1.3.
"""

import contextlib
import datetime
import functools
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import DeviceError, UnavailableError
from serve.contract.manifest import Dims, TokenizerFacts
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.state import new_state
from serve.runtime.protocol import Capabilities, FinishReason
from serve.trtllm.limits import (
    CROSS_KV_FRACTION,
    ENGINES_FOLDER,
    EngineLimits,
    SequenceLimits,
    check_build,
    check_config,
    limits_of,
)
from serve.trtllm.runtime import (
    LENGTH_PENALTY,
    ExecutorRequest,
    ExecutorResponse,
    TensorRTLLMRuntime,
)


def open_tensorrt_llm(engine: Engine, config: RuntimeConfig) -> TensorRTLLMRuntime:
    """Start the executor on an engine.

    Raises:
        UnavailableError: the library or the GPU is missing.
        EngineError: the engine is malformed, or was built for another runtime, release or GPU.
        ConfigError: the configuration exceeds the limits that the engine was built for.
    """
    limits = limits_of(engine)
    check_build(engine, limits, config.device)
    check_config(limits, config)
    return TensorRTLLMRuntime(engine, CppExecutor(engine, limits, config))


class RulesCallback:
    """Applies Whisper's token rules as the executor's batched logits post-processor.

    The executor calls it after each step, on its own thread, with the logits of every request that
    uses it. The call forbids tokens in place. Client ids identify requests.
    """

    def __init__(self, facts: TokenizerFacts, dims: Dims) -> None:
        self._facts = facts
        self._dims = dims
        self._rules_for = functools.cache(functools.partial(TokenRules, facts, dims))
        self.requests: dict[int, ExecutorRequest] = {}
        """By client id; `CppExecutor` adds and removes them."""

    def __call__(
        self,
        req_ids: Sequence[int],
        logits: Sequence[torch.Tensor],
        token_ids: Sequence[Sequence[Sequence[int]]],
        stream_ptr: int,
        client_ids: Sequence[int | None],
    ) -> None:
        """Set the logits of forbidden tokens to -inf, for all requests at once.

        Args:
            req_ids: the executor's own ids, which are not used.
            logits: one tensor per request, (1, beams, n_vocab), changed in place.
            token_ids: for each request and beam, the prompt and the tokens sampled so far.
            stream_ptr: the CUDA stream that computes `logits`.
            client_ids: the id that `CppExecutor` gave each request.
        """
        active = [  # without cancelled requests
            (part, [list(beam)[len(request.prompt) - request.prefix :] for beam in beams], request)
            for part, beams, client_id in zip(logits, token_ids, client_ids, strict=True)
            if client_id is not None and (request := self.requests.get(client_id)) is not None
        ]
        if not active:
            return
        device = active[0][0].device
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            if device.type == "cuda":
                external: Any = torch.cuda.ExternalStream  # has no type hints
                stack.enter_context(torch.cuda.stream(external(stream_ptr, device=device)))
            rules = self._rules_for(device)
            timestamp_begin = self._facts.timestamp_begin
            rows = [  # before last, last, highest timestamp, count, timestamps wanted
                [
                    *[0, 0, *tokens][-2:],
                    max((token for token in tokens if token >= timestamp_begin), default=0),
                    len(tokens),
                    int(request.timestamps),
                ]
                for part, beams, request in active
                for tokens in beams[: part.shape[-2]]
            ]
            table = torch.tensor(rows).to(device)  # one copy to the device
            state = new_state(len(rows), 2, device)
            state.tokens.copy_(table[:, :2])
            state.position.fill_(1)
            state.last_timestamp.copy_(table[:, 2])
            state.text_begin.copy_(2 - table[:, 3])
            state.timestamps.copy_(table[:, 4])
            stacked = torch.cat([part.reshape(-1, self._dims.n_vocab) for part, _, _ in active])
            allowed = stacked.float()
            rules.apply(state, torch.arange(len(rows), device=device), allowed)
            masked = torch.split(allowed.to(stacked.dtype), [p.shape[-2] for p, _, _ in active])
            for request_masked, (part, _, _) in zip(masked, active, strict=True):
                part.copy_(request_masked.view_as(part))


class CppExecutor:
    """`tensorrt_llm.bindings.executor.Executor` as a `serve.trtllm.runtime.Executor`.

    Args:
        engine: a TensorRT-LLM engine that passed `check_build`.
        limits: the engine's limits.
        config: a config that passed `check_config`.

    Raises:
        UnavailableError: the executor does not start; the message contains the library's.
    """

    def __init__(self, engine: Engine, limits: EngineLimits, config: RuntimeConfig) -> None:
        # Import it only now: it is large, starts MPI, and is absent on most machines.
        self._api: Any = importlib.import_module("tensorrt_llm.bindings.executor")
        trtllm = config.tensorrt_llm
        facts, dims = engine.manifest.tokenizer, engine.manifest.dims
        self.lengths: SequenceLimits = limits
        self._eot = facts.eot
        self._n_vocab = dims.n_vocab
        self._n_audio_ctx = dims.n_audio_ctx
        self._callback = RulesCallback(facts, dims)
        ends = self._api.FinishReason
        self._reasons: dict[Any, FinishReason]
        self._reasons = {ends.END_ID: "eot", ends.LENGTH: "length", ends.CANCELLED: "cancelled"}
        self._client_ids = 0
        self._clients: dict[int, int] = {}  # request id -> client id
        self._closed = False
        folder = engine.path / ENGINES_FOLDER
        try:
            self._executor = self._api.Executor(
                str(folder / "encoder"),
                str(folder / "decoder"),
                self._api.ModelType.ENCODER_DECODER,
                self._executor_config(config),
            )
        except RuntimeError as error:
            raise UnavailableError(
                f"TensorRT-LLM cannot run the engine in {folder}: {error}"
            ) from error
        self.capabilities = Capabilities(
            runtime="tensorrt_llm",
            timestamps=True,
            sampling=True,
            detect_language=facts.multilingual,
            streaming=trtllm.beam_width == 1,
            beam_width=trtllm.beam_width,
            max_windows=min(config.slots, limits.max_batch_size),
            beam_sizes=tuple(sorted({1, trtllm.beam_width})),
        )

    def _executor_config(self, config: RuntimeConfig) -> Any:
        api, trtllm = self._api, config.tensorrt_llm
        options: dict[str, Any] = {}
        device = torch.device(config.device)
        if device.index is not None:
            options["parallel_config"] = api.ParallelConfig(device_ids=[device.index])
        return api.ExecutorConfig(
            max_beam_width=trtllm.beam_width,
            kv_cache_config=api.KvCacheConfig(
                # NOTE: must be off. Blocks are found by decoder tokens alone, and all windows
                # have the same prompt: a window would read another window's keys and values.
                enable_block_reuse=False,
                free_gpu_memory_fraction=trtllm.kv_cache_fraction,
                cross_kv_cache_fraction=CROSS_KV_FRACTION,
            ),
            # NOTE: must be off. It normalizes over the candidates, and a greedy token has only one.
            normalize_log_probs=False,
            batching_type=api.BatchingType.INFLIGHT,
            logits_post_processor_config=api.LogitsPostProcessorConfig(
                processor_batched=self._callback
            ),
            max_batch_size=config.slots,
            gather_generation_logits=True,  # for probes; other requests do not return them
            **options,
        )

    def enqueue(self, request: ExecutorRequest) -> int:
        options: dict[str, Any] = {}
        self._client_ids += 1
        if not request.probe:
            options["logits_post_processor_name"] = self._api.Request.BATCHED_POST_PROCESSOR_NAME
            self._callback.requests[self._client_ids] = request
        library_request = self._api.Request(
            list(request.prompt),
            request.max_tokens,
            streaming=not request.probe and self.capabilities.streaming,
            sampling_config=self._sampling(request),
            output_config=self._api.OutputConfig(
                return_log_probs=not request.probe,
                return_generation_logits=request.probe,
                exclude_input_from_output=True,
            ),
            end_id=self._eot,
            pad_id=self._eot,
            client_id=self._client_ids,
            encoder_input_features=request.features,
            # NOTE: required; by default the library takes the length of the encoder's input.
            encoder_output_length=self._n_audio_ctx,
            **options,
        )
        try:
            request_id = int(self._executor.enqueue_request(library_request))
        except RuntimeError as error:
            raise DeviceError(f"TensorRT-LLM rejected a request: {error}") from error
        self._clients[request_id] = self._client_ids
        return request_id

    def _sampling(self, request: ExecutorRequest) -> Any:
        if request.temperature > 0:
            return self._api.SamplingConfig(
                beam_width=1, top_p=1.0, temperature=request.temperature, seed=request.seed
            )
        if request.beam_size > 1:
            return self._api.SamplingConfig(
                beam_width=request.beam_size, length_penalty=LENGTH_PENALTY
            )
        return self._api.SamplingConfig(beam_width=1, top_k=1)

    def await_responses(self, timeout_s: float) -> list[ExecutorResponse]:
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            responses: Iterable[Any] = self._executor.await_responses(timeout=timeout)
        except RuntimeError as error:
            raise DeviceError(f"TensorRT-LLM failed: {error}") from error
        return [self._response(response) for response in responses]

    def _response(self, response: Any) -> ExecutorResponse:
        request_id = int(response.request_id)
        if response.has_error():
            self._remove(request_id)
            return ExecutorResponse(request_id, finished="error", error=str(response.error_msg))
        result = response.result
        tokens = tuple(result.output_token_ids[0]) if result.output_token_ids else ()
        if not result.is_final:
            return ExecutorResponse(request_id, tokens)
        self._remove(request_id)
        reason = self._reasons.get(result.finish_reasons[0] if result.finish_reasons else None)
        error = "" if reason else f"unexpected end {result.finish_reasons}"
        logprobs, logits = result.cum_log_probs, result.generation_logits
        return ExecutorResponse(
            request_id,
            tokens,
            reason or "error",
            logprob_sum=float(logprobs[0]) if logprobs else None,
            logits=None if logits is None else logits.reshape(-1, self._n_vocab)[0].float().cpu(),
            error=error,
        )

    def _remove(self, request_id: int) -> None:
        client_id = self._clients.pop(request_id, None)
        if client_id is not None:
            self._callback.requests.pop(client_id, None)

    def cancel(self, request_id: int) -> None:
        self._executor.cancel_request(request_id)
        self._remove(request_id)

    def steps(self) -> tuple[int, int, float]:
        if self._closed:
            return 0, 0, 0.0
        stats = list(self._executor.get_latest_iteration_stats())
        batches = [item.inflight_batching_stats for item in stats]
        slots = sum(batch.num_scheduled_requests for batch in batches if batch is not None)
        return len(stats), slots, sum(item.iter_latency_ms for item in stats) / 1000

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._executor.shutdown()
