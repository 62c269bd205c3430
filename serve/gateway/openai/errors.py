"""Refusals as OpenAI's API tells them: {"error": {"message", "type", "param", "code"}}.

https://developers.openai.com/api/docs/guides/error-codes
"""

import re
from collections.abc import Collection
from typing import Any

from starlette.responses import JSONResponse

from serve.contract.errors import (
    AccessError,
    AudioError,
    AudioLimitError,
    CancelledError,
    DeadlineError,
    EarshotError,
    EngineError,
    OptionError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve.gateway.refusals import Refusal

_BY_REASON = {
    "draining": (503, "draining"),
    "slow_upload": (408, "upload_timeout"),
    "too_large": (413, "request_too_large"),
    "media_type": (415, "unsupported_media_type"),
    "method": (405, "method_not_allowed"),
    "not_found": (404, "not_found"),
    "key_limit": (429, "rate_limit_exceeded"),
}
"""HTTP status and code of refusals that the gateway has a reason for."""
_BY_CLASS: dict[type[EarshotError], tuple[int, str | None]] = {
    AccessError: (401, "invalid_api_key"),
    AudioLimitError: (422, "audio_limit_exceeded"),
    AudioError: (400, "invalid_audio"),
    OptionError: (400, "invalid_value"),
    RequestError: (400, None),
    OverloadedError: (429, "overloaded"),
    CancelledError: (499, "client_gone"),
    DeadlineError: (503, "timeout"),
    UnavailableError: (503, "server_unavailable"),
    EngineError: (503, "server_unavailable"),
    EarshotError: (500, "server_error"),
}
"""Those of the others, by the class of the error; the first that fits."""
_RETRY = (408, 429, 503)
_SUBJECT = re.compile(r"(?:the request: )?(\w+)")  # what a message begins with


class FieldRefusal(Refusal):
    """A field of a form is wrong.

    Args:
        param: its name.
        message: what was found, what was expected.
        code: says to programs what is wrong, where OpenAI has a code for it.
        status: name of the gRPC status, where it is not that of a wrong option.
    """

    def __init__(
        self, param: str, message: str, code: str | None = None, status: str | None = None
    ) -> None:
        super().__init__(OptionError(message), status)
        self.param = param
        self.code = code


def error_response(
    refusal: Refusal, fields: Collection[str], headers: dict[str, str] | None = None
) -> JSONResponse:
    """A refusal as a response.

    Args:
        refusal: why there is no answer.
        fields: names that an error's message may begin with; it then is about that field.
        headers: more of them.
    """
    status, body = error_body(refusal, fields)
    more = dict(headers or {})
    if status in _RETRY:
        more["Retry-After"] = str(refusal.retry_after_s)
    if status == 401:
        more["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, status, more)


def error_body(refusal: Refusal, fields: Collection[str]) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of a refusal; see `error_response`."""
    status, code = _status_and_code(refusal)
    error = {
        "message": str(refusal),
        "type": _type(status),
        "param": _param(refusal, fields),
        "code": code,
    }
    return status, {"error": error}


def _status_and_code(refusal: Refusal) -> tuple[int, str | None]:
    by_class = (found for kind, found in _BY_CLASS.items() if isinstance(refusal.error, kind))
    status, code = _BY_REASON.get(refusal.reason) or next(by_class)
    if isinstance(refusal, FieldRefusal) and refusal.code is not None:
        code = refusal.code
    return status, code


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _param(refusal: Refusal, fields: Collection[str]) -> str | None:
    if isinstance(refusal, FieldRefusal):
        return refusal.param
    if isinstance(refusal.error, AudioError):
        return "file"
    named = _SUBJECT.match(str(refusal))
    if isinstance(refusal.error, OptionError) and named and named[1].lower() in fields:
        return named[1].lower()
    return None
