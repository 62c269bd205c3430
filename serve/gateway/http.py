"""The addresses of HTTP: KServe v2, here; OpenAI's API, in `serve.gateway.openai`; small pages.

    GET  /v2, /v2/health/live, /v2/health/ready
    GET  /v2/models/{name}[/versions/{version}][/ready]
    POST /v2/models/{name}[/versions/{version}]/infer
    GET  /health, /metrics, /docs, /openapi.json
    GET  /, /page/…, /state, POST /subtitles: the page for people, in `serve.gateway.page`
    WS   /v1/realtime, in `serve.gateway.live`

Errors of KServe are {"error": "..."}. Where waiting helps, the status is 503 and Retry-After says
how long. Metrics and health have an address of their own besides, and a Unix socket in the run's
folder: doors that no crowd of clients stands in.
"""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp

from serve.gateway import errors
from serve.gateway.context import Services, Visit
from serve.gateway.edge.budget import JSON_S_PER_BYTE, Share
from serve.gateway.edge.connection import SHARE
from serve.gateway.edge.headers import RECORD, with_headers
from serve.gateway.edge.uploads import body_chunks, while_client_waits
from serve.gateway.errors import ApiError, as_kserve
from serve.gateway.kserve.checks import check_streamed
from serve.gateway.kserve.http import Translated, answer_to_http, json_bytes, request_from_http
from serve.gateway.kserve.messages import raw_parts
from serve.gateway.limits import EXPANSION, Permit
from serve.gateway.live.route import RealtimeRoute
from serve.gateway.observe.metrics import OWN_PAGE
from serve.gateway.openai import docs
from serve.gateway.openai.routes import build_openai_app
from serve.gateway.overload.sound import of_tensors
from serve.gateway.page.routes import page_routes
from serve.gateway.page.state import EngineStateReader
from serve.gateway.upstream.exchange import Exchange

_HEADER = "Inference-Header-Content-Length"
_OFFERED = (
    "offered are /v2, /v2/health/live, /v2/health/ready, and below /v2/models/NAME: nothing, "
    "/ready, /infer; OpenAI's API lies below /v1, /docs tells of it, and / is a page for people"
)
_PAGE_POLICY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'"
}
Endpoint = Callable[[Request], Awaitable[Response]]
WholePage = Callable[[], Awaitable[bytes]]
"""Gives the page of metrics."""


def build_app(
    door: Services, metrics: WholePage, state: EngineStateReader, jobs: Sequence[BaseRoute] = ()
) -> ASGIApp:
    """Build the application for clients.

    Args:
        door: lets requests in.
        metrics: gives their page.
        state: what the page shows of the server.
        jobs: the addresses of jobs; (): there are no jobs.
    """
    api = _Api(door)
    routes: list[BaseRoute] = [
        *page_routes(state, door),
        Route("/health", api.health),
        Route("/metrics", _metrics(door, metrics, needs_key=True)),
        Route("/docs", _docs),
        Route("/openapi.json", _openapi),
        Route("/v2", api.server_metadata),
        Route("/v2/health/live", api.live),
        Route("/v2/health/ready", api.ready),
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(model, api.model_metadata),
            Route(f"{model}/ready", api.model_ready),
            Route(f"{model}/infer", api.infer, methods=["POST"]),
        ]
    routes += [
        WebSocketRoute("/v1/realtime", RealtimeRoute(door)),
        Mount("/v1", build_openai_app(door, jobs)),
    ]
    return _app(routes, door)


def build_watchers_app(door: Services, metrics: WholePage) -> ASGIApp:
    """Build the application for Prometheus, and for whoever asks whether the server is well."""
    api = _Api(door)
    routes: list[BaseRoute] = [
        Route("/metrics", _metrics(door, metrics)),
        Route(OWN_PAGE, _metrics(door, _own_page(door))),
        Route("/health", api.health),
        Route("/v2/health/live", api.live),
    ]
    return _app(routes, door)


def _app(routes: list[BaseRoute], door: Services) -> ASGIApp:
    handlers: Any = {ApiError: _refused, HTTPException: _no_route, Exception: _failed}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return with_headers(app, door.config.server, lambda: door.admission.draining)


