"""From a transcriber's events to Triton's responses.

Each request has a `Responder`, which outlives the `execute` of the model; one thread sends what all
responders have to say (`ResponseQueue`). Cancels do not come through Triton: see
`serve.triton.keys`.
"""

import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any

from serve.contract.errors import EarshotError, shown
from serve.contract.messages import Failed, Finished, RequestHandle, TranscriberEvent
from serve.wire import tensors

logger = logging.getLogger("earshot")

_TRITON_NAMES = {"INVALID_ARGUMENT": "INVALID_ARG"}  # of statuses that are gRPC's elsewhere
_FLUSH_S = 10.0  # most that the end waits for responses on their way


class Sender:
    """Triton's response sender of one request, and what makes responses for it.

    Args:
        sender: from the request.
        backend_utils: the module `triton_python_backend_utils`, which exists in Triton alone.
    """

    def __init__(self, sender: Any, backend_utils: Any) -> None:
        self._sender = sender
        self._utils = backend_utils

    def response(self, outputs: Mapping[str, tensors.Tensor]) -> Any:
        """Make a response with these outputs."""
        made = [self._utils.Tensor(*item) for item in outputs.items()]
        return self._utils.InferenceResponse(made)

    def error_response(self, error: EarshotError) -> Any:
        """Make a response with an error's text and status: the one place that makes them."""
        name = error.status.grpc
        code = getattr(self._utils.TritonError, _TRITON_NAMES.get(name, name))
        triton_error = self._utils.TritonError(tensors.error_to_text(error), code)
        return self._utils.InferenceResponse(error=triton_error)

    def send(self, response: Any, final: bool) -> None:
        """Send a response; waits until Triton has taken it."""
        flags = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)


class Responder:
    """Answers one request; its last response, and only that, is final.

    Args:
        sender: of the request.
        stream: whether segments are sent one by one.
        phases: whether the answer tells those of its time.
    """

    def __init__(self, sender: Sender, stream: bool, phases: bool = False) -> None:
        # None after the last response, for Triton keeps a request as long as its sender lives.
        self._sender: Sender | None = sender
        self._stream = stream
        self._phases = phases
        self._lock = threading.Lock()
        self._handle: RequestHandle | None = None
        self._lost = False  # a response could not be sent, so nobody should work for it

    @property
    def done(self) -> bool:
        """Tell whether the last response has been sent."""
        return self._sender is None

    def set_handle(self, handle: RequestHandle) -> None:
        """Take what cancels the request, should its client turn out not to be answerable."""
        with self._lock:
            self._handle = handle
            lost = self._lost
        if lost:
            handle.cancel()

    def send_event(self, event: TranscriberEvent) -> None:
        """Pass on what the transcriber says; waits until Triton has taken it."""
        sender = self._sender
        if sender is None:
            return
        try:
            if isinstance(event, Finished):
                outputs = tensors.transcript_outputs(event.transcript, phases=self._phases)
                self._send(sender.response(outputs), final=True)
            elif isinstance(event, Failed):
                self.fail(event.error)
            elif self._stream:
                outputs = tensors.segment_outputs(event.segment)
                self._send(sender.response(outputs), final=False)
        except Exception as error:
            logger.exception("a response could not be sent")
            self._give_up()
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error; one that nobody expected counts as the server's own."""
        if not isinstance(error, EarshotError):
            error = EarshotError(f"internal error: {shown(error)}")
        sender = self._sender
        if sender is not None:
            self._send(sender.error_response(error), final=True)

    def _give_up(self) -> None:
        with self._lock:
            self._lost = True
            handle = self._handle
        if handle is not None:
            handle.cancel()

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
        """Have an event sent; return at once."""
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
