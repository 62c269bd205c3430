"""One request in the hands of whoever answers it, and its answers as they come."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Self

from tritonclient.grpc import service_pb2

from serve.gateway import refusals
from serve.gateway.limits import Ticket
from serve.gateway.refusals import Refusal

logger = logging.getLogger("earshot.gateway")


class Exchange:
    """A request and its answers.

    Leaving its `with` block by an exception tells the model that nobody waits any more.

    Args:
        source: the answers, ModelStreamInferResponses; read to their end, whatever happens. Raises
            a Refusal where the request fails.
        ticket: closed when the server has let go of the request.
        cancel: tells the server that nobody waits.
        limit_s: longest wait for all answers.
    """

    def __init__(
        self,
        source: AsyncIterator[bytes],
        ticket: Ticket,
        cancel: Callable[[], None],
        limit_s: float,
    ) -> None:
        self._source = source
        self._ticket = ticket
        self._cancel = cancel
        self._limit_s = limit_s
        self._end_s = asyncio.get_running_loop().time() + limit_s
        self._answers: asyncio.Queue[bytes | Refusal | None] = asyncio.Queue()
        self._done = False
        self.pump = asyncio.create_task(self._pump())

    async def next_answer(self) -> bytes | None:
        """The next `ModelStreamInferResponse`; None: there is no further one.

        Raises:
            Refusal: the request failed.
        """
        try:
            async with asyncio.timeout_at(self._end_s):
                answer = await self._answers.get()
        except TimeoutError:
            raise refusals.no_answer_in_time(self._limit_s) from None
        if isinstance(answer, Refusal):
            raise answer
        return answer

    async def only_answer(self) -> service_pb2.ModelInferResponse:
        """The one answer of a request that is not streamed.

        Raises:
            Refusal: the request failed.
        """
        answer = await self.next_answer()
        if answer is None:
            raise refusals.from_upstream("INTERNAL", "the call ended without an answer")
        found = service_pb2.ModelStreamInferResponse.FromString(answer).infer_response
        found.parameters.clear()  # by which Triton tells a stream's client that it is the last
        return found

    def end(self, refusal: Refusal) -> None:
        """Answer this now, whatever the server will."""
        self._answers.put_nowait(refusal)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Cancel the request, unless it has ended."""
        if kind is not None and not self._done:
            self._cancel()

    async def _pump(self) -> None:
        end: Refusal | None = None
        try:
            async for answer in self._source:
                self._answers.put_nowait(answer)
        except Refusal as refusal:
            end = refusal
        except Exception:  # one request must not hurt its neighbours
            logger.exception("a request failed in the gateway")
            end = refusals.failed()
        finally:
            self._done = True
            self._ticket.close()
            self._answers.put_nowait(end)
