"""Transcribe the requests of many clients through one runtime.

    submit ──> decoder pool ────> device thread ──────────────────────────────> on_event
               decode, cut        log-mel, jobs, poll, judge, retry, stitch

The device thread owns the runtime and the state of every request; its loop is
`Transcriber._serve`. Other threads only put calls into its inbox. Every accepted request ends with
exactly one terminal event, because only `Transcriber._end` sends terminal events, on the device
thread. Every wait has a time limit.
"""

import concurrent.futures
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from serve.contract.config import TranscriberConfig
from serve.contract.engine import Engine
from serve.contract.errors import CancelledError, DeadlineError, DeviceError, EarshotError, shown
from serve.contract.fresh_thread import run_in_fresh_thread
from serve.contract.messages import (
    AudioFile,
    OnEvent,
    Priority,
    Request,
    RequestFailed,
    RequestFinished,
    RequestHandle,
    Segment,
    SegmentReady,
    TranscriberEvent,
    Transcript,
)
from serve.runtime.protocol import Gauges, JobEvent, Runtime
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import AudioWindow
from serve.transcriber.active import ActiveRequest
from serve.transcriber.audio_decoder_pool import AudioDecoderPool
from serve.transcriber.decoding_plan import audio_bytes, check_config, plan_request, with_texts
from serve.transcriber.dispatch import DecodingWindow, Dispatcher
from serve.transcriber.guard import guarded
from serve.transcriber.request_tracker import Outcome, RequestTracker, Stats

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.02  # maximum wait of a poll, so that arrivals and cancellations are handled soon
_WORD_THREADS = 2  # timing the words of a window takes milliseconds, mostly outside the GIL
_STALLED_S = 60.0  # a loop iteration that takes longer is unhealthy


