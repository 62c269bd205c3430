"""One request on its way to a server, and to the next one where that does not take it; and its
answers as they come."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Self

from tritonclient.grpc import service_pb2

from serve.contract.errors import DeadlineError, OverloadedError, UnavailableError
from serve.gateway import errors
from serve.gateway.errors import ApiError
from serve.gateway.limits import Permit
from serve.gateway.observe.metrics import UpstreamMetrics
from serve.gateway.upstream.calls import Call
from serve.gateway.upstream.outgoing import Outgoing
from serve.gateway.upstream.own import OwnTriton
from serve.wire.tensors import MODEL

logger = logging.getLogger("earshot.gateway")


class Exchange:
    """A request, which is with the least busy server that takes it as soon as this exists.

    Leaving its `with` block by an exception tells the server that nobody waits any more. What the
    server answers is read to its end, whatever happens.

    Args:
        request: it, and its audio.
        servers: those of its model.
        metrics: count how each of them ended it.
        ticket: closed when the last server has let go of the request.
        limit_s: longest wait for all answers.

    Raises:
        ApiError: no server takes it; the ticket is still open.
    """

    def __init__(
        self,
        request: Outgoing,
        servers: Iterable[OwnTriton],
        metrics: UpstreamMetrics,
        ticket: Permit,
        limit_s: float,
    ) -> None:
        self._target = request.target
        self._left = list(servers)  # who have not had it
        self._request: Outgoing | None = request  # as long as another may get it
        self._metrics = metrics
        self._ticket = ticket
        self._limit_s = limit_s
        self._end_s = asyncio.get_running_loop().time() + limit_s
        self._answers: asyncio.Queue[bytes | ApiError | None] = asyncio.Queue()
        self._lost = self._cancelled = self._done = False
        self.answered = False
        """The last server has answered it to the end, and somebody waited."""
        self._server, self._call = self._give()
        self.pump = asyncio.create_task(self._pump())

    async def next_answer(self) -> bytes | None:
        """Wait for the next `ModelStreamInferResponse`; None: there is no further one.

        Raises:
            ApiError: the request failed.
        """
        try:
            async with asyncio.timeout_at(self._end_s):
                answer = await self._answers.get()
        except TimeoutError:
            raise errors.no_answer_in_time(self._limit_s) from None
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def only_answer(self) -> service_pb2.ModelInferResponse:
        """Wait for the one answer of a request that is not streamed.

        Raises:
            ApiError: the request failed.
        """
        answer = await self.next_answer()
        if answer is None:
            raise errors.from_upstream("INTERNAL", "the call ended without an answer")
        response = service_pb2.ModelStreamInferResponse.FromString(answer).infer_response
        response.parameters.clear()  # by which Triton tells a stream's client that it is the last
        return response

    def end(self, refusal: ApiError) -> None:
        """Answer this now, whatever the server will."""
        self._answers.put_nowait(refusal)

    def __enter__(self) -> Self:
        """Return the exchange; leaving the block by an exception cancels it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Cancel the request, unless it has ended."""
        if kind is not None and not self._done:
            self._cancelled = True
            self._call.cancel()

    async def _pump(self) -> None:
        end: ApiError | None = None
        try:
            await self._deliver()
        except ApiError as refusal:
            end = refusal
        except Exception:  # one request must not hurt its neighbours
            logger.exception("a request failed in the gateway")
            end = errors.failed()
        finally:
            self._done = True
            self._ticket.close()
            self._answers.put_nowait(end)

    async def _deliver(self) -> None:
        """Take in the answers of one of the servers.

        Raises:
            ApiError: it failed at the last that may have had it, or after its first answer.
        """
        while True:
            begun = False
            try:
                async for answer in self._call.answers():
                    begun = True
                    self._answers.put_nowait(self._named(answer))
            except ApiError as refusal:
                self._metrics.ended(self._server.name, refusal.status.grpc)
                if begun or not self._may_go_on(refusal):
                    raise
                failed = refusal
            else:
                self._metrics.ended(self._server.name, "OK")
                self.answered = not self._cancelled
                return
            finally:
                self._server.inflight -= 1
                self._call.close()
            try:
                self._server, self._call = self._give()
            except ApiError:
                raise failed from None

    def _give(self) -> tuple[OwnTriton, Call]:
        """Give it to the least busy server that takes it.

        Raises:
            ApiError: none does.
        """
        assert self._request is not None  # dropped with the last of those who are left
        why: ApiError | None = None
        for server in sorted(self._left, key=lambda server: server.inflight):
            if not server.takes():
                continue
            self._left.remove(server)
            try:
                call = server.send(self._request)
            except ApiError as refusal:
                why = refusal
                continue
            server.inflight += 1
            if not self._left:
                self._request = None  # its audio may be large
            return server, call
        raise why or errors.server_away()

    def _may_go_on(self, refusal: ApiError) -> bool:
        """Tell whether another server may have it after one that has answered nothing.

        One that was lost may have been so by this request's doing, so that this counts once.
        """
        if self._cancelled or not self._left or isinstance(refusal.error, DeadlineError):
            return False
        if isinstance(refusal.error, UnavailableError):
            self._lost, again = True, not self._lost
            return again
        return isinstance(refusal.error, OverloadedError)

    def _named(self, answer: bytes) -> bytes:
        """Give an answer the model's name that the client knows; a field's last value counts."""
        if self._target.client_name in ("", MODEL):
            return answer
        head = service_pb2.ModelInferResponse(model_name=self._target.client_name)
        whole = service_pb2.ModelStreamInferResponse(infer_response=head)
        return answer + bytes(whole.SerializeToString())
