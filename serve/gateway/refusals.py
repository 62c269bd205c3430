"""What a client is answered in place of an answer: which status, which words.

A refusal's text is what `serve.wire.tensors` makes of an error, so that our client raises the same
error again. Triton's own words never leave the machine: they name shared-memory regions, paths and
addresses.
"""

import logging
import math

from serve.contract.errors import (
    CancelledError,
    DeadlineError,
    EarshotError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve.wire import tensors

logger = logging.getLogger("earshot.gateway")

_RETRY_AFTER_S = 1

HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 413,
    "UNIMPLEMENTED": 404,
    "CANCELLED": 499,
    "DEADLINE_EXCEEDED": 504,
    "UNAVAILABLE": 503,
    "INTERNAL": 500,
}
"""The HTTP status that says what a gRPC status says."""

_TRITON_NAMES = {"INVALID_ARG": "INVALID_ARGUMENT"}
_SERVER_FAILED = "the server failed while it worked on this request; its log has the details"
_SERVER_AWAY = "the engine's process is not there, it is being started again; try again"

# Triton's words, with status INTERNAL, for a model's process that stands still or is gone.
_STALLED = ("is not healthy", "Failed to obtain the health mutex")


class Refusal(Exception):
    """Why a request gets no answer.

    Args:
        error: what to tell the client.
        status: name of the gRPC status; None takes that of the error's class.
        reason: label of the metric that counts refusals.
    """

    def __init__(self, error: EarshotError, status: str | None = None, reason: str = "") -> None:
        super().__init__(str(error))
        self.error = error
        self.status = status or _TRITON_NAMES.get(error.status, error.status)
        self.text = tensors.error_to_text(error)
        self.reason = reason or self.status.lower()
        self.param: str | None = None
        """The field that is wrong, where it is one."""
        self.retry_after_s = _RETRY_AFTER_S
        """What a client is asked to wait, where waiting helps."""


def invalid(message: str) -> Refusal:
    """The request is wrong."""
    return Refusal(RequestError(message))


def not_found(message: str) -> Refusal:
    """It names a model, a version or an address that does not exist."""
    return Refusal(RequestError(message), "NOT_FOUND")


def too_large(message: str) -> Refusal:
    """It is larger than one request may be."""
    return Refusal(RequestError(message), "RESOURCE_EXHAUSTED", "too_large")


def media_type(message: str) -> Refusal:
    """Its body is of another kind than expected."""
    return Refusal(RequestError(message), reason="media_type")


def overloaded(message: str, reason: str) -> Refusal:
    """There is no room, or no time, for it now."""
    return Refusal(OverloadedError(message), reason=reason)


def stopping() -> Refusal:
    """The server takes nothing more."""
    return overloaded("the server is stopping; try again later", "draining")


def key_limit(limit: str, name: str, wait_s: float = _RETRY_AFTER_S) -> Refusal:
    """A key has had all that it may have for now."""
    refusal = overloaded(f"the key {name} has used up its {limit}; try again later", "key_limit")
    refusal.retry_after_s = math.ceil(wait_s)
    return refusal


def no_answer_in_time(limit_s: float) -> Refusal:
    """Triton has had it for too long."""
    return Refusal(DeadlineError(f"no answer within {limit_s:g} s; try again"), reason="deadline")


def server_away() -> Refusal:
    """Triton cannot be reached, or its model cannot."""
    return Refusal(UnavailableError(_SERVER_AWAY), reason="server_away")


def from_upstream(status: str, text: str) -> Refusal:
    """What a client is told of an error that Triton answered with.

    Args:
        status: name of the call's gRPC status; empty for a message of its stream.
        text: Triton's, or the model's in the form of `serve.wire.tensors`.
    """
    error = tensors.error_from_text(text, "")
    named = type(error) is not EarshotError
    if named and error.status != "INTERNAL":
        return Refusal(error, status or None)
    logger.error("a server answered %s: %s", status or "an error", text)
    if named:  # its class may be known, its words may hold anything
        return Refusal(type(error)(_SERVER_FAILED), status or None)
    if status == "UNAVAILABLE" or any(words in text for words in _STALLED):
        return server_away()
    if status in ("", "INTERNAL") and not text.startswith(f"{EarshotError.__name__}: "):
        return Refusal(UnavailableError(_SERVER_FAILED))  # Triton did, not the model
    return Refusal(EarshotError(_SERVER_FAILED))


def no_room_for_upload() -> Refusal:
    """A file cannot be kept, or handed on; the log says why."""
    return Refusal(UnavailableError("the server has no room for the file just now; try again"))


def client_gone() -> Refusal:
    """Nobody will read the answer."""
    return Refusal(CancelledError("the client has gone"), reason="client_gone")


def failed() -> Refusal:
    """A fault of ours, which is in the log."""
    return Refusal(EarshotError(_SERVER_FAILED))
