"""Systems that make live text: a real server, or its sessions alone under a clock that jumps."""

import asyncio
import contextlib
import dataclasses
import functools
import selectors
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from eval.config import EvaluationProduct
from eval.server import running
from serve.cli.live_client import Heard, converse, transcribe_live
from serve.contract.codec import to_json
from serve.contract.messages import Request, Samples, Transcript
from serve.contract.server_config import LiveConfig
from serve.gateway.live.events import Event
from serve.gateway.live.session import LiveSession
from serve.gateway.live.settings import SessionSettings
from serve.gateway.live.utterance import UpdateWindow
from serve.gateway.observe.metrics import LiveMetrics
from serve.speech.vad import VadModel
from serve.transcriber.loop import Transcriber
from serve.transcriber.open import open_transcriber
from serve.wire.client import TritonClient

T = TypeVar("T")
_CHANGED = "earshot_live_changed_words_total"
_WAIT_S = 60.0  # that a session may say nothing


@dataclasses.dataclass(frozen=True)
class StreamingSystem:
    """Ways to make text of whole recordings and of streams.

    Attributes:
        whole: transcribes a recording.
        play: streams audio as it is spoken; see `serve.cli.live_client.transcribe_live`.
        changed: counts the words of hypotheses so far that did not stay; raises an EarshotError if
            a process of the server has ended.
        loop: makes the event loop in which streams are played; None: asyncio's own.
    """

    whole: Callable[[Request], Transcript]
    play: Callable[[Iterable[Samples], dict[str, Any]], AsyncIterator[Heard]]
    changed: Callable[[], float]
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None


@contextlib.contextmanager
def open_system(config: EvaluationProduct, decode_s: float) -> Iterator[StreamingSystem]:
    """Open a system for the length of a `with` block.

    Args:
        config: the product.
        decode_s: 0 starts a real server; else sessions are simulated in this process, and every
            decoding takes so long by their clock.

    Raises:
        EarshotError: it does not start.
    """
    if decode_s:
        with open_transcriber(config) as transcriber:
            simulated = Simulated(transcriber, config.live, decode_s)
            yield StreamingSystem(
                transcriber.transcribe, simulated.play, simulated.changed, JumpingLoop
            )
        return
    timeout_s = config.transcriber.request_timeout_s
    with running(config) as server, TritonClient(server.grpc, timeout_s) as client:
        yield StreamingSystem(
            lambda request: client.start(request).result(),
            functools.partial(transcribe_live, f"ws://{server.http}", wait_s=_WAIT_S),
            lambda: server.counters(_CHANGED)[_CHANGED],
        )


class Simulated:
    """Sessions by a clock that stands while anything works and jumps to when there is more to do.

    So streams run as fast as they are decoded, and the result depends neither on the machine nor on
    its other work. Streams share one decoder, which makes one text after another.

    Args:
        transcriber: decodes.
        config: how live text is made.
        decode_s: that each decoding takes.
    """

    def __init__(self, transcriber: Transcriber, config: LiveConfig, decode_s: float) -> None:
        self._transcriber = transcriber
        self._config = config
        self._decode_s = decode_s
        self._registry = CollectorRegistry()
        self._metrics = LiveMetrics(self._registry, ())
        self._decoder = asyncio.Lock()
        self._streams = 0  # that are played

    async def play(
        self, blocks: Iterable[Samples], transcription: dict[str, Any]
    ) -> AsyncIterator[Heard]:
        """Stream through a session in this process."""
        wire = _Wire(self)
        work = asyncio.create_task(wire.work())
        self._streams += 1
        try:
            async for news in converse(wire, blocks, transcription, pace=1.0, wait_s=_WAIT_S):
                yield news
        finally:
            self._streams -= 1
            work.cancel()
            await asyncio.wait((work,))

    def changed(self) -> float:
        """Count the words that did not stay."""
        return self._registry.get_sample_value(_CHANGED) or 0.0

    def session(self, send: "asyncio.Queue[Event | Exception]") -> LiveSession:
        """Make a session whose events go into a queue."""

        async def transcribe(_model: str | None, window: UpdateWindow) -> Transcript:
            async with self._decoder:
                request = window.request(self._config, np.concatenate(window.audio))
                transcript = self._transcriber.transcribe(request)
                await asyncio.sleep(self._decode_s)
            return transcript

        return LiveSession(
            self._config,
            str,
            transcribe,
            send.put,
            lambda _: None,
            VadModel(),
            InlineExecutor(),
            self._metrics,
            lambda: self._streams,
            SessionSettings(),
        )


class _Wire:
    """Stands for the connection to a session in this process."""

    def __init__(self, system: Simulated) -> None:
        self._events = asyncio.Queue[Event | Exception]()
        self._session = system.session(self._events)

    async def work(self) -> None:
        try:
            await self._session.start()
            await self._session.work()
        except Exception as error:  # noqa: BLE001 - raised by `recv`
            await self._events.put(error)

    async def send(self, message: str) -> None:
        await self._session.handle(message)

    async def recv(self) -> str:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return to_json(event)


class InlineExecutor(Executor):
    """Runs work at once, in the thread that submits it: a clock that jumps waits for no thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Return the result as a future that is done."""
        future = Future[T]()
        future.set_result(fn(*args, **kwargs))
        return future


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop by whose clock nothing but waiting takes time, and that waits for nothing."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Return the seconds."""
        return self._jumps.waited_s


class _Jumps(selectors.SelectSelector):
    waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.waited_s += max(0.0, timeout or 0.0)
        return super().select(None if timeout is None else 0.0)
