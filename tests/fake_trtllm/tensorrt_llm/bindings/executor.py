"""A stand-in for `tensorrt_llm.bindings.executor` 1.2: signatures, refusals, in-flight batching.

Signatures follow cpp/tensorrt_llm/nanobind/executor/{executor,request,executorConfig}.cpp. Like
nanobind, a wrong type raises TypeError; like the library, a bad setting raises RuntimeError and a
bad request answers with an error. One call of `await_responses` runs at most one step. Of beams
only the greedy one is searched.
"""

import dataclasses
import datetime
import enum
import itertools
import json
import math
import time
import typing
from pathlib import Path

import torch
from plain_whisper import PlainWhisper
from safetensors.torch import load_file

ModelType = enum.Enum("ModelType", "DECODER_ONLY ENCODER_ONLY ENCODER_DECODER")
BatchingType = enum.Enum("BatchingType", "STATIC INFLIGHT")
CommunicationType = enum.Enum("CommunicationType", "MPI")
CommunicationMode = enum.Enum("CommunicationMode", "LEADER ORCHESTRATOR")
FinishReason = enum.Enum(
    "FinishReason", "NOT_FINISHED END_ID STOP_WORDS LENGTH TIMED_OUT CANCELLED"
)


def typed(**values):
    """Check `name=(value, type)`; None stands for an argument that was left out."""
    for name, (value, kind) in values.items():
        # nanobind takes no bool for int and, unlike Python, no float for int.
        wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
        if value is not None and wrong:
            raise TypeError(f"incompatible function arguments: {name} = {value!r}")


class KvCacheConfig:
    def __init__(
        self,
        enable_block_reuse=True,
        max_tokens=None,
        max_attention_window=None,
        sink_token_length=None,
        free_gpu_memory_fraction=None,
        host_cache_size=None,
        onboard_blocks=True,
        cross_kv_cache_fraction=None,
        secondary_offload_min_priority=None,
        event_buffer_max_size=0,
        *,
        enable_partial_reuse=True,
        copy_on_partial_reuse=True,
        use_uvm=False,
        attention_dp_events_gather_period_ms=5,
        runtime_defaults=None,
        max_gpu_total_bytes=0,
    ):
        typed(
            enable_block_reuse=(enable_block_reuse, bool),
            free_gpu_memory_fraction=(free_gpu_memory_fraction, float),
            cross_kv_cache_fraction=(cross_kv_cache_fraction, float),
        )
        self.enable_block_reuse = enable_block_reuse
        self.free_gpu_memory_fraction = free_gpu_memory_fraction
        self.cross_kv_cache_fraction = cross_kv_cache_fraction


class ParallelConfig:
    def __init__(
        self,
        communication_type=CommunicationType.MPI,
        communication_mode=CommunicationMode.LEADER,
        device_ids=None,
        participant_ids=None,
        orchestrator_config=None,
        num_nodes=None,
    ):
        typed(device_ids=(device_ids, list))
        self.device_ids = device_ids


class LogitsPostProcessorConfig:
    def __init__(self, processor_map=None, processor_batched=None, replicate=True):
        if processor_batched is not None and not callable(processor_batched):
            raise TypeError("incompatible function arguments: processor_batched")
        self.processor_batched = processor_batched


