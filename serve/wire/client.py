"""A gRPC client of the models `whisper` and `whisper_stream`."""

import contextlib
import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Literal, Self

import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from serve.contract.errors import CancelledError, DeadlineError, EarshotError, UnavailableError
from serve.contract.messages import Request, RequestFinished, Samples, SegmentReady, Transcript
from serve.wire import tensors

_READY_S = 2.0
_GRACE_S = 5.0  # time beyond the deadline that gRPC itself keeps
_REQUEST_S = 660.0  # a little more than the server's limit for a request
_CLOSED = (None, InferenceServerException("hung up", status="StatusCode.CANCELLED"))

State = Literal["ready", "not ready", "silent", "absent"]
"""A server's state; "silent" accepts connections but does not answer, "absent" does not exist."""


class TritonClient:
    """A client of one server. Thread-safe.

    Args:
        address: the gRPC endpoint, host:port.
        timeout_s: the timeout of a request.
        key: the API key, if the server needs one.
    """

    def __init__(self, address: str, timeout_s: float = _REQUEST_S, key: str | None = None) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = triton_grpc.InferenceServerClient(address)
        # The streams that have not ended.
        self._streams: set[queue.SimpleQueue[tuple[Any, Any]]] = set()
        self._closed = False

    def ready(self) -> bool:
        """Return whether the server answers soon and has loaded the model."""
        return self.state(_READY_S) == "ready"

    def state(self, timeout_s: float) -> State:
        """Ask the server for its state.

        Args:
            timeout_s: longest wait for its answer.
        """
        try:
            ready = self._client.is_model_ready(tensors.MODEL, client_timeout=timeout_s)
        except InferenceServerException as error:
            return "silent" if str(error.status()).endswith("DEADLINE_EXCEEDED") else "absent"
        return "ready" if ready else "not ready"

    def transcribe(self, audio: bytes | Samples, **options: Any) -> Transcript:
        """Transcribe a file's bytes, or samples; options are the other fields of `Request`.

        Raises:
            EarshotError: the server's error, in its class.
            UnavailableError: the server is not reachable.
            DeadlineError: the timeout expired.
            CancelledError: the connection was closed.
        """
        return self.start(Request(audio=audio, **options)).result()

    def start(self, request: Request) -> "Future[Transcript]":
        """Send a request and return at once; the result raises the errors of `transcribe`.

        Cancelling the future cancels the request.
        """
        answer: Future[Transcript] = Future()

        def on_answer(result: Any, error: Any) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                if error is not None:
                    raise self._error(error)
                answer.set_result(tensors.transcript_from_outputs(result.as_numpy))
            except Exception as failure:  # noqa: BLE001 - raised where the result is awaited
                answer.set_exception(failure)

        inputs, timeout_s = _inputs(request), self._timeout_s
        call = self._client.async_infer(
            tensors.MODEL, inputs, on_answer, client_timeout=timeout_s, headers=self._headers
        )
        answer.add_done_callback(lambda _: call.cancel())  # no effect on a call that has ended
        return answer

    def stream(
        self, request: Request, model: str = tensors.STREAM_MODEL
    ) -> Iterator[SegmentReady | RequestFinished]:
        """Yield each segment as soon as it is final, then the complete answer.

        Closing the iterator early cancels the request. Triton itself, without a gateway, has only
        the model `tensors.MODEL`, which sends no segments.

        Raises:
            EarshotError: see `transcribe`.
        """
        messages: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._streams.add(messages)
        if self._closed:
            messages.put(_CLOSED)
        end = time.monotonic() + self._timeout_s
        # A tritonclient object has one stream; the underlying connection is shared.
        with contextlib.closing(triton_grpc.InferenceServerClient(self._address)) as client:
            client.start_stream(
                lambda result, error: messages.put((result, error)),
                stream_timeout=self._timeout_s,
                headers=self._headers,
            )
            is_running = True
            try:
                with contextlib.suppress(InferenceServerException):  # the callback gets it too
                    client.async_stream_infer(model, _inputs(request))
                while is_running:
                    event = self._next(messages, end)
                    is_running = not isinstance(event, RequestFinished)
                    yield event
            except EarshotError as error:
                is_running = isinstance(error, DeadlineError) or self._closed
                raise
            finally:
                self._streams.discard(messages)
                # Cancel only a running request: a cancel that races with the end of the request
                # can make Triton 24.10 leak it, and then wait for it at shutdown.
                client.stop_stream(cancel_requests=is_running)

    def close(self) -> None:
        """Close the connection; running streams raise a CancelledError."""
        self._closed = True
        for messages in list(self._streams):
            messages.put(_CLOSED)
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(
        self, messages: "queue.SimpleQueue[tuple[Any, Any]]", end: float
    ) -> SegmentReady | RequestFinished:
        try:
            result, error = messages.get(timeout=max(0.0, end - time.monotonic()) + _GRACE_S)
        except queue.Empty:
            raise DeadlineError(f"no answer within {self._timeout_s:g} s") from None
        if error is not None:
            raise self._error(error)
        if tensors.is_whole(result.as_numpy):
            return RequestFinished(tensors.transcript_from_outputs(result.as_numpy))
        (segment,) = tensors.segments_from_outputs(result.as_numpy)
        return SegmentReady(segment)

    def _error(self, error: Any) -> EarshotError:
        """Convert an error of tritonclient to one of `serve.contract.errors`."""
        status = str(error.status() or "").removeprefix("StatusCode.")
        converted = tensors.error_from_text(str(error.message()), status)
        if type(converted) is UnavailableError:
            return UnavailableError(f"server at {self._address}: {converted}")
        if type(converted) is CancelledError:
            return CancelledError("the request was cancelled")
        return converted


def _inputs(request: Request) -> list[Any]:
    inputs = []
    for name, values in tensors.request_to_inputs(request).items():
        tensor = triton_grpc.InferInput(name, list(values.shape), tensors.INPUTS[name].datatype)
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    return inputs
