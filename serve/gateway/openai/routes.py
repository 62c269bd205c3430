"""OpenAI's audio API over HTTP, below /v1.

    POST /v1/audio/transcriptions, /v1/audio/translations
    GET  /v1/models, /v1/models/{name}, /v1/usage, /v1/shadow
    POST /v1/realtime/client_secrets: see `serve.gateway.live.route`
    /v1/audio/jobs: see `serve.gateway.jobs.routes`, where there are jobs

A streamed request goes to the model that answers segment by segment, any other to the one that
answers once. Errors that come after the first event of a stream are its last event.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from serve.contract.errors import RequestError
from serve.contract.messages import Finished, Task, Transcript
from serve.gateway import errors
from serve.gateway.context import Services, Visit
from serve.gateway.edge.headers import RECORD, ignored, served_by, warnings
from serve.gateway.edge.uploads import while_client_waits
from serve.gateway.errors import ApiError, as_openai, openai_error
from serve.gateway.kserve.messages import read_transcript, request_parts, stream_event
from serve.gateway.live.route import make_client_secret
from serve.gateway.models import Target
from serve.gateway.openai.answers import (
    Deltas,
    Events,
    body,
    delta_event,
    done_event,
    segment_event,
)
from serve.gateway.openai.fields import FIELDS, FormFields, read_fields
from serve.gateway.openai.form import received_form
from serve.gateway.openai.usage import UsageOfKey
from serve.gateway.shadow.monitor import answer_findings
from serve.gateway.upstream.exchange import Exchange

logger = logging.getLogger("earshot.gateway")

_CREATED = int(time.time())
_OFFERED = (
    "offered are POST /v1/audio/transcriptions and /v1/audio/translations, GET /v1/models, "
    "/v1/models/NAME, /v1/usage and /v1/shadow, POST /v1/realtime/client_secrets, and jobs at "
    "/v1/audio/jobs"
)
_BATCHES = ("/batches", "/files", "/uploads")  # what OpenAI's Batch API consists of
_ANY = ["GET", "POST", "DELETE"]


def build_openai_app(door: Services, jobs: Sequence[BaseRoute] = ()) -> Starlette:
    """Build the application for what lies below /v1; `jobs` are the addresses of jobs."""

    def identify(request: Request) -> None:
        door.callers.identify(request.headers.get("authorization"))

    async def list_models(request: Request) -> Response:
        identify(request)
        models = [_described(name) for name in door.models.names]
        return JSONResponse({"object": "list", "data": models})

    async def one_model(request: Request) -> Response:
        identify(request)
        door.models.named(name := request.path_params["name"])
        return JSONResponse(_described(name))

    make_secret = functools.partial(make_client_secret, door=door)
    findings = functools.partial(
        answer_findings, monitor=door.shadow, keys=door.callers, server=door.config.server
    )
    handlers: Any = {ApiError: _refused, HTTPException: _no_route, Exception: _failed}
    app = Starlette(
        routes=[
            Route("/audio/transcriptions", _Audio(door, "transcribe"), methods=["POST"]),
            Route("/audio/translations", _Audio(door, "translate"), methods=["POST"]),
            Route("/models", list_models),
            Route("/models/{name:path}", one_model),
            Route("/usage", UsageOfKey(door).answer),
            Route("/realtime/client_secrets", make_secret, methods=["POST"]),
            *(jobs or [Route("/audio/jobs{rest:path}", _no_jobs, methods=["GET", "POST"])]),
            Route("/shadow", findings),
            *(Route(f"{path}{{rest:path}}", _no_batches, methods=_ANY) for path in _BATCHES),
        ],
        exception_handlers=handlers,
    )
    app.router.redirect_slashes = False
    return app


def _described(model: str) -> dict[str, Any]:
    """Describe a model as OpenAI does; null: no end is announced."""
    return {
        "id": model,
        "object": "model",
        "created": _CREATED,
        "owned_by": "earshot",
        "shutdown_date": None,
    }


class _Audio:
    """An address that takes audio, as an ASGI application."""

    def __init__(self, door: Services, task: Task) -> None:
        self._door = door
        self._task = task
        self._route = "transcriptions" if task == "transcribe" else "translations"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, events, line = Request(scope, receive), Events(send), scope["state"][RECORD]
        authorization = request.headers.get("authorization")
        try:
            with self._door.account(line, self._route, authorization) as visit:
                response = await self._answer(request, visit, events)
        except Exception as error:
            if not events.begun:
                raise
            await events.send(_failed_event(error, line.id))
            await events.end()
        else:
            if response is not None:
                await response(scope, receive, send)

    async def _answer(self, request: Request, visit: Visit, events: Events) -> Response | None:
        """Return the response; None: it was sent as events."""
        limit_s, folder = self._door.upload_timeout_s, self._door.upstreams.uploads
        async with contextlib.AsyncExitStack() as stack:
            with self._door.admission.admit(visit.account) as ticket:
                received = received_form(request, ticket, limit_s, folder)
                form = await stack.enter_async_context(received)
                unknown = self._door.config.gateway.unknown_fields
                fields = read_fields(form.pairs, self._task, unknown)
                target = Target(self._door.models.named(fields.model), fields.stream)
                visit.line.model = target.model
                visit.sound = self._door.targets.look(form.sound)
                parts = request_parts(fields.request, form.audio())
                exchange = self._door.pass_on(
                    visit, target, parts, ticket, fields.stream, form.path
                )
            stack.enter_context(exchange)
            events.headers = served_by(target.model) | ignored(fields.ignored)
            if fields.stream:
                transcript = await _pass_on(request, exchange, events, fields, visit)
            else:
                transcript = read_transcript(
                    await while_client_waits(request, exchange.only_answer())
                )
            visit.answered(transcript)
        if fields.stream:
            return None
        # Subtitles of long audio take a while to split.
        text, kind = await asyncio.to_thread(body, transcript, fields)
        headers = events.headers | warnings(transcript.warnings)
        return Response(text, media_type=kind, headers=headers)


async def _pass_on(
    request: Request, exchange: Exchange, events: Events, fields: FormFields, visit: Visit
) -> Transcript:
    """Send a stream's segments as they come, and its end; return the whole.

    Raises:
        ApiError: the request failed, or the client has gone.
    """
    deltas, index = Deltas(), 0
    while True:
        answer = await while_client_waits(request, exchange.next_answer())
        if answer is None:
            raise errors.from_upstream("INTERNAL", "the stream ended without an answer")
        event = stream_event(answer)
        if isinstance(event, Finished):
            await events.send(done_event(event.transcript, fields))
            await events.end()
            return event.transcript
        visit.segment_sent(event.segment.end)
        if delta := deltas.next(event.segment.text):
            await events.send(delta_event(delta, index, event.segment, fields))
            visit.text_sent()
        if fields.format == "diarized_json":
            await events.send(segment_event(index, event.segment))
        index += 1


def _failed_event(error: Exception, request_id: str) -> dict[str, Any]:
    """Make the event that ends a stream which failed."""
    if not isinstance(error, ApiError):
        logger.error("stream %s failed in the gateway", request_id, exc_info=error)
        error = errors.failed()
    return openai_error(error, FIELDS)


async def _refused(request: Request, refusal: ApiError) -> Response:
    return as_openai(refusal, FIELDS)


async def _no_route(request: Request, error: HTTPException) -> Response:
    text = f"no {request.method} at this address; {_OFFERED}"
    reason = "method" if error.status_code == 405 else "not_found"
    return as_openai(ApiError(RequestError(text), reason), FIELDS, dict(error.headers or {}))


async def _no_jobs(request: Request) -> Response:
    raise errors.not_found("this server keeps no jobs; jobs.folder of its config makes it do so")


async def _no_batches(request: Request) -> Response:
    raise errors.not_found(
        "there are no batches and files here: OpenAI's are of JSON, which holds no audio; send "
        "each recording, or its url, to POST /v1/audio/jobs, and ask for its result later"
    )


async def _failed(request: Request, error: Exception) -> Response:
    return as_openai(errors.failed(), FIELDS)
