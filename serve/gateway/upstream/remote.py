"""Another Earshot, by the gRPC of its gateway: asked every second whether it takes requests.

What it refuses because it drains, is full or has gone, another may answer. A connection that is
lost counts until the next look. A server that says nothing gets no more requests soon, and after
`server.stall_timeout_s` those that it has are taken for lost.
"""

import asyncio
import functools
import logging
import mmap
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2

from serve.contract.errors import AccessError, ConfigError, DeadlineError
from serve.contract.server_config import UpstreamConfig
from serve.gateway import refusals
from serve.gateway.checks import LENGTH
from serve.gateway.envelope import Part, raw_part, streamed_answer, with_model
from serve.gateway.models import Target
from serve.gateway.refusals import Refusal
from serve.gateway.upstream.calls import CHANNEL_OPTIONS, Call, Channel
from serve.gateway.upstream.server import Outgoing

logger = logging.getLogger("earshot.gateway")

KEY_ENVIRONMENT = "EARSHOT_UPSTREAM_KEY"

INTERVAL_S = 1.0  # between two looks
SILENT_S = 6.0  # a server that is busy may miss a look, or two


class Remote:
    """Another Earshot; see `Server`.

    Args:
        config: where it is, and what it serves.
        stall_timeout_s: a server that has said nothing for so long has lost its requests.

    Raises:
        ConfigError: its key or the roots of its certificate cannot be read.
    """

    def __init__(self, config: UpstreamConfig, stall_timeout_s: float) -> None:
        self.name = config.address
        self.models = config.models
        self.inflight = 0
        self._stall_timeout_s = stall_timeout_s
        self._ready: frozenset[str] = frozenset()
        self._heard_s = asyncio.get_running_loop().time()
        self._reason = ""  # of why it is not ready
        self._calls: set[Call] = set()
        key = _key(config)
        headers = (("authorization", f"Bearer {key}"),) if key else ()
        self._grpc = _open(config)
        self._channel = Channel(self._grpc, headers)

    def takes(self, model: str) -> bool:
        """Tell whether it did at the last look, and its connection stands."""
        away = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
        return model in self._ready and self._grpc.get_state() not in away

    async def ready(self, model: str) -> bool:
        """Tell the same as `takes`."""
        return self.takes(model)

    def answer_name(self, target: Target) -> str:
        """Return the name that it is asked by."""
        return target.name

    def send(self, request: Outgoing) -> Call:
        """Give it a request; audio that lies in a file is read and sent."""
        parts, trace = with_model(request.parts, request.target.name), request.spans.passed_on()
        if request.upload is None:
            call, source = self._channel.send(b"".join(parts), request.streamed, trace)
        else:
            build = functools.partial(_with_file, parts, request.upload)
            call, source = self._channel.send(build, request.streamed, trace)
        request.spans.given(self.name, inside=False)
        answers = source if request.streamed else _as_stream(source)
        sent = Call(call, answers, at_end=self._calls.discard)
        self._calls.add(sent)
        return sent

    async def small(self, method: str, message: bytes) -> bytes:
        """See `Server`."""
        return await self._channel.small(method, message)

    async def watch(self) -> None:
        """Look every second."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Ask it which of its models are ready."""
        now = asyncio.get_running_loop().time()
        try:
            if not self._ready:
                await self._check_key()
            ready = [model for model in self.models if await self._is_ready(model)]
        except Refusal as refusal:
            answered = not isinstance(refusal.error, DeadlineError)
            if answered:
                self._heard_s = now
            silent_s = now - self._heard_s
            if answered or silent_s > SILENT_S:
                self._note((), _reason(refusal))
            if silent_s > self._stall_timeout_s:
                for call in list(self._calls):
                    call.end(refusals.server_away())
        else:
            self._heard_s = now
            missing = ", ".join(model for model in self.models if model not in ready)
            self._note(ready, f"{missing} is not ready there" if missing else "")

    def failed(self, refusal: Refusal) -> None:
        """Give it no more until the next look, if it has gone, as a request of its tells."""
        if refusal.reason == "server_away" or isinstance(refusal.error, AccessError):
            self._note((), _reason(refusal))

    async def close(self) -> None:
        """See `Server`."""
        await self._channel.close()

    async def _check_key(self) -> None:
        """Ask what needs a key, which readiness does not, whoever is there to answer.

        Raises:
            Refusal: the key is refused, or there is no answer.
        """
        try:
            await self.small("ServerMetadata", b"")
        except Refusal as refusal:
            if isinstance(refusal.error, AccessError | DeadlineError):
                raise

    async def _is_ready(self, model: str) -> bool:
        request = service_pb2.ModelReadyRequest(name=model).SerializeToString()
        try:
            answer = await self.small("ModelReady", request)
        except Refusal as refusal:
            if refusal.status.grpc == "NOT_FOUND":
                return False
            raise
        return bool(service_pb2.ModelReadyResponse.FromString(answer).ready)

    def _note(self, ready: Iterable[str], reason: str) -> None:
        before, self._ready = self._ready, frozenset(ready)
        if self._ready != before or reason != self._reason:
            logger.log(
                logging.WARNING if reason else logging.INFO,
                "%s takes requests for %s%s",
                self.name,
                ", ".join(sorted(self._ready)) or "nothing",
                f": {reason}" if reason else "",
            )
        self._reason = reason


async def _as_stream(source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield answers of ModelInfer as those of ModelStreamInfer."""
    async for answer in source:
        yield streamed_answer(answer)


def _reason(refusal: Refusal) -> str:
    if isinstance(refusal.error, AccessError):
        return f"it refuses the key ({refusal}); see upstreams.key_file or {KEY_ENVIRONMENT}"
    if refusal.reason == "server_away":
        return "it cannot be reached"
    return str(refusal)


def _with_file(parts: Iterable[Part], path: str) -> bytes:
    """Serialise a request with the bytes of a file as its audio."""
    audio = service_pb2.ModelInferRequest()
    audio.inputs.add(name="AUDIO", datatype="BYTES", shape=[1])
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        raw = raw_part(LENGTH.pack(len(view)), view)
        return b"".join([*parts, audio.SerializeToString(), *raw])


def _key(config: UpstreamConfig) -> str:
    if not config.key_file:
        return os.environ.get(KEY_ENVIRONMENT, "").strip()
    return _read(config.key_file, "key_file").decode("ascii", "replace").strip()


def _open(config: UpstreamConfig) -> grpc.aio.Channel:
    if not config.tls:
        return grpc.aio.insecure_channel(config.address, options=CHANNEL_OPTIONS)
    roots = _read(config.tls_roots, "tls_roots") if config.tls_roots else None
    credentials = grpc.ssl_channel_credentials(roots)
    return grpc.aio.secure_channel(config.address, credentials, options=CHANNEL_OPTIONS)


def _read(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"upstreams.{key} = {path} cannot be read: {error.strerror}") from error