class ExecutorConfig:
    def __init__(
        self,
        max_beam_width=1,
        scheduler_config=None,
        kv_cache_config=None,
        enable_chunked_context=False,
        normalize_log_probs=True,
        iter_stats_max_iterations=1000,
        request_stats_max_iterations=0,
        batching_type=BatchingType.INFLIGHT,
        max_batch_size=None,
        max_num_tokens=None,
        parallel_config=None,
        peft_cache_config=None,
        logits_post_processor_config=None,
        decoding_config=None,
        use_gpu_direct_storage=False,
        gpu_weights_percent=1.0,
        max_queue_size=None,
        extended_runtime_perf_knob_config=None,
        debug_config=None,
        recv_poll_period_ms=0,
        max_seq_idle_microseconds=180_000_000,
        spec_dec_config=None,
        guided_decoding_config=None,
        additional_model_outputs=None,
        cache_transceiver_config=None,
        gather_generation_logits=False,
        mm_embedding_offloading=False,
        enable_trt_overlap=False,
        fail_fast_on_attention_window_too_large=False,
    ):
        typed(
            max_beam_width=(max_beam_width, int),
            kv_cache_config=(kv_cache_config, KvCacheConfig),
            normalize_log_probs=(normalize_log_probs, bool),
            batching_type=(batching_type, BatchingType),
            max_batch_size=(max_batch_size, int),
            parallel_config=(parallel_config, ParallelConfig),
            logits_post_processor_config=(logits_post_processor_config, LogitsPostProcessorConfig),
            gather_generation_logits=(gather_generation_logits, bool),
        )
        self.max_beam_width = max_beam_width
        self.kv_cache_config = kv_cache_config or KvCacheConfig()
        self.normalize_log_probs = normalize_log_probs
        self.batching_type = batching_type
        self.max_batch_size = max_batch_size
        self.parallel_config = parallel_config
        self.logits_post_processor_config = logits_post_processor_config
        self.gather_generation_logits = gather_generation_logits


class SamplingConfig:
    def __init__(
        self,
        beam_width=1,
        *,
        top_k=None,
        top_p=None,
        top_p_min=None,
        top_p_reset_ids=None,
        top_p_decay=None,
        seed=None,
        temperature=None,
        min_tokens=None,
        beam_search_diversity_rate=None,
        repetition_penalty=None,
        presence_penalty=None,
        frequency_penalty=None,
        length_penalty=None,
        early_stopping=None,
        no_repeat_ngram_size=None,
        num_return_sequences=None,
        min_p=None,
        beam_width_array=None,
    ):
        typed(
            beam_width=(beam_width, int),
            top_k=(top_k, int),
            top_p=(top_p, float),
            seed=(seed, int),
            temperature=(temperature, float),
            length_penalty=(length_penalty, float),
        )
        if top_p is not None and not 0 < top_p <= 1:
            raise RuntimeError("Assertion failed: topP.value() > 0.f && topP.value() <= 1.f")
        self.beam_width, self.top_k, self.top_p = beam_width, top_k, top_p
        self.seed, self.temperature = seed, temperature
        self.length_penalty = length_penalty


class OutputConfig:
    def __init__(
        self,
        return_log_probs=False,
        return_context_logits=False,
        return_generation_logits=False,
        exclude_input_from_output=False,
        return_encoder_output=False,
        return_perf_metrics=False,
        additional_model_outputs=None,
    ):
        self.return_log_probs = return_log_probs
        self.return_generation_logits = return_generation_logits
        self.exclude_input_from_output = exclude_input_from_output


