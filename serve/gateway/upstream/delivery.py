"""One request on its way to a server, and to the next one where that does not take it."""

from collections.abc import AsyncIterator, Iterable

from tritonclient.grpc import service_pb2

from serve.contract.errors import AccessError, DeadlineError, OverloadedError, UnavailableError
from serve.gateway import refusals
from serve.gateway.metrics import UpstreamMetrics
from serve.gateway.refusals import Refusal
from serve.gateway.upstream.calls import Call
from serve.gateway.upstream.server import Outgoing, Server


class Delivery:
    """A request is with the least busy server that takes it as soon as this exists.

    Args:
        request: it, and its audio.
        servers: those of its model.
        metrics: count how each of them ended it.

    Raises:
        Refusal: none of them takes it.
    """

    def __init__(
        self, request: Outgoing, servers: Iterable[Server], metrics: UpstreamMetrics
    ) -> None:
        self._target = request.target
        self._left = list(servers)  # who have not had it
        self._request: Outgoing | None = request  # as long as another may get it
        self._metrics = metrics
        self._lost = self._cancelled = False
        self._server, self._call = self._give()

    async def answers(self) -> AsyncIterator[bytes]:
        """The answers of one of the servers.

        Raises:
            Refusal: it failed at the last that may have had it, or after its first answer.
        """
        while True:
            begun = False
            try:
                async for answer in self._call.answers():
                    begun = True
                    yield self._named(answer)
            except Refusal as refusal:
                self._metrics.ended(self._server.name, refusal.status.grpc)
                self._server.failed(refusal)
                if begun or not self._may_go_on(refusal):
                    raise _told(refusal) from refusal
                failed = refusal
            else:
                self._metrics.ended(self._server.name, "OK")
                return
            finally:
                self._server.inflight -= 1
                self._call.close()
            try:
                self._server, self._call = self._give()
            except Refusal:
                raise _told(failed) from failed

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._cancelled = True
        self._call.cancel()

    def _give(self) -> tuple[Server, Call]:
        """Give it to the least busy server that takes it.

        Raises:
            Refusal: none does.
        """
        assert self._request is not None  # dropped with the last of those who are left
        why = refusals.server_away()
        for server in sorted(self._left, key=lambda server: server.inflight):
            if not server.takes(self._target.model):
                continue
            self._left.remove(server)
            try:
                call = server.send(self._request)
            except Refusal as refusal:
                why = refusal
                continue
            server.inflight += 1
            if not self._left:
                self._request = None  # its audio may be large
            return server, call
        raise why

    def _may_go_on(self, refusal: Refusal) -> bool:
        """Whether another server may have it that has not answered anything.

        One that was lost may have been so by this request's doing, so that this counts once.
        """
        if self._cancelled or not self._left or isinstance(refusal.error, DeadlineError):
            return False
        if isinstance(refusal.error, UnavailableError | AccessError):
            self._lost, again = True, not self._lost
            return again
        return isinstance(refusal.error, OverloadedError)

    def _named(self, answer: bytes) -> bytes:
        """The answer with the model's name as the client knows it; a field's last value counts."""
        if self._target.asked in ("", self._server.answer_name(self._target)):
            return answer
        head = service_pb2.ModelInferResponse(model_name=self._target.asked)
        whole = service_pb2.ModelStreamInferResponse(infer_response=head)
        return answer + bytes(whole.SerializeToString())


def _told(refusal: Refusal) -> Refusal:
    """What a client is told: that a server refuses the gateway's key is none of its business."""
    return refusals.server_away() if isinstance(refusal.error, AccessError) else refusal
