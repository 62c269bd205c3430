"""Run an engine with PyTorch, with in-flight batching over slots.

`poll` is the main loop. It encodes queued windows into slots and prefills their prompts. It then
advances every busy slot by one token per row, or by several if it replays CUDA graphs. A window
that arrives while others decode joins the next step. A GPU encodes larger batches faster, so
windows wait until slots for a whole batch are free; `serve.native.encoder_scheduler` has the rules.
Urgent windows get slots first. `serve.native.scheduler` has the further rules for a CPU.
"""

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Sequence

import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import DETECT_LANGUAGE, Engine
from serve.contract.errors import DeviceError, OptionError, UnavailableError
from serve.contract.fields import MAX_BEAMS
from serve.contract.fresh_thread import run_in_fresh_thread
from serve.native.alignment import Aligner, EndedWindow
from serve.native.device import current, open_device
from serve.native.encoder_scheduler import CudaStreams, EncoderScheduler
from serve.native.encoders import GraphEncoder, WindowEncoder
from serve.native.language_search import (
    LanguageHypothesis,
    best_hypothesis,
    best_sequence,
    next_language_job,
    score_language,
)
from serve.native.prefill import Prefill, SlotJob
from serve.native.resources import RuntimeResources, load_resources
from serve.native.rules.state import RowState
from serve.native.slots import SlotPool
from serve.native.speculative import open_loop
from serve.native.stopwatch import Stopwatch, total
from serve.native.threads import Threads
from serve.runtime.protocol import Capabilities, FinishReason, Gauges, Job, JobEvent, Scores
from serve.speech.features import N_FRAMES

logger = logging.getLogger(__name__)


def check_job(job: Job, n_text_ctx: int, capabilities: Capabilities) -> None:
    """Check that a job fits the context and has only supported options.

    Raises:
        OptionError: it does not.
    """
    room = n_text_ctx - len(job.prompt)
    if room < 1 or job.options.max_tokens < 1:
        raise OptionError(
            f"a prompt of {len(job.prompt)} tokens and max_tokens {job.options.max_tokens} do not "
            f"fit a context of {n_text_ctx} tokens"
        )
    if refusal := capabilities.refusal(job.options):
        raise OptionError(refusal)


