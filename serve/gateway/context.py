"""The door of both protocols: it lets requests in, counts them until their ends, and tells what is
known of the server."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tritonclient.grpc import service_pb2

from serve.contract.config import Config
from serve.contract.messages import Priority, Transcript
from serve.gateway import errors
from serve.gateway.background import LoopWatch
from serve.gateway.client_secrets import ClientSecrets
from serve.gateway.edge.budget import Turns
from serve.gateway.edge.uploads import Uploads
from serve.gateway.errors import ApiError
from serve.gateway.keys import ApiKey, ApiKeys
from serve.gateway.kserve.checks import (
    audio_s,
    check_request,
    check_streamed,
    phases,
    queue_s,
    segment_end_s,
)
from serve.gateway.kserve.messages import Chunk, read_envelope, read_transcript
from serve.gateway.limits import EXPANSION, Account, Admission, Permit, StreamSlots
from serve.gateway.models import Models, Target
from serve.gateway.observe.log import OK, LogRecord
from serve.gateway.observe.metrics import Metrics
from serve.gateway.observe.tracing import open_traces
from serve.gateway.overload.sound import AudioLength, DurationEstimator, of_tensors
from serve.gateway.shadow.monitor import ShadowMonitor
from serve.gateway.upstream.exchange import Exchange
from serve.gateway.upstream.outgoing import Outgoing
from serve.gateway.upstream.own import OwnEngine
from serve.gateway.upstream.pool import Upstreams
from serve.gateway.usage import Usage
from serve.wire.folder import signing_key

_EXTENSIONS = ("binary_tensor_data",)  # those of Triton's that are offered here


class Visit:
    """A request that has been let in.

    Args:
        caller: who sends it.
        line: of the log, which tells its route.
        metrics: what is counted goes there.
        usage: so does what its key has had.
        lengths: learn how long its audio was.
    """

    def __init__(
        self,
        caller: ApiKey,
        line: LogRecord,
        metrics: Metrics,
        usage: Usage,
        lengths: DurationEstimator,
    ) -> None:
        self.caller = caller
        self.line = line
        self.watch: Callable[[Transcript], None] | None = None
        """Is told its answer; None: nobody is."""
        self._metrics = metrics
        self._usage = usage
        self._lengths = lengths
        self._uncounted = 1  # itself
        self._sent_s = 0.0  # audio of the segments that were sent and are not counted
        self.sound: AudioLength | None = None
        """What is known of its audio, where there is a latency target."""

    @property
    def account(self) -> Account:
        """The account of its caller: what is under way."""
        return self.caller.account

    def segment_sent(self, end_s: float) -> None:
        """Note that the client gets a stream's segment, which ends so many seconds in."""
        self._sent_s = max(self._sent_s, end_s)

    def close(self) -> None:
        """Count the audio of the segments that were sent, if no whole answer has counted it."""
        if self._sent_s:
            self.caller.count_audio(self._sent_s)
            self._count(self._sent_s)

    def text_sent(self) -> None:
        """Note that a piece of a stream's text has been sent."""
        if (took_s := self.line.text_sent()) is not None:
            self._metrics.delta(self.line.route, took_s)

    def answered(self, transcript: Transcript) -> None:
        """Count its audio, whose length its answer has told."""
        self.line.spans.answered(transcript.phases)
        self._count_answer(transcript.duration, transcript.timings.queue_s)
        if self.watch:
            self.watch(transcript)

    def passed_on(self, answer: service_pb2.ModelInferResponse) -> None:
        """Count its audio, of an answer of KServe's."""
        self.line.spans.answered(phases(answer) if self.line.spans.recorded else ())
        if (seconds := audio_s(answer)) or not (end_s := segment_end_s(answer)):
            self._count_answer(seconds, queue_s(answer))
        else:
            self.segment_sent(end_s)
        if self.watch:
            with contextlib.suppress(ApiError):  # its client wants a part of it alone
                self.watch(read_transcript(answer))

    def count_live(self, seconds: float) -> None:
        """Count live audio as it comes in.

        Raises:
            ApiError: there has been too much before it.
        """
        self._usage.require(self.caller)
        self.caller.count_live(seconds)
        self._count(seconds)

    def _count_answer(self, seconds: float, queued_s: float | None) -> None:
        self._sent_s = 0.0
        self.caller.count_audio(seconds)
        self._count(seconds)
        self.line.queued(queued_s)
        if self.sound is not None:
            self._lengths.learn(self.sound, seconds)

    def _count(self, seconds: float) -> None:
        self._metrics.count_audio(self.line.route, self.caller.name, seconds)
        self.line.add_audio(seconds)
        self._usage.count(self.caller.name, self.line.model, self._uncounted, seconds)
        self._uncounted = 0


