"""A stand-in for `tensorrt_llm.bindings.executor` 1.2: refusals, in-flight batching.

Signatures were read in executorConfig.cpp, request.cpp and executor.cpp of
cpp/tensorrt_llm/nanobind/executor; they have the arguments that Earshot passes, the real ones take
more. Like nanobind, a wrong type raises TypeError; like the library, a bad setting raises
RuntimeError and a bad request answers with an error. One call of `await_responses` runs at most one
step. Of beams only the greedy one is searched.
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
from types import SimpleNamespace

import torch
from plain_whisper import PlainWhisper
from safetensors.torch import load_file

ModelType = enum.Enum("ModelType", "DECODER_ONLY ENCODER_ONLY ENCODER_DECODER")
BatchingType = enum.Enum("BatchingType", "STATIC INFLIGHT")
FinishReason = enum.Enum(
    "FinishReason", "NOT_FINISHED END_ID STOP_WORDS LENGTH TIMED_OUT CANCELLED"
)


def bind(value, *kinds):
    """Refuse a value of another type, as nanobind does: unlike Python it takes no bool for int."""
    fits = type(value) in kinds or (typing.Callable in kinds and callable(value))
    if not fits or (isinstance(value, list) and any(type(item) is not int for item in value)):
        raise TypeError(f"incompatible function arguments: {value!r} is none of {kinds}")


class Bound:
    """A class of the bindings: a dataclass whose types are checked."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            bind(getattr(self, field.name), *(typing.get_args(field.type) or [field.type]))


class Vector:
    """A C++ vector as the bindings show it where they do not copy it into a list."""

    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return Vector(self.items[index]) if isinstance(index, slice) else self.items[index]

    def __iter__(self):
        return iter(self.items)

    __hash__ = None


@dataclasses.dataclass(kw_only=True)
class KvCacheConfig(Bound):
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float | None = None
    cross_kv_cache_fraction: float | None = None


@dataclasses.dataclass(kw_only=True)
class ParallelConfig(Bound):
    device_ids: list | None = None


@dataclasses.dataclass(kw_only=True)
class LogitsPostProcessorConfig(Bound):
    processor_batched: typing.Callable | None = None


@dataclasses.dataclass(kw_only=True)
class ExecutorConfig(Bound):
    max_beam_width: int = 1
    kv_cache_config: KvCacheConfig = dataclasses.field(default_factory=KvCacheConfig)
    normalize_log_probs: bool = True
    batching_type: BatchingType = BatchingType.INFLIGHT
    max_batch_size: int | None = None
    parallel_config: ParallelConfig | None = None
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    gather_generation_logits: bool = False


@dataclasses.dataclass
class SamplingConfig(Bound):
    beam_width: int = 1
    _: dataclasses.KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    length_penalty: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RuntimeError("Assertion failed: topP.value() > 0.f && topP.value() <= 1.f")


@dataclasses.dataclass(kw_only=True)
class OutputConfig(Bound):
    return_log_probs: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False


@dataclasses.dataclass
class Request(Bound):
    BATCHED_POST_PROCESSOR_NAME: typing.ClassVar[str] = "batched"

    input_token_ids: list
    max_tokens: int
    _: dataclasses.KW_ONLY
    streaming: bool = False
    sampling_config: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    output_config: OutputConfig = dataclasses.field(default_factory=OutputConfig)
    end_id: int | None = None
    pad_id: int | None = None
    logits_post_processor_name: str | None = None
    client_id: int | None = None
    encoder_input_features: torch.Tensor | None = None
    encoder_output_length: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.max_tokens < 1:
            raise RuntimeError("Assertion failed: mMaxNewTokens > 0")


@dataclasses.dataclass
class Result:
    is_final: bool
    output_token_ids: list
    finish_reasons: list
    cum_log_probs: list | None = None
    generation_logits: torch.Tensor | None = None