def _metrics(door: Services, metrics: WholePage, needs_key: bool = False) -> Endpoint:
    async def page(request: Request) -> Response:
        if needs_key:
            door.callers.identify(request.headers.get("authorization"))
        return Response(
            await metrics(),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    return page


def _own_page(door: Services) -> WholePage:
    async def page() -> bytes:
        return door.metrics.page()

    return page


async def _docs(request: Request) -> Response:
    return HTMLResponse(docs.page(), headers=_PAGE_POLICY)


async def _openapi(request: Request) -> Response:
    return JSONResponse(docs.openapi())


class _Api:
    def __init__(self, door: Services) -> None:
        self._door = door

    async def health(self, request: Request) -> Response:
        ready = await self._door.ready()
        health = {"status": "ok" if ready else "unavailable", **await self._door.engines()}
        return JSONResponse(health, 200 if ready else 503)

    async def live(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        if not await self._door.ready():
            raise errors.server_away()
        return Response()

    async def model_ready(self, request: Request) -> Response:
        target = self._door.models.target(*_model(request))
        if not await self._door.ready(target.model):
            raise errors.server_away()
        return Response()

    async def server_metadata(self, request: Request) -> Response:
        self._identify(request)
        return _message(await self._door.server_metadata())

    async def model_metadata(self, request: Request) -> Response:
        self._identify(request)
        return _message(await self._door.model_metadata(*_model(request)))

    def _identify(self, request: Request) -> None:
        self._door.callers.identify(request.headers.get("authorization"))

    async def infer(self, request: Request) -> Response:
        authorization = request.headers.get("authorization")
        with self._door.account(request.scope["state"][RECORD], "http", authorization) as visit:
            with self._door.admission.admit(visit.account) as ticket:
                exchange, translated = await self._begin(request, ticket, visit)
            with exchange:
                answer = await while_client_waits(request, exchange.only_answer())
            visit.passed_on(answer)
            body, json_size = answer_to_http(answer, translated)
        if json_size is None:
            return Response(body, media_type="application/json")
        headers = {_HEADER: str(json_size)}
        return Response(body, headers=headers, media_type="application/octet-stream")

    async def _begin(
        self, request: Request, ticket: Permit, visit: Visit
    ) -> tuple[Exchange, Translated]:
        name, version = _model(request)
        target = self._door.models.target(name, version)
        visit.line.model = target.model
        check_streamed(target, streamed=False)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise errors.invalid("the body has a Content-Encoding; send it as it is")
        header = request.headers.get(_HEADER)
        body = await self._body(request, ticket, header)
        json_size = json_bytes(len(body), header)
        ticket.charge((EXPANSION - 1) * json_size)
        share: Share = request.scope[SHARE]
        await share.pay(json_size * JSON_S_PER_BYTE)
        translated = request_from_http(name, version, body, json_size)
        visit.caller.require_duration([output.name for output in translated.request.outputs])
        parts = [translated.request.SerializeToString(), *raw_parts(translated.raw)]
        look = functools.partial(of_tensors, translated.request, translated.raw)
        visit.sound = self._door.targets.look(look)
        return self._door.pass_on(visit, target, parts, ticket, streamed=False), translated

    async def _body(self, request: Request, ticket: Permit, header: str | None) -> bytes:
        def check(size: int) -> None:
            json_bytes(size, header)

        chunks = body_chunks(request, ticket, self._door.upload_timeout_s, check)
        return b"".join([chunk async for chunk in chunks])


def _model(request: Request) -> tuple[str, str]:
    return request.path_params["name"], request.path_params.get("version", "")


def _message(message: Any) -> Response:
    """Write a protobuf message as KServe's JSON, which has 64-bit numbers as numbers."""
    content = MessageToDict(message, preserving_proto_field_name=True)
    for tensor in [*content.get("inputs", ()), *content.get("outputs", ())]:
        tensor["shape"] = [int(size) for size in tensor["shape"]]
    return JSONResponse(content)


async def _refused(request: Request, refusal: ApiError) -> Response:
    return as_kserve(refusal)


async def _no_route(request: Request, error: HTTPException) -> Response:
    text = f"RequestError: no {request.method} at this address; {_OFFERED}"
    return JSONResponse({"error": text}, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return as_kserve(errors.failed())
