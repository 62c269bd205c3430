"""HTTP clients: their requests as they come in, and whether they still wait for an answer."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from serve.gateway import refusals
from serve.gateway.limits import Ticket

T = TypeVar("T")


async def body_chunks(
    request: Request, ticket: Ticket, limit_s: float, check: Callable[[int], object] = int
) -> AsyncGenerator[bytes, None]:
    """The body as it comes, if it is let in; refused as soon as it is known to be too large.

    Args:
        request: whose body has not been read.
        ticket: is charged with what is declared at first, and with what comes beyond it.
        limit_s: how long all of it may take.
        check: may refuse a body of so many bytes or more.

    Raises:
        Refusal: it is too large, too slow, or the client has gone.
    """
    known = int(request.headers.get("content-length", 0))
    check(known)
    ticket.charge(known)
    stream, received = request.stream(), 0
    end_s = asyncio.get_running_loop().time() + limit_s
    while True:
        try:  # not around the yield, where the time is another's
            async with asyncio.timeout_at(end_s) as limit:
                with ticket.arriving(limit):
                    chunk = await anext(stream, None)
        except TimeoutError:
            if asyncio.get_running_loop().time() < end_s:  # the server stops
                raise refusals.stopping() from None
            raise refusals.overloaded(
                f"the request was not whole after {limit_s:g} s (server.upload_timeout_s)",
                "slow_upload",
            ) from None
        except ClientDisconnect:
            raise refusals.client_gone() from None
        if chunk is None:
            return
        received += len(chunk)
        if received > known:  # it was not declared
            check(received)
            ticket.charge(received - known)
            known = received
        yield chunk


async def while_client_waits(request: Request, answer: Awaitable[T]) -> T:
    """The answer.

    Raises:
        Refusal: the client went first, or the request failed.
    """
    answered = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((answered, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise refusals.client_gone()
        return answered.result()
    finally:
        for task in (answered, gone):
            task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
