"""A runtime without a network: scripted tokens, delays counted in polls, failures, cancel.

`FakeRuntime` keeps the whole contract of `Runtime`, so that the transcriber and the
server can be tested in milliseconds. What a window "says" is decided by a script: a function of
the job, called when the job gets its slot. One poll is one step: it gives a free slot to each
waiting job that fits, and every busy slot yields one token.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from serve.contract.engine import DETECT_LANGUAGE, Engine
from serve.contract.errors import AudioError, DeviceError, EarshotError, OptionError
from serve.contract.manifest import Confidence
from serve.contract.messages import (
    Alignment,
    Request,
    Segment,
    Timings,
    Transcript,
)
from serve.runtime.protocol import Capabilities, FinishReason, Gauges, Job, JobEvent, Scores
from serve.speech.tokenizer import Tokenizer
from tests.tiny_engine import make_engine

CAPABILITIES = Capabilities(
    runtime="fake",
    timestamps=True,
    sampling=True,
    detect_language=True,
    languages=True,
    streaming=True,
    beam_width=1,
    max_windows=4,
    short_windows=True,
)

CONFIDENCE = Confidence("logistic", 1.0, 0.5, 2.0, "fake", clips=10, words=100, languages=("en",))


@dataclasses.dataclass(frozen=True)
class Play:
    """What the fake does with one job."""

    tokens: tuple[int, ...] = ()
    delay: int = 0  # polls in the slot before the first token
    avg_logprob: float = -0.1
    no_speech_prob: float = 0.0
    language: int | None = None  # token id that is "detected"
    language_prob: float = 0.9
    # token id and probability of the language that a window sounds like if its prompt names one
    top_language: tuple[int, float] | None = None
    error: EarshotError | None = None  # the job fails with this after its tokens
    text_below: int = 0  # ids below are text, to be aligned
    loops: int = 0  # after so many tokens the job ends as a loop, if it may
    device_error: str = ""  # the poll in which the job would finish raises DeviceError


@dataclasses.dataclass
class _Slot:
    job: Job
    play: Play
    wait: int
    sent: int = 0


class FakeRuntime:
    """Runtime with answers from `script`; see the module's docstring."""

    def __init__(
        self,
        script: Callable[[Job], Play],
        capabilities: Capabilities = CAPABILITIES,
        n_text_ctx: int = 448,
        step_s: float = 0.0,
    ) -> None:
        self.capabilities = capabilities
        self.jobs: list[Job] = []  # every job ever submitted, in order
        self.log: list[tuple[str, int]] = []  # ("submit" | "finish" | "cancel", job id)
        self.most_in_hand = 0  # most jobs submitted and unfinished at one time
        self.closed = False
        self._script = script
        self._n_text_ctx = n_text_ctx
        self._step_s = step_s
        self._waiting: collections.deque[Job] = collections.deque()
        self._slots: list[_Slot] = []
        self._events: list[JobEvent] = []
        self._gauges = Gauges()

    def submit(self, job: Job) -> None:
        if len(job.prompt) >= self._n_text_ctx or job.options.max_tokens < 1:
            raise OptionError(f"a prompt of {len(job.prompt)} tokens leaves no room")
        if refusal := self.capabilities.refusal(job.options):
            raise OptionError(refusal)
        self.jobs.append(job)
        self.log.append(("submit", job.id))
        self._waiting.append(job)
        self.most_in_hand = max(self.most_in_hand, len(self._waiting) + len(self._slots))

    def poll(self, timeout_s: float) -> list[JobEvent]:
        if self._step_s and (self._waiting or self._slots):
            time.sleep(min(self._step_s, timeout_s))
        while self._waiting and len(self._slots) < self.capabilities.max_windows:
            job = self._waiting.popleft()
            play = self._script(job)
            self._slots.append(_Slot(job, play, play.delay))
            self._gauges.windows += 1
        if self._slots:
            self._gauges.steps += 1
            self._gauges.step_slots += len(self._slots)
        for slot in list(self._slots):
            self._step(slot)
        events, self._events = self._events, []
        return events

    def cancel(self, job_id: int) -> None:
        known = [job.id for job in self._waiting] + [slot.job.id for slot in self._slots]
        if job_id not in known:
            return
        self._waiting = collections.deque(job for job in self._waiting if job.id != job_id)
        self._slots = [slot for slot in self._slots if slot.job.id != job_id]
        self.log.append(("cancel", job_id))
        self._events.append(JobEvent(job_id, finished="cancelled"))

    def gauges(self) -> Gauges:
        return dataclasses.replace(
            self._gauges, queued=len(self._waiting), busy_slots=len(self._slots)
        )

    def close(self) -> None:
        self.closed = True
        self._waiting.clear()
        self._slots.clear()

    def _step(self, slot: _Slot) -> None:
        if slot.wait > 0:
            slot.wait -= 1
            return
        limit = min(slot.job.options.max_tokens, self._n_text_ctx - len(slot.job.prompt))
        looped = 0 < slot.play.loops == slot.sent + 1 and slot.job.loop_tokens > 0
        tokens = slot.play.tokens[slot.sent : slot.sent + 1]
        slot.sent += len(tokens)
        self._gauges.tokens += len(tokens)
        if tokens and slot.sent < limit and not looped:
            self._events.append(JobEvent(slot.job.id, tokens))
            return
        self._finish(slot, tokens, "loop" if looped else "length" if tokens else "eot")

    def _finish(self, slot: _Slot, tokens: tuple[int, ...], reason: FinishReason) -> None:
        play = slot.play
        if play.device_error:
            raise DeviceError(play.device_error)
        self._slots.remove(slot)
        self.log.append(("finish", slot.job.id))
        if play.error is not None:
            self._events.append(JobEvent(slot.job.id, tokens, "error", error=play.error))
            return
        detects, heard = DETECT_LANGUAGE in slot.job.prompt, play.top_language
        detected, prob = (play.language, play.language_prob) if detects else (None, None)
        if not detects and heard is not None and heard[0] not in slot.job.prompt:
            wanted, prompt = slot.job.detection, set(slot.job.prompt)
            close = any(
                heard[0] in languages and languages & prompt for languages in wanted.close_languages
            )
            if 0 < wanted.switch <= heard[1] and not close:
                detected, prob = heard
        scores = Scores(
            avg_logprob=play.avg_logprob,
            no_speech_prob=play.no_speech_prob,
            language=detected,
            language_prob=prob,
            encode_s=0.0,
            decode_s=0.0,
            top_language=None if detects else heard,
        )
        text = [token for token in play.tokens if token < play.text_below]
        alignment = even_alignment(len(text), slot.job.align_frames) if text else None
        self._events.append(JobEvent(slot.job.id, tokens, reason, scores, alignment=alignment))


