"""The Triton models `whisper` and `whisper_stream`: tensors <-> transcriber, errors -> status.

Both are this file. `whisper` owns the engine and answers each request once; `whisper_stream` is
decoupled, sends each segment as soon as it is known, and passes its requests on through
`serve.triton.relay`. `execute` copies a request's tensors out, starts it and returns; its response
sender lives on in a `Responder`.
"""

import dataclasses
import functools
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import triton_python_backend_utils as pb_utils

from serve.config import Config, load_config
from serve.errors import EarshotError, OptionError
from serve.messages import Failed, Finished, TranscriberEvent
from serve.transcriber.stats import Stats
from serve.triton import wire
from serve.triton.metrics import FAMILIES
from serve.triton.relay import Cancellable, Inputs, OnEvent, RelayClient, RelayServer
from serve.triton.server import require_numpy_1

if TYPE_CHECKING:
    from serve.transcriber.loop import Transcriber

logger = logging.getLogger("earshot")

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_CANCEL_POLL_S = 0.05
_METRICS_S = 1.0
_SWITCH_S = 0.0005  # longest that one thread keeps the interpreter while another waits for it
_FLUSH_S = 10.0  # most that the end waits for answers on their way


class Backend(Protocol):
    """What stands behind a model."""

    def start(self, inputs: Inputs, on_event: OnEvent) -> Cancellable:
        """Start a request; raises an EarshotError where it is refused at once."""
        ...

    def close(self) -> None:
        """Finish what was accepted, within a limit, and free everything."""
        ...


class EngineBackend:
    """The transcriber, in this process, and open to `whisper_stream` through the relay."""

    def __init__(
        self, config: Config, engine: str, relay: Path, failure: Path, backend_model: str
    ) -> None:
        self._failure = failure
        self._drain_s = config.server.drain_timeout_s
        self._malformed = 0
        self._lock = threading.Lock()
        began = time.monotonic()
        self._transcriber = _open_transcriber(config, engine, backend_model)
        logger.info("the engine is open after %.1f s", time.monotonic() - began)
        self._publisher = Publisher(self._stats)
        self._relay = RelayServer(relay, self.start)  # last: whisper_stream is ready after this

    def start(self, inputs: Inputs, on_event: OnEvent) -> Cancellable:
        """Submit a request."""
        try:
            request = wire.request_from_inputs(inputs)
        except EarshotError:
            with self._lock:
                self._malformed += 1
            raise
        return self._transcriber.submit(request, on_event)

    def close(self) -> None:
        """Drain, then stop."""
        self._publisher.close()
        self._transcriber.drain(self._drain_s)
        self._relay.close()
        self._transcriber.close()

    def _stats(self) -> Stats:
        if not self._transcriber.healthy:
            self._failure.write_text("the device failed, see the log", encoding="utf-8")
        stats = self._transcriber.stats()
        return dataclasses.replace(stats, rejected=stats.rejected + self._malformed)


class Publisher:
    """Copies statistics into Triton's metrics once a second."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        kinds = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}
        self._stats = stats
        self._families = [
            pb_utils.MetricFamily(
                name=family.name, description=family.description, kind=kinds[family.kind]
            )
            for family in FAMILIES
        ]
        self._metrics = [
            (made.Metric(labels=series.labels), family.kind, series.value)
            for made, family in zip(self._families, FAMILIES, strict=True)
            for series in family.series
        ]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="earshot-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the metrics go before their families, as Triton demands."""
        self._stopped.set()
        self._thread.join(timeout=10)
        self._metrics.clear()
        self._families.clear()

    def _run(self) -> None:
        while not self._stopped.wait(_METRICS_S):
            stats = self._stats()
            for metric, kind, value in self._metrics:
                if kind == "gauge":
                    metric.set(value(stats))
                else:
                    metric.increment(max(0.0, value(stats) - metric.value()))


class Responder:
    """Answers one request; its last message, and only that, has the final flag.

    The lock keeps `cancelled` and the last message apart: asking Triton about a request that has
    ended crashes the server.
    """

    def __init__(self, sender: Any, stream: bool) -> None:
        self._sender = sender  # None after the last message
        self._stream = stream
        self._lost = False
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the last message has been sent."""
        return self._sender is None

    def tell(self, event: TranscriberEvent) -> None:
        """Pass on what the transcriber says; waits until Triton has taken it."""
        try:
            if isinstance(event, Finished):
                self._send(_response(wire.transcript_outputs(event.transcript)), final=True)
            elif isinstance(event, Failed):
                self.fail(event.error)
            elif self._stream:
                self._send(_response(wire.segment_outputs(event.segment)), final=False)
        except Exception as error:
            logger.exception("an answer could not be sent")
            self._lost = True
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error: the one place where errors become statuses."""
        if not isinstance(error, EarshotError):
            error = EarshotError(f"internal error: {error!r}")
        code = getattr(pb_utils.TritonError, error.status)
        triton_error = pb_utils.TritonError(wire.error_to_text(error), code)
        self._send(pb_utils.InferenceResponse(error=triton_error), final=True)

    def cancelled(self) -> bool:
        """Whether the client no longer waits, or cannot be answered."""
        with self._lock:
            return self._lost or (self._sender is not None and bool(self._sender.is_cancelled()))

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            sender = self._sender
            if final:
                self._sender = None
            if sender is not None:
                sender.send(response, flags=_FINAL if final else 0)


