"""OpenAI's transcription sessions over HTTP.

    WS   /v1/realtime                   a session
    POST /v1/realtime/client_secrets    a short-lived key with which a browser opens one

If a session cannot open, the handshake gets an HTTP answer, as at any other address below /v1. If
the server ends a session, it sends an event `error` and closes with one of these codes:

    1001  the client has sent nothing for too long, or the session has lasted too long
    1008  the client sent too many wrong events; its key has used up its audio of the minute or day,
          or was removed; or there is no room for a message
    1011  the server failed
    1012  the server stops; the audio before is answered
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from serve.contract.codec import from_table, split_unknown, to_json
from serve.contract.errors import EarshotError, OverloadedError, RequestError, shown
from serve.contract.keys import CLIENT_SECRET_PREFIX
from serve.contract.messages import Transcript
from serve.gateway import errors
from serve.gateway.client_secrets import ClientSecret
from serve.gateway.context import RequestContext, Services
from serve.gateway.edge.budget import ConnectionBudget
from serve.gateway.edge.connection import BUDGET, CONNECTION_LOST, SlowClientError
from serve.gateway.edge.headers import RECORD, ignored, served_by
from serve.gateway.edge.uploads import json_object
from serve.gateway.engines import EngineRequest
from serve.gateway.errors import ApiError, as_openai, field_error
from serve.gateway.keys import ApiKey, bearer_token
from serve.gateway.kserve.messages import request_parts
from serve.gateway.limits import Permit
from serve.gateway.live import events
from serve.gateway.live.events import Event
from serve.gateway.live.session import LiveSession
from serve.gateway.live.settings import SessionSettings, Whole, as_session, unknown_keys, updated
from serve.gateway.live.utterance import UpdateWindow
from serve.gateway.models import Target
from serve.gateway.target import AudioLength
from serve.speech.vad import VadModel

logger = logging.getLogger("earshot.gateway")

IDLE_TIMEOUT_S = 300.0  # a client that sends nothing for so long is disconnected
_SUBPROTOCOL = "realtime"  # browsers offer it, for they cannot set headers
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
_URL_PARAMETERS = ("model", "intent")
_THREADS = 4  # that resample audio and detect speech
_COPIES = 4  # that exist of a message while it is handled
_MAX_SECRET_BYTES = 100_000  # the body of a request for a client secret


class RealtimeRoute:
    """The WebSocket route of live sessions, an ASGI application."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._pool = ThreadPoolExecutor(_THREADS, "earshot-live")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        connection = _Connection(self._services, websocket)
        request = self._services, scope["state"][RECORD], "live", connection.identify
        try:
            async with RequestContext(*request, timed=False) as context:
                await connection.serve(context, self._pool)
        except ApiError as error:
            if websocket.application_state == WebSocketState.CONNECTING:
                await websocket.send_denial_response(as_openai(error))


