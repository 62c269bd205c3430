"""OpenAI's audio API over HTTP, below /v1.

    POST /v1/audio/transcriptions, /v1/audio/translations
    GET  /v1/models, /v1/models/{name}, /v1/usage, /v1/shadow
    POST /v1/realtime/client_secrets: see `serve.gateway.live.route`
    /v1/audio/jobs: see `serve.gateway.jobs.routes`, if there are jobs

A streamed request goes to the model that answers segment by segment, any other to the one that
answers once. An error after the first event of a stream is its last event.

GET /v1/usage?start=2027-01-01&end=2027-01-31 is not OpenAI's. It returns what the caller's key has
had, by day in UTC and model; both days count, and the default is the month until today.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from serve.contract.errors import AccessError, ConfigError
from serve.contract.messages import Task, Transcript
from serve.gateway import errors
from serve.gateway.context import RequestContext, Services
from serve.gateway.edge.connection import SlowClientError
from serve.gateway.edge.headers import RECORD, ignored, served_by, warnings
from serve.gateway.edge.uploads import while_client_waits
from serve.gateway.engines import EngineCall, EngineRequest
from serve.gateway.errors import ApiError, as_openai, exception_handlers, field_error, openai_error
from serve.gateway.kserve.messages import read_streamed, request_parts
from serve.gateway.live.route import make_client_secret
from serve.gateway.models import Target
from serve.gateway.openai import answers
from serve.gateway.openai.answers import Events
from serve.gateway.openai.fields import FormFields, read_fields
from serve.gateway.openai.form import received_form
from serve.gateway.usage import day_of, month_until

logger = logging.getLogger("earshot.gateway")

_MODEL = {  # of every name; its end is not announced
    "object": "model",
    "created": int(time.time()),
    "owned_by": "earshot",
    "shutdown_date": None,
}


def build_openai_app(services: Services, jobs: Sequence[BaseRoute] = ()) -> Starlette:
    """Build the application below /v1; `jobs` are the routes of jobs."""

    async def list_models(request: Request) -> Response:
        services.keys.of_request(request)
        models = [{"id": name, **_MODEL} for name in services.models.names]
        return JSONResponse({"object": "list", "data": models})

    async def one_model(request: Request) -> Response:
        services.keys.of_request(request)
        services.models.named(name := request.path_params["name"])
        return JSONResponse({"id": name, **_MODEL})

    make_secret = functools.partial(make_client_secret, services=services)
    app = Starlette(
        routes=[
            Route("/audio/transcriptions", _AudioRoute(services, "transcribe"), methods=["POST"]),
            Route("/audio/translations", _AudioRoute(services, "translate"), methods=["POST"]),
            Route("/models", list_models),
            Route("/models/{name:path}", one_model),
            Route("/usage", functools.partial(_usage, services)),
            Route("/realtime/client_secrets", make_secret, methods=["POST"]),
            *jobs,
            Route("/shadow", functools.partial(_shadow, services)),
        ],
        exception_handlers=exception_handlers(as_openai),
    )
    app.router.redirect_slashes = False
    return app


class _AudioRoute:
    """A route that takes audio, as an ASGI application."""

    def __init__(self, services: Services, task: Task) -> None:
        self._services = services
        self._task = task
        self._route = "transcriptions" if task == "transcribe" else "translations"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, record = Request(scope, receive), scope["state"][RECORD]
        events = Events(send)
        try:
            async with RequestContext(self._services, record, self._route) as context:
                response = await self._answer(request, context, events)
                if response is not None:
                    await response(scope, receive, send)
        except Exception as error:
            if not events.begun or isinstance(error, SlowClientError):
                raise
            if not isinstance(error, ApiError):
                logger.exception("stream %s failed in the gateway", record.id)
                error = errors.failed()
            await events.send(openai_error(error))
            await events.end()

    async def _answer(
        self, request: Request, context: RequestContext, events: Events
    ) -> Response | None:
        """Return the response; None: it was sent as events."""
        services, config = self._services, self._services.config
        with context.admit() as permit:
            async with received_form(request, permit, services.engines.uploads) as form:
                fields = read_fields(form.pairs, self._task, config.gateway.unknown_fields)
                target = Target(services.models.named(fields.model), fields.stream)
                context.record.model = target.model
                parts = request_parts(fields.request, form.audio())
                audio = form.audio_length() if services.target else None
                engine_request = EngineRequest(target, parts, fields.stream, form.path, audio=audio)
                with context.start(engine_request, permit) as call:
                    events.headers = served_by(target.model) | ignored(fields.ignored)
                    if fields.stream:
                        transcript = await _pass_on(request, call, events, fields, context)
                    else:
                        transcript = await while_client_waits(request, call.transcript())
                context.answered(transcript)  # the shadow monitor may keep the file
        if fields.stream:
            return None
        # Subtitles of long audio take a while to split.
        text, kind = await asyncio.to_thread(answers.render_transcript, transcript, fields)
        headers = events.headers | warnings(transcript.warnings)
        return Response(text, media_type=kind, headers=headers)


async def _pass_on(
    request: Request, call: EngineCall, events: Events, fields: FormFields, context: RequestContext
) -> Transcript:
    """Send a stream's segments as they come, and its end; return the whole.

    Raises:
        ApiError: the request failed, or the client left.
    """
    text, index = "", 0
    while True:
        answer = await while_client_waits(request, call.next())
        if answer is None:
            raise errors.from_upstream("INTERNAL", "the stream ended without an answer")
        piece = read_streamed(answer)
        if isinstance(piece, Transcript):
            await events.send(answers.done_event(piece, fields))
            await events.end()
            return piece
        context.segment_sent(piece.end)
        if delta := answers.added_text(text, piece.text):
            await events.send(answers.delta_event(delta, index, piece, fields))
            context.text_sent()
        if fields.format == "diarized_json":
            await events.send(answers.segment_event(index, piece))
        text += piece.text
        index += 1


async def _usage(services: Services, request: Request) -> Response:
    """Answer with the usage of the caller's key."""
    api_key = services.keys.of_request(request)
    errors.require_known(request.query_params, ("start", "end"))
    last = _day(request, "end", services.usage.day)
    first = _day(request, "start", month_until(last))
    if first > last:
        raise field_error("start", f"start = {first} is behind end = {last}")
    rows = [
        {
            "day": row.day,
            "model": row.model,
            "requests": row.requests,
            "audio_seconds": round(row.audio_s, 3),
        }
        for row in await services.usage.rows(api_key.name, first, last)
    ]
    return JSONResponse({"object": "list", "start": first, "end": last, "data": rows})


async def _shadow(services: Services, request: Request) -> Response:
    """Answer with the findings of the shadow monitor.

    Raises:
        ApiError: 403, the request's key is not a reader's.
    """
    name, readers = services.keys.of_request(request).name, services.config.shadow.readers
    if not (name in readers if services.keys.required else services.config.server.on_loopback):
        error = AccessError("texts of others are shown to the keys of shadow.readers alone")
        raise ApiError(error, "reader")
    return JSONResponse(services.shadow.findings(), headers={"Cache-Control": "no-store"})


def _day(request: Request, name: str, default: str) -> str:
    try:
        return day_of(request.query_params.get(name, default))
    except ConfigError as error:
        raise field_error(name, f"{name}: {error}") from error
