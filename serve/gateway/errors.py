"""Refusals, which clients get in place of an answer: which status, which words.

A refusal's text is what `serve.wire.tensors` makes of an error, so that our client raises the same
error again. Triton's own words never leave the machine: they name shared-memory regions, paths and
addresses.

Below /v1, and where a page or a host may not ask, refusals are told as OpenAI's API tells them,
{"error": {"message", "type", "param", "code"}}:
https://developers.openai.com/api/docs/guides/error-codes
"""

import dataclasses
import logging
import math
import re
from collections.abc import Collection
from typing import Any

from starlette.responses import JSONResponse

from serve.contract.errors import (
    AudioError,
    CancelledError,
    DeadlineError,
    EarshotError,
    OptionError,
    OverloadedError,
    RequestError,
    Status,
    UnavailableError,
)
from serve.wire import tensors

logger = logging.getLogger("earshot.gateway")

REASONS = {
    "draining": Status("UNAVAILABLE", 503, "draining", close=1012),
    "server_stopping": Status("UNAVAILABLE", 503, "draining", close=1012),
    "slow_upload": Status("UNAVAILABLE", 408, "upload_timeout"),
    "connections": Status("UNAVAILABLE", 503, "overloaded"),
    "key_limit": Status("UNAVAILABLE", 429, "rate_limit_exceeded"),
    "insufficient_quota": Status("RESOURCE_EXHAUSTED", 429, "insufficient_quota"),
    "latency_target": Status("RESOURCE_EXHAUSTED", 429, "overloaded"),
    "too_large": Status("RESOURCE_EXHAUSTED", 413, "request_too_large"),
    "media_type": Status("INVALID_ARGUMENT", 415, "unsupported_media_type"),
    "not_found": Status("NOT_FOUND", 404, "not_found"),
    "method": Status("NOT_FOUND", 405, "method_not_allowed"),
    "origin": Status("PERMISSION_DENIED", 403, "origin_not_allowed"),
    "reader": Status("PERMISSION_DENIED", 403, "reader_not_allowed"),
    "host": Status("PERMISSION_DENIED", 421, "host_not_allowed"),
    "job_open": Status("INVALID_ARGUMENT", 409, "job_open"),
    "job_failed": Status("INVALID_ARGUMENT", 409, "job_failed"),
    "idempotency": Status("INVALID_ARGUMENT", 422, "idempotency_key_reused"),
    "session_idle": Status("INVALID_ARGUMENT", 400, "session_idle", close=1001),
    "session_expired": Status("INVALID_ARGUMENT", 400, "session_expired", close=1001),
}
"""Statuses of refusals with a reason of the gateway's own; others have their error's class's."""

_RETRY_AFTER_S = 1
_SERVER_FAILED = "the server failed while it worked on this request; its log has the details"
_SERVER_AWAY = "the engine's process is not there, it is being started again; try again"
_SUBJECT = re.compile(r"(?:the request: )?(\w+)")  # what a message begins with

# Triton's words, with status INTERNAL, for a model's process that stands still or is gone.
_STALLED = ("is not healthy", "Failed to obtain the health mutex")


class ApiError(Exception):
    """The reason why a request gets no answer.

    Args:
        error: what to tell the client.
        reason: label of the metric that counts refusals; empty: gRPC's status in small letters.
        grpc: name of the gRPC status, where it is not that of the reason or of the error's class.
    """

    def __init__(self, error: EarshotError, reason: str = "", grpc: str = "") -> None:
        super().__init__(str(error))
        self.error = error
        self.text = tensors.error_to_text(error)
        self.reason = reason or (grpc or error.status.grpc).lower()
        self.status = REASONS.get(self.reason, error.status)
        if grpc:
            self.status = dataclasses.replace(self.status, grpc=grpc)
        self.param: str | None = None
        """The field that is wrong, where it is one."""
        self.retry_after_s = _RETRY_AFTER_S
        """The time that a client is asked to wait, where waiting helps."""

    @property
    def headers(self) -> dict[str, str]:
        """Those of an HTTP answer: how long to wait, or what is needed to come in."""
        if self.status.again:
            return {"Retry-After": str(self.retry_after_s)}
        return {"WWW-Authenticate": "Bearer"} if self.status.http == 401 else {}


def field_error(param: str, message: str, code: str | None = None, reason: str = "") -> ApiError:
    """Make the error of a field that is wrong.

    Args:
        param: the field's name.
        message: what was found and what was expected.
        code: OpenAI's code for this mistake, if there is one.
        reason: see `ApiError`.
    """
    error = ApiError(OptionError(message), reason)
    error.param = param
    if code is not None:
        error.status = dataclasses.replace(error.status, code=code)
    return error