class Answers:
    """Sends answers on a thread of its own.

    Triton takes a millisecond or more to take one, which the device thread must not wait for. One
    thread, so that a request's messages keep their order.
    """

    def __init__(self) -> None:
        self._outbox: queue.SimpleQueue[tuple[Responder, TranscriberEvent] | None]
        self._outbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="earshot-answers", daemon=True)
        self._thread.start()

    def put(self, responder: Responder, event: TranscriberEvent) -> None:
        """Have an event sent; returns at once."""
        self._outbox.put((responder, event))

    def close(self) -> None:
        """Send what is left, and stop."""
        self._outbox.put(None)
        self._thread.join(timeout=_FLUSH_S)

    def _run(self) -> None:
        while (message := self._outbox.get()) is not None:
            responder, event = message
            try:
                responder.tell(event)
            except Exception:  # not even the error could be sent: others still wait
                logger.exception("a request got no answer")


class CancelWatch:
    """Cancels the requests whose gRPC clients have cancelled or gone.

    Triton 24.10 does not tell when an HTTP client goes; its request runs to its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[Responder, Cancellable]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="earshot-cancels", daemon=True)
        self._thread.start()

    def add(self, responder: Responder, ticket: Cancellable) -> None:
        """Watch a request until it has ended."""
        with self._lock:
            self._open.append((responder, ticket))

    def close(self) -> None:
        """Stop."""
        self._stopped.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopped.wait(_CANCEL_POLL_S):
            self._poll()

    def _poll(self) -> None:
        with self._lock:
            entries = list(self._open)
        for responder, ticket in entries:
            if responder.cancelled():
                ticket.cancel()
        with self._lock:
            self._open = [entry for entry in self._open if not entry[0].done]


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Get ready to answer; `whisper` has transcribed once when this returns."""
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
        # Python's 5 ms are several decoder steps, for which the device thread would stand still.
        sys.setswitchinterval(_SWITCH_S)
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._stream = pb_utils.using_decoupled_model_transaction_policy(config)
        try:
            require_numpy_1(np.__version__)
            self._backend = _open_backend(parameters, self._stream)
        except Exception as error:
            if not isinstance(error, EarshotError):
                logger.exception("the model failed to start")
            # `serve.triton.server` waits for this file, and then does not wait for the other model.
            Path(parameters["failure"]).write_text(str(error) or repr(error), encoding="utf-8")
            raise pb_utils.TritonModelException(str(error)) from error
        self._answers = Answers()
        self._cancels = CancelWatch()

    def execute(self, requests: list[Any]) -> None:
        """Start the requests; answers come from other threads."""
        for request in requests:
            inputs = _inputs(request)
            streamed = bool(inputs.get("STREAM", [self._stream])[0])
            responder = Responder(request.get_response_sender(), streamed)
            try:
                if streamed and not self._stream:
                    raise OptionError(
                        f"STREAM = true, but the model {wire.MODEL} answers once; send the "
                        f"request to {wire.STREAM_MODEL} over a gRPC stream"
                    )
                on_event = functools.partial(self._answers.put, responder)
                ticket = self._backend.start(inputs, on_event)
            except EarshotError as error:
                responder.fail(error)
            except Exception as error:  # one request must not hurt its neighbours
                logger.exception("a request failed")
                responder.fail(error)
            else:
                self._cancels.add(responder, ticket)

    def finalize(self) -> None:
        """Finish what was accepted and stop."""
        self._backend.close()
        self._answers.close()
        self._cancels.close()


def _open_backend(parameters: dict[str, str], stream: bool) -> Backend:
    config = load_config(parameters["config"])
    relay = Path(parameters["relay"])
    if stream:
        return RelayClient(relay, config.server.start_timeout_s)
    failure = Path(parameters["failure"])
    return EngineBackend(config, parameters["engine"], relay, failure, parameters["backend_model"])


def _open_transcriber(config: Config, engine: str, backend_model: str) -> "Transcriber":
    """With a runtime of its own, or with the model `backend_model` as its runtime."""
    # Loads torch, which the process of whisper_stream does without.
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415

    if not backend_model:
        return open_transcriber(config, engine)
    from serve.trtllm.backend import open_backend  # noqa: PLC0415

    infer = functools.partial(_infer, backend_model)
    # Triton lets a model call another only once it is initialised, so there is no warm-up.
    return open_transcriber(config, engine, functools.partial(open_backend, infer=infer), False)


def _infer(model: str, inputs: Mapping[str, Any], outputs: list[str]) -> dict[str, Any]:
    """Call another model of this server; from any thread, many at once."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=outputs,
        inputs=[pb_utils.Tensor(*item) for item in inputs.items()],
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
    )
    response = request.exec()
    if response.has_error():
        raise EarshotError(f"the model {model}: {response.error().message()}")
    tensors = {name: pb_utils.get_output_tensor_by_name(response, name) for name in outputs}
    return {name: np.array(tensor.as_numpy()) for name, tensor in tensors.items()}


def _inputs(request: Any) -> dict[str, wire.Tensor]:
    """Copies of the tensors that were sent; Triton's own memory ends with `execute`."""
    found = ((name, pb_utils.get_input_tensor_by_name(request, name)) for name in wire.INPUTS)
    return {name: np.array(tensor.as_numpy()) for name, tensor in found if tensor is not None}


def _response(outputs: dict[str, wire.Tensor]) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in outputs.items()])
