"""From a transcriber's events to Triton's responses, and from a client's cancel back.

Each request has a `Responder`, which outlives the `execute` of its model. One thread sends what
all responders have to say (`ResponseQueue`), another asks whether their clients still wait
(`CancelWatch`).
"""

import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any

from serve.errors import EarshotError, shown
from serve.messages import Failed, Finished, RequestHandle, TranscriberEvent
from serve.triton import wire

logger = logging.getLogger("earshot")

_CANCEL_POLL_S = 0.05
_FLUSH_S = 10.0  # most that the end waits for responses on their way
_JOIN_S = 10.0


class Sender:
    """Triton's response sender of one request, and what makes responses for it.

    Args:
        sender: from the request.
        backend_utils: the module `triton_python_backend_utils`, which exists in Triton alone.
    """

    def __init__(self, sender: Any, backend_utils: Any) -> None:
        self._sender = sender
        self._utils = backend_utils

    def response(self, outputs: Mapping[str, wire.Tensor]) -> Any:
        """A response with these outputs."""
        tensors = [self._utils.Tensor(*item) for item in outputs.items()]
        return self._utils.InferenceResponse(tensors)

    def error_response(self, error: EarshotError) -> Any:
        """A response with an error's text and status: the one place where errors become that."""
        code = getattr(self._utils.TritonError, error.status)
        triton_error = self._utils.TritonError(wire.error_to_text(error), code)
        return self._utils.InferenceResponse(error=triton_error)

    def send(self, response: Any, final: bool) -> None:
        """Send a response; waits until Triton has taken it."""
        flags = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled or gone; not to be asked after the final response."""
        return bool(self._sender.is_cancelled())


class Responder:
    """Answers one request; its last response, and only that, is final.

    The lock keeps `cancelled` and the last response apart: asking Triton 24.10 about a request
    that has ended crashes the server.

    Args:
        sender: of the request.
        stream: whether segments are sent one by one.
    """

    def __init__(self, sender: Sender, stream: bool) -> None:
        # None after the last response, for Triton keeps a request as long as its sender lives.
        self._sender: Sender | None = sender
        self._stream = stream
        self._lost = False  # a response could not be sent, so nobody should work for it
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the last response has been sent."""
        return self._sender is None

    def send_event(self, event: TranscriberEvent) -> None:
        """Pass on what the transcriber says; waits until Triton has taken it."""
        sender = self._sender
        if sender is None:
            return
        try:
            if isinstance(event, Finished):
                outputs = wire.transcript_outputs(event.transcript)
                self._send(sender.response(outputs), final=True)
            elif isinstance(event, Failed):
                self.fail(event.error)
            elif self._stream:
                outputs = wire.segment_outputs(event.segment)
                self._send(sender.response(outputs), final=False)
        except Exception as error:
            logger.exception("a response could not be sent")
            self._lost = True
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error; one that nobody expected counts as the server's own."""
        if not isinstance(error, EarshotError):
            error = EarshotError(f"internal error: {shown(error)}")
        sender = self._sender
        if sender is not None:
            self._send(sender.error_response(error), final=True)

    def cancelled(self) -> bool:
        """Whether the client no longer waits, or cannot be answered."""
        with self._lock:
            return self._lost or (self._sender is not None and self._sender.is_cancelled())

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            sender = self._sender
            if final:
                self._sender = None
            if sender is not None:
                sender.send(response, final)


class ResponseQueue:
    """Sends responses on a thread of its own.

    Triton takes a millisecond or more to take one, which the device thread must not wait for. One
    thread, so that a request's responses keep their order.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[Responder, TranscriberEvent] | None]
        self._events = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="earshot-responses", daemon=True)
        self._thread.start()

    def put(self, responder: Responder, event: TranscriberEvent) -> None:
        """Have an event sent; returns at once."""
        self._events.put((responder, event))

    def close(self) -> None:
        """Send what is left, and stop."""
        self._events.put(None)
        self._thread.join(timeout=_FLUSH_S)

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            responder, event = item
            try:
                responder.send_event(event)
            except Exception:  # not even the error could be sent: others still wait
                logger.exception("a request got no answer")


class CancelWatch:
    """Cancels the requests whose gRPC clients have cancelled or gone.

    Triton 24.10 does not tell when an HTTP client goes; its request runs to its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[tuple[Responder, RequestHandle]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="earshot-cancels", daemon=True)
        self._thread.start()

    def add(self, responder: Responder, handle: RequestHandle) -> None:
        """Watch a request until it has ended."""
        with self._lock:
            self._watched.append((responder, handle))

    def close(self) -> None:
        """Stop."""
        self._stopped.set()
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        while not self._stopped.wait(_CANCEL_POLL_S):
            self._poll()

    def _poll(self) -> None:
        with self._lock:
            watched = list(self._watched)
        for responder, handle in watched:
            if responder.cancelled():
                handle.cancel()
        with self._lock:
            self._watched = [entry for entry in self._watched if not entry[0].done]
