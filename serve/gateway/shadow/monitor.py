"""The shadow monitor: a reference answers some requests again, while nothing else is in flight.

GET /v1/shadow answers with the figures and the worst texts. The texts are clients', so only
`shadow.readers` may read them. OpenAI's API has no such address.
"""

import asyncio
import collections
import dataclasses
import datetime
import itertools
import logging
import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tritonclient.grpc import service_pb2

from serve.contract.config import Config
from serve.contract.errors import OverloadedError, UnavailableError
from serve.contract.messages import Transcript
from serve.gateway.background import Background, unless
from serve.gateway.engines import REFERENCE, EngineRequest, Engines
from serve.gateway.errors import ApiError
from serve.gateway.keys import ApiKey
from serve.gateway.kserve.messages import LENGTH
from serve.gateway.limits import Admission
from serve.gateway.models import Target
from serve.gateway.shadow import figures
from serve.wire.tensors import INPUTS

logger = logging.getLogger("earshot.gateway")

WINDOW = 1000
"""The number of latest comparisons that rates and worst texts are of."""
LOOK_S = 0.05
"""Seconds between two looks at the requests in flight."""
AWAY_S = 5.0
"""Seconds between two tries while the reference takes nothing."""
IDLE_S = 1.0  # without a request in flight, before the reference is asked
MAX_PENDING_MB = 64  # MiB of samples that wait; the oldest are dropped
_MAX_WORST = 20  # texts that are kept
_MAX_LOST = 2  # times that a sample may lose its server: it may be the cause
_SEED = 20  # of the choice of samples: the same requests in a row give the same ones
_MAX_CHARS = 2000  # a text that is kept
_DIGITS = 6  # behind the point, in JSON
_MIB = 2**20
# Upper estimates of memory: of a sample without the request, and of each character of text.
_SAMPLE_BYTES, _CHARACTER_BYTES = 4096, 4
_BEAM = "BEAM_SIZE"
_NOT_ASKED = {  # inputs that the reference does not get: they cost time and change no word
    *("WORD_TIMESTAMPS", "TRY_WORD_TIMESTAMPS", "TOKEN_LOGPROBS", "LOW_CONFIDENCE"),
    *("DIARIZE", "NUM_SPEAKERS", "MIN_SPEAKERS", "MAX_SPEAKERS"),
    *("KNOWN_SPEAKER_NAMES", "KNOWN_SPEAKER_REFERENCES", _BEAM),
}


class _ClientCameError(Exception):
    """A client's request was sent while the reference worked."""


@dataclasses.dataclass(eq=False)
class ShadowSample:
    """An answered request that the reference answers again."""

    request: EngineRequest  # in one part; its file is a link of the sample's own
    served: figures.ScoredText
    size: int  # bytes of the request, its file and the answer's text
    lost: int = 0  # times that a server had it and was lost

    def remove(self) -> None:
        """Remove the sample's file."""
        if self.request.audio_file:
            with suppress(OSError):
                os.unlink(self.request.audio_file)