class Transcriber:
    """A transcriber of concurrent requests through one runtime. Thread-safe.

    Args:
        engine: the engine, for its tokenizer and sizes.
        runtime: the runtime; the transcriber owns it, calls it on the device thread only, and
            closes it in `close`.
        config: limits, defaults and retry thresholds.
        grace_s: seconds after a request's deadline at which `transcribe` stops waiting.
        join_s: maximum seconds that `close` waits for the device thread.
        idle_s: maximum seconds that the device thread sleeps; an arrival wakes it at once.

    Raises:
        ConfigError: the runtime cannot honor the configuration.
        EngineError: the engine's tokenizer cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        runtime: Runtime,
        config: TranscriberConfig,
        grace_s: float = 10.0,
        join_s: float = 30.0,
        idle_s: float = 10.0,
    ) -> None:
        self._grace_s, self._join_s, self._idle_s = grace_s, join_s, idle_s
        self.capabilities = runtime.capabilities
        self.tokenizer = Tokenizer(engine)
        check_config(config, self.capabilities, self.tokenizer)
        self._manifest = engine.manifest
        self._runtime = runtime
        self._config = config
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tracker = RequestTracker(config)
        slots = self.capabilities.max_windows
        self._post_failure = self._on_device_thread(self._fail)
        self._decoders = AudioDecoderPool(
            config,
            slots,
            self._on_device_thread(self._receive_window),
            self._post_failure,
            self._tokenize,
            self.capabilities.device,
        )
        # The device does not wait for words and speakers.
        self._word_threads, self._speaker_threads = (
            concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=f"earshot-{phase}")
            for phase, threads in (("words", _WORD_THREADS), ("speakers", 1))
        )
        # Only the device thread writes these; others read the first two.
        self._gauges: Gauges = runtime.gauges()
        self._last_iteration_s = time.monotonic()
        self._dispatcher = Dispatcher(
            runtime, engine.load_mel_filters(), self._decoders.mark_submitted
        )

        self._thread = threading.Thread(target=self._run, name="earshot-device", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- for any thread

    def submit(
        self, request: Request, on_event: OnEvent, priority: Priority = "file"
    ) -> RequestHandle:
        """Accept a request or reject it at once; never blocks.

        Args:
            request: the audio and the options.
            on_event: called on the device thread, so it must be quick. It gets a `SegmentReady`
                for each final segment in order of time, then exactly one `RequestFinished` or
                `RequestFailed`. Audio is decoded on demand, so an error in it may follow segments.
                If `on_event` raises an exception, the request is cancelled as if its client had
                disconnected.
            priority: live text goes before files, and files before jobs; see `FairQueue`.

        Raises:
            OptionError, AudioError: the request is invalid.
            OverloadedError: too many requests or bytes are pending, or the transcriber is closing.
            DeviceError: the device has failed.
        """
        try:
            tokenizer, capabilities = self.tokenizer, self.capabilities
            plan = plan_request(request, tokenizer, capabilities, self._config, self._manifest)
            in_memory = not isinstance(request.audio, AudioFile)
            held_bytes = audio_bytes(request) if in_memory else 0
            active = self._tracker.accept(plan, on_event, held_bytes, priority)
        except EarshotError:
            self._tracker.reject()
            raise
        self._decoders.add(active, request)
        if plan.speakers is not None:
            diarize = functools.partial(self._decoders.diarize, active, request)
            work = functools.partial(run_in_fresh_thread, diarize)
            self._speaker_threads.submit(
                self._run_phase, "speakers", active, work, active.set_turns
            )
        # Wake the device thread, which must now keep one more deadline.
        self._inbox.put(_wake_up)
        cancelled = CancelledError("the client cancelled the request")
        return RequestHandle(functools.partial(self._post_failure, active, cancelled))

    def reject(self) -> None:
        """Count a request that was too malformed to be submitted."""
        self._tracker.reject()

    def transcribe(
        self, request: Request, on_segment: Callable[[Segment], object] = lambda segment: None
    ) -> Transcript:
        """Transcribe and wait for the answer.

        Args:
            request: the audio and the options.
            on_segment: called on the device thread with each final segment, so it must be quick.

        Raises:
            EarshotError: the error of `submit`, or the one that the request ended with.
        """
        answer: concurrent.futures.Future[Transcript] = concurrent.futures.Future()

        def on_event(event: TranscriberEvent) -> None:
            if isinstance(event, RequestFinished):
                answer.set_result(event.transcript)
            elif isinstance(event, RequestFailed):
                answer.set_exception(event.error)
            else:
                on_segment(event.segment)

        handle = self.submit(request, on_event)
        limit_s = self._config.request_timeout_s + self._grace_s
        try:
            return answer.result(limit_s)
        except TimeoutError as error:
            raise DeadlineError(f"no answer after {limit_s:g} s; the device hangs") from error
        finally:
            handle.cancel()  # matters only if the wait was interrupted

    @property
    def healthy(self) -> bool:
        """Whether requests can be answered: the device thread runs and makes progress."""
        limit_s = max(_STALLED_S, self._config.request_timeout_s)
        busy = self._tracker.oldest() is not None
        stalled = busy and time.monotonic() - self._last_iteration_s > limit_s
        return not self._tracker.closed and self._thread.is_alive() and not stalled

    def stats(self) -> Stats:
        """Return the current counters and gauges."""
        return self._tracker.stats(self._dispatcher, self._gauges)

    def drain(self, timeout_s: float) -> None:
        """Reject new requests and wait until the accepted ones have ended, or the timeout."""
        self._tracker.drain(timeout_s)

    def close(self) -> None:
        """End pending requests with a CancelledError, stop the threads and close the runtime.

        Repeated calls do nothing.
        """
        self._tracker.close()
        self._decoders.close()
        self._inbox.put(_wake_up)
        self._thread.join(self._join_s)
        if self._thread.is_alive():
            logger.error("the device thread did not stop within %g s", self._join_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tokenize(self, active: ActiveRequest) -> None:
        """Add a request's texts to its plan before its first window; runs on a worker.

        Raises:
            OptionError: see `with_texts`.
        """
        n_text_ctx = self._manifest.dims.n_text_ctx
        plan = with_texts(active.plan, self.tokenizer, self._config, n_text_ctx)
        self._inbox.put(functools.partial(active.set_plan, plan))

    def _run_phase(
        self, phase: str, active: ActiveRequest, work: Callable[[], T], record: Callable[[T], None]
    ) -> None:
        """Run a phase of a request on this thread, and record its result on the device thread."""
        if active.ended:
            return
        began_s = time.monotonic()
        result = guarded(f"{phase} of request {active.id}", work)
        active.phases.record(phase, began_s)
        if isinstance(result, EarshotError):
            self._post_failure(active, result)
        else:
            self._inbox.put(functools.partial(self._record, active, record, result))

    def _on_device_thread(self, work: Callable[..., None]) -> Callable[..., None]:
        """Return a function, for any thread, that runs `work` on the device thread."""
        return lambda *args: self._inbox.put(functools.partial(work, *args))

    # ---------------------------------------------------------------- the device thread

    def _serve(self) -> None:
        """Run the loop: each iteration is one step of the runtime, or a sleep if idle."""
        while not self._tracker.closed:
            self._run_inbox()  # decoded audio, cancellations, stop; sleeps if idle
            self._expire()
            for active, error in self._dispatcher.submit_windows():
                self._fail(active, error)
            for event in self._runtime.poll(_POLL_S):
                self._handle_event(event)
            self._gauges = self._runtime.gauges()
            self._last_iteration_s = time.monotonic()

    def _run(self) -> None:
        """Serve until told to stop or until the device fails, then end everything."""
        failure: DeviceError | None = None
        try:
            self._serve()
        except DeviceError as error:
            failure = error
        except Exception as error:
            logger.exception("the device thread failed")
            failure = DeviceError(f"internal error: {shown(error)}")
        self._tracker.close(failure)
        pending = self._tracker.pending()
        if failure is not None:
            logger.error("the device failed, and %d requests with it: %s", len(pending), failure)
        self._dispatcher.clear()
        for active in pending:
            self._fail(active, failure or CancelledError("the server has shut down"))
        self._decoders.close()
        for threads in (self._word_threads, self._speaker_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._runtime.close()

    def _run_inbox(self) -> None:
        """Run the calls of other threads; if idle, sleep until a call or the next deadline."""
        wait_s = 0.0
        if self._dispatcher.idle:
            oldest = self._tracker.oldest()
            wait_s = self._idle_s if oldest is None else oldest.deadline_s - time.monotonic()
            wait_s = min(max(wait_s, 0.0), self._idle_s)
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=wait_s)()
            while True:
                self._inbox.get_nowait()()

    def _expire(self) -> None:
        limit_s = self._config.request_timeout_s
        while (active := self._tracker.oldest()) and active.deadline_s <= time.monotonic():
            self._fail(active, DeadlineError(f"not finished within {limit_s:g} s"))

    def _receive_window(self, active: ActiveRequest, window: AudioWindow) -> None:
        if active.ended:
            return
        if window.last and not window.voice_pending:
            self._tracker.mark_decoded(active)
        if active.voice_pending:
            active.set_voice(window)
            held, active.held = active.held, None
            if held is not None:
                held()
        else:
            active.add_window(window)
            self._dispatcher.enqueue(active)
            if active.complete:  # the audio has no speech
                self._send_progress(active)

    def _handle_event(self, event: JobEvent) -> None:
        """Handle a runtime event; if a window has ended, advance its request."""
        if (decoding := self._dispatcher.record(event)) is None:
            return
        active = decoding.active
        if event.scores is None:
            cause = event.error or EarshotError(f"the runtime ended a window: {event.finished}")
            self._fail(active, cause)
        elif active.voice_pending:
            active.held = functools.partial(self._end_window, decoding, event)
        else:
            self._end_window(decoding, event)

    def _end_window(self, decoding: DecodingWindow, event: JobEvent) -> None:
        """Judge a window's result, and advance its request."""
        active = decoding.active
        description = f"processing window {decoding.index} of request {active.id}"
        work = functools.partial(self._process_window, decoding, event)
        if (error := guarded(description, work)) is not None:
            self._fail(active, error)
            return
        self._send_progress(active)

    def _record(self, active: ActiveRequest, record: Callable[[T], None], result: T) -> None:
        """Record the result of a phase on another thread."""
        if not active.ended:
            record(result)
            self._send_progress(active)

    def _send_progress(self, active: ActiveRequest) -> None:
        """Send a client its new final segments, and the transcript once it is complete."""
        events = guarded(f"ending request {active.id}", functools.partial(self._new_events, active))
        if isinstance(events, EarshotError):
            self._fail(active, events)
            return
        for event in events:
            if isinstance(event, RequestFinished):
                self._end(active, event, "ok")
            elif not self._deliver(active, event):
                self._fail(active, CancelledError("the client is gone"))
                return
        if not active.ended:  # the next window may have waited for this result
            self._dispatcher.enqueue(active)

    def _process_window(self, decoding: DecodingWindow, event: JobEvent) -> None:
        """Judge a job's result, then retry the window or time its words."""
        active = decoding.active
        retry_temperature = active.judge_attempt(
            decoding.index,
            decoding.job.options.temperature,
            tuple(decoding.tokens),
            event,
            self.tokenizer,
            self._config,
        )
        if retry_temperature is not None:
            self._dispatcher.retry(decoding, retry_temperature)
        elif work := active.untimed_words(decoding.index, self.tokenizer):
            record = functools.partial(active.set_words, decoding.index)
            self._word_threads.submit(self._run_phase, "words", active, work, record)

    def _new_events(self, active: ActiveRequest) -> list[SegmentReady | RequestFinished]:
        segments: Sequence[Segment] = active.stitch_ready(self.tokenizer)
        if not active.complete:
            return [*map(SegmentReady, segments)]
        transcript = active.transcript(self.tokenizer)
        if active.plan.returns_speakers:
            segments = transcript.segments
        return [*map(SegmentReady, segments), RequestFinished(transcript)]

    def _fail(self, active: ActiveRequest, error: EarshotError) -> None:
        """End a request with an error, unless it has ended."""
        if isinstance(error, CancelledError):
            outcome: Outcome = "cancelled"
        else:
            outcome = "timed_out" if isinstance(error, DeadlineError) else "failed"
        if not active.ended:
            self._end(active, RequestFailed(error), outcome)

    def _end(
        self, active: ActiveRequest, event: RequestFinished | RequestFailed, outcome: Outcome
    ) -> None:
        """Send a request's terminal event and free its resources."""
        active.ended, active.held = True, None
        self._tracker.remove(active, outcome)
        self._deliver(active, event)
        self._tracker.mark_answered()
        self._decoders.release(active)
        self._dispatcher.cancel(active)

    def _deliver(self, active: ActiveRequest, event: TranscriberEvent) -> bool:
        """Send an event to the client; return False if it raises an exception."""
        try:
            active.on_event(event)
        except Exception:
            logger.exception("request %d: its client raised an exception", active.id)
            return False
        return True


def _wake_up() -> None:
    """Do nothing; putting this into the inbox wakes the device thread."""
