"""A stand-in for `tensorrt_llm.llmapi` 1.4: signatures, refusals, asynchronous batching.

Signatures follow tests/unittest/api_stability/references*/*.yaml and llmapi/llm_args.py; what a
Whisper request may hold follows _torch/models/modeling_whisper.py (WhisperInputProcessor), what a
result does executor/result.py. The network is transformers' Whisper, on the CPU; a thread gives
every active request one token a step. Of beams only the greedy one is searched.
"""

import asyncio
import dataclasses
import itertools
import threading
import typing
from pathlib import Path

import numpy as np
import torch
import transformers

from tensorrt_llm.kinds import check, check_one
from tensorrt_llm.sampling_params import SamplingParams

POSITIONS = 1500  # of the encoder's output, whatever the clip's length


class RequestError(RuntimeError):
    """A request was refused or failed; others go on."""


class EngineDeadError(RuntimeError):
    """The executor died; nothing goes on. Real name: tensorrt_llm.executor.EngineDeadError."""


class Settings:
    def __post_init__(self):
        check(self, ValueError)


@dataclasses.dataclass(kw_only=True)
class KvCacheConfig(Settings):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float = 0.9
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    tokens_per_block: int = 32
    use_kv_cache_manager_v2: bool = False


@dataclasses.dataclass(kw_only=True)
class SchedulerConfig(Settings):
    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"
    context_chunking_policy: str | None = None
    dynamic_batch_config: dict | None = None
    use_python_scheduler: bool = False


@dataclasses.dataclass(kw_only=True)
class CudaGraphConfig(Settings):
    batch_sizes: list | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclasses.dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: typing.Any = None


@dataclasses.dataclass
class LlmArgs(Settings):
    """The keywords of `LLM`; unknown ones are refused."""

    model: str | Path
    tokenizer: str | Path | None = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    backend: str = "pytorch"
    attn_backend: str = "TRTLLM"
    model_kwargs: dict | None = None
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_input_len: int = 1024
    max_seq_len: int | None = None
    max_num_tokens: int = 8192
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    cuda_graph_config: CudaGraphConfig | None = None
    kv_cache_config: KvCacheConfig = dataclasses.field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    stream_interval: int = 1
    enable_iter_perf_stats: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.attn_backend != "TRTLLM" or self.enable_chunked_prefill:
            raise ValueError("encoder-decoder models need TRTLLM attention, unchunked")
        if self.kv_cache_config.cross_kv_cache_fraction is None:
            raise ValueError("cross_kv_cache_fraction is required for encoder-decoder models")
        if self.max_num_tokens < POSITIONS:
            raise ValueError("max_num_tokens is less than the encoder puts out")


class RequestOutput:
    """What `generate_async` returns: an asynchronous iterator over itself."""

    def __init__(self, llm, request_id, prompt, prompt_token_ids, streaming):
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self.outputs = [CompletionOutput(0)]
        self.finished = False
        self._llm, self._streaming, self._aborted = llm, streaming, False
        self._loop = asyncio.get_running_loop()  # the stand-in has no synchronous way
        self._queue = asyncio.Queue()

    def abort(self):
        self._aborted = True
        self._llm._abort(self.request_id)

    def aborted(self):
        return self._aborted

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.finished:
            raise StopAsyncIteration
        message = await self._queue.get()
        if isinstance(message, Exception):
            raise message
        tokens, logprobs, reason = message
        (output,) = self.outputs
        output.token_ids.extend(tokens)
        output.logprobs = output.logprobs + logprobs
        output.finish_reason, self.finished = reason, reason is not None
        return self

    def _post(self, message):
        self._loop.call_soon_threadsafe(self._queue.put_nowait, message)


@dataclasses.dataclass
class Active:
    """A request that the stand-in decodes."""

    output: RequestOutput
    params: SamplingParams
    samples: np.ndarray
    prompt: list
    encoded: typing.Any = None
    cache: typing.Any = None
    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    told: int = 0


