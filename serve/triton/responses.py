"""Turn a transcriber's events into Triton's responses.

Each request has a `Responder`, which outlives the model's `execute`. One thread, that of the
`ResponseQueue`, sends the responses of all responders. Triton does not pass on cancellations; see
`serve.triton.cancellation`.
"""

import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any

from serve.contract.errors import EarshotError, shown
from serve.contract.messages import RequestFailed, RequestFinished, TranscriberEvent
from serve.wire import tensors

logger = logging.getLogger("earshot")

_TRITON_NAMES = {"INVALID_ARGUMENT": "INVALID_ARG"}  # statuses with other names than gRPC's
_FLUSH_S = 10.0  # longest wait of `close` for queued responses


class Responder:
    """The sender of one request's responses; only the last response is final.

    Args:
        sender: Triton's response sender of the request.
        backend_utils: the module `triton_python_backend_utils`, which exists only in Triton.
        stream: whether to send each segment separately.
        phases: whether the answer has PHASES.
    """

    def __init__(
        self, sender: Any, backend_utils: Any, stream: bool = False, phases: bool = False
    ) -> None:
        # None after the last response, since Triton keeps a request as long as its sender lives.
        self._sender = sender
        self._utils = backend_utils
        self._stream = stream
        self._phases = phases

    @property
    def done(self) -> bool:
        """Return whether the last response has been sent."""
        return self._sender is None

    def send_event(self, event: TranscriberEvent) -> None:
        """Send an event of the transcriber as a response, and wait until Triton accepts it."""
        if self.done:
            return
        try:
            if isinstance(event, RequestFinished):
                self.send(tensors.transcript_outputs(event.transcript, phases=self._phases))
            elif isinstance(event, RequestFailed):
                self.fail(event.error)
            elif self._stream:
                self.send(tensors.segment_outputs(event.segment), final=False)
        except Exception as error:
            logger.exception("a response could not be sent")
            self.fail(error)

    def send(self, outputs: Mapping[str, tensors.Tensor], final: bool = True) -> None:
        """Send a response with these outputs."""
        output_tensors = [self._utils.Tensor(*item) for item in outputs.items()]
        self._send(self._utils.InferenceResponse(output_tensors), final)

    def fail(self, error: Exception) -> None:
        """End with an error; an unexpected exception is an internal error of the server."""
        if not isinstance(error, EarshotError):
            error = EarshotError(f"internal error: {shown(error)}")
        name = error.status.grpc
        code = getattr(self._utils.TritonError, _TRITON_NAMES.get(name, name))
        triton_error = self._utils.TritonError(tensors.error_to_text(error), code)
        self._send(self._utils.InferenceResponse(error=triton_error), final=True)

    def _send(self, response: Any, final: bool) -> None:
        flags = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        sender = self._sender
        if final:
            self._sender = None
        if sender is not None:
            sender.send(response, flags=flags)


class ResponseQueue:
    """A thread that sends responses.

    Triton needs a millisecond or more to accept a response, and the device thread must not wait for
    that. A single thread keeps a request's responses in order.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[Responder, TranscriberEvent] | None]
        self._events = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="earshot-responses", daemon=True)
        self._thread.start()

    def put(self, responder: Responder, event: TranscriberEvent) -> None:
        """Queue an event and return at once."""
        self._events.put((responder, event))

    def close(self) -> None:
        """Send the queued events and stop."""
        self._events.put(None)
        self._thread.join(timeout=_FLUSH_S)

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            responder, event = item
            try:
                responder.send_event(event)
            except Exception:  # the error could not be sent either; other requests still wait
                logger.exception("a request got no answer")
