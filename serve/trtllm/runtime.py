"""TensorRTLLMRuntime: windows become TensorRT-LLM requests, its responses become events.

TensorRT-LLM schedules by itself, so a job is simply enqueued and its responses awaited. How it is
reached is behind `Executor`: `serve.trtllm.executor.CppExecutor` calls the C++ executor of release
1.2, `serve.trtllm.llm_api.LlmApiExecutor` calls the LLM API of release 1.3 and later.

A language is detected, and the no-speech probability measured, by a probe: a request of one token
whose prompt ends at start-of-transcript. It costs a second encoder pass for that window.
"""

import contextlib
import dataclasses
import queue
import time
from typing import Protocol, TypeVar

import torch

from serve.contract.engine import DETECT_LANGUAGE, Engine
from serve.contract.errors import EarshotError, OptionError
from serve.runtime.protocol import Capabilities, FinishReason, Gauges, Job, JobEvent, Scores
from serve.speech.features import WINDOW_SAMPLES
from serve.trtllm.limits import SequenceLimits

FORBIDDEN = -1e4  # far below any logit of Whisper, and a float16
LENGTH_PENALTY = 1.0  # of beams, as everywhere in Earshot; the library's default is none

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ExecutorRequest:
    """One request to TensorRT-LLM."""

    prompt: tuple[int, ...]
    # In host memory, contiguous: log-mel float16 (3000, n_mels), time first; or, for an executor
    # that `takes` samples, float32 (n,).
    features: torch.Tensor
    max_tokens: int
    prefix: int = 0  # see `Job.prefix`
    timestamps: bool = False
    temperature: float = 0.0
    beam_size: int = 1
    seed: int = 0
    probe: bool = False  # no rules; one token: give back its logits


@dataclasses.dataclass(frozen=True)
class ExecutorResponse:
    """News of one request."""

    id: int
    tokens: tuple[int, ...] = ()  # new since the last response
    finished: FinishReason | None = None
    logprob_sum: float | None = None  # with `finished`: over every sampled token
    logits: torch.Tensor | None = None  # to a probe: float32 (n_vocab,)
    error: str = ""  # with `finished` "error"


class Executor(Protocol):
    """Takes requests and gives responses: TensorRT-LLM, however it is reached."""

    capabilities: Capabilities  # what its requests can ask for
    lengths: SequenceLimits  # what fits in a request

    def enqueue(self, request: ExecutorRequest) -> int:
        """Hand over a request and return its id; never blocks.

        Raises:
            DeviceError: TensorRT-LLM takes no requests any more.
        """
        ...

    def await_responses(self, timeout_s: float) -> list[ExecutorResponse]:
        """Wait at most `timeout_s` for news.

        Raises:
            DeviceError: TensorRT-LLM failed.
        """
        ...

    def cancel(self, request_id: int) -> None:
        """Stop a request. Responses to it may still arrive."""
        ...

    def steps(self) -> tuple[int, int, float]:
        """Count (steps, requests in them, seconds spent) since the last call.

        Raises:
            DeviceError: TensorRT-LLM failed.
        """
        ...

    def close(self) -> None:
        """End every request and free the GPU."""
        ...


def take_all(waiting: queue.SimpleQueue[T], timeout_s: float) -> list[T]:
    """Take what is in a queue; wait at most `timeout_s` for the first of it."""
    taken: list[T] = []
    with contextlib.suppress(queue.Empty):
        taken.append(waiting.get(timeout=timeout_s))
        while True:
            taken.append(waiting.get_nowait())
    return taken


@dataclasses.dataclass
class _Window:
    """A job on its way."""

    job: Job
    features: torch.Tensor
    probing: bool
    began: float
    prompt: tuple[int, ...]
    first_at: float | None = None  # when its first token arrived
    sampled: int = 0
    no_speech_prob: float | None = None
    language: int | None = None
    language_prob: float | None = None


