"""One request for a transcript, or live stream, from its arrival to its end: who sends it, and what
of it is counted."""

import time
from collections.abc import Collection

from serve.gateway.callers import Caller
from serve.gateway.limits import Account
from serve.gateway.metrics import Metrics


class Visit:
    """A request that has been let in.

    Args:
        caller: who sends it.
        route: label of the metrics.
        metrics: what is counted goes there.
        began_s: when it came, by the monotonic clock.
    """

    def __init__(self, caller: Caller, route: str, metrics: Metrics, began_s: float) -> None:
        self._caller = caller
        self._route = route
        self._metrics = metrics
        self._began_s: float | None = began_s

    @property
    def account(self) -> Account:
        """What its caller has under way."""
        return self._caller.account

    def require_duration(self, outputs: Collection[str]) -> None:
        """See `Caller`."""
        self._caller.require_duration(outputs)

    def said(self) -> None:
        """A piece of a stream's text has been sent."""
        if self._began_s is not None:
            self._metrics.delta(self._route, time.monotonic() - self._began_s)
            self._began_s = None

    def heard(self, audio_s: float) -> None:
        """Count its audio, whose length its answer has told."""
        self._caller.heard(audio_s)
        self._metrics.heard(self._route, self._caller.name, audio_s)

    def hear(self, audio_s: float) -> None:
        """Count live audio as it comes in.

        Raises:
            Refusal: there has been too much before it.
        """
        self._caller.hear(audio_s)
        self._metrics.heard(self._route, self._caller.name, audio_s)
