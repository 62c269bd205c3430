"""Errors that clients get in place of an answer, and the table of statuses.

An error is written in three forms: OpenAI's JSON below /v1 and before routing, KServe's JSON below
/v2, and a status of gRPC. Every form is made from a `ErrorStatus`: the class of the error in
`serve.contract.errors` has one, and `REASONS` has one for each reason of the gateway. A message
never repeats Triton's own words, for they name shared-memory regions, paths and addresses.

OpenAI's form is {"error": {"message", "type", "param", "code"}}:
https://developers.openai.com/api/docs/guides/error-codes
"""

import asyncio
import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.contract.config import OPTIONS
from serve.contract.errors import (
    AudioError,
    CancelledError,
    DeadlineError,
    EarshotError,
    ErrorStatus,
    OptionError,
    OverloadedError,
    RequestError,
    UnavailableError,
    shown,
)
from serve.wire import tensors

logger = logging.getLogger("earshot.gateway")

REASONS = {
    "draining": ErrorStatus("UNAVAILABLE", 503, "draining", close=1012),
    "server_stopping": ErrorStatus("UNAVAILABLE", 503, "draining", close=1012),
    "slow_upload": ErrorStatus("UNAVAILABLE", 408, "upload_timeout"),
    "connections": ErrorStatus("UNAVAILABLE", 503, "overloaded"),
    "key_limit": ErrorStatus("UNAVAILABLE", 429, "rate_limit_exceeded"),
    "insufficient_quota": ErrorStatus("RESOURCE_EXHAUSTED", 429, "insufficient_quota"),
    "latency_target": ErrorStatus("RESOURCE_EXHAUSTED", 429, "overloaded"),
    "too_large": ErrorStatus("RESOURCE_EXHAUSTED", 413, "request_too_large"),
    "media_type": ErrorStatus("INVALID_ARGUMENT", 415, "unsupported_media_type"),
    "not_found": ErrorStatus("NOT_FOUND", 404, "not_found"),
    "method": ErrorStatus("NOT_FOUND", 405, "method_not_allowed"),
    "origin": ErrorStatus("PERMISSION_DENIED", 403, "origin_not_allowed"),
    "reader": ErrorStatus("PERMISSION_DENIED", 403, "reader_not_allowed"),
    "host": ErrorStatus("PERMISSION_DENIED", 421, "host_not_allowed"),
    "job_open": ErrorStatus("INVALID_ARGUMENT", 409, "job_open"),
    "job_failed": ErrorStatus("INVALID_ARGUMENT", 409, "job_failed"),
    "idempotency": ErrorStatus("INVALID_ARGUMENT", 422, "idempotency_key_reused"),
    "session_idle": ErrorStatus("INVALID_ARGUMENT", 400, "session_idle", close=1001),
    "session_expired": ErrorStatus("INVALID_ARGUMENT", 400, "session_expired", close=1001),
}
"""Statuses by the gateway's own reasons; an error without such a reason has its class's status."""

_RETRY_AFTER_S = 1
_SERVER_FAILED = "the server failed while it worked on this request; its log has the details"
_OFFERED = "/openapi.json lists all; jobs are at /v1/audio/jobs if the config has jobs.folder"
_SUBJECT = re.compile(r"(?:the request: )?(\w+)")  # the first word of a message
# Triton's words, with status INTERNAL, for a model's process that has stalled or died.
_STALLED_TEXTS = ("is not healthy", "Failed to obtain the health mutex")


class ApiError(Exception):
    """The error that a client gets in place of an answer.

    Args:
        error: the error to write; its class gives the status unless `reason` does.
        reason: a key of `REASONS` or another label for metrics and log; empty: the gRPC status.
    """

    def __init__(self, error: EarshotError, reason: str = "") -> None:
        super().__init__(str(error))
        self.error = error
        self.text = tensors.error_to_text(error)
        self.reason = reason or error.status.grpc.lower()
        self.status = REASONS.get(self.reason, error.status)
        self.param: str | None = None
        """The field that is wrong, if one is."""
        self.retry_after_s = _RETRY_AFTER_S
        """The wait before a retry, if a retry helps."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an HTTP answer: the wait before a retry, or the missing authorization."""
        if self.status.retryable:
            return {"Retry-After": str(self.retry_after_s)}
        return {"WWW-Authenticate": "Bearer"} if self.status.http == 401 else {}


# ------------------------------------------------------------ from an exception to an answer


def status_of(error: BaseException) -> tuple[ErrorStatus, str]:
    """Return the status and the reason with which an exception ends its request."""
    if isinstance(error, ApiError):
        return error.status, error.reason
    if isinstance(error, asyncio.CancelledError):
        return CancelledError.status, "client_gone"
    return EarshotError.status, "internal"