class NativeRuntime:
    """Implements `serve.runtime.protocol.Runtime` on the CPU or one CUDA device.

    Args:
        engine: an engine of this runtime.
        config: device, slots and batch sizes.

    Raises:
        UnavailableError: the device does not exist, or has too little memory.
        EngineError: the engine's tensors do not match its manifest.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        device = open_device(config)
        dims, facts = engine.manifest.dims, engine.manifest.tokenizer
        rows = config.rows or config.slots
        if rows < config.slots:
            raise UnavailableError(
                f"runtime.rows = {rows} is less than runtime.slots = {config.slots}, and every "
                "slot needs a row; raise rows, or set it to 0 for one row a slot"
            )
        self._facts = facts
        self._dims = dims
        self._device = device
        self._threads = Threads(config) if device.type == "cpu" else None
        self._slots = SlotPool(config.slots, rows)
        self._streams = CudaStreams(device) if config.cuda_graph and device.type == "cuda" else None
        load = functools.partial(self._load, engine, config, rows)
        try:
            if device.type == "cpu":
                run_in_fresh_thread(load)
            else:
                with current(device):
                    load()
        except torch.OutOfMemoryError as error:
            raise UnavailableError(
                f"{device} has too little memory for runtime.slots = {config.slots} with "
                f"runtime.rows = {rows} and runtime.encoder_batch = {config.encoder_batch}; "
                f"lower them ({error})"
            ) from error
        self._running: dict[int, SlotJob] = {}  # by the submitted job's id
        self._own_job_ids = itertools.count(-1, -1)  # ids of the runtime's own jobs
        self._pending_events: list[JobEvent] = []  # events of jobs cancelled since the last poll
        self._gauges = Gauges()
        self.capabilities = Capabilities(
            runtime="native",
            timestamps=True,
            sampling=True,
            detect_language=facts.multilingual,
            streaming=False,
            beam_width=min(rows, MAX_BEAMS) if rows > config.slots else 1,
            max_windows=config.slots,
            device=str(device),
            search_options=True,
            words=self._aligner is not None,
            languages=facts.multilingual,
            phrases=True,
            short_windows=True,
            urgent_first=True,
            reports_begin=True,
        )

    @torch.inference_mode()
    def _load(self, engine: Engine, config: RuntimeConfig, rows: int) -> None:
        """Allocate everything, capture the graphs, and log the choices and the memory."""
        device, streams = self._device, self._streams
        resources = load_resources(engine, config, device, rows)
        ops = resources.network.ops
        self._network = resources.network
        self.fp8 = ops.fp8
        self._cross_kv = config.cross_kv
        self._state = resources.state
        batch = min(config.encoder_batch, config.slots)
        encoder = (GraphEncoder if resources.graphs else WindowEncoder)(
            resources.network, resources.decoders, batch
        )
        self._loop = open_loop(config, resources)
        prefill = Prefill(resources)
        self._aligner: Aligner | None = None
        if self._facts.alignment_heads:
            self._aligner = Aligner(
                resources.network, resources.cache, self._facts, rows, graphs=resources.graphs
            )
        if device.type == "cuda":
            self._warm_up(resources, encoder, prefill)
        self._scheduler = EncoderScheduler(
            encoder, prefill, self._slots, batch, device, streams, concurrent=streams is not None
        )
        self.description = (
            f"{device}: {ops.name} kernels ({ops.reason}), {type(self._loop).__name__}"
        )
        if resources.draft is not None:
            self.description += f", drafts of up to {config.draft_tokens} tokens"
        self.description += f"; {resources.plan}" if resources.plan else ""
        logger.info("%s", self.description)

    def _warm_up(
        self, resources: RuntimeResources, encoder: WindowEncoder, prefill: Prefill
    ) -> None:
        """Compile the GPU's kernels, capture its graphs and allocate their memory."""
        aligners = [self._aligner] if self._aligner else []
        step_replays = [self._loop.replay, prefill.replay, *(one.replay for one in aligners)]
        warm_ups = [prefill.warm_up, *(one.warm_up for one in aligners)]
        if resources.network.ops.name == "triton":
            from serve.native.kernels import launch  # noqa: PLC0415 - needs triton

            abridged = (decoder.abridged() for decoder, _ in resources.decoders)
            with launch.compile_in_parallel(self._device, *abridged):
                for replay in (encoder.replay, *step_replays):
                    replay.rehearse()
                for warm_up in warm_ups:
                    warm_up()
            torch.cuda.empty_cache()
        if self._streams is not None:
            encoder.replay.record(self._streams.encoder)
            for replay in step_replays:
                replay.record(self._streams.steps)
        for warm_up in warm_ups:
            warm_up()
        torch.cuda.synchronize(self._device)  # later work is on other streams

    def submit(self, job: Job) -> None:
        check_job(job, self._dims.n_text_ctx, self.capabilities)
        if job.features.shape[-1] > N_FRAMES:
            raise OptionError(
                f"a window has {job.features.shape[-1]} frames; expected at most {N_FRAMES}"
            )
        self._scheduler.add(job)

    @torch.inference_mode()
    def cancel(self, job_id: int) -> None:
        running = self._running.get(job_id)
        if running is not None:
            self._make_current()
            self._state.finished[running.allocation.first_row : running.allocation.rows.stop] = True
            self._pending_events.append(JobEvent(job_id, finished="cancelled"))
            self._release(running)
        elif (self._aligner and self._aligner.drop(job_id)) or self._scheduler.remove(job_id):
            self._pending_events.append(JobEvent(job_id, finished="cancelled"))

    @torch.inference_mode()
    def poll(self, timeout_s: float) -> list[JobEvent]:
        """Start queued windows and advance every busy slot; see `Runtime.poll`.

        A step is short, and an idle runtime returns at once, so `timeout_s` is never reached.
        """
        events, self._pending_events = self._pending_events, []
        try:
            self._make_current()
            if self._threads:
                self._threads.adapt()
            for started in self._scheduler.begin(list(self._running.values())):
                self._running[started.submitted.id] = started
                events.append(JobEvent(started.submitted.id, began_s=started.stopwatch.began_s))
            if self._running:
                self._step()
                events += self._collect()
            if self._aligner:
                events += self._aligner.collect(wait=not self._running)
        except torch.AcceleratorError as error:
            raise DeviceError(f"{self._device} failed: {error}") from error
        return events

    def gauges(self) -> Gauges:
        return dataclasses.replace(
            self._gauges,
            queued=len(self._scheduler),
            busy_slots=self._slots.busy,
            windows=self._scheduler.windows,
            drafted=self._loop.drafted,
            drafted_right=self._loop.accepted,
        )

    def teacher_forced_logits(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Compute logits for given tokens with this runtime's own steps, to measure its error.

        Args:
            features: float32 (batch, n_mels, 3000), batch at most the number of slots.
            tokens: int64 (batch, time), time at most n_text_ctx.

        Returns:
            float32 (batch, time, n_vocab), the logits after each token.
        """
        with current(self._device):
            return self._network.teacher_forced_logits(features, tokens, self._cross_kv)

    def close(self) -> None:
        """Drop every job; the memory is freed with the object."""
        self._scheduler.clear()
        if self._aligner:
            self._aligner.clear()
        for running in list(self._running.values()):
            self._release(running)

    def _make_current(self) -> None:
        """Make the runtime's GPU and stream current in this thread.

        They stay current. To restore the previous ones after every poll would take a tenth of the
        time of a small model's step.
        """
        if self._device.type != "cuda":
            return
        if self._streams is None:
            torch.cuda.set_device(self._device.index or 0)
        elif torch.cuda.current_stream().cuda_stream != self._streams.steps.cuda_stream:
            torch.cuda.set_stream(self._streams.steps)

    def _step(self) -> None:
        """Run a step of all busy slots, or of the urgent ones only."""
        policy = self._scheduler.urgent_policy
        if policy:
            self._slots.pause(policy.paused([running.job for running in self._running.values()]))
        stopwatch = Stopwatch(self._device, "steps")
        steps, n_slots = self._loop.launch(self._slots), len(self._slots.owners())
        stopwatch.stop()
        self._scheduler.decode_timers.append(stopwatch)
        if policy:
            policy.record(stopwatch.seconds(), urgent_only=n_slots < self._slots.busy)
        self._gauges.steps += steps
        self._gauges.step_slots += steps * n_slots

    def _collect(self) -> list[JobEvent]:
        """End finished jobs and return their events; windows to align get theirs later."""
        snapshot = self._loop.read_snapshot()
        self._gauges.encode_s += total(self._scheduler.encode_timers)
        self._gauges.decode_s += total(self._scheduler.decode_timers)
        if snapshot is None:
            return []
        finished = snapshot.state.finished.tolist()
        running = {slot_job.job.id: slot_job for slot_job in self._running.values()}
        ended = [
            running[job_id]
            for allocation, job_id in snapshot.owners
            if all(finished[row] for row in allocation.rows) and job_id in running
        ]
        return self._end(ended, snapshot.state) if ended else []

    def _end(self, ended: Sequence[SlotJob], state: RowState) -> list[JobEvent]:
        """Release finished windows, or decode them in another language."""
        answered, continued = list[EndedWindow](), list[SlotJob]()
        for running in ended:
            running.hypotheses += (self._hypothesis_of(running, state),)
            next_job = next_language_job(
                running.submitted, running.hypotheses, self._facts, next_id=next(self._own_job_ids)
            )
            if next_job is None:
                answer = best_hypothesis(running.hypotheses, self._facts)
                answered.append(EndedWindow(answer.job, running.allocation, answer.event))
                self._release(running)
            else:
                self._slots.hand_over(running.job.id, next_job.id)
                running.job = next_job
                continued.append(running)
        if continued:
            self._scheduler.prefill(continued)
        if self._aligner is None or not answered:
            return [window.event for window in answered]
        stopwatch = Stopwatch(self._device, "words")
        events = self._aligner.launch(answered)
        stopwatch.stop()
        self._scheduler.decode_timers.append(stopwatch)
        return events

    def _hypothesis_of(self, running: SlotJob, state: RowState) -> LanguageHypothesis:
        """Return the hypothesis of a finished job."""
        leader = running.allocation.first_row
        sampled, logprob_sum = best_sequence(
            running.job, running.allocation, state, self._facts.eot
        )
        reason = self._reason(running.job, sampled)
        top_language = int(state.language[leader]), float(state.language_prob[leader])
        detected = DETECT_LANGUAGE in running.job.prompt
        scores = Scores(
            avg_logprob=logprob_sum / len(sampled),
            no_speech_prob=float(state.no_speech_prob[leader]),
            language=top_language[0] if detected else None,
            language_prob=top_language[1] if detected else None,
            encode_s=running.stopwatch.seconds(),
            decode_s=time.perf_counter() - running.decode_began,
            began_s=(running.stopwatch.began_s, running.decode_began),
            top_language=top_language if self._facts.multilingual and not detected else None,
        )
        self._gauges.tokens += len(sampled)
        tokens = tuple(sampled[:-1] if reason == "eot" else sampled)
        event = JobEvent(running.submitted.id, tokens, reason, scores)
        return score_language(running.job, event, logprob_sum, running.hypotheses, self._facts)

    def _reason(self, job: Job, sampled: list[int]) -> FinishReason:
        """Return why a job's sequence ended: at end-of-text, at a limit, or else by a loop."""
        if sampled[-1] == self._facts.eot:
            return "eot"
        room = self._dims.n_text_ctx - len(job.prompt)
        return "length" if len(sampled) == min(job.options.max_tokens, room) else "loop"

    def _release(self, running: SlotJob) -> None:
        self._slots.release(running.job.id)
        del self._running[running.submitted.id]
        if not self._running:
            self._loop.discard_launched()
