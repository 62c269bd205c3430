"""Requests that are accepted and have not ended: what the transcriber's threads share."""

import itertools
import threading
import time
from typing import Literal

from serve.contract.config import TranscriberConfig
from serve.contract.errors import DeviceError, OverloadedError
from serve.contract.messages import OnEvent, Priority
from serve.transcriber.active import ActiveRequest
from serve.transcriber.audio import MIB
from serve.transcriber.plan import Plan
from serve.transcriber.stats import Counters, Outcome

MAX_PENDING_MB = 1024  # MiB of requests' audio that is not yet decoded; more is refused


class Ledger:
    """Takes requests in, or refuses them, and counts how they end. Thread-safe.

    Args:
        config: the most requests that may be pending, the most audio of theirs that may wait to
            be decoded, and how long each may take.
    """

    def __init__(self, config: TranscriberConfig) -> None:
        self._config = config
        self._ids = itertools.count()
        # Guarded by the condition, which is notified of every answered request.
        self._changed = threading.Condition()
        self._pending: dict[int, ActiveRequest] = {}  # in order of acceptance, and so of deadline
        self._audio_bytes: dict[int, int] = {}  # of those whose audio is not wholly decoded
        self._unanswered = 0  # requests removed whose terminal event is being sent
        self._counters = Counters()
        self._busy_since_s = 0.0
        self._state: Literal["open", "draining", "closed"] = "open"
        self._failure: DeviceError | None = None

    def accept(
        self, plan: Plan, on_event: OnEvent, audio_bytes: int, priority: Priority = "file"
    ) -> ActiveRequest:
        """Take a request in.

        Args:
            plan: what is to be done.
            on_event: called with its segments and its end.
            audio_bytes: held until the audio is decoded; see `mark_decoded`.
            priority: its own.

        Raises:
            OverloadedError: too many requests or bytes are pending, or no more are taken.
            DeviceError: the device has failed.
        """
        with self._changed:
            self._refuse_if_unable(audio_bytes)
            now = time.monotonic()
            deadline_s = now + self._config.request_timeout_s
            active = ActiveRequest(
                next(self._ids), plan, on_event, now, deadline_s, priority=priority
            )
            if not self._pending:
                self._busy_since_s = now
            self._pending[active.id] = active
            self._audio_bytes[active.id] = audio_bytes
            self._counters = self._counters.plus(accepted=1)
            return active

    def _refuse_if_unable(self, audio_bytes: int) -> None:
        if self._failure is not None:
            raise DeviceError(f"the device has failed, restart the server: {self._failure}")
        if self._state != "open":
            raise OverloadedError("the server is shutting down; send the request elsewhere")
        pending, limit = len(self._pending), self._config.max_pending
        if pending >= limit:
            raise OverloadedError(f"{pending} of {limit} requests are pending; try again later")
        held, limit = sum(self._audio_bytes.values()), MAX_PENDING_MB
        if held + audio_bytes > limit * MIB:
            raise OverloadedError(
                f"{held / MIB:.1f} MiB of audio wait to be decoded and the request brings "
                f"{audio_bytes / MIB:.1f}, at most {limit} may wait; try again later"
            )

    def reject(self) -> None:
        """Count a request that was refused at once."""
        with self._changed:
            self._counters = self._counters.plus(rejected=1)

    def mark_decoded(self, active: ActiveRequest) -> None:
        """Note that a request's audio is decoded, and no longer held as it was sent."""
        with self._changed:
            self._audio_bytes.pop(active.id, None)

    def remove(self, active: ActiveRequest, outcome: Outcome) -> None:
        """Count a request's end; its terminal event must follow, and then `mark_answered`."""
        with self._changed:
            del self._pending[active.id]
            self._audio_bytes.pop(active.id, None)
            self._unanswered += 1
            increments: dict[str, float] = {outcome: 1}
            if outcome == "ok":
                increments |= {"audio_s": active.duration_s, "untold_s": active.untold_s}
            if not self._pending:
                increments["busy_s"] = time.monotonic() - self._busy_since_s
            self._counters = self._counters.plus(**increments)

    def mark_answered(self) -> None:
        """Note that the terminal event of a removed request was sent."""
        with self._changed:
            self._unanswered -= 1
            self._changed.notify_all()

    def oldest(self) -> ActiveRequest | None:
        """Return the pending request whose deadline comes first."""
        with self._changed:
            return next(iter(self._pending.values()), None)

    def counters(self) -> tuple[Counters, list[ActiveRequest]]:
        """Return the counters, and the pending requests of the same moment."""
        with self._changed:
            pending, counters = list(self._pending.values()), self._counters
            if pending:
                counters = counters.plus(busy_s=time.monotonic() - self._busy_since_s)
            return counters, pending

    @property
    def closed(self) -> bool:
        """Tell whether no request can be answered any more."""
        with self._changed:
            return self._state == "closed"

    def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait until all have ended, or time is up."""
        with self._changed:
            if self._state == "open":
                self._state = "draining"
            self._changed.wait_for(lambda: not self._pending and not self._unanswered, timeout_s)

    def close(self, failure: DeviceError | None = None) -> None:
        """Take no more requests, because of a failure if one is given."""
        with self._changed:
            self._state = "closed"
            self._failure = failure or self._failure