class LLM:
    instances: typing.ClassVar[list] = []  # every one made, for tests to look into

    def __init__(
        self,
        model,
        tokenizer=None,
        tokenizer_mode="auto",
        skip_tokenizer_init=False,
        trust_remote_code=False,
        tensor_parallel_size=1,
        dtype="auto",
        revision=None,
        tokenizer_revision=None,
        **kwargs,
    ):
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs")}
        known = {field.name for field in dataclasses.fields(LlmArgs)}
        for key in kwargs:
            if key not in known:
                raise ValueError(f"LLM got invalid argument: {key}")
        self.args = LlmArgs(**given, **kwargs)
        self.model = model
        self.processor = transformers.AutoProcessor.from_pretrained(model)
        self.config = transformers.WhisperConfig.from_pretrained(model)
        generation = transformers.GenerationConfig.from_pretrained(model)
        self.suppress = list(generation.suppress_tokens or [])
        self.begin_suppress = list(generation.begin_suppress_tokens or [])
        network = transformers.WhisperForConditionalGeneration.from_pretrained(model)
        asked = (self.args.model_kwargs or {}).get("torch_dtype")
        self.dtype = getattr(torch, asked) if asked else network.dtype
        self.network = network.to(self.dtype).float().eval()
        self.generator = torch.Generator().manual_seed(
            0
        )  # one for all, whatever seeds they ask for
        self.requests = []  # (inputs, sampling_params), as given
        self.encoded_together: list[int] = []
        self.most_active = 0
        self.broken = ""  # a message: the next step is the executor's last
        self._ids = itertools.count(1)
        self._lock = threading.Condition()
        self._queue: dict[int, Active] = {}
        self._active: dict[int, Active] = {}
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        LLM.instances.append(self)

    def generate_async(
        self,
        inputs,
        sampling_params=None,
        lora_request=None,
        prompt_adapter_request=None,
        streaming=False,
        kv_cache_retention_config=None,
        disaggregated_params=None,
        trace_headers=None,
        _postproc_params=None,
        scheduling_params=None,
        conversation_params=None,
        cache_salt=None,
        priority=0.5,
    ):
        if not self._running:
            raise RuntimeError("LLM is shutting down")
        for name, value, kind in (
            ("inputs", inputs, dict),
            ("sampling_params", sampling_params, SamplingParams),
            ("streaming", streaming, bool),
        ):
            check_one(name, value, kind, TypeError)
        self.requests.append((inputs, dataclasses.replace(sampling_params)))
        prompt, samples = self._process(inputs, sampling_params)
        if sampling_params.end_id is None:  # as `_prepare_sampling_params` does
            sampling_params.end_id = self.processor.tokenizer.eos_token_id
        if sampling_params.width != self.args.max_beam_width:
            raise RequestError(
                f"Request beam width {sampling_params.width} is not equal to max_beam_width "
                f"{self.args.max_beam_width}. This is not supported!"
            )
        if self.args.max_input_len < POSITIONS:
            raise RequestError(f"encoder output of {POSITIONS} exceeds the cross-KV pool")
        request_id = next(self._ids)
        output = RequestOutput(self, request_id, inputs["prompt"], prompt, streaming)
        with self._lock:
            self._queue[request_id] = Active(output, sampling_params, samples, prompt)
            self._lock.notify()
        return output

    def shutdown(self):
        with self._lock:
            self._running = False
            self._lock.notify()
        self._thread.join(10)

    # ------------------------------------------------------------------ the stand-in's own work

    def _process(self, inputs, params):
        """The decoder's prompt and the samples of one request, or what is wrong with it."""
        unknown = inputs.keys() - {"prompt", "multi_modal_data"}
        if unknown:
            raise TypeError(f"unknown keys {unknown}")
        (clip,) = inputs["multi_modal_data"]["audio"]
        samples, rate = clip
        check_one("prompt", inputs["prompt"], str, TypeError)
        check_one("samples", samples, np.ndarray, TypeError)
        check_one("rate", rate, int, TypeError)
        if rate != 16_000:
            raise ValueError(f"Whisper expects 16000 Hz audio; got {rate} Hz")
        samples = np.asarray(samples, dtype=np.float32)
        if len(samples) > 480_000:
            raise ValueError(f"Audio is {len(samples) / rate:.2f}s long; at most 30s per request")
        prompt = self.processor.tokenizer.encode(inputs["prompt"], add_special_tokens=False)
        if not prompt or prompt[0] != self.config.decoder_start_token_id:
            raise ValueError("A Whisper text prompt must start with <|startoftranscript|>")
        room = self.config.max_target_positions - len(prompt)
        params.max_tokens = min(params.max_tokens, room)
        return prompt, samples

    def _abort(self, request_id):
        with self._lock:
            active = self._queue.pop(request_id, None) or self._active.pop(request_id, None)
        if active is not None:
            active.output._post(([], [], "cancelled"))

    def _run(self):
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._active or not self._running)
                if not self._running:
                    return
                if self.broken:
                    self._die()
                    return
                fresh = self._admit()
            with torch.inference_mode():
                for active in fresh:
                    self._encode(active)
                for request_id, active in list(self._active.items()):
                    self._step(request_id, active)

    def _die(self):
        self._running = False
        for active in (*self._queue.values(), *self._active.values()):
            active.output._post(EngineDeadError(self.broken))

    def _admit(self):
        """Requests that start in this iteration: as many as slots and token budget allow."""
        budget = self.args.max_num_tokens // POSITIONS
        room = min(self.args.max_batch_size - len(self._active), budget)
        ids = list(self._queue)[:room]
        fresh = [self._queue.pop(request_id) for request_id in ids]
        self._active |= dict(zip(ids, fresh, strict=True))
        self.most_active = max(self.most_active, len(self._active))
        if fresh:
            self.encoded_together.append(len(fresh))
        return fresh

    def _encode(self, active):
        extractor = self.processor.feature_extractor
        features = extractor(active.samples, sampling_rate=16_000, return_tensors="pt")
        active.encoded = self.network.model.encoder(features.input_features)

    def _step(self, request_id, active):
        params = active.params
        outputs = self.network(
            encoder_outputs=active.encoded,
            decoder_input_ids=torch.tensor([active.tokens[-1:] or active.prompt]),
            past_key_values=active.cache,
            use_cache=True,
        )
        active.cache = outputs.past_key_values
        row = outputs.logits[0, -1].float()
        raw = row.log_softmax(dim=-1)
        row[self.suppress] = -torch.inf
        if not active.tokens:
            row[self.begin_suppress] = -torch.inf
        if params.greedy:
            token = int(row.argmax())
        else:
            probs = (row / params.temperature).softmax(dim=-1)
            token = int(torch.multinomial(probs, 1, generator=self.generator))
        active.tokens.append(token)
        if params.logprobs is not None:
            best = int(raw.argmax())
            active.logprobs.append({t: Logprob(float(raw[t])) for t in (best, token)})
        reason = None
        if token == params.end_id:
            reason = "stop"  # the tokens hold the end
        elif len(active.tokens) == params.max_tokens:
            reason = "length"
        if reason is not None:
            with self._lock:
                if self._active.pop(request_id, None) is None:
                    return  # aborted meanwhile
        if reason is not None or active.output._streaming:
            fresh = active.tokens[active.told :], active.logprobs[active.told :]
            active.told = len(active.tokens)
            active.output._post((*fresh, reason))
