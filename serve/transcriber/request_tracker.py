"""Admit requests, track the pending ones and count their outcomes."""

import collections
import dataclasses
import itertools
import threading
import time
from typing import Any, Literal

from serve.contract.config import TranscriberConfig
from serve.contract.errors import DeviceError, OverloadedError
from serve.contract.messages import OnEvent, Priority
from serve.runtime.protocol import Gauges
from serve.transcriber.active import ActiveRequest
from serve.transcriber.decoding_plan import MIB, DecodingPlan
from serve.transcriber.dispatch import Dispatcher

Outcome = Literal["ok", "failed", "cancelled", "timed_out"]


MAX_PENDING_MB = 1024  # maximum MiB of undecoded audio of all requests
_GAUGES = ("tokens", "busy_slots", "encode_s", "decode_s", "drafted", "drafted_right")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of a transcriber's counters and gauges; `accepted == ended + pending`.

    The counters count since its start, including the warm-up.
    """

    accepted: int = 0  # requests accepted; each ends in one of the four outcomes
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    timed_out: int = 0
    rejected: int = 0  # requests rejected on arrival, not counted as accepted
    audio_s: float = 0.0  # seconds of audio of the requests that ended ok, before padding
    untold_s: float = 0.0  # seconds of speech in that audio without text
    busy_s: float = 0.0  # seconds of wall clock in which at least one request was pending
    pending: int  # requests accepted and not yet ended
    queued: int  # pending requests without a window in a slot so far
    windows: int  # windows submitted to the runtime for the first time
    retries: int  # windows submitted again, nearly always at a higher temperature
    loops: int  # windows ended because their text repeated itself
    tokens: int  # tokens sampled
    busy_slots: int
    mean_batch: float  # mean number of slots in use per decoder step; 0 before the first
    encode_s: float  # seconds of wall clock that the runtime spent encoding
    decode_s: float  # seconds of wall clock that the runtime spent decoding
    drafted: int  # draft tokens proposed by the engine's draft decoder
    drafted_right: int  # accepted draft tokens

    @property
    def ended(self) -> int:
        """The number of requests that got their terminal event."""
        return self.ok + self.failed + self.cancelled + self.timed_out

    @property
    def rtfx(self) -> float:
        """Seconds of audio transcribed per busy second; 0 before the first."""
        return self.audio_s / self.busy_s if self.busy_s > 0 else 0.0


class RequestTracker:
    """The pending requests and their counters, shared by the transcriber's threads. Thread-safe.

    Args:
        config: the limits of pending requests and undecoded audio, and the request timeout.
    """

    def __init__(self, config: TranscriberConfig) -> None:
        self._config = config
        self._ids = itertools.count()
        # The condition guards all fields; every answered request notifies it.
        self._changed = threading.Condition()
        self._pending: dict[int, ActiveRequest] = {}  # in order of acceptance, and so of deadline
        self._audio_bytes: dict[int, int] = {}  # of requests with undecoded audio
        self._unanswered = 0  # removed requests that are being sent their terminal event
        self._counters: dict[str, Any] = collections.defaultdict(int)  # fields of `Stats`
        self._busy_since_s = 0.0
        self._state: Literal["open", "draining", "closed"] = "open"
        self._failure: DeviceError | None = None

    def accept(
        self, plan: DecodingPlan, on_event: OnEvent, audio_bytes: int, priority: Priority = "file"
    ) -> ActiveRequest:
        """Admit a request.

        Args:
            plan: the request's plan.
            on_event: called with the request's segments and its terminal event.
            audio_bytes: bytes of memory held until the audio is decoded; see `mark_decoded`.
            priority: the request's priority.

        Raises:
            OverloadedError: too many requests or bytes are pending, or the server is draining.
            DeviceError: the device has failed.
        """
        with self._changed:
            self._check_capacity(audio_bytes)
            now_s = time.monotonic()
            deadline_s = now_s + self._config.request_timeout_s
            active = ActiveRequest(
                next(self._ids), plan, on_event, now_s, deadline_s, priority=priority
            )
            if not self._pending:
                self._busy_since_s = now_s
            self._pending[active.id] = active
            self._audio_bytes[active.id] = audio_bytes
            self._counters["accepted"] += 1
            return active

    def _check_capacity(self, audio_bytes: int) -> None:
        if self._failure is not None:
            raise DeviceError(f"the device has failed; restart the server: {self._failure}")
        if self._state != "open":
            raise OverloadedError("the server is shutting down; send the request to another one")
        pending, limit = len(self._pending), self._config.max_pending
        if pending >= limit:
            raise OverloadedError(
                f"{pending} requests are pending, the maximum (transcriber.max_pending); try again "
                "later"
            )
        pending_bytes, limit = sum(self._audio_bytes.values()), MAX_PENDING_MB
        if pending_bytes + audio_bytes > limit * MIB:
            raise OverloadedError(
                f"{pending_bytes / MIB:.1f} MiB of audio are waiting to be decoded, and the "
                f"request adds {audio_bytes / MIB:.1f} MiB; the maximum is {limit} MiB: try again "
                "later"
            )

    def reject(self) -> None:
        """Count a request that was rejected on arrival."""
        with self._changed:
            self._counters["rejected"] += 1

    def mark_decoded(self, active: ActiveRequest) -> None:
        """Release the bytes of a request's audio, which is decoded now."""
        with self._changed:
            self._audio_bytes.pop(active.id, None)

    def remove(self, active: ActiveRequest, outcome: Outcome) -> None:
        """Remove and count a request; send its terminal event next, then call `mark_answered`."""
        with self._changed:
            del self._pending[active.id]
            self._audio_bytes.pop(active.id, None)
            self._unanswered += 1
            self._counters[outcome] += 1
            if outcome == "ok":
                self._counters["audio_s"] += active.duration_s
                self._counters["untold_s"] += active.untold_s
            if not self._pending:
                self._counters["busy_s"] += time.monotonic() - self._busy_since_s

    def mark_answered(self) -> None:
        """Record that a removed request was sent its terminal event."""
        with self._changed:
            self._unanswered -= 1
            self._changed.notify_all()

    def oldest(self) -> ActiveRequest | None:
        """Return the pending request with the earliest deadline."""
        with self._changed:
            return next(iter(self._pending.values()), None)

    def pending(self) -> list[ActiveRequest]:
        """Return the pending requests, oldest first."""
        with self._changed:
            return list(self._pending.values())

    def stats(self, dispatcher: Dispatcher, gauges: Gauges) -> Stats:
        """Return a consistent snapshot of the counters of tracker, dispatcher and runtime."""
        with self._changed:
            counters = dict(self._counters)
            if self._pending:
                busy_s = time.monotonic() - self._busy_since_s
                counters["busy_s"] = counters.get("busy_s", 0.0) + busy_s
            return Stats(
                **counters,
                **{name: getattr(gauges, name) for name in _GAUGES},
                pending=len(self._pending),
                queued=sum(active.started_s is None for active in self._pending.values()),
                windows=dispatcher.windows,
                retries=dispatcher.retries,
                loops=dispatcher.loops,
                mean_batch=gauges.step_slots / gauges.steps if gauges.steps else 0.0,
            )

    @property
    def closed(self) -> bool:
        """Whether the tracker is closed, so that no request can be answered any more."""
        with self._changed:
            return self._state == "closed"

    def drain(self, timeout_s: float) -> None:
        """Reject new requests and wait until all pending ones have ended, or the timeout."""
        with self._changed:
            if self._state == "open":
                self._state = "draining"
            self._changed.wait_for(lambda: not self._pending and not self._unanswered, timeout_s)

    def close(self, failure: DeviceError | None = None) -> None:
        """Reject all further requests; `failure` is the reason, if there is one."""
        with self._changed:
            self._state = "closed"
            self._failure = failure or self._failure