class Request:
    BATCHED_POST_PROCESSOR_NAME = "batched"

    def __init__(
        self,
        input_token_ids,
        max_tokens,
        *,
        streaming=False,
        sampling_config=None,
        output_config=None,
        end_id=None,
        pad_id=None,
        position_ids=None,
        bad_words=None,
        stop_words=None,
        embedding_bias=None,
        external_draft_tokens_config=None,
        prompt_tuning_config=None,
        multimodal_input=None,
        multimodal_embedding=None,
        mrope_config=None,
        lora_config=None,
        lookahead_config=None,
        kv_cache_retention_config=None,
        logits_post_processor_name=None,
        logits_post_processor=None,
        encoder_input_token_ids=None,
        client_id=None,
        return_all_generated_tokens=False,
        priority=0.5,
        type=None,
        context_phase_params=None,
        encoder_input_features=None,
        encoder_output_length=None,
        cross_attention_mask=None,
        num_return_sequences=1,
        eagle_config=None,
        skip_cross_attn_blocks=None,
        guided_decoding_params=None,
        language_adapter_uid=None,
        allotted_time_ms=None,
        cache_salt_id=None,
    ):
        typed(
            input_token_ids=(input_token_ids, list),
            max_tokens=(max_tokens, int),
            streaming=(streaming, bool),
            sampling_config=(sampling_config, SamplingConfig),
            output_config=(output_config, OutputConfig),
            end_id=(end_id, int),
            pad_id=(pad_id, int),
            embedding_bias=(embedding_bias, torch.Tensor),
            logits_post_processor_name=(logits_post_processor_name, str),
            client_id=(client_id, int),
            encoder_input_features=(encoder_input_features, torch.Tensor),
            encoder_output_length=(encoder_output_length, int),
        )
        if not all(isinstance(token, int) and token >= 0 for token in input_token_ids):
            raise TypeError("incompatible function arguments: input_token_ids")
        if max_tokens < 1:
            raise RuntimeError("Assertion failed: mMaxNewTokens > 0")
        self.input_token_ids, self.max_tokens, self.streaming = (
            input_token_ids,
            max_tokens,
            streaming,
        )
        self.sampling_config = sampling_config or SamplingConfig()
        self.output_config = output_config or OutputConfig()
        self.end_id, self.embedding_bias, self.client_id = end_id, embedding_bias, client_id
        self.logits_post_processor_name = logits_post_processor_name
        self.encoder_input_features = encoder_input_features
        self.encoder_output_length = encoder_output_length


@dataclasses.dataclass
class Result:
    is_final: bool = False
    output_token_ids: list = dataclasses.field(default_factory=list)
    cum_log_probs: list | None = None
    log_probs: list | None = None
    context_logits: torch.Tensor | None = None
    generation_logits: torch.Tensor | None = None
    encoder_output: torch.Tensor | None = None
    finish_reasons: list = dataclasses.field(default_factory=list)
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    request_perf_metrics: object = None


class Response:
    def __init__(self, request_id, error_msg=None, result=None, client_id=None):
        self.request_id, self.client_id = request_id, client_id
        self._error_msg, self._result = error_msg, result

    def has_error(self):
        return self._error_msg is not None

    @property
    def error_msg(self):
        return self._error_msg

    @property
    def result(self):
        if self.has_error():
            raise RuntimeError("Cannot get the result of a response with an error")
        return self._result


@dataclasses.dataclass
class InflightBatchingStats:
    num_scheduled_requests: int
    num_context_requests: int
    num_gen_requests: int


@dataclasses.dataclass
class IterationStats:
    iter: int
    iter_latency_ms: float
    num_active_requests: int
    inflight_batching_stats: InflightBatchingStats | None


@dataclasses.dataclass
class Active:
    """A request that the stand-in decodes."""

    request: Request
    cross: list | None = None
    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    logits: list = dataclasses.field(default_factory=list)
    generator: torch.Generator | None = None


