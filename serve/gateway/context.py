"""The objects that request handlers get: the gateway's services, and the context of one request."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from tritonclient.grpc import service_pb2

from serve.contract.config import Config
from serve.contract.errors import EarshotError
from serve.contract.messages import Transcript
from serve.gateway.background import LoopWatch
from serve.gateway.client_secrets import ClientSecrets
from serve.gateway.edge.budget import SharedBudget
from serve.gateway.edge.connection import SlowClientError
from serve.gateway.edge.uploads import Uploads
from serve.gateway.engines import EngineAddress, EngineCall, EngineRequest, Engines
from serve.gateway.errors import ApiError, client_gone, status_of
from serve.gateway.keys import ApiKey, ApiKeys
from serve.gateway.kserve.messages import answer_figures, read_transcript
from serve.gateway.limits import Admission, Permit, StreamSlots
from serve.gateway.models import Models
from serve.gateway.observe.log import OK, LogRecord
from serve.gateway.observe.metrics import Metrics
from serve.gateway.observe.spans import open_tracer
from serve.gateway.shadow.monitor import ShadowMonitor
from serve.gateway.target import AudioLength, LatencyTarget
from serve.gateway.usage import Usage
from serve.wire.folder import gateway_alive, signing_key


class Services:
    """The services of a gateway that request handlers share. For one event loop.

    Args:
        config: the configuration of this process.
        folder: the run's folder.
        addresses: the addresses of the run's engines.

    Raises:
        ConfigError: the keys, or OpenTelemetry's variables, cannot be used.
    """

    def __init__(self, config: Config, folder: Path, addresses: Sequence[EngineAddress]) -> None:
        self.config, self.folder = config, folder
        self.process_number = addresses[0].process_number
        self.models = Models(config)
        self.keys = ApiKeys(config)
        self.client_secrets = ClientSecrets(signing_key(folder))
        self.usage = Usage(config, folder)
        self.admission = Admission(config.server)
        self.uploads = Uploads(self.admission)
        self.streams = StreamSlots(config.live)
        self.watch = LoopWatch(gateway_alive(folder, self.process_number))
        self.budget = SharedBudget()
        target_s, slots = config.gateway.target_p99_s, config.runtime.slots * len(addresses)
        self.target = LatencyTarget(target_s, slots) if target_s else None
        self.metrics = Metrics(self.streams)
        self.engines = Engines(config, folder, addresses, self.target, self.metrics.upstreams)
        self.shadow = ShadowMonitor(config, self.engines, self.metrics.shadow)
        self.tracer = open_tracer(self.metrics.spans)

    async def ready(self) -> bool:
        """Return whether a new request would be answered."""
        return not self.admission.draining and await self.engines.ready()


@dataclasses.dataclass(eq=False)
class RequestContext:
    """A request for a transcript, as an async context manager: from its key to its end.

    Entering it identifies the API key and counts the request. Leaving it records the end of the
    request, once: usage, metrics, span and log record, in this order.
    """

    services: Services
    record: LogRecord  # gets the figures of the request
    route: str  # the label of metrics and log
    # Returns the API key, or raises an ApiError; None: the header `authorization` names it.
    identify: Callable[[], ApiKey] | None = None
    timed: bool = True  # whether the server determines how long the request takes

    def __post_init__(self) -> None:
        self.api_key: ApiKey
        self._audio: AudioLength | None = None
        self._watch: Callable[[Transcript], None] | None = None
        self._uncounted_requests = 1
        self._sent_s = 0.0  # audio of segments that were sent and are not counted yet
        self.record.route = self.route
        self.record.span = self.services.tracer.begin(self.record)
        self.record.trace_id = self.record.span.trace_id

    async def __aenter__(self) -> Self:
        try:
            authorization, keys = self.record.header("authorization"), self.services.keys
            self.api_key = self.identify() if self.identify else keys.identify(authorization)
            self.record.key = self.api_key.name
            self.record.limit_headers = self.api_key.limit_headers
            self.services.usage.require(self.api_key)
            self.api_key.count_request()
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, SlowClientError):
            error = client_gone()
        if self._sent_s:
            self.api_key.count_audio(self._sent_s)
            self._count(self._sent_s)
        record, reason = self.record, ""
        if error is None:
            record.status, record.outcome = "OK", record.outcome or OK
        else:
            status, reason = status_of(error)
            record.status, record.outcome = status.grpc, record.outcome or reason
            if record.path and not record.http_status:  # no answer has begun: it is the error
                kserve = record.path.startswith("/v2/")
                record.http_status = status.kserve if kserve else status.http
        if isinstance(error, ApiError):
            record.param = error.param or ""
        metrics = self.services.metrics
        metrics.requests.labels(record.route, record.status, record.key).inc()
        if reason:
            metrics.refused.labels(reason).inc()
        if self.timed:
            metrics.seconds.labels(record.route).observe(time.monotonic() - record.began_s)
        record.span.end(record)
        record.write()

    def admit(self) -> Permit:
        """Admit the request before its body is received.

        Raises:
            ApiError: 503, the server drains; 429, the key or the server has too many in flight.
        """
        return self.services.admission.admit(self.api_key)

    def start(self, request: EngineRequest, permit: Permit) -> EngineCall:
        """Give the request to an engine; its answer may become a sample of the shadow monitor.

        Raises:
            ApiError: 429, it would miss the latency target; 503, no engine takes it.
        """
        self._audio = request.audio
        call = self.services.engines.start(request, permit, self.record.span)
        self._watch = self.services.shadow.watching(request)
        return call

    def segment_sent(self, end_s: float) -> None:
        """Note that the client gets a segment of a stream, which ends at this second."""
        self._sent_s = max(self._sent_s, end_s)

    def text_sent(self) -> None:
        """Note that the client got some of a stream's text."""
        if (took_s := self.record.text_sent()) is not None:
            self.services.metrics.first_delta_s.labels(self.record.route).observe(took_s)

    def answered(self, transcript: Transcript) -> None:
        """Count the request's audio, by the length in its transcript."""
        self.record.span.answered(transcript.phases)
        self._count_answer(transcript.duration, transcript.timings.queue_s)
        if self._watch:
            self._watch(transcript)

    def kserve_answered(self, answer: service_pb2.ModelInferResponse) -> None:
        """Count the audio of an answer of KServe's, a segment or the whole."""
        audio_s, segment_end_s, queue_s, phases = answer_figures(answer)
        self.record.span.answered(phases)
        if segment_end_s:
            self.segment_sent(segment_end_s)
        else:
            self._count_answer(audio_s, queue_s)
        if self._watch:
            with contextlib.suppress(EarshotError):  # the client asked for some of the outputs
                self._watch(read_transcript(answer))

    def count_live(self, seconds: float) -> None:
        """Count live audio as it comes in.

        Raises:
            ApiError: 429, the key has had too much before it.
        """
        self.services.usage.require(self.api_key)
        self.api_key.require_audio()
        self.api_key.count_audio(seconds)
        self._count(seconds)

    def _count_answer(self, seconds: float, queued_s: float | None) -> None:
        self._sent_s = 0.0
        self.api_key.count_audio(seconds)
        self._count(seconds)
        self.record.queued(queued_s)
        if self.services.target is not None and self._audio is not None:
            self.services.target.learn(self._audio, seconds)

    def _count(self, seconds: float) -> None:
        record, key = self.record, self.api_key.name
        self.services.metrics.audio_s.labels(record.route, key).inc(seconds)
        record.audio_s = (record.audio_s or 0.0) + seconds
        self.services.usage.count(key, record.model, self._uncounted_requests, seconds)
        self._uncounted_requests = 0