def even_alignment(tokens: int, frames: int) -> Alignment | None:
    """Each token takes as long as the others, and silence follows that is as long; or none."""
    if not frames:
        return None
    at = np.arange(frames) * (tokens + 1) // frames
    matrix = np.where(at == np.arange(tokens + 1)[:, None], 1.0, -1.0).astype(np.float32)
    return Alignment(np.full(tokens, 0.5, np.float32), matrix)


def fake_engine(folder: Path, multilingual: bool = True) -> Engine:
    """An engine without weights: a tokenizer and a manifest with 448 text positions."""
    engine = make_engine(folder, multilingual=multilingual)
    dims = dataclasses.replace(engine.manifest.dims, n_text_ctx=448)
    return Engine(engine.path, dataclasses.replace(engine.manifest, dims=dims))


class Echo:
    """A script: each window says its request's prompt, from 0 to 1 s.

    Args:
        tokenizer: of the engine that the runtime stands for.
        **play: fields of `Play` for every window.
    """

    def __init__(self, tokenizer: Tokenizer, **play: Any) -> None:
        self._facts = tokenizer.facts
        self._play = play

    def __call__(self, job: Job) -> Play:
        facts = self._facts
        begin = job.prompt.index(facts.sot_prev) + 1 if facts.sot_prev in job.prompt else 0
        text = job.prompt[begin : job.prompt.index(facts.sot)]
        if job.options.timestamps:
            text = (facts.timestamp_begin, *text, facts.timestamp_begin + 50)
        language = facts.languages.get("es")
        fields = {"tokens": text, "language": language, "text_below": facts.eot}
        return Play(**{**fields, **self._play})


def transcript(*texts: str) -> Transcript:
    """A transcript of consecutive segments, a second each."""
    segments = tuple(
        Segment(i, i + 1.0, text, (7, 8), -0.25, 0.01, 0.0, 1.1) for i, text in enumerate(texts)
    )
    timings = Timings(queue_s=0.1, encode_s=0.2, decode_s=0.3, total_s=0.7)
    return Transcript("".join(texts).strip(), "en", None, float(len(texts)), segments, timings)


class FakeTranscriber:
    """Answers every file alike, but for those that hold nothing."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def transcribe(self, request: Request, on_segment=lambda segment: None) -> Transcript:
        self.requests.append(request)
        if not len(request.audio):
            raise AudioError("audio has 0 bytes; expected a file")
        answer = transcript(" Hello & goodbye.", " 1 < 2\n\n--> 3")
        for segment in answer.segments:
            on_segment(segment)
        return dataclasses.replace(
            answer, warnings=("audio is cut short",) if request.partial else ()
        )

    def __enter__(self) -> "FakeTranscriber":
        return self

    def __exit__(self, *_: object) -> None:
        pass