class Executor:
    instances: typing.ClassVar[list] = []  # every one made, for tests to look into

    def __init__(self, encoder_model_path, decoder_model_path, model_type, executor_config):
        typed(model_type=(model_type, ModelType), executor_config=(executor_config, ExecutorConfig))
        if model_type is not ModelType.ENCODER_DECODER:
            raise RuntimeError("two model paths need ModelType.ENCODER_DECODER")
        if executor_config.kv_cache_config.cross_kv_cache_fraction is None:
            raise RuntimeError("Must set crossKvCacheFraction for encoder-decoder model")
        self.config = executor_config
        halves = [self._open(path) for path in (encoder_model_path, decoder_model_path)]
        self.encoder_build, self.build = (build for build, _, _ in halves)
        self.network = PlainWhisper(*((config, tensors) for _, config, tensors in halves))
        self.vocab = halves[1][1]["vocab_size"]
        for build in (self.encoder_build, self.build):
            plugins = build["plugin_config"]
            packed = plugins["remove_input_padding"] == "enable"
            if not packed or build["kv_cache_type"] != "PAGED":
                raise RuntimeError(
                    "requires GPT attention plugin with packed input and paged KV cache"
                )
            if (executor_config.max_batch_size or 1) > build["max_batch_size"]:
                raise RuntimeError("runtime max_batch_size exceeds the engine's")
        if executor_config.max_beam_width > self.build["max_beam_width"]:
            raise RuntimeError("runtime max_beam_width exceeds the engine's")
        self.requests = []
        self.queue: dict[int, Active] = {}
        self.active: dict[int, Active] = {}
        self.responses: list[Response] = []
        self.stats: list[IterationStats] = []
        self.encoded_together: list[int] = []
        self.broken = ""
        self._ids = itertools.count(1)
        self.running = True
        Executor.instances.append(self)

    @staticmethod
    def _open(path):
        config = json.loads((Path(path) / "config.json").read_text())
        tensors = load_file(Path(path) / "rank0.engine")
        return config["build_config"], config["pretrained_config"], tensors

    def can_enqueue_requests(self):
        return self.running

    def enqueue_request(self, request):
        typed(request=(request, Request))
        if not self.running:
            raise RuntimeError("executor is shut down")
        request_id = next(self._ids)
        self.requests.append(request)
        error = self._refusal(request)
        if error:
            self.responses.append(Response(request_id, error))
        else:
            self.queue[request_id] = Active(request)
        return request_id

    def _refusal(self, request):
        features, prompt = request.encoder_input_features, len(request.input_token_ids)
        if features is None or features.ndim != 2:
            return "encoder input features must be [length, featureDim]"
        frames, mels = features.shape
        bias = request.embedding_bias
        asks_logits = request.output_config.return_generation_logits
        longest = min(self.encoder_build["max_input_len"], self.build["max_encoder_input_len"])
        faults = {
            "the features' bytes are copied: they must have the engine's dtype": (
                features.dtype != torch.float16 or not features.is_contiguous()
            ),
            f"features have {mels} mels": mels != self.network.encoder_config["n_mels"],
            f"Encoder length ({frames}) exceeds maximum encoder input length": frames > longest,
            f"{frames} != {request.encoder_output_length}: slice exceeds buffer size": (
                frames % 2 or request.encoder_output_length != frames // 2
            ),
            f"Prompt length ({prompt}) exceeds maximum input length": (
                prompt > self.build["max_input_len"]
            ),
            f"Prompt length ({prompt}) and max_tokens exceed the max sequence length": (
                prompt + request.max_tokens > self.build["max_seq_len"]
            ),
            "beam width of the request exceeds that of the executor": (
                request.sampling_config.beam_width > self.config.max_beam_width
            ),
            "gather_generation_logits must be enabled": (
                asks_logits and not self.config.gather_generation_logits
            ),
            "The embedding bias shape is not as expected": (
                bias is not None and tuple(bias.shape) != (self.vocab,)
            ),
            "Embedding bias data type must be same as model logits type.": (
                bias is not None and bias.dtype != torch.float16
            ),
        }
        return next((message for message, fault in faults.items() if fault), "")

    def await_responses(self, timeout=None):
        typed(timeout=(timeout, datetime.timedelta))
        if self.broken:
            raise RuntimeError(self.broken)
        if not self.responses and (self.queue or self.active):
            self._step()
        elif not self.responses and timeout is not None:
            time.sleep(min(timeout.total_seconds(), 0.001))
        responses, self.responses = self.responses, []
        return responses

    def cancel_request(self, id=None):
        typed(id=(id, int))
        found = self.queue.pop(id, None) or self.active.pop(id, None)
        if found is not None:  # the real one, too, sends a last response
            self.responses.append(
                Response(id, result=Result(True, [[]], finish_reasons=[FinishReason.CANCELLED]))
            )

    def get_latest_iteration_stats(self):
        stats, self.stats = self.stats, []
        return stats

    def shutdown(self):
        self.running = False

    # ------------------------------------------------------------------ the stand-in's own work

    def _step(self):
        began = time.perf_counter()
        limit = self.config.max_batch_size or self.build["max_batch_size"]
        budget, fresh = self.encoder_build["max_num_tokens"], 0
        while self.queue and len(self.active) < limit:
            request_id = next(iter(self.queue))
            budget -= self.queue[request_id].request.encoder_output_length
            if budget < 0:
                break
            self._start(request_id, self.queue.pop(request_id))
            fresh += 1
        if fresh:
            self.encoded_together.append(fresh)
        with torch.inference_mode():
            logits = {id: self._logits(active) for id, active in self.active.items()}
            self._post_process(logits)
            for request_id, row in logits.items():
                self._sample(request_id, self.active[request_id], row.reshape(-1).float())
        count = len(logits)
        latency_ms = 1000 * (time.perf_counter() - began)
        batch = InflightBatchingStats(count, fresh, count - fresh)
        self.stats.append(IterationStats(len(self.stats), latency_ms, count, batch))

    def _start(self, request_id, active):
        with torch.inference_mode():
            encoded = self.network.encode(active.request.encoder_input_features[None])
            active.cross = self.network.cross(encoded)
        active.generator = torch.Generator().manual_seed(active.request.sampling_config.seed or 0)
        self.active[request_id] = active

    def _logits(self, active):
        tokens = torch.tensor([active.request.input_token_ids + active.tokens])
        logits = self.network.logits(tokens, active.cross)[:, -1:].half()
        if active.request.output_config.return_generation_logits:
            active.logits.append(logits[0, 0].clone())
        return logits  # (1, beams, vocab)

    def _post_process(self, logits):
        asked = {
            id: self.active[id].request
            for id in logits
            if self.active[id].request.logits_post_processor_name is not None
        }
        if not asked:
            return
        config = self.config.logits_post_processor_config
        for request in asked.values():
            if request.logits_post_processor_name != Request.BATCHED_POST_PROCESSOR_NAME:
                raise RuntimeError("no such logits post-processor")
        config.processor_batched(
            list(asked),
            [logits[id] for id in asked],
            [[r.input_token_ids + self.active[id].tokens] for id, r in asked.items()],
            0,
            [request.client_id for request in asked.values()],
        )

    def _sample(self, request_id, active, row):
        request, sampling = active.request, active.request.sampling_config
        if request.embedding_bias is not None:
            row = row + request.embedding_bias.float()
        if sampling.top_k is None and sampling.top_p is not None:
            probs = (row / (sampling.temperature or 1.0)).softmax(dim=-1)
            token = int(torch.multinomial(probs, 1, generator=active.generator))
        else:
            token = int(row.argmax())
        # Normalised over the candidates, the only candidate of top-k 1 has probability 1.
        normalised = self.config.normalize_log_probs and sampling.top_k == 1
        active.logprobs.append(0.0 if normalised else float(row.log_softmax(dim=-1)[token]))
        reason = FinishReason.NOT_FINISHED
        if token == request.end_id:
            reason = FinishReason.END_ID  # the sequence holds only tokens to be put out
        else:
            active.tokens.append(token)
            if len(active.tokens) == request.max_tokens:
                reason = FinishReason.LENGTH
        self._respond(request_id, active, reason)

    def _respond(self, request_id, active, reason):
        request, final = active.request, reason is not FinishReason.NOT_FINISHED
        if not final and not request.streaming:
            return
        tokens = list(active.tokens)
        if request.streaming:
            tokens = tokens[len(tokens) - (reason is not FinishReason.END_ID) :]
        elif not request.output_config.exclude_input_from_output:
            tokens = request.input_token_ids + tokens
        result = Result(is_final=final, output_token_ids=[tokens], finish_reasons=[reason])
        if request.output_config.return_log_probs:
            result.cum_log_probs = [math.fsum(active.logprobs)]
            result.log_probs = [list(active.logprobs)]
        if active.logits and final:
            result.generation_logits = torch.stack(active.logits)[None]  # (beams, tokens, vocab)
        if final:
            del self.active[request_id]
        self.responses.append(Response(request_id, result=result, client_id=request.client_id))
