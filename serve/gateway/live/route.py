"""WS /v1/realtime: OpenAI's transcription sessions.

If a session cannot open, the handshake gets an HTTP answer, as at any other address below /v1. If
the server ends a session, it sends an event `error` and closes with one of these codes:

    1001  it has said nothing, or has lasted, for too long
    1008  too many of its events were wrong, its key has had its audio of this minute or day, or is
          known no more, or there is no room for what it sends
    1011  the server failed
    1012  the server stops; what had come in was answered
"""

import asyncio
import functools
import logging
from typing import Any

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from serve.contract.codec import to_json
from serve.contract.errors import EarshotError, OverloadedError, RequestError, shown
from serve.contract.keys import CLIENT_SECRET_PREFIX
from serve.contract.messages import Transcript
from serve.gateway import errors
from serve.gateway.client_secrets import ClientSecret
from serve.gateway.context import RequestContext, Services
from serve.gateway.edge.budget import Share
from serve.gateway.edge.connection import LOST, SHARE, SlowClientError
from serve.gateway.edge.headers import RECORD, ignored, served_by
from serve.gateway.engine import EngineRequest
from serve.gateway.errors import ApiError, as_openai, field_error
from serve.gateway.keys import ApiKey, bearer_token
from serve.gateway.kserve.messages import request_parts
from serve.gateway.limits import Permit
from serve.gateway.live import events
from serve.gateway.live.events import Event, EventError
from serve.gateway.live.session import MAX_ERRORS, Session, TooManyErrors
from serve.gateway.live.settings import Settings, unknown_keys, updated
from serve.gateway.live.utterance import Window
from serve.gateway.models import Target
from serve.gateway.observe.log import LogRecord
from serve.gateway.target import AudioLength
from serve.speech.activity import Detector
from serve.speech.rate import SAMPLE_RATE

logger = logging.getLogger("earshot.gateway")

_SUBPROTOCOL = "realtime"  # what browsers offer, which cannot set headers
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
_FIELDS = ("model", "intent")  # of the address
_COPIES = 4  # of a message, while it is worked on
_FIRST = asyncio.FIRST_COMPLETED