@dataclasses.dataclass
class Response:
    request_id: int
    error_msg: str | None = None
    result: Result | None = None
    client_id: int | None = None

    def has_error(self):
        return self.error_msg is not None


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
        for path in (encoder_model_path, decoder_model_path):
            bind(path, str)
        bind(executor_config, ExecutorConfig)
        if model_type is not ModelType.ENCODER_DECODER:
            raise RuntimeError("two model paths need ModelType.ENCODER_DECODER")
        if executor_config.kv_cache_config.cross_kv_cache_fraction is None:
            raise RuntimeError("Must set crossKvCacheFraction for encoder-decoder model")
        self.config = executor_config
        halves = [self.open(path) for path in (encoder_model_path, decoder_model_path)]
        self.encoder_build, self.build = (build for build, _, _ in halves)
        self.network = PlainWhisper(*((config, tensors) for _, config, tensors in halves))
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
        self.stats: list[SimpleNamespace] = []
        self.encoded_together: list[int] = []
        self.broken = ""
        self.ids = itertools.count(1)
        self.running = True
        Executor.instances.append(self)

    @staticmethod
    def open(path):
        config = json.loads((Path(path) / "config.json").read_text())
        tensors = load_file(Path(path) / "rank0.engine")
        return config["build_config"], config["pretrained_config"], tensors

    def enqueue_request(self, request):
        bind(request, Request)
        if not self.running:
            raise RuntimeError("executor is shut down")
        request_id = next(self.ids)
        self.requests.append(request)
        error = self.refusal(request)
        if error:
            self.responses.append(Response(request_id, error))
        else:
            self.queue[request_id] = Active(request)
        return request_id

    def refusal(self, request):
        features, prompt = request.encoder_input_features, len(request.input_token_ids)
        if features is None or features.ndim != 2:
            return "encoder input features must be [length, featureDim]"
        frames, mels = features.shape
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
        }
        return next((message for message, fault in faults.items() if fault), "")

    def await_responses(self, timeout=None):
        bind(timeout, datetime.timedelta, type(None))
        if self.broken:
            raise RuntimeError(self.broken)
        if not self.responses and (self.queue or self.active):
            self.step()
        elif not self.responses and timeout is not None:
            time.sleep(min(timeout.total_seconds(), 0.001))
        responses, self.responses = self.responses, []
        return responses

    def cancel_request(self, id=None):
        bind(id, int, type(None))
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

    def step(self):
        began = time.perf_counter()
        limit = self.config.max_batch_size or self.build["max_batch_size"]
        budget, fresh = self.encoder_build["max_num_tokens"], 0
        while self.queue and len(self.active) < limit:
            request_id = next(iter(self.queue))
            budget -= self.queue[request_id].request.encoder_output_length
            if budget < 0:
                break
            self.start(request_id, self.queue.pop(request_id))
            fresh += 1
        if fresh:
            self.encoded_together.append(fresh)
        with torch.inference_mode():
            logits = {id: self.logits_of(active) for id, active in self.active.items()}
            self.post_process(logits)
            for request_id, row in logits.items():
                self.sample(request_id, self.active[request_id], row.reshape(-1).float())
        latency_ms = 1000 * (time.perf_counter() - began)
        batch = SimpleNamespace(num_scheduled_requests=len(logits))
        self.stats.append(
            SimpleNamespace(iter_latency_ms=latency_ms, inflight_batching_stats=batch)
        )

    def start(self, request_id, active):
        with torch.inference_mode():
            encoded = self.network.encode(active.request.encoder_input_features[None])
            active.cross = self.network.cross(encoded)
        active.generator = torch.Generator().manual_seed(active.request.sampling_config.seed or 0)
        self.active[request_id] = active

    def logits_of(self, active):
        tokens = torch.tensor([active.request.input_token_ids + active.tokens])
        logits = self.network.logits(tokens, active.cross)[:, -1:].half()
        if active.request.output_config.return_generation_logits:
            active.logits.append(logits[0, 0].clone())
        return logits  # (1, beams, vocab)

    def post_process(self, logits):
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
            [
                Vector([Vector(r.input_token_ids + self.active[id].tokens)])
                for id, r in asked.items()
            ],
            0,
            [request.client_id for request in asked.values()],
        )

    def sample(self, request_id, active, row):
        request, sampling = active.request, active.request.sampling_config
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
        self.respond(request_id, active, reason)

    def respond(self, request_id, active, reason):
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
        if active.logits and final:
            result.generation_logits = torch.stack(active.logits)[None]  # (beams, tokens, vocab)
        if final:
            del self.active[request_id]
        self.responses.append(Response(request_id, result=result, client_id=request.client_id))