def as_openai(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Write an error as a response of OpenAI's API, with further headers."""
    return JSONResponse(openai_error(error), error.status.http, (headers or {}) | error.headers)


def as_kserve(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Write an error as a response of KServe's HTTP, with further headers."""
    return JSONResponse({"error": error.text}, error.status.kserve, (headers or {}) | error.headers)


def exception_handlers(render: Callable[[ApiError, dict[str, str]], Response]) -> Any:
    """Return Starlette's exception handlers of one application.

    Args:
        render: writes an error in the form of the application's API, with further headers.
    """

    async def answer(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return render(error if isinstance(error, ApiError) else failed(), {})
        text = f"no {request.method} at this address; {_OFFERED}"
        reason = "method" if error.status_code == 405 else "not_found"
        response = render(ApiError(RequestError(text), reason), dict(error.headers or {}))
        response.status_code = error.status_code
        return response

    return dict.fromkeys((ApiError, HTTPException, Exception), answer)


def openai_error(error: ApiError) -> dict[str, Any]:
    """Write the body of an error of OpenAI's API.

    `param` is read from the message: an option's error begins with the name of the option, or of
    its tensor.
    """
    param, subject = error.param, _SUBJECT.match(str(error))
    if param is None and isinstance(error.error, AudioError):
        param = "file"
    elif param is None and isinstance(error.error, OptionError) and subject:
        param = subject[1].lower() if subject[1].lower() in OPTIONS else None
    kind, code = error.status.kind, error.status.code
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


# ------------------------------------------------------------ errors of the gateway


def field_error(param: str, message: str, code: str | None = None, reason: str = "") -> ApiError:
    """Return the error of a wrong field.

    Args:
        param: the field's name.
        message: the value found and the value expected.
        code: OpenAI's code for this mistake, if there is one.
        reason: see `ApiError`.
    """
    error = ApiError(OptionError(message), reason)
    error.param = param
    if code is not None:
        error.status = dataclasses.replace(error.status, code=code)
    return error


def require_known(names: Iterable[str], known: Sequence[str]) -> None:
    """Reject unknown parameters of a URL.

    Raises:
        ApiError: 400, one is not `known`.
    """
    for name in names:
        if name not in known:
            expected = f"unknown parameter {shown(name)}; expected one of {', '.join(known)}"
            raise field_error(name[:60], expected)


def invalid(message: str) -> ApiError:
    """Return the error of a wrong request."""
    return ApiError(RequestError(message))


def not_found(message: str) -> ApiError:
    """Return the error of a model, a version or an address that does not exist."""
    return ApiError(RequestError(message), "not_found")


def too_large(message: str) -> ApiError:
    """Return the error of a request that exceeds the limit of a single one."""
    return ApiError(RequestError(message), "too_large")


def media_type(message: str) -> ApiError:
    """Return the error of a body of an unexpected type."""
    return ApiError(RequestError(message), "media_type")


def overloaded(message: str, reason: str, retry_after_s: int = _RETRY_AFTER_S) -> ApiError:
    """Return the error of a request for which there is no room, or no time, now."""
    error = ApiError(OverloadedError(message), reason)
    error.retry_after_s = retry_after_s
    return error


def stopping() -> ApiError:
    """Return the error of a request that reaches a draining server."""
    return overloaded("the server is stopping; try again later", "draining")


def key_limit(limit: str, name: str, wait_s: float = 0.0, reason: str = "key_limit") -> ApiError:
    """Return the error of a key that has used up a limit.

    Args:
        limit: the limit's name.
        name: the key's name.
        wait_s: seconds until the key may send again; 0: they are unknown.
        reason: see `ApiError`.
    """
    when = f"in {math.ceil(wait_s)} s" if wait_s else "later"
    message = f"the key {name} has used up its {limit}; try again {when}"
    return overloaded(message, reason, math.ceil(wait_s) or _RETRY_AFTER_S)


def no_answer_in_time(limit_s: float) -> ApiError:
    """Return the error of a request that Triton has had for too long."""
    return ApiError(DeadlineError(f"no answer within {limit_s:g} s; try again"), "deadline")


def server_away() -> ApiError:
    """Return the error of a request that no engine can take."""
    return ApiError(UnavailableError("the engine process is restarting; try again"), "server_away")


def from_upstream(status: str, text: str) -> ApiError:
    """Return the error to tell a client when Triton answered with one.

    Args:
        status: the gRPC status of the call; empty for a message of the stream.
        text: Triton's text, or the model's in the form of `serve.wire.tensors`.
    """
    error = tensors.error_from_text(text, "")
    has_class = type(error) is not EarshotError
    if has_class and error.status.grpc != "INTERNAL":
        return ApiError(error)
    logger.error("a server answered %s: %s", status or "an error", text)
    if has_class:  # its class may be known, its words may hold anything
        return ApiError(type(error)(_SERVER_FAILED))
    if status == "UNAVAILABLE" or any(words in text for words in _STALLED_TEXTS):
        return server_away()
    if status in ("", "INTERNAL") and not text.startswith(f"{EarshotError.__name__}: "):
        return ApiError(UnavailableError(_SERVER_FAILED))  # Triton failed, not the model
    return ApiError(EarshotError(_SERVER_FAILED))


def no_room_for_upload() -> ApiError:
    """Return the error of a file that cannot be spooled or handed to an engine."""
    return ApiError(UnavailableError("the server has no room for the file just now; try again"))


def client_gone() -> ApiError:
    """Return the error of a client that left; no client reads it."""
    return ApiError(CancelledError("the client has gone"), "client_gone")


def failed() -> ApiError:
    """Return the error of a fault of the gateway, which is in the log."""
    return ApiError(EarshotError(_SERVER_FAILED))
