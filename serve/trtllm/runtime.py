"""Run windows as TensorRT-LLM requests, and turn its responses into events.

TensorRT-LLM does its own scheduling, so the runtime only enqueues jobs and waits for responses.
`Executor` has two implementations: `serve.trtllm.executor.CppExecutor` for the C++ executor of
release 1.2, and `serve.trtllm.llm_api.LlmApiExecutor` for the LLM API of release 1.3 and later.

A probe detects the language and measures the no-speech probability. It is a request for one token
after start-of-transcript, and costs a second encoder pass for the window.
"""

import dataclasses
import time
from typing import Protocol

import torch

from serve.contract.engine import DETECT_LANGUAGE, Engine
from serve.contract.errors import EarshotError, OptionError
from serve.runtime.protocol import Capabilities, FinishReason, Gauges, Job, JobEvent, Scores
from serve.trtllm.limits import SequenceLimits

LENGTH_PENALTY = 1.0  # of beam searches, as everywhere in Earshot; the library's default is none


@dataclasses.dataclass(frozen=True)
class ExecutorRequest:
    """One request to TensorRT-LLM."""

    prompt: tuple[int, ...]
    # Contiguous, in host memory: log-mel float16 (3000, n_mels); for an executor with the
    # `input_kind` "samples", float32 (n,).
    features: torch.Tensor
    max_tokens: int
    prefix: int = 0  # see `Job.prefix`
    timestamps: bool = False
    temperature: float = 0.0
    beam_size: int = 1
    seed: int = 0
    probe: bool = False  # compute one token without rules, and return its logits


@dataclasses.dataclass(frozen=True)
class ExecutorResponse:
    """New tokens of one request, or its end."""

    id: int
    tokens: tuple[int, ...] = ()  # sampled since the last response
    finished: FinishReason | None = None
    logprob_sum: float | None = None  # with `finished`: sum over every sampled token
    logits: torch.Tensor | None = None  # of a probe: float32 (n_vocab,)
    error: str = ""  # with `finished` "error"


class Executor(Protocol):
    """An interface of TensorRT-LLM that accepts requests and returns responses."""

    capabilities: Capabilities  # the supported options
    lengths: SequenceLimits  # the maximum lengths of a request

    def enqueue(self, request: ExecutorRequest) -> int:
        """Enqueue a request without blocking, and return its id.

        Raises:
            DeviceError: TensorRT-LLM does not accept requests any more.
        """

    def await_responses(self, timeout_s: float) -> list[ExecutorResponse]:
        """Wait at most `timeout_s` for responses.

        Raises:
            DeviceError: TensorRT-LLM failed.
        """

    def cancel(self, request_id: int) -> None:
        """Stop a request. Responses to it may still arrive."""

    def steps(self) -> tuple[int, int, float]:
        """Return (steps, requests summed over the steps, seconds) since the last call.

        Raises:
            DeviceError: TensorRT-LLM failed.
        """

    def close(self) -> None:
        """End every request and free the GPU."""


@dataclasses.dataclass
class _Window:
    """A job in flight."""

    job: Job
    features: torch.Tensor
    probing: bool
    began_s: float
    prompt: tuple[int, ...]
    first_token_s: float | None = None  # monotonic time of the first token
    sampled: int = 0
    no_speech_prob: float | None = None
    language: int | None = None
    language_prob: float | None = None


class TensorRTLLMRuntime:
    """Implements `serve.runtime.protocol.Runtime` over an `Executor`.

    Args:
        engine: an engine for TensorRT-LLM.
        executor: the executor that runs the engine; the runtime closes it.
    """

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self.capabilities = executor.capabilities
        self._lengths = executor.lengths
        self._facts = engine.manifest.tokenizer
        self._executor = executor
        self._windows: dict[int, _Window] = {}  # by request id
        self._ended: list[JobEvent] = []  # events of jobs cancelled since the last poll
        self._gauges = Gauges()

    def submit(self, job: Job) -> None:
        self._check(job)
        probing = DETECT_LANGUAGE in job.prompt
        # NOTE: time first and in the engine's dtype, since the library copies bytes; in host
        # memory, since the library's own stream would not wait for earlier work on the GPU.
        if self.capabilities.input_kind == "samples":
            features = job.features.to("cpu", torch.float32).contiguous()
        else:
            features = job.features.to("cpu", torch.float16).T.contiguous()
        self._send(_Window(job, features, probing, time.perf_counter(), job.prompt))

    def poll(self, timeout_s: float) -> list[JobEvent]:
        events, self._ended = self._ended, []
        if self._windows:
            for response in self._executor.await_responses(0.0 if events else timeout_s):
                events += self._handle_response(response)
        return events

    def cancel(self, job_id: int) -> None:
        for request_id, window in self._windows.items():
            if window.job.id == job_id:
                self._executor.cancel(request_id)
                del self._windows[request_id]
                self._ended.append(JobEvent(job_id, finished="cancelled"))
                return

    def gauges(self) -> Gauges:
        """Return gauges and counters; the library's whole time counts as decoding."""
        steps, step_slots, seconds = self._executor.steps()
        self._gauges.steps += steps
        self._gauges.step_slots += step_slots
        self._gauges.decode_s += seconds
        busy = min(len(self._windows), self.capabilities.max_windows)
        return dataclasses.replace(self._gauges, queued=len(self._windows) - busy, busy_slots=busy)

    def close(self) -> None:
        self._windows.clear()
        self._executor.close()

    def _check(self, job: Job) -> None:
        if refusal := self.capabilities.refusal(job.options):
            raise OptionError(refusal)
        limits, max_tokens = self._lengths, job.options.max_tokens
        room = limits.max_seq_len - len(job.prompt)
        if len(job.prompt) > limits.max_prompt_tokens or room < 1 or max_tokens < 1:
            raise OptionError(
                f"a prompt of {len(job.prompt)} tokens and max_tokens {max_tokens} do not "
                f"fit this engine; expected at most {limits.max_prompt_tokens} tokens in the "
                f"prompt and {limits.max_seq_len} in total"
            )

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

    def _handle_response(self, response: ExecutorResponse) -> list[JobEvent]:
        """Turn one response into events; ignore responses of cancelled jobs."""
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
                self._record_probe(window, response)
                self._send(window)
            return []
        return self._progress(window, response)

    def _progress(self, window: _Window, response: ExecutorResponse) -> list[JobEvent]:
        tokens = response.tokens
        # End of text is counted below; remove it if the library includes it.
        if tokens and tokens[-1] == self._facts.eot:
            tokens = tokens[:-1]
        now = time.perf_counter()
        if window.first_token_s is None:
            window.first_token_s = now
            self._gauges.windows += 1
        ended = response.finished == "eot"
        window.sampled += len(tokens) + ended
        self._gauges.tokens += len(tokens) + ended
        if response.finished is None:
            return [JobEvent(window.job.id, tokens)] if tokens else []
        if response.finished == "cancelled":
            return [JobEvent(window.job.id, tokens, "cancelled")]
        total = response.logprob_sum
        scores = Scores(
            avg_logprob=total / window.sampled if total is not None and window.sampled else None,
            no_speech_prob=window.no_speech_prob,
            language=window.language,
            language_prob=window.language_prob,
            encode_s=window.first_token_s - window.began_s,
            decode_s=now - window.first_token_s,
            began_s=(window.began_s, window.first_token_s),
        )
        return [JobEvent(window.job.id, tokens, response.finished, scores)]

    def _record_probe(self, window: _Window, response: ExecutorResponse) -> None:
        """Record the probe's probabilities, and write the language into the prompt."""
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
