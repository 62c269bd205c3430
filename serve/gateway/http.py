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
from serve.gateway.observe.metrics import OWN_PAGE
from serve.gateway.openai.docs import openapi
from serve.gateway.openai.routes import build_openai_app
from serve.gateway.page.routes import page_routes

Endpoint = Callable[[Request], Awaitable[Response]]
MetricsPage = Callable[[], Awaitable[bytes]]


def build_app(services: Services, metrics: MetricsPage, jobs: Sequence[BaseRoute]) -> ASGIApp:
    """Build the application for clients.

    Args:
        services: the gateway's services.
        metrics: returns the page of all processes' metrics.
        jobs: the routes of jobs; (): there are no jobs.
    """

    async def metrics_for_keys(request: Request) -> Response:
        services.keys.of_request(request)
        return await _metrics(metrics)(request)

    routes: list[BaseRoute] = [
        *page_routes(services),
        Route("/health", _health(services)),
        Route("/metrics", metrics_for_keys),
        Route("/openapi.json", openapi),
        *kserve_routes(services),
        WebSocketRoute("/v1/realtime", RealtimeRoute(services)),
        Mount("/v1", build_openai_app(services, jobs)),
    ]
    return _app(routes, services)


def build_monitoring_app(services: Services, metrics: MetricsPage) -> ASGIApp:
    """Build the application for Prometheus and for health checks."""

    async def own_page() -> bytes:
        return services.metrics.page()

    routes: list[BaseRoute] = [
        Route("/metrics", _metrics(metrics)),
        Route(OWN_PAGE, _metrics(own_page)),
        Route("/health", _health(services)),
        Route("/v2/health/live", live),
    ]
    return _app(routes, services)


def _app(routes: list[BaseRoute], services: Services) -> ASGIApp:
    app = Starlette(routes=routes, exception_handlers=exception_handlers(as_kserve))
    app.router.redirect_slashes = False
    return with_headers(app, services.config.server, services.admission)


def _metrics(metrics: MetricsPage) -> Endpoint:
    async def page(request: Request) -> Response:
        return Response(await metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return page


def _health(services: Services) -> Endpoint:
    async def answer(request: Request) -> Response:
        ready = await services.ready()
        health: dict[str, object] = {"status": "ok" if ready else "unavailable"}
        if len(engines := services.engines.own) > 1:
            health["engines"] = {engine.name: await engine.ready() for engine in engines}
        return JSONResponse(health, 200 if ready else 503)

    return answer
