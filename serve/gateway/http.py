"""The routes of HTTP, for clients and for monitoring.

    /v1   OpenAI's API, in `serve.gateway.openai`; live text and jobs
    /v2   KServe v2, in `serve.gateway.kserve.http`
    GET  /health, /metrics, /openapi.json
    GET  /, /page/…, /state, POST /subtitles: the page for people, in `serve.gateway.page`

Errors below /v1 have OpenAI's form, others KServe's: {"error": "..."}. If waiting helps,
Retry-After tells how long. Metrics and health also have their own address, and a Unix
socket in the run's folder, which no crowd of clients can block.
"""

from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp

from serve.gateway.context import Services
from serve.gateway.edge.headers import with_headers
from serve.gateway.errors import as_kserve, exception_handlers
from serve.gateway.kserve.http import kserve_routes, live
from serve.gateway.live.route import RealtimeRoute
from serve.gateway.observe.pages import OWN_PAGE, whole_page
from serve.gateway.openai.docs import openapi
from serve.gateway.openai.routes import build_openai_app
from serve.gateway.page.routes import page_routes
from serve.gateway.page.state import EngineStateReader


def build_app(services: Services, state: EngineStateReader, jobs: Sequence[BaseRoute]) -> ASGIApp:
    """Build the application for clients.

    Args:
        services: the gateway's services.
        state: the state of the server that the page shows.
        jobs: the routes of jobs; (): there are no jobs.
    """

    async def metrics(request: Request) -> Response:
        services.keys.of_request(request)
        return _metrics(await whole_page(services))

    routes: list[BaseRoute] = [
        *page_routes(services, state),
        Route("/health", _health(services)),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        *kserve_routes(services),
        WebSocketRoute("/v1/realtime", RealtimeRoute(services)),
        Mount("/v1", build_openai_app(services, jobs)),
    ]
    return _app(routes, services)


def build_monitoring_app(services: Services) -> ASGIApp:
    """Build the application for Prometheus and for health checks."""

    async def metrics(request: Request) -> Response:
        return _metrics(await whole_page(services))

    async def own_metrics(request: Request) -> Response:
        return _metrics(services.metrics.page())

    routes: list[BaseRoute] = [
        Route("/metrics", metrics),
        Route(OWN_PAGE, own_metrics),
        Route("/health", _health(services)),
        Route("/v2/health/live", live),
    ]
    return _app(routes, services)


def _app(routes: list[BaseRoute], services: Services) -> ASGIApp:
    app = Starlette(routes=routes, exception_handlers=exception_handlers(as_kserve))
    app.router.redirect_slashes = False
    return with_headers(app, services.config.server, services.admission)


def _metrics(page: bytes) -> Response:
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


def _health(services: Services) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        ready = await services.ready()
        health: dict[str, object] = {"status": "ok" if ready else "unavailable"}
        if len(engines := services.engines.own) > 1:
            health["engines"] = {engine.name: await engine.ready() for engine in engines}
        return JSONResponse(health, 200 if ready else 503)

    return answer