class Services:
    """Takes requests in until it is told to drain. For one event loop.

    Args:
        config: the whole configuration.
        folder: of the run.
        engines: of the run.
        alive: is touched as long as the loop goes on.

    Raises:
        ConfigError: the keys or what says where traces go cannot be used.
    """

    def __init__(
        self, config: Config, folder: Path, engines: Sequence[OwnEngine], alive: Path
    ) -> None:
        self.config = config
        self.models = Models(config)
        self.callers = ApiKeys(config)
        self.client_secrets = ClientSecrets(signing_key(folder))
        self.usage = Usage(config, folder)
        self.admission = Admission(config.server)
        self.turns = Turns()
        self.uploads = Uploads(self.admission)
        self.streams = StreamSlots(config.live)
        self.watch = LoopWatch(alive)
        self.metrics = Metrics(self.admission, self.streams, self.watch, self.turns, self.usage)
        self.traces = open_traces(config.traces, self.metrics.spans)
        self.upstreams = Upstreams(config, self.models, folder, engines, self.metrics.upstreams)
        self.targets = self.upstreams.targets
        self.shadow = ShadowMonitor(config, self.upstreams, self.metrics.shadow)
        self.upload_timeout_s = config.server.upload_timeout_s
        self._drain_s = config.server.drain_timeout_s

    # ------------------------------------------------------------ requests

    def send(
        self,
        message: bytes,
        ticket: Permit,
        visit: Visit,
        streamed: bool,
    ) -> Exchange:
        """Check a request that came as protobuf, count it, and pass it on.

        Args:
            message: a serialised `ModelInferRequest`.
            ticket: the request's; the exchange that is returned closes it.
            visit: whose request it is.
            streamed: whether several answers can be sent.

        Raises:
            ApiError: it goes no further; the ticket is still open.
        """
        envelope = read_envelope(message)
        ticket.charge(len(message) + (EXPANSION - 1) * envelope.structure_bytes)
        target = self.models.target(envelope.request.model_name, envelope.request.model_version)
        visit.line.model = target.model
        check_streamed(target, streamed)
        check_request(envelope.request, envelope.raw, streamed)
        outputs = [output.name for output in envelope.request.outputs]
        visit.caller.require_duration(outputs, target.segments)
        visit.sound = self.targets.look(lambda: of_tensors(envelope.request, envelope.raw))
        return self.pass_on(visit, target, [message], ticket, streamed)

    def pass_on(
        self,
        visit: Visit,
        target: Target,
        parts: Sequence[Chunk],
        ticket: Permit,
        streamed: bool,
        upload: str | None = None,
        priority: Priority = "file",
    ) -> Exchange:
        """Give a visit's request to a server, as `Upstreams.send` does; its answer may be watched.

        Raises:
            ApiError: nobody can take it; the ticket is still open.
        """
        exchange = self.upstreams.send(
            *(target, parts, ticket, streamed, upload),
            spans=visit.line.spans,
            sound=visit.sound,
            priority=priority,
        )
        visit.watch = self.shadow.watching(Outgoing(target, parts, streamed, upload))
        return exchange

    def account(
        self, line: LogRecord, route: str, authorization: str | None, timed: bool = True
    ) -> contextlib.AbstractContextManager[Visit]:
        """Let a request in whose header names its caller; see `account_of`."""
        return self.account_of(line, route, lambda: self.callers.identify(authorization), timed)

    @contextlib.contextmanager
    def account_of(
        self, line: LogRecord, route: str, caller_of: Callable[[], ApiKey], timed: bool = True
    ) -> Iterator[Visit]:
        """Let a request for a transcript in, count it and how it ends, and time it.

        Args:
            line: of the log; is told all of this, for others to write.
            route: label of the metrics.
            caller_of: finds out who sends it, or refuses whoever it is.
            timed: whether how long it takes is the server's doing.

        Raises:
            ApiError: whoever it is may not come in, or not now.
        """
        line.route = route
        line.spans = self.traces.begin(line)
        line.trace_id = line.spans.trace_id

        def ended(status: str, outcome: str) -> None:
            self.metrics.ended(route, line.key, status, "" if outcome == OK else outcome)
            line.status, line.outcome = status, line.outcome or outcome

        with self.metrics.timed(route) if timed else contextlib.nullcontext():
            try:
                caller = caller_of()
                line.key, line.left = caller.name, caller.left
                self.usage.require(caller)
                caller.begin()
                visit = Visit(caller, line, self.metrics, self.usage, self.targets.lengths)
                with contextlib.closing(visit):
                    yield visit
            except ApiError as refusal:
                line.param = refusal.param or ""
                ended(refusal.status.grpc, refusal.reason)
                raise
            except asyncio.CancelledError:
                ended("CANCELLED", "client_gone")
                raise
            except Exception:
                ended("INTERNAL", "internal")
                raise
            ended("OK", OK)

    async def drain(self) -> bool:
        """Refuse what comes from now on and wait for the rest; whether all of it was answered.

        What has not ended within the configured time is ended then.
        """
        self.admission.start_draining()
        self.uploads.end_all(errors.stopping())
        self.streams.end_all()
        if await self.admission.wait_until_empty(self._drain_s):
            return True
        self.admission.end_arrivals()
        self.upstreams.end_all(
            errors.overloaded(
                f"the server stopped before the answer was there (server.drain_timeout_s = "
                f"{self._drain_s:g}); try again later",
                "draining",
            )
        )
        return False

    # ------------------------------------------------------------ what is known of the server

    async def ready(self, model: str | None = None) -> bool:
        """Tell whether a request that came now would be answered: for a model, or for any."""
        return not self.admission.draining and await self.upstreams.ready(model)

    async def engines(self) -> dict[str, dict[str, bool]]:
        """Tell which of several engines of this run are ready, by their devices; empty for one."""
        own = self.upstreams.own
        if len(own) < 2:
            return {}
        return {"engines": {server.name: await server.ready() for server in own}}

    async def server_metadata(self) -> service_pb2.ServerMetadataResponse:
        """Return name and version of Triton, and those of its extensions that are offered.

        Raises:
            ApiError: Triton is away.
        """
        answer = await self.upstreams.small(self.models.default, "ServerMetadata", b"")
        metadata = service_pb2.ServerMetadataResponse.FromString(answer)
        offered = [name for name in metadata.extensions if name in _EXTENSIONS]
        del metadata.extensions[:]
        metadata.extensions.extend(offered)
        return metadata

    async def model_metadata(self, name: str, version: str) -> service_pb2.ModelMetadataResponse:
        """Return inputs and outputs of a model.

        Raises:
            ApiError: there is no such model, or Triton is away.
        """
        return await self.upstreams.metadata(self.models.target(name, version), version)