class Live:
    """The address, as an ASGI application."""

    def __init__(self, door: Services) -> None:
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        websocket = WebSocket(scope, receive, send)
        try:
            line = scope["state"][RECORD]
            caller_of = functools.partial(self._caller, websocket)
            async with RequestContext(self._door, line, "live", caller_of, timed=False) as visit:
                await self._admitted(websocket, visit)
        except ApiError as refusal:
            if websocket.application_state == WebSocketState.CONNECTING:
                await websocket.send_denial_response(as_openai(refusal, _FIELDS))

    def _caller(self, websocket: WebSocket) -> ApiKey:
        """Identify the caller by its API key, or by a client secret.

        Raises:
            ApiError: there is neither, or it is not good.
        """
        if (secret := self._secret(websocket)) is not None:
            return self._door.keys.with_public_id(secret.key_id)
        return self._door.keys.identify(_authorization(websocket))

    def _secret(self, websocket: WebSocket) -> ClientSecret | None:
        token = bearer_token(_authorization(websocket))
        is_secret = token.startswith(CLIENT_SECRET_PREFIX)
        return self._door.client_secrets.read(token) if is_secret else None

    async def _admitted(self, websocket: WebSocket, visit: RequestContext) -> None:
        """Serve a session, if there may be one.

        Raises:
            ApiError: there may not, or its client has taken nothing for too long.
        """
        stop = asyncio.Event()
        settings = self._settings(websocket)
        visit.record.model = self._door.models.named(settings.input.transcription.model)
        with (
            visit.admit() as ticket,
            self._door.streams.register(visit.api_key, stop.set),
        ):
            if self._door.target is not None:
                self._door.target.require_live(len(self._door.streams) - 1)
            await self._serve(websocket, visit, ticket, stop, settings)

    def _settings(self, websocket: WebSocket) -> Settings:
        """Choose the settings that a session begins with: the client secret's, then the URL's.

        Raises:
            ApiError: a parameter of the URL is wrong.
        """
        query, settings = websocket.query_params, Settings()
        if (intent := query.get("intent", "transcription")) != "transcription":
            raise field_error("intent", f"intent = {shown(intent)}; expected transcription")
        if (secret := self._secret(websocket)) is not None:
            settings, _ = updated(settings, secret.session)
        if model := query.get("model"):
            self._door.models.named(model)
            transcription = {"transcription": {"model": model}}
            settings, _ = updated(settings, {"audio": {"input": transcription}})
        return settings

    async def _serve(
        self,
        websocket: WebSocket,
        visit: RequestContext,
        ticket: Permit,
        stop: asyncio.Event,
        settings: Settings,
    ) -> None:
        try:
            detector = await asyncio.to_thread(Detector)  # the first one reads the model
        except EarshotError as error:
            raise ApiError(error) from error
        offered = websocket.scope["subprotocols"]
        unknown = [key for key in websocket.query_params if key not in _FIELDS]
        told = served_by(visit.record.model) | ignored(unknown)
        headers = [(name.encode(), text.encode()) for name, text in told.items()]
        session = Session(
            self._door.config.live,
            self._door.models.named,
            functools.partial(self._transcribe, visit, ticket),
            functools.partial(_send, websocket, visit.record),
            visit.count_live,
            detector,
            self._door.metrics.live,
            self._door.streams.__len__,
            settings,
            [unknown_keys(dict.fromkeys(unknown, ""))] if unknown else [],
        )
        try:
            await websocket.accept(_SUBPROTOCOL if _SUBPROTOCOL in offered else None, headers)
            end = await self._run(session, websocket, visit, ticket, stop)
            if end is not None:
                visit.record.outcome = end.reason
                await _close(websocket, visit.record, end)
        except WebSocketDisconnect:
            pass
        except SlowClientError:
            raise errors.client_gone() from None

    async def _run(
        self,
        session: Session,
        websocket: WebSocket,
        visit: RequestContext,
        ticket: Permit,
        stop: asyncio.Event,
    ) -> ApiError | None:
        """Serve a session until it ends; why the server ends it, None: its client has.

        Whatever ends it ends its decoding.
        """
        await session.start()
        work = asyncio.create_task(session.work())
        take = asyncio.create_task(self._take_in(session, websocket, visit, ticket))
        stopped = asyncio.create_task(stop.wait())
        lost = asyncio.create_task(websocket.scope[LOST].wait())
        tasks = (work, take, stopped, lost)
        limit_s = self._door.config.live.max_session_s
        try:
            await asyncio.wait(tasks, timeout=limit_s, return_when=_FIRST)
            if work.done():  # it does not end by itself
                work.result()
            if take.done():
                return take.result()
            if lost.done():
                return None
            if not stopped.done():
                return self._expired()
            await _ended(take)
            await session.drain()
            await work
            stopping = OverloadedError("the server is stopping; connect again")
            return ApiError(stopping, "server_stopping")
        except (WebSocketDisconnect, SlowClientError):
            raise
        except Exception:  # one session must not hurt its neighbours
            logger.exception("a live session failed in the gateway")
            return ApiError(errors.failed().error, "server_error")
        finally:
            for task in tasks:
                await _ended(task)

    def _expired(self) -> ApiError:
        limit_s = self._door.config.live.max_session_s
        message = f"the session has lasted {limit_s:g} s (live.max_session_s); open another"
        return ApiError(RequestError(message), "session_expired")

    async def _take_in(
        self, session: Session, websocket: WebSocket, visit: RequestContext, ticket: Permit
    ) -> ApiError | None:
        limit_s = self._door.config.live.idle_timeout_s
        share: Share = websocket.scope[SHARE]
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    message = await websocket.receive()
            except TimeoutError:
                text = f"nothing came for {limit_s:g} s (live.idle_timeout_s)"
                return ApiError(RequestError(text), "session_idle")
            if message["type"] == "websocket.disconnect":
                return None
            held = ticket.child()  # of a message, while it is worked on
            try:
                text = message.get("text") or ""
                held.charge(_COPIES * len(text))
                await share.pay(events.cost_s(text))
                self._door.keys.require_good(visit.api_key)  # its key may be removed
                await session.handle(text)
            except ApiError as refusal:
                return refusal
            except TooManyErrors:
                text = f"{MAX_ERRORS} events were wrong; the session is closed"
                return ApiError(RequestError(text), "too_many_errors")
            finally:
                held.release()

    async def _transcribe(
        self, visit: RequestContext, stream: Permit, model: str | None, window: Window
    ) -> Transcript:
        """Ask for the text of a window.

        Raises:
            ApiError: there is none.
        """
        with visit.record.span.part("decoding") as spans:
            with stream.child() as ticket:
                target = Target(self._door.models.named(model), segments=False)
                parts = request_parts(window.request(self._door.config.live))
                ticket.charge(sum(map(len, parts)))
                sound = AudioLength(len(window.samples) / SAMPLE_RATE)
                request = EngineRequest(target, parts, priority="live", audio=sound)
                call = self._door.engines.start(request, ticket, spans)
            with call:
                transcript = await call.transcript()
            spans.answered(transcript.phases)
        visit.record.queued(transcript.timings.queue_s)
        return transcript


def _authorization(websocket: WebSocket) -> str | None:
    """Find the header that names the caller, which browsers can only say as a subprotocol."""
    header: str | None = websocket.headers.get("authorization")
    for offered in websocket.scope["subprotocols"]:
        if header is None and offered.startswith(_KEY_SUBPROTOCOL):
            return f"Bearer {offered.removeprefix(_KEY_SUBPROTOCOL)}"
    return header


async def _send(websocket: WebSocket, line: LogRecord, event: Event) -> None:
    await websocket.send_text(to_json(event))
    if event["type"] == events.DELTA:
        line.text_sent()


async def _close(websocket: WebSocket, line: LogRecord, end: ApiError) -> None:
    error = EventError(str(end), end.reason)
    await _send(websocket, line, events.error(error, kind=end.status.kind))
    await websocket.close(end.status.close, str(end)[:100])


async def _ended(task: asyncio.Task[Any]) -> None:
    """End a task, and wait for that; how it ended has been seen or does not matter any more."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()
