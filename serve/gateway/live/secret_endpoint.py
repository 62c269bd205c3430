"""POST /v1/realtime/client_secrets: make short-lived keys with which browsers open live sessions.

The body is that of OpenAI's API, and each part of it may be left out:

    {"expires_after": {"anchor": "created_at", "seconds": 600}, "session": {…}}
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.contract.codec import from_table, parse_json, split_unknown
from serve.contract.errors import OptionError, RequestError, shown
from serve.gateway import errors
from serve.gateway.client_secrets import ClientSecret
from serve.gateway.context import Services
from serve.gateway.edge.uploads import whole_body
from serve.gateway.errors import ApiError, field_error
from serve.gateway.limits import Permit, check_json
from serve.gateway.live import events
from serve.gateway.live.events import EventError
from serve.gateway.live.settings import Settings, Whole, as_session, unknown_keys

_MAX_BYTES = 100_000
_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class _Expiry:
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Whole, Field(ge=10, le=7200)] = _SECONDS


@dataclasses.dataclass(frozen=True)
class _Wanted:
    expires_after: _Expiry | None = None
    session: dict[str, Any] | None = None


class SecretEndpoint:
    """The address, as an endpoint.

    Args:
        door: identifies callers, and signs.
    """

    def __init__(self, door: Services) -> None:
        self._door = door

    async def answer(self, request: Request) -> Response:
        """Make a client secret in the name of the caller's API key.

        Raises:
            ApiError: there is no good API key, or the body is wrong.
        """
        caller = self._door.keys.identify(request.headers.get("authorization"))
        with self._door.admission.admit(caller) as ticket:
            table, unknown = split_unknown(_Wanted, await self._body(request, ticket))
        wanted = _read(table)
        changes = wanted.session or {}
        event = events.ClientEvent("session.update", None, {"session": changes})
        try:
            settings, warnings = events.read_update(
                event, Settings(), self._door.models.named, begun=False
            )
        except EventError as error:
            raise field_error(error.param or "session", str(error), error.code) from error
        if unknown:
            warnings.append(unknown_keys(unknown))
        seconds = wanted.expires_after.seconds if wanted.expires_after else _SECONDS
        secret = ClientSecret(
            round(time.time()) + seconds,
            caller.key.public_id if caller.key else "",
            split_unknown(Settings, changes)[0],
        )
        described = {"id": events.new_id("sess"), "object": events.OBJECT, **as_session(settings)}
        told = {
            "value": self._door.client_secrets.sign(secret),
            "expires_at": secret.expires_at,
            "session": described,
        }
        return JSONResponse(events.with_warnings(told, warnings))

    async def _body(self, request: Request, ticket: Permit) -> Mapping[str, Any]:
        limit_s = self._door.config.server.upload_timeout_s
        text = await whole_body(request, ticket, limit_s, _require_small)
        check_json(text, "the body")
        try:
            found = parse_json(text or b"{}")
        except ValueError as error:
            raise ApiError(RequestError(f"the body is not JSON: {error}")) from None
        if not isinstance(found, Mapping):
            raise errors.invalid(f"the body is {shown(found)}; expected a JSON object")
        return found


def _read(table: Mapping[str, Any]) -> _Wanted:
    try:
        return from_table(_Wanted, table, "client_secrets", error=OptionError)
    except OptionError as error:
        message = str(error).removeprefix("client_secrets: ")
        raise field_error(message.partition(" ")[0], message) from error


def _require_small(size: int) -> None:
    if size > _MAX_BYTES:
        raise errors.too_large(f"the body has {size} bytes; expected at most {_MAX_BYTES}")