def as_openai(
    refusal: ApiError, fields: Collection[str] = (), headers: dict[str, str] | None = None
) -> JSONResponse:
    """Tell a refusal as a response of OpenAI's API.

    Args:
        refusal: why there is no answer.
        fields: names that an error's message may begin with; it then is about that field.
        headers: more of them.
    """
    more = (headers or {}) | refusal.headers
    return JSONResponse(openai_error(refusal, fields), refusal.status.http, more)


def openai_error(refusal: ApiError, fields: Collection[str]) -> dict[str, Any]:
    """Write the body of a refusal; see `as_openai`."""
    status = refusal.status
    error = {
        "message": str(refusal),
        "type": status.kind,
        "param": _param(refusal, fields),
        "code": status.code,
    }
    return {"error": error}


def _param(refusal: ApiError, fields: Collection[str]) -> str | None:
    if refusal.param is not None:
        return refusal.param
    if isinstance(refusal.error, AudioError):
        return "file"
    named = _SUBJECT.match(str(refusal))
    if isinstance(refusal.error, OptionError) and named and named[1].lower() in fields:
        return named[1].lower()
    return None


def as_kserve(refusal: ApiError) -> JSONResponse:
    """Tell a refusal as a response of KServe's HTTP."""
    return JSONResponse({"error": refusal.text}, refusal.status.kserve, refusal.headers)


def invalid(message: str) -> ApiError:
    """Say that the request is wrong."""
    return ApiError(RequestError(message))


def not_found(message: str) -> ApiError:
    """Say that it names a model, a version or an address that does not exist."""
    return ApiError(RequestError(message), "not_found")


def too_large(message: str) -> ApiError:
    """Say that it is larger than one request may be."""
    return ApiError(RequestError(message), "too_large")


def media_type(message: str) -> ApiError:
    """Say that its body is of another kind than expected."""
    return ApiError(RequestError(message), "media_type")


def overloaded(message: str, reason: str) -> ApiError:
    """Say that there is no room, or no time, for it now."""
    return ApiError(OverloadedError(message), reason)


def stopping() -> ApiError:
    """Say that the server takes nothing more."""
    return overloaded("the server is stopping; try again later", "draining")


def key_limit(
    limit: str, name: str, wait_s: float | None = None, reason: str = "key_limit"
) -> ApiError:
    """Say that a key has had all that it may have for now, and until when where that is known."""
    when = "later" if wait_s is None else f"in {math.ceil(wait_s)} s"
    refusal = overloaded(f"the key {name} has used up its {limit}; try again {when}", reason)
    if wait_s is not None:
        refusal.retry_after_s = math.ceil(wait_s)
    return refusal


def beyond_target(message: str, wait_s: int) -> ApiError:
    """Say that it would not be answered in time, and when it would."""
    refusal = overloaded(message, "latency_target")
    refusal.retry_after_s = wait_s
    return refusal


def no_answer_in_time(limit_s: float) -> ApiError:
    """Say that Triton has had it for too long."""
    return ApiError(DeadlineError(f"no answer within {limit_s:g} s; try again"), "deadline")


def server_away() -> ApiError:
    """Say that Triton cannot be reached, or its model cannot."""
    return ApiError(UnavailableError(_SERVER_AWAY), "server_away")


def from_upstream(status: str, text: str) -> ApiError:
    """Choose what a client is told of an error that Triton answered with.

    Args:
        status: name of the call's gRPC status; empty for a message of its stream.
        text: Triton's, or the model's in the form of `serve.wire.tensors`.
    """
    error = tensors.error_from_text(text, "")
    named = type(error) is not EarshotError
    if named and error.status.grpc != "INTERNAL":
        return ApiError(error, grpc=status)
    logger.error("a server answered %s: %s", status or "an error", text)
    if named:  # its class may be known, its words may hold anything
        return ApiError(type(error)(_SERVER_FAILED), grpc=status)
    if status == "UNAVAILABLE" or any(words in text for words in _STALLED):
        return server_away()
    if status in ("", "INTERNAL") and not text.startswith(f"{EarshotError.__name__}: "):
        return ApiError(UnavailableError(_SERVER_FAILED))  # Triton did, not the model
    return ApiError(EarshotError(_SERVER_FAILED))


def no_room_for_upload() -> ApiError:
    """Say that a file cannot be kept, or handed on; the log says why."""
    return ApiError(UnavailableError("the server has no room for the file just now; try again"))


def client_gone() -> ApiError:
    """Say that nobody will read the answer."""
    return ApiError(CancelledError("the client has gone"), "client_gone")


def failed() -> ApiError:
    """Say that the fault is ours; it is in the log."""
    return ApiError(EarshotError(_SERVER_FAILED))
