"""The page's addresses for browsers.

    GET  /           the page itself
    GET  /page/…     what it loads
    GET  /state      what it shows of the server
    POST /subtitles  what it saves; see `serve.gateway.page.subtitles`

It loads nothing from elsewhere, and its policy forbids that to whatever might get into it. Browsers
keep the files, and each time ask only whether they have changed.
"""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from serve.gateway.context import Services
from serve.gateway.page.state import State
from serve.gateway.page.subtitles import Subtitles

_WEB = Path(__file__).parent / "web"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
}


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def page_routes(state: State, door: Services) -> list[BaseRoute]:
    """List the page's addresses; `state` is what it shows of the server to who may see it."""
    files = _Files(directory=_WEB)

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    async def tell(request: Request) -> Response:
        door.keys.identify(request.headers.get("authorization"))
        return JSONResponse(state.found, headers={"Cache-Control": "no-store"})

    return [
        Route("/", page),
        Route("/state", tell),
        Route("/subtitles", Subtitles(door).answer, methods=["POST"]),
        Mount("/page", files),
    ]
