"""The monitor: takes samples of answered requests, and has a reference answer them when nothing
else is under way."""

import asyncio
import collections
import dataclasses
import datetime
import logging
import random
from collections.abc import Callable

from serve.contract.config import Config
from serve.contract.errors import OverloadedError, UnavailableError
from serve.contract.messages import Transcript
from serve.gateway.background import Background
from serve.gateway.envelope import read_transcript
from serve.gateway.limits import Account, Admission
from serve.gateway.models import Target
from serve.gateway.refusals import Refusal
from serve.gateway.shadow.figures import BOUND, Comparison, Drift, compare
from serve.gateway.shadow.metrics import ALL, ShadowMetrics
from serve.gateway.shadow.samples import Pending, Sample, for_reference
from serve.gateway.upstream.outgoing import Outgoing
from serve.gateway.upstream.pool import REFERENCE, Upstreams

logger = logging.getLogger("earshot.gateway")

WINDOW = 1000
"""The last comparisons, which rates and worst cases are of."""
_SEED = 20  # of the choice of samples: the same requests in a row give the same ones
LOOK_S = 0.05
"""Between two looks at what is under way."""
AWAY_S = 5.0
"""Between two tries while the reference takes nothing."""
_MAX_LOST = 2  # servers that a sample may cost: it may be what they die of
_MAX_CHARS = 2000  # of a text that is kept
_MIB = 2**20


class _ClientCame(Exception):
    """A client's request was given to a server while the reference worked."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A request whose two texts differ."""

    number: int  # of its comparison
    compared_at: str  # in UTC
    model: str
    cer: float
    comparison: Comparison
    served: str
    reference: str


class Shadow(Background):
    """Watches a gateway's answers. For one event loop.

    Args:
        config: says what is sampled, and who is the reference.
        upstreams: through which samples go, as requests do.
        metrics: what is counted and found goes there.
    """

    def __init__(self, config: Config, upstreams: Upstreams, metrics: ShadowMetrics) -> None:
        self.config = config.shadow
        self.pending = Pending(self.config.max_pending_mb * _MIB, upstreams.uploads)
        self.window: collections.deque[Comparison] = collections.deque(maxlen=WINDOW)
        self.worst: list[Case] = []
        """The worst first."""
        self.compared = 0
        self.drift = Drift(self.config.baseline)
        self._reference = REFERENCE if self.config.engine else ""
        self._upstreams = upstreams
        self._metrics = metrics
        self._chance = random.Random(_SEED)
        self._uncounted = Admission(config.server)  # where no client's request is
        self._came = asyncio.Event()
        self._busy_s = 0.0  # when a request was under way last
        metrics.pending.set_function(lambda: len(self.pending))
        metrics.pending_bytes.set_function(lambda: self.pending.bytes)

    def start(self) -> None:
        """Begin, where anything is to be watched."""
        if self.config.share:
            self._upstreams.at_send = self._client_came
            super().start()

    def watching(self, request: Outgoing) -> Callable[[Transcript], None] | None:
        """Return what is to be told a request's answer, where it becomes a sample."""
        if request.streamed or self._chance.random() >= self.config.share:
            return None
        return lambda served: self._add(request, served)

    def _add(self, request: Outgoing, served: Transcript) -> None:
        self._metrics.sampled.inc()
        try:
            self._metrics.dropped.inc(self.pending.add(request, served))
        except OSError as error:
            logger.error("a sample's file cannot be kept: %s", error)
            self._metrics.dropped.inc()

    def _client_came(self) -> None:
        self._came.set()

    # ------------------------------------------------------------ comparing

    async def _run(self) -> None:
        while True:
            await self._idle()
            sample = self.pending.take()
            try:
                await self._compare(sample)
            except _ClientCame:
                self._metrics.yielded.inc()
                self._metrics.dropped.inc(self.pending.put_back(sample))
            except Refusal as refusal:
                away = isinstance(refusal.error, UnavailableError | OverloadedError)
                if away and sample.lost < _MAX_LOST:
                    self._metrics.dropped.inc(self.pending.put_back(sample))
                    await asyncio.sleep(AWAY_S)
                else:
                    logger.warning("the reference has not answered: %s", refusal)
                    self._metrics.failed.inc()
                    sample.remove()
            except Exception:  # one sample must not end the watch
                logger.exception("a sample could not be compared")
                self._metrics.failed.inc()
                sample.remove()
            else:
                sample.remove()

    async def _idle(self) -> None:
        """Return when a sample waits, and nothing has been under way for long enough."""
        clock = asyncio.get_running_loop().time
        while True:
            if self._came.is_set() or self._upstreams.under_way:
                self._busy_s = clock()
                self._came.clear()
            elif len(self.pending) and clock() >= self._busy_s + self.config.idle_s:
                return
            await asyncio.sleep(LOOK_S)

    async def _compare(self, sample: Sample) -> None:
        reference = await self._answer(sample)
        comparison = await asyncio.to_thread(compare, sample.served, reference)
        self.compared += 1
        self.window.append(comparison)
        self._metrics.compared.labels(comparison.language).inc()
        self._metrics.tell_cer(self.window, ALL)
        own = [one for one in self.window if one.language == comparison.language]
        self._metrics.tell_cer(own, comparison.language)
        self._judge(comparison)
        self._keep(sample, reference, comparison)

    async def _answer(self, sample: Sample) -> Transcript:
        """Ask the reference.

        Raises:
            _ClientCame: somebody else has to be served first.
            Refusal: there is no answer.
        """
        request = sample.request
        message = await asyncio.to_thread(
            for_reference, bytes(request.parts[0]), self.config.beam_size
        )
        target = Target(self._reference or request.target.model, segments=False)
        ticket = self._uncounted.let_in(Account(""))
        with ticket:
            exchange = self._upstreams.send(
                target, [message], ticket, False, request.upload, priority="job"
            )
        self._came.clear()  # which was this one
        with exchange:
            answer = asyncio.ensure_future(exchange.only_answer())
            came = asyncio.ensure_future(self._came.wait())
            try:
                await asyncio.wait((answer, came), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise _ClientCame
                return read_transcript(answer.result())
            except Refusal as refusal:
                sample.lost += isinstance(refusal.error, UnavailableError)
                raise
            finally:
                for task in (answer, came):
                    task.cancel()

    def _judge(self, comparison: Comparison) -> None:
        """Add its gaps up, and say so where the bound is crossed."""
        before = self.drift.value
        self.drift.add(comparison.gaps)
        self._metrics.drift.set(self.drift.value)
        if before <= BOUND < self.drift.value:
            logger.error(
                "the served engine has drifted from the reference: the sum of the gaps' rises is "
                "%.1f, beyond %g, after %d requests; GET /v1/shadow has the worst of them",
                self.drift.value,
                BOUND,
                self.compared,
            )

    def _keep(self, sample: Sample, reference: Transcript, comparison: Comparison) -> None:
        """Keep the texts if they are among the worst of the window."""
        case = Case(
            self.compared,
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            sample.request.target.model,
            comparison.cer,
            comparison,
            sample.served.text[:_MAX_CHARS],
            reference.text[:_MAX_CHARS],
        )
        recent = [one for one in self.worst if one.number > self.compared - WINDOW]
        if comparison.edits:
            recent.append(case)
        self.worst = sorted(recent, key=lambda one: -one.cer)[: self.config.worst]
