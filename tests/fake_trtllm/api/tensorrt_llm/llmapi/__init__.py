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

import numpy as np
import torch
import transformers

POSITIONS = 1500  # of the encoder's output, whatever the clip's length
EXACT = (bool, int, float, str)  # as in the bindings, a bool is no int and an int no float


class RequestError(RuntimeError):
    """A request was refused or failed; others go on."""


class EngineDeadError(RuntimeError):
    """The executor died; nothing goes on. Real name: tensorrt_llm.executor.EngineDeadError."""


def check(made, error):
    """Raise `error` where a field of a dataclass holds another kind of value."""
    for name, declared in typing.get_type_hints(type(made)).items():
        check_one(f"{type(made).__name__}.{name}", getattr(made, name), declared, error)


def check_one(name, value, declared, error):
    """Raise `error` where a value is of none of the kinds that an annotation names."""
    kinds = typing.get_args(declared) or (declared,)
    if not any(type(value) is kind if kind in EXACT else isinstance(value, kind) for kind in kinds):
        raise error(f"{name} = {value!r}; expected {declared}")


class Settings:
    def __post_init__(self):
        check(self, ValueError)


@dataclasses.dataclass(kw_only=True)
class KvCacheConfig(Settings):
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float = 0.9
    cross_kv_cache_fraction: float | None = None
    use_kv_cache_manager_v2: bool = False


@dataclasses.dataclass(kw_only=True)
class SchedulerConfig(Settings):
    use_python_scheduler: bool = False


@dataclasses.dataclass(kw_only=True)
class CudaGraphConfig(Settings):
    batch_sizes: list | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class SamplingParams:
    """What NVIDIA's own Whisper test passes, with the refusals."""

    end_id: int | None = None
    max_tokens: int = 32
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    temperature: float | None = None
    length_penalty: float | None = None
    logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self):
        check(self, TypeError)
        if (self.best_of or self.n) < self.n:
            raise ValueError("best_of cannot be less than n")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")

    @property
    def width(self):
        return (self.best_of or self.n) if self.use_beam_search else 1


@dataclasses.dataclass
class Logprob:
    logprob: float


@dataclasses.dataclass
class CompletionOutput:
    index: int
    token_ids: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    finish_reason: str | None = None


@dataclasses.dataclass
class LlmArgs(Settings):
    """The keywords of `LLM`; unknown ones are refused."""

    model: str
    dtype: str = "auto"
    backend: str = "pytorch"
    attn_backend: str = "TRTLLM"
    model_kwargs: dict | None = None
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_input_len: int = 1024
    max_num_tokens: int = 8192
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    cuda_graph_config: CudaGraphConfig | None = None
    kv_cache_config: KvCacheConfig = dataclasses.field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)

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

    def __init__(self, llm, request_id, streaming):
        self.request_id = request_id
        self.outputs = [CompletionOutput(0)]
        self.finished = False
        self.llm, self.streaming = llm, streaming
        self.loop = asyncio.get_running_loop()  # the stand-in has no synchronous way
        self.queue = asyncio.Queue()

    def abort(self):
        self.llm.abort(self.request_id)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.finished:
            raise StopAsyncIteration
        message = await self.queue.get()
        if isinstance(message, Exception):
            raise message
        tokens, logprobs, reason = message
        (output,) = self.outputs
        output.token_ids.extend(tokens)
        output.logprobs = output.logprobs + logprobs
        output.finish_reason, self.finished = reason, reason is not None
        return self

    def post(self, message):
        self.loop.call_soon_threadsafe(self.queue.put_nowait, message)


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

    def __init__(self, model, **options):
        self.args = LlmArgs(model, **options)
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
        self.requests = []  # (inputs, sampling_params), as given
        self.encoded_together: list[int] = []
        self.most_active = 0
        self.broken = ""  # a message: the next step is the executor's last
        self.ids = itertools.count(1)
        self.lock = threading.Condition()
        self.queue: dict[int, Active] = {}
        self.active: dict[int, Active] = {}
        self.running = True
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        LLM.instances.append(self)

    def generate_async(self, inputs, sampling_params, streaming):
        if not self.running:
            raise RuntimeError("LLM is shutting down")
        for name, value, kind in (
            ("inputs", inputs, dict),
            ("sampling_params", sampling_params, SamplingParams),
            ("streaming", streaming, bool),
        ):
            check_one(name, value, kind, TypeError)
        self.requests.append((inputs, dataclasses.replace(sampling_params)))
        prompt, samples = self.process(inputs, sampling_params)
        if sampling_params.end_id is None:  # as `_prepare_sampling_params` does
            sampling_params.end_id = self.processor.tokenizer.eos_token_id
        if sampling_params.width != self.args.max_beam_width:
            raise RequestError(
                f"Request beam width {sampling_params.width} is not equal to max_beam_width "
                f"{self.args.max_beam_width}. This is not supported!"
            )
        if self.args.max_input_len < POSITIONS:
            raise RequestError(f"encoder output of {POSITIONS} exceeds the cross-KV pool")
        request_id = next(self.ids)
        output = RequestOutput(self, request_id, streaming)
        with self.lock:
            self.queue[request_id] = Active(output, sampling_params, samples, prompt)
            self.lock.notify()
        return output

    def shutdown(self):
        with self.lock:
            self.running = False
            self.lock.notify()
        self.thread.join(10)

    # ------------------------------------------------------------------ the stand-in's own work

    def process(self, inputs, params):
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

    def abort(self, request_id):
        with self.lock:
            active = self.queue.pop(request_id, None) or self.active.pop(request_id, None)
        if active is not None:
            active.output.post(([], [], "cancelled"))

    def run(self):
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.queue or self.active or not self.running)
                if not self.running:
                    return
                if self.broken:
                    self.die()
                    return
                fresh = self.admit()
            with torch.inference_mode():
                for active in fresh:
                    self.encode(active)
                for request_id, active in list(self.active.items()):
                    self.step(request_id, active)

    def die(self):
        self.running = False
        for active in (*self.queue.values(), *self.active.values()):
            active.output.post(EngineDeadError(self.broken))

    def admit(self):
        """Requests that start in this iteration: as many as slots and token budget allow."""
        budget = self.args.max_num_tokens // POSITIONS
        room = min(self.args.max_batch_size - len(self.active), budget)
        ids = list(self.queue)[:room]
        fresh = [self.queue.pop(request_id) for request_id in ids]
        self.active |= dict(zip(ids, fresh, strict=True))
        self.most_active = max(self.most_active, len(self.active))
        if fresh:
            self.encoded_together.append(len(fresh))
        return fresh

    def encode(self, active):
        extractor = self.processor.feature_extractor
        features = extractor(active.samples, sampling_rate=16_000, return_tensors="pt")
        active.encoded = self.network.model.encoder(features.input_features)

    def step(self, request_id, active):
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
        token = int(row.argmax())
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
            with self.lock:
                if self.active.pop(request_id, None) is None:
                    return  # aborted meanwhile
        if reason is not None or active.output.streaming:
            fresh = active.tokens[active.told :], active.logprobs[active.told :]
            active.told = len(active.tokens)
            active.output.post((*fresh, reason))
