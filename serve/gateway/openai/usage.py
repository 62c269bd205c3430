"""GET /v1/usage: what the caller's key has had, by day in UTC and model.

    GET /v1/usage?start=2027-01-01&end=2027-01-31

Both days count; without them it is the month until today. The address is none of OpenAI's.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.contract.errors import ConfigError, shown
from serve.gateway.context import Services
from serve.gateway.errors import field_error
from serve.gateway.usage import Row, day_of, month_until

_FIELDS = ("start", "end")


class UsageOfKey:
    """The address, as an endpoint."""

    def __init__(self, door: Services) -> None:
        self._door = door

    async def answer(self, request: Request) -> Response:
        """Answer with the rows of the caller's key.

        Raises:
            ApiError: whoever it is may not come in, a day is wrong, or usage cannot be told.
        """
        caller = self._door.callers.identify(request.headers.get("authorization"))
        usage = self._door.usage
        for name in request.query_params:
            if name not in _FIELDS:
                known = " and ".join(_FIELDS)
                raise field_error(name[:60], f"{shown(name)} is unknown; known: {known}")
        last = _day(request, "end", usage.day)
        first = _day(request, "start", month_until(last))
        if first > last:
            raise field_error("start", f"start = {first} is behind end = {last}")
        rows = await usage.rows(caller.name, first, last)
        told = [_told(row) for row in rows]
        return JSONResponse({"object": "list", "start": first, "end": last, "data": told})


def _day(request: Request, name: str, default: str) -> str:
    try:
        return day_of(request.query_params.get(name, default))
    except ConfigError as error:
        raise field_error(name, f"{name}: {error}") from error


def _told(row: Row) -> dict[str, Any]:
    return {
        "day": row.day,
        "model": row.model,
        "requests": row.requests,
        "audio_seconds": round(row.audio_s, 3),
    }
