"""One request for a transcript, or live stream, from its arrival to its end: who sends it, and what
of it is counted."""

from collections.abc import Collection

from tritonclient.grpc import service_pb2

from serve.contract.messages import Transcript
from serve.gateway.callers import Caller
from serve.gateway.checks import audio_s, queue_s
from serve.gateway.limits import Account
from serve.gateway.log import Line
from serve.gateway.metrics import Metrics


class Visit:
    """A request that has been let in.

    Args:
        caller: who sends it.
        line: of the log, which tells its route.
        metrics: what is counted goes there.
    """

    def __init__(self, caller: Caller, line: Line, metrics: Metrics) -> None:
        self._caller = caller
        self.line = line
        self._metrics = metrics

    @property
    def account(self) -> Account:
        """What its caller has under way."""
        return self._caller.account

    def require_duration(self, outputs: Collection[str]) -> None:
        """See `Caller`."""
        self._caller.require_duration(outputs)

    def said(self) -> None:
        """A piece of a stream's text has been sent."""
        if (took_s := self.line.said()) is not None:
            self._metrics.delta(self.line.route, took_s)

    def answered(self, transcript: Transcript) -> None:
        """Count its audio, whose length its answer has told."""
        self._heard(transcript.duration, transcript.timings.queue_s)

    def passed_on(self, answer: service_pb2.ModelInferResponse) -> None:
        """The same, of an answer of KServe's."""
        self._heard(audio_s(answer), queue_s(answer))

    def hear(self, seconds: float) -> None:
        """Count live audio as it comes in.

        Raises:
            Refusal: there has been too much before it.
        """
        self._caller.hear(seconds)
        self._count(seconds)

    def _heard(self, seconds: float, queued_s: float | None) -> None:
        self._caller.heard(seconds)
        self._count(seconds)
        self.line.queued(queued_s)

    def _count(self, seconds: float) -> None:
        self._metrics.heard(self.line.route, self._caller.name, seconds)
        self.line.heard(seconds)
