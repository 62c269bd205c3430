"""A gRPC stream of requests: each goes its own way through Triton, their answers share the stream.

Triton gets a stream for each request. So a request's end is its stream's end, and a client that
goes leaves nothing behind but requests that are cancelled by their keys and read to their ends.
"""

import asyncio
import contextlib
import logging
from typing import Any

from tritonclient.grpc import service_pb2

from serve.gateway import errors
from serve.gateway.context import Services, Visit
from serve.gateway.errors import ApiError
from serve.gateway.observe.log import LogRecord
from serve.gateway.upstream.exchange import Exchange

logger = logging.getLogger("earshot.gateway")

_IDLE_S = 600.0  # how long a stream may stay open without a request
_WRITE_S = 60.0  # a client that takes no answer for so long counts as gone
_TRITON_ERROR = "triton_grpc_error"

Context = Any
"""grpc.aio.ServicerContext, or what stands in for it."""


async def write(context: Context, answer: bytes) -> None:
    """Send an answer.

    Raises:
        ApiError: the client does not take it.
    """
    try:
        async with asyncio.timeout(_WRITE_S):
            await context.write(answer)
    except TimeoutError:
        raise errors.no_answer_in_time(_WRITE_S) from None


def metadata(context: Context, name: str) -> str | None:
    """Find the metadata of a call that has this name."""
    return dict(context.invocation_metadata() or ()).get(name)


def authorization(context: Context) -> str | None:
    """Find the metadata of a call that names its caller."""
    return metadata(context, "authorization")


class Stream:
    """One client's stream.

    Args:
        door: takes its requests in.
        context: gRPC's.
        line: of the log, for the stream as a whole.
    """

    def __init__(self, door: Services, context: Context, line: LogRecord) -> None:
        self._door = door
        self._context = context
        self._line = line
        self._count = 0  # of its requests
        # A client that asks for it gets the first error as the stream's status, as from Triton.
        metadata = dict(context.invocation_metadata() or ())
        self._error_is_status = metadata.get(_TRITON_ERROR) == "true"
        self._writing = asyncio.Lock()
        self._requests: set[asyncio.Task[None]] = set()
        # Of a client that takes no answers no more is read than could have been let in.
        self._room = asyncio.Semaphore(door.admission.max_requests)

    async def run(self) -> None:
        """Answer requests until the client has no more.

        Raises:
            ApiError: the stream cannot go on; what it had accepted is answered.
        """
        # Before a message comes in.
        caller = self._door.callers.identify(authorization(self._context))
        end: ApiError | None = None
        # Streams are counted, too, for they may be idle.
        with contextlib.closing(self._door.admission.admit(caller.account)):
            try:
                async with asyncio.TaskGroup() as group:
                    try:
                        await self._take_all(group)
                    except ApiError as refusal:
                        end = refusal
            except* ApiError as refused:
                end = next(iter(refused.exceptions))  # type: ignore[assignment]
        if end is not None:
            raise end

    async def _take_all(self, group: asyncio.TaskGroup) -> None:
        wait_s = self._door.upload_timeout_s
        while True:
            message = await self._door.uploads.receive(
                self._context, wait_s, needed=lambda: bool(self._requests)
            )
            if message is None:
                return
            wait_s = _IDLE_S
            await self._room.acquire()
            if self._door.admission.draining:  # since the message came
                raise errors.stopping()
            task = group.create_task(self._answer(message))
            self._requests.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        self._room.release()

    async def _answer(self, message: bytes) -> None:
        """Answer one request; raise its refusal where that is to be the stream's status."""
        answering = self._answered(message)
        del message  # what was refused is not counted, and its client may take no answers
        if error := await answering:
            await self._write(error)

    async def _answered(self, message: bytes) -> bytes | None:
        """Pass a request's answers on; return the error that it ends with, if it does."""
        self._count += 1
        line = LogRecord(f"{self._line.id}.{self._count}", header=self._line.header)
        try:
            with self._door.account(line, "grpc_stream", authorization(self._context)) as visit:
                exchange = self._send(message, visit)
                del message
                await self._pass_on(exchange, visit)
        except ApiError as refusal:
            if self._error_is_status:
                raise
            return _error_message(refusal)
        except Exception:
            logger.exception("request %s failed in the gateway", line.id)
            return _error_message(errors.failed())
        finally:
            line.write()
        return None

    def _send(self, message: bytes, visit: Visit) -> Exchange:
        with self._door.admission.admit(visit.account) as ticket:
            return self._door.send(message, ticket, visit, streamed=True)

    async def _pass_on(self, exchange: Exchange, visit: Visit) -> None:
        with exchange:
            while (answer := await exchange.next_answer()) is not None:
                parsed = service_pb2.ModelStreamInferResponse.FromString(answer)
                visit.passed_on(parsed.infer_response)
                await self._write(answer)
                visit.text_sent()

    async def _write(self, answer: bytes) -> None:
        async with self._writing:
            await write(self._context, answer)


def _error_message(refusal: ApiError) -> bytes:
    message = service_pb2.ModelStreamInferResponse(error_message=refusal.text)
    return bytes(message.SerializeToString())