class ShadowMonitor(Background):
    """Compares a gateway's answers with a reference's. For one event loop.

    Args:
        config: the share of requests, and the reference.
        engines: one of them answers the samples.
        metrics: the counters.
    """

    def __init__(self, config: Config, engines: Engines, metrics: figures.ShadowMetrics) -> None:
        self.config = config.shadow
        self.pending: collections.deque[ShadowSample] = collections.deque()
        """Samples that wait. The oldest are compared first, and dropped first."""
        self.window: collections.deque[figures.Comparison] = collections.deque(maxlen=WINDOW)
        self.compared = 0
        self._worst: list[dict[str, Any]] = []  # requests with texts that differ, as JSON has them
        self._drift = figures.DriftCusum(self.config.baseline)
        self._max_bytes, self._bytes = MAX_PENDING_MB * _MIB, 0  # of pending samples
        self._numbers = itertools.count(1)  # of samples' files
        self._engines = engines
        self._metrics = metrics
        self._chance = random.Random(_SEED)
        self._uncounted = Admission(config.server)  # which counts no client's request
        self._busy_s = 0.0  # when a request was in flight last
        metrics.pending.set_function(lambda: len(self.pending))
        metrics.pending_bytes.set_function(lambda: self._bytes)

    def start(self) -> None:
        """Begin, if any request is to be sampled."""
        if self.config.share:
            super().start()

    def watching(self, request: EngineRequest) -> Callable[[Transcript], None] | None:
        """Return a function that takes the request's answer, if the request becomes a sample."""
        if request.streamed or self._chance.random() >= self.config.share:
            return None
        return lambda served: self._add(request, served)

    def findings(self) -> dict[str, Any]:
        """Return the figures and the worst texts, as JSON has them."""
        by_language: dict[str, list[figures.Comparison]] = {}
        for comparison in self.window:
            by_language.setdefault(comparison.language, []).append(comparison)
        return {
            "object": "shadow",
            "share": self.config.share,
            "compared": self.compared,
            "pending": len(self.pending),
            "cer": _rate(self.window),
            "cer_by_language": {name: _rate(by_language[name]) for name in sorted(by_language)},
            "drift": round(self._drift.value, _DIGITS),
            "drift_bound": figures.BOUND,
            "baseline": dataclasses.asdict(self.config.baseline),
            "gaps": dataclasses.asdict(figures.baseline_of(self.window)),
            "worst": self._worst,
        }

    def _add(self, request: EngineRequest, served: Transcript) -> None:
        """Add a sample, if there is room for it."""
        self._metrics.sampled.inc()
        size = sum(map(len, request.parts)) + _SAMPLE_BYTES + _CHARACTER_BYTES * len(served.text)
        link = None
        try:
            if request.audio_file:
                size += os.stat(request.audio_file).st_size
            if size > self._max_bytes:
                self._metrics.dropped.inc()
                return
            if request.audio_file:
                link = str(self._engines.uploads / f"shadow-{next(self._numbers)}")
                os.link(request.audio_file, link)
        except OSError as error:
            logger.error("a sample's file cannot be kept: %s", error)
            self._metrics.dropped.inc()
            return
        kept = dataclasses.replace(request, parts=[b"".join(request.parts)], audio_file=link)
        self._put(ShadowSample(kept, figures.scored(served), size))

    def _put(self, sample: ShadowSample) -> None:
        """Append a sample, and drop the oldest ones while the queue is too large."""
        self.pending.append(sample)
        self._bytes += sample.size
        while self._bytes > self._max_bytes:
            self._take().remove()
            self._metrics.dropped.inc()

    def _take(self) -> ShadowSample:
        sample = self.pending.popleft()
        self._bytes -= sample.size
        return sample

    async def _run(self) -> None:
        while True:
            await self._idle()
            sample = self._take()
            try:
                await self._compare(sample)
            except _ClientCameError:
                self._metrics.requeued.inc()
                self._put(sample)
                continue
            except ApiError as error:
                away = isinstance(error.error, UnavailableError | OverloadedError)
                if away and sample.lost < _MAX_LOST:
                    self._put(sample)
                    await asyncio.sleep(AWAY_S)
                    continue
                logger.warning("the reference has not answered: %s", error)
                self._metrics.failed.inc()
            except Exception:  # one sample must not end the monitor
                logger.exception("a sample could not be compared")
                self._metrics.failed.inc()
            sample.remove()

    async def _idle(self) -> None:
        """Return when a sample waits, and nothing has been in flight for long enough."""
        clock = asyncio.get_running_loop().time
        while True:
            if self._engines.started.is_set() or self._engines.calls:
                self._busy_s = clock()
                self._engines.started.clear()
            elif self.pending and clock() >= self._busy_s + IDLE_S:
                return
            await asyncio.sleep(LOOK_S)

    async def _compare(self, sample: ShadowSample) -> None:
        """Compare an answer with the reference's, and add the figures to the window's."""
        reference = figures.scored(await self._answer(sample))
        comparison = await asyncio.to_thread(figures.compare, sample.served, reference)
        metrics, window, language = self._metrics, self.window, comparison.language
        self.compared += 1
        window.append(comparison)
        metrics.compared.labels(language).inc()
        metrics.tell_cer(window, figures.ALL)
        metrics.tell_cer([case for case in window if case.language == language], language)
        previous = self._drift.value
        self._drift.add(comparison.gaps)
        metrics.drift.set(self._drift.value)
        if previous <= figures.BOUND < self._drift.value:
            logger.error(
                "the served engine has drifted from the reference: CUSUM is %.1f, above the "
                "threshold %g, after %d requests; GET /v1/shadow lists the worst ones",
                *(self._drift.value, figures.BOUND, self.compared),
            )
        cases = [case for case in self._worst if case["number"] > self.compared - WINDOW]
        if comparison.edits:
            mismatch = {
                "number": self.compared,
                "compared_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "model": sample.request.target.model,
                "cer": round(comparison.cer, _DIGITS),
                "served": sample.served.text[:_MAX_CHARS],
                "reference": reference.text[:_MAX_CHARS],
            }
            cases.append(dataclasses.asdict(comparison) | mismatch)
        self._worst = sorted(cases, key=lambda case: -case["cer"])[:_MAX_WORST]

    async def _answer(self, sample: ShadowSample) -> Transcript:
        """Ask the reference.

        Raises:
            _ClientCameError: a client's request came, which goes first.
            ApiError: there is no answer.
        """
        message, started = bytes(sample.request.parts[0]), self._engines.started
        message = await asyncio.to_thread(for_reference, message, self.config.beam_size)
        model = REFERENCE if self.config.engine else sample.request.target.model
        file = sample.request.audio_file
        request = EngineRequest(Target(model, False), [message], audio_file=file, priority="job")
        with self._uncounted.admit_unchecked(ApiKey("")) as permit:
            call = self._engines.start(request, permit)
        started.clear()  # the sample's own request has set it
        try:
            with call:
                return await unless(started.wait(), _ClientCameError, call.transcript())
        except ApiError as error:
            sample.lost += isinstance(error.error, UnavailableError)
            raise


def for_reference(message: bytes, beam_size: int) -> bytes:
    """Make the reference's request from a serialised `ModelInferRequest`; the text stays the same.

    Args:
        message: the request, without its model's name.
        beam_size: the reference's beam; 0: the request's.
    """
    request = service_pb2.ModelInferRequest.FromString(message)
    del request.outputs[:]
    not_asked = _NOT_ASKED if beam_size else _NOT_ASKED - {_BEAM}
    raw = len(request.raw_input_contents) > 0
    for index in reversed(range(len(request.inputs))):
        if request.inputs[index].name in not_asked:
            del request.inputs[index]
            if raw:
                del request.raw_input_contents[index]
    if beam_size:
        number = request.inputs.add(name=_BEAM, datatype=INPUTS[_BEAM].datatype, shape=[1])
        if raw:
            request.raw_input_contents.append(beam_size.to_bytes(LENGTH.size, "little"))
        else:
            number.contents.int_contents.append(beam_size)
    return bytes(request.SerializeToString())


def _rate(comparisons: Sequence[figures.Comparison]) -> dict[str, float] | None:
    rate = figures.pooled_cer(comparisons)
    return {name: round(value, _DIGITS) for name, value in rate.items()} or None
