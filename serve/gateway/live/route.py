"""OpenAI's transcription sessions over HTTP.

    WS   /v1/realtime                   a session
    POST /v1/realtime/client_secrets    a short-lived key with which a browser opens one

If a session cannot open, the handshake gets an HTTP answer, as at any other address below /v1. If
the server ends a session, it sends an event `error` and closes with one of these codes:

    1001  it has said nothing, or has lasted, for too long
    1008  it sent too many wrong events, its key has had its audio of this minute or day, or is
          known no more, or there is no room for what it sends
    1011  the server failed
    1012  the server stops; what had come in was answered
"""

import asyncio
import dataclasses
import functools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from serve.contract.codec import from_table, split_unknown, to_json
from serve.contract.errors import EarshotError, OptionError, OverloadedError, RequestError, shown
from serve.contract.keys import CLIENT_SECRET_PREFIX
from serve.contract.messages import Transcript
from serve.gateway import errors
from serve.gateway.client_secrets import ClientSecret
from serve.gateway.context import RequestContext, Services
from serve.gateway.edge.budget import ConnectionBudget
from serve.gateway.edge.connection import BUDGET, LOST, SlowClientError
from serve.gateway.edge.headers import RECORD, ignored, served_by
from serve.gateway.edge.uploads import json_object
from serve.gateway.engine import EngineRequest
from serve.gateway.errors import ApiError, as_openai, field_error
from serve.gateway.keys import ApiKey, bearer_token
from serve.gateway.kserve.messages import request_parts
from serve.gateway.limits import Permit
from serve.gateway.live import events
from serve.gateway.live.events import Event
from serve.gateway.live.session import LiveSession
from serve.gateway.live.settings import (
    EventError,
    SessionSettings,
    Whole,
    as_session,
    read_update,
    unknown_keys,
    updated,
)
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
_COPIES = 4  # of a message, while it is handled
_MAX_SECRET_BYTES = 100_000  # of a request for a client secret
_SECRET_S = 600  # that a client secret is valid, where its request does not say


class RealtimeRoute:
    """The WebSocket route of live sessions, an ASGI application."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._pool = ThreadPoolExecutor(_THREADS, "earshot-live")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        try:
            identify = functools.partial(self._api_key, websocket)
            record = scope["state"][RECORD]
            async with RequestContext(
                self._services, record, "live", identify, timed=False
            ) as context:
                await self._admit(websocket, context)
        except ApiError as error:
            if websocket.application_state == WebSocketState.CONNECTING:
                await websocket.send_denial_response(as_openai(error, _URL_PARAMETERS))

    def _api_key(self, websocket: WebSocket) -> ApiKey:
        """Identify the API key by itself, or by a client secret.

        Raises:
            ApiError: there is neither, or it is not valid.
        """
        if (secret := self._secret(websocket)) is not None:
            return self._services.keys.with_public_id(secret.key_id)
        return self._services.keys.identify(_authorization(websocket))

    def _secret(self, websocket: WebSocket) -> ClientSecret | None:
        token = bearer_token(_authorization(websocket))
        is_secret = token.startswith(CLIENT_SECRET_PREFIX)
        return self._services.client_secrets.read(token) if is_secret else None

    async def _admit(self, websocket: WebSocket, context: RequestContext) -> None:
        """Serve a session, if there may be one.

        Raises:
            ApiError: there may not, or its client has taken nothing for too long.
        """
        stop = asyncio.Event()
        settings = self._settings(websocket)
        context.record.model = self._services.models.named(settings.input.transcription.model)
        streams = self._services.streams
        with context.admit() as permit, streams.register(context.api_key, stop.set):
            if self._services.target is not None:
                self._services.target.require_live(len(streams) - 1)
            try:
                detector = await asyncio.to_thread(VadModel)  # the first one reads the model
            except EarshotError as error:
                raise ApiError(error) from error
            connection = _Connection(self._services, websocket, context, permit, stop)
            await connection.serve(settings, detector, self._pool)

    def _settings(self, websocket: WebSocket) -> SessionSettings:
        """Choose the settings that a session begins with: the client secret's, then the URL's.

        Raises:
            ApiError: a parameter of the URL is wrong.
        """
        query, settings = websocket.query_params, SessionSettings()
        if (intent := query.get("intent", "transcription")) != "transcription":
            raise field_error("intent", f"intent = {shown(intent)}; expected transcription")
        if (secret := self._secret(websocket)) is not None:
            settings, _ = updated(settings, secret.session)
        if model := query.get("model"):
            self._services.models.named(model)
            transcription = {"transcription": {"model": model}}
            settings, _ = updated(settings, {"audio": {"input": transcription}})
        return settings


@dataclasses.dataclass(frozen=True, eq=False)
class _Connection:
    """One client's connection, which has been admitted."""

    services: Services
    websocket: WebSocket  # its handshake is not answered yet
    context: RequestContext
    permit: Permit
    stop: asyncio.Event  # is set when the server stops

    async def serve(
        self, settings: SessionSettings, detector: VadModel, pool: ThreadPoolExecutor
    ) -> None:
        """Accept the connection, and serve its session to the end.

        Raises:
            ApiError: the client has taken nothing for too long.
        """
        websocket = self.websocket
        unknown = [key for key in websocket.query_params if key not in _URL_PARAMETERS]
        session = LiveSession(
            self.services.config.live,
            self.services.models.named,
            self._transcribe,
            self._send,
            self.context.count_live,
            detector,
            pool,
            self.services.metrics.live,
            self.services.streams.__len__,
            settings,
            [unknown_keys(dict.fromkeys(unknown, ""))] if unknown else [],
        )
        subprotocol = _SUBPROTOCOL if _SUBPROTOCOL in websocket.scope["subprotocols"] else None
        told = served_by(self.context.record.model) | ignored(unknown)
        headers = [(name.encode(), text.encode()) for name, text in told.items()]
        try:
            await websocket.accept(subprotocol, headers)
            if (end := await self._run(session)) is not None:
                self.context.record.outcome = end.reason
                error = EventError(str(end), end.reason)
                await self._send(events.error(error, kind=end.status.kind))
                await websocket.close(end.status.close, str(end)[:100])
        except WebSocketDisconnect:
            pass

    async def _run(self, session: LiveSession) -> ApiError | None:
        """Serve a session until it ends, and end its decoding.

        Returns:
            The reason for which the server ends it; None: its client has left.
        """
        await session.start()
        work = asyncio.create_task(session.work())
        receive = asyncio.create_task(self._receive(session))
        stopped = asyncio.create_task(self.stop.wait())
        lost = asyncio.create_task(self.websocket.scope[LOST].wait())
        tasks = (work, receive, stopped, lost)
        try:
            limit_s = events.MAX_SESSION_S
            await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():  # it does not end by itself
                work.result()
            if receive.done():
                return receive.result()
            if lost.done():
                return None
            if not stopped.done():
                message = f"the session has lasted {limit_s:g} s; open another"
                return ApiError(RequestError(message), "session_expired")
            await _cancel(receive)
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
                await _cancel(task)

    async def _receive(self, session: LiveSession) -> ApiError | None:
        """Handle the client's messages until it leaves, or until the server ends the session."""
        budget: ConnectionBudget = self.websocket.scope[BUDGET]
        while True:
            try:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    message = await self.websocket.receive()
            except TimeoutError:
                text = f"nothing came for {IDLE_TIMEOUT_S:g} s"
                return ApiError(RequestError(text), "session_idle")
            if message["type"] == "websocket.disconnect":
                return None
            held = self.permit.child()  # of a message, while it is handled
            try:
                text = message.get("text") or ""
                held.charge(_COPIES * len(text))
                await budget.pay(events.cost_s(text))
                self.services.keys.require_good(self.context.api_key)  # its key may be removed
                await session.handle(text)
            except ApiError as error:
                return error
            finally:
                held.release()

    async def _transcribe(self, model: str | None, window: UpdateWindow) -> Transcript:
        """Transcribe a window.

        Raises:
            ApiError: there is no text.
        """
        record, target = self.context.record, Target(self.services.models.named(model), False)
        with record.span.part("decoding") as span:
            with self.permit.child() as permit:
                parts = request_parts(
                    window.request(self.services.config.live), samples=window.audio
                )
                permit.charge(sum(map(len, parts)))
                audio = AudioLength(window.duration_s)
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