@dataclasses.dataclass(eq=False)
class _Connection:
    """One client's connection."""

    services: Services
    websocket: WebSocket  # its handshake is not answered yet
    secret: ClientSecret | None = None  # in place of an API key
    stop: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # the server stops
    context: RequestContext = dataclasses.field(init=False)
    permit: Permit = dataclasses.field(init=False)

    def identify(self) -> ApiKey:
        """Identify the API key by itself, or by a client secret.

        Raises:
            ApiError: there is neither, or it is not valid.
        """
        authorization = _authorization(self.websocket)
        token = bearer_token(authorization)
        if not token.startswith(CLIENT_SECRET_PREFIX):
            return self.services.keys.identify(authorization)
        self.secret = self.services.client_secrets.read(token)
        return self.services.keys.with_public_id(self.secret.key_id)

    async def serve(self, context: RequestContext, pool: ThreadPoolExecutor) -> None:
        """Serve a session to the end, if there may be one.

        Raises:
            ApiError: there may not.
            SlowClientError: its client has taken nothing for too long.
        """
        self.context, services = context, self.services
        settings = self._settings()
        context.record.model = services.models.named(settings.input.transcription.model)
        streams = services.streams
        with (
            context.admit() as self.permit,
            streams.register(context.api_key, self.stop.set),
            contextlib.suppress(WebSocketDisconnect),
        ):
            if services.target is not None:
                services.target.require_live(len(streams) - 1)
            try:
                detector = await asyncio.to_thread(VadModel)  # the first one reads the model
            except EarshotError as error:
                raise ApiError(error) from error
            unknown = [key for key in self.websocket.query_params if key not in _URL_PARAMETERS]
            session = LiveSession(
                services.config.live,
                services.models.named,
                self._transcribe,
                self._send,
                context.count_live,
                detector,
                pool,
                services.metrics.live,
                streams.__len__,
                settings,
            )
            offered = self.websocket.scope["subprotocols"]
            headers = Headers(served_by(context.record.model) | ignored(unknown))
            subprotocol = _SUBPROTOCOL if _SUBPROTOCOL in offered else None
            await self.websocket.accept(subprotocol, headers.raw)
            try:
                await self._run(session)
            except ApiError as end:
                context.record.outcome = end.reason
                await self._send(events.error(end, end.reason))
                await self.websocket.close(end.status.close, str(end)[:100])

    def _settings(self) -> SessionSettings:
        """Choose the settings that a session begins with: the client secret's, then the URL's.

        Raises:
            ApiError: a parameter of the URL is wrong.
        """
        query, settings = self.websocket.query_params, SessionSettings()
        if (intent := query.get("intent", "transcription")) != "transcription":
            raise field_error("intent", f"intent = {shown(intent)}; expected transcription")
        if self.secret is not None:
            settings, _ = updated(settings, self.secret.session)
        if model := query.get("model"):
            self.services.models.named(model)
            transcription = {"transcription": {"model": model}}
            settings, _ = updated(settings, {"audio": {"input": transcription}})
        return settings

    async def _run(self, session: LiveSession) -> None:
        """Serve a session until the client leaves or the server ends it; then stop its tasks.

        Raises:
            ApiError: the server ends the session; the error is the reason.
        """
        work = asyncio.create_task(session.work())
        receive = asyncio.create_task(self._receive(session))
        stopped = asyncio.create_task(self.stop.wait())
        disconnected = asyncio.create_task(self.websocket.scope[CONNECTION_LOST].wait())
        tasks = (work, receive, stopped, disconnected)
        try:
            limit_s = events.MAX_SESSION_S
            await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for session_task in (work, receive):  # a finished `work` has failed: re-raise its error
                if session_task.done():
                    session_task.result()
            if receive.done() or disconnected.done():
                return
            if not stopped.done():
                message = f"the session has lasted {limit_s:g} s; open another"
                raise ApiError(RequestError(message), "session_expired")
            receive.cancel()
            await asyncio.wait((receive,))
            await session.drain()
            await work
            stopping = OverloadedError("the server is stopping; connect again")
            raise ApiError(stopping, "server_stopping")
        except (ApiError, WebSocketDisconnect, SlowClientError):
            raise
        except Exception as error:  # one session must not hurt its neighbours
            logger.exception("a live session failed in the gateway")
            raise ApiError(errors.failed().error, "server_error") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, session: LiveSession) -> None:
        """Handle the client's messages until it leaves.

        Raises:
            ApiError: the server ends the session; the error is the reason.
        """
        budget: ConnectionBudget = self.websocket.scope[BUDGET]
        while True:
            try:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    message = await self.websocket.receive()
            except TimeoutError:
                text = f"nothing came for {IDLE_TIMEOUT_S:g} s"
                raise ApiError(RequestError(text), "session_idle") from None
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text") or ""
            with self.permit.child() as permit:  # for the message, while it is handled
                permit.charge(_COPIES * len(text))
                await budget.pay(events.cost_s(text))
                self.services.keys.require_good(self.context.api_key)  # its key may be removed
                await session.handle(text)

    async def _transcribe(self, window: UpdateWindow) -> Transcript:
        """Transcribe a window.

        Raises:
            ApiError: there is no text.
        """
        record, target = self.context.record, Target(self.services.models.default, False)
        audio = AudioLength(window.duration_s)
        with record.span.part("decoding") as span:
            with self.permit.child() as permit:
                parts = request_parts(window.options, samples=window.audio)
                permit.charge(sum(map(len, parts)))
                request = EngineRequest(target, parts, priority="live", audio=audio)
                call = self.services.engines.start(request, permit, span)
            with call:
                transcript = await call.transcript()
            span.answered(transcript.phases)
        record.queued(transcript.timings.queue_s)
        return transcript

    async def _send(self, event: Event) -> None:
        await self.websocket.send_text(to_json(event))
        if event["type"] == events.DELTA:
            self.context.record.text_sent()


def _authorization(websocket: WebSocket) -> str | None:
    """Return the authorization header; browsers can only send a key as a subprotocol."""
    header: str | None = websocket.headers.get("authorization")
    for offered in websocket.scope["subprotocols"]:
        if header is None and offered.startswith(_KEY_SUBPROTOCOL):
            return f"Bearer {offered.removeprefix(_KEY_SUBPROTOCOL)}"
    return header


# ---------------------------------------------------------------- client secrets


@dataclasses.dataclass(frozen=True)
class _Expiry:
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Whole, Field(ge=10, le=7200)] = 600


@dataclasses.dataclass(frozen=True)
class _SecretRequest:
    """The body of a request for a client secret, as OpenAI's API has it."""

    expires_after: _Expiry | None = None
    session: dict[str, Any] | None = None


def _wrong_key(message: str) -> ApiError:
    message = message.removeprefix("client_secrets: ")
    return field_error(message.partition(" ")[0], message)


async def make_client_secret(request: Request, services: Services) -> Response:
    """Answer with a client secret in the name of the request's API key.

    Raises:
        ApiError: there is no valid API key, or the body is wrong.
    """
    api_key = services.keys.of_request(request)
    with services.admission.admit(api_key) as permit:
        body = await json_object(request, permit, _MAX_SECRET_BYTES, "the body")
    table, unknown = split_unknown(_SecretRequest, body)
    secret_request = from_table(_SecretRequest, table, "client_secrets", error=_wrong_key)
    changes = secret_request.session or {}
    settings, warnings = updated(SessionSettings(), changes, services.models.named)
    if unknown:
        warnings.append(unknown_keys(unknown))
    seconds = (secret_request.expires_after or _Expiry()).seconds
    known, _ = split_unknown(SessionSettings, changes)
    secret = ClientSecret(round(time.time()) + seconds, api_key.key.public_id, known)
    session = {"id": events.new_id("sess"), "object": events.OBJECT, **as_session(settings)}
    value = services.client_secrets.sign(secret)
    answer = {"value": value, "expires_at": secret.expires_at, "session": session}
    return JSONResponse(events.with_warnings(answer, warnings))