class TensorRTLLMRuntime:
    """Implements `serve.runtime.protocol.Runtime` over an `Executor`.

    Args:
        engine: an engine that TensorRT-LLM runs.
        executor: closed with the runtime.
    """

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self.capabilities = executor.capabilities
        self._lengths = executor.lengths
        self._facts = engine.manifest.tokenizer
        self._dims = engine.manifest.dims
        self._executor = executor
        self._windows: dict[int, _Window] = {}  # by request id
        self._ended: list[JobEvent] = []  # cancelled before the next poll
        self._gauges = Gauges(0, 0, 0, 0, 0, 0, 0.0, 0.0)

    def submit(self, job: Job) -> None:
        """Take one job; see `Runtime.submit`."""
        self._check(job)
        probing = DETECT_LANGUAGE in job.prompt
        # NOTE: time first and in the engine's dtype, for the library copies bytes; in host memory,
        # for it copies on a stream of its own, which would not wait for work on the GPU.
        if self.capabilities.takes == "samples":
            features = job.features.to("cpu", torch.float32).contiguous()
        else:
            features = job.features.to("cpu", torch.float16).T.contiguous()
        self._send(_Window(job, features, probing, time.perf_counter(), job.prompt))

    def poll(self, timeout_s: float) -> list[JobEvent]:
        """Wait for news; see `Runtime.poll`."""
        events, self._ended = self._ended, []
        if self._windows:
            for response in self._executor.await_responses(0.0 if events else timeout_s):
                events += self._take(response)
        return events

    def cancel(self, job_id: int) -> None:
        """End a job; see `Runtime.cancel`."""
        for request_id, window in self._windows.items():
            if window.job.id == job_id:
                self._executor.cancel(request_id)
                del self._windows[request_id]
                self._ended.append(JobEvent(job_id, finished="cancelled"))
                return

    def gauges(self) -> Gauges:
        """Return gauges and counters; all of the library's time counts as decoding."""
        steps, step_slots, seconds = self._executor.steps()
        self._count(steps=steps, step_slots=step_slots, decode_s=seconds)
        busy = min(len(self._windows), self.capabilities.max_windows)
        return dataclasses.replace(self._gauges, queued=len(self._windows) - busy, busy_slots=busy)

    def _count(self, **more: float) -> None:
        """Add to counters, by their names in `Gauges`."""
        changed = {name: getattr(self._gauges, name) + value for name, value in more.items()}
        self._gauges = dataclasses.replace(self._gauges, **changed)

    def close(self) -> None:
        """Drop every job and free the GPU."""
        self._windows.clear()
        self._executor.close()

    def _check(self, job: Job) -> None:
        limits, options = self._lengths, job.options
        self._check_features(job.features)
        self._check_abilities(job)
        room = limits.max_seq_len - len(job.prompt)
        if len(job.prompt) > limits.max_prompt_tokens or room < 1 or options.max_tokens < 1:
            raise OptionError(
                f"a prompt of {len(job.prompt)} tokens and max_tokens {options.max_tokens} do not "
                f"fit this engine: prompts of at most {limits.max_prompt_tokens} tokens, "
                f"{limits.max_seq_len} tokens in all"
            )

    def _check_features(self, features: torch.Tensor) -> None:
        shape = tuple(features.shape)
        expected = (self._dims.n_mels, 2 * self._dims.n_audio_ctx)
        if self.capabilities.takes == "samples":
            if len(shape) != 1 or not 1 <= shape[0] <= WINDOW_SAMPLES:
                raise OptionError(
                    f"samples of shape {shape}; this engine takes 1 to {WINDOW_SAMPLES} of them"
                )
        elif shape != expected:
            raise OptionError(f"features of shape {shape}; this engine takes {expected}")

    def _check_abilities(self, job: Job) -> None:
        if job.options.timestamps and not self.capabilities.timestamps:
            raise OptionError(
                "timestamps: this runtime cannot enforce their rules; ask without timestamps"
            )
        if DETECT_LANGUAGE in job.prompt and not self.capabilities.detect_language:
            raise OptionError("language: this runtime cannot detect it; name it")
        text = job.prefix or job.prompt[:1] != (self._facts.sot,)
        if text and not self.capabilities.previous_text:
            raise OptionError("prompt: this runtime cannot begin with text; leave it out")
        if job.options.temperature > 0 and not self.capabilities.sampling:
            raise OptionError("temperature: this runtime decodes greedily; expected 0")
        refusal = self.capabilities.refusal_of(job)
        if refusal is not None:
            raise OptionError(refusal)

    def _send(self, window: _Window) -> None:
        job, options = window.job, window.job.options
        if window.probing:
            prompt = job.prompt[: job.prompt.index(self._facts.sot) + 1]
            request = ExecutorRequest(prompt, window.features, max_tokens=1, probe=True)
        else:
            request = ExecutorRequest(
                prompt=window.prompt,
                features=window.features,
                max_tokens=min(options.max_tokens, self._lengths.max_seq_len - len(window.prompt)),
                prefix=job.prefix,
                timestamps=options.timestamps,
                temperature=options.temperature,
                beam_size=options.beam_size,
                seed=options.seed,
            )
        self._windows[self._executor.enqueue(request)] = window

    def _take(self, response: ExecutorResponse) -> list[JobEvent]:
        """Turn one response into events; one to a cancelled job is nobody's."""
        window = self._windows.get(response.id)
        if window is None:
            return []
        if response.finished is not None:
            del self._windows[response.id]
        if response.finished == "error":
            error = EarshotError(f"TensorRT-LLM failed this window: {response.error}")
            return [JobEvent(window.job.id, finished="error", error=error)]
        if window.probing:
            if response.finished is not None:
                self._note_probe(window, response)
                self._send(window)
            return []
        return self._progress(window, response)

    def _progress(self, window: _Window, response: ExecutorResponse) -> list[JobEvent]:
        tokens = response.tokens
        # The end token counts below; it is no text, should the library leave it in.
        if tokens and tokens[-1] == self._facts.eot:
            tokens = tokens[:-1]
        now = time.perf_counter()
        if window.first_at is None:
            window.first_at = now
            self._count(windows=1)
        ended = response.finished == "eot"
        window.sampled += len(tokens) + ended
        self._count(tokens=len(tokens) + ended)
        if response.finished is None:
            return [JobEvent(window.job.id, tokens)] if tokens else []
        if response.finished == "cancelled":
            return [JobEvent(window.job.id, tokens, "cancelled")]
        scores = Scores(
            avg_logprob=_mean(response.logprob_sum, window.sampled),
            no_speech_prob=window.no_speech_prob,
            language=window.language,
            language_prob=window.language_prob,
            encode_s=window.first_at - window.began,
            decode_s=now - window.first_at,
            began_s=(window.began, window.first_at),
        )
        return [JobEvent(window.job.id, tokens, response.finished, scores)]

    def _note_probe(self, window: _Window, response: ExecutorResponse) -> None:
        """Keep what is told at start-of-transcript; put the language into the prompt."""
        window.probing = False
        assert response.logits is not None
        logits = response.logits.float()
        window.no_speech_prob = float(logits.softmax(dim=-1)[self._facts.no_speech])
        languages = sorted(self._facts.languages.values())
        prob, index = logits[languages].softmax(dim=-1).max(dim=-1)
        language, window.language_prob = languages[int(index)], float(prob)
        window.language = language
        window.prompt = tuple(
            language if token == DETECT_LANGUAGE else token for token in window.job.prompt
        )


def _mean(total: float | None, count: int) -> float | None:
    return None if total is None or count == 0 else total / count