async def _cancel(task: asyncio.Task[Any]) -> None:
    """End a task, and wait for that. Its result has been seen or does not matter."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


# ---------------------------------------------------------------- client secrets


@dataclasses.dataclass(frozen=True)
class _Expiry:
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Whole, Field(ge=10, le=7200)] = _SECRET_S


@dataclasses.dataclass(frozen=True)
class _SecretRequest:
    """The body of a request for a client secret, as OpenAI's API has it."""

    expires_after: _Expiry | None = None
    session: dict[str, Any] | None = None


async def make_client_secret(request: Request, services: Services) -> Response:
    """Answer with a client secret in the name of the request's API key.

    Raises:
        ApiError: there is no valid API key, or the body is wrong.
    """
    api_key = services.keys.of_request(request)
    with services.admission.admit(api_key) as permit:
        body = await json_object(request, permit, _MAX_SECRET_BYTES, "the body", empty=b"{}")
    table, unknown = split_unknown(_SecretRequest, body)
    try:
        wanted = from_table(_SecretRequest, table, "client_secrets", error=OptionError)
    except OptionError as error:
        message = str(error).removeprefix("client_secrets: ")
        raise field_error(message.partition(" ")[0], message) from error
    changes = wanted.session or {}
    try:
        settings, warnings = read_update(
            changes, SessionSettings(), services.models.named, begun=False
        )
    except EventError as error:
        raise field_error(error.param or "session", str(error), error.code) from error
    if unknown:
        warnings.append(unknown_keys(unknown))
    seconds = wanted.expires_after.seconds if wanted.expires_after else _SECRET_S
    secret = ClientSecret(
        round(time.time()) + seconds,
        api_key.key.public_id if api_key.key else "",
        split_unknown(SessionSettings, changes)[0],
    )
    session = {"id": events.new_id("sess"), "object": events.OBJECT, **as_session(settings)}
    value = services.client_secrets.sign(secret)
    answer = {"value": value, "expires_at": secret.expires_at, "session": session}
    return JSONResponse(events.with_warnings(answer, warnings))
