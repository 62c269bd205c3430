"""Counters and gauges of a transcriber."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Self

from serve.runtime.protocol import Gauges
from serve.transcriber.active import ActiveRequest
from serve.transcriber.dispatch import Dispatcher

Outcome = Literal["ok", "failed", "cancelled", "timed_out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """The transcriber's own counters since its start, including the warm-up."""

    accepted: int = 0  # requests accepted; each ends in one of the four outcomes
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    timed_out: int = 0
    rejected: int = 0  # requests rejected on arrival, not counted as accepted
    audio_s: float = 0.0  # seconds of audio of the requests that ended ok, before padding
    untold_s: float = 0.0  # seconds of speech in that audio without text
    busy_s: float = 0.0  # seconds of wall clock in which at least one request was pending

    @property
    def ended(self) -> int:
        """The number of requests that got their terminal event."""
        return self.ok + self.failed + self.cancelled + self.timed_out

    @property
    def rtfx(self) -> float:
        """Seconds of audio transcribed per busy second; 0 before the first."""
        return self.audio_s / self.busy_s if self.busy_s > 0 else 0.0

    def plus(self, **increments: float) -> Self:
        """Return a copy with some counters increased."""
        return dataclasses.replace(
            self, **{name: getattr(self, name) + value for name, value in increments.items()}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats(Counters):
    """A snapshot of a transcriber's counters and gauges; `accepted == ended + pending`."""

    pending: int  # requests accepted and not yet ended
    queued: int  # pending requests without a window in a slot so far
    windows: int  # windows submitted to the runtime for the first time
    retries: int  # windows submitted again, nearly always at a higher temperature
    loops: int  # windows ended because their text repeated itself
    tokens: int  # tokens sampled
    busy_slots: int
    mean_batch: float  # mean number of slots in use per decoder step; 0 before the first
    encode_s: float  # seconds of wall clock that the runtime spent encoding
    decode_s: float  # seconds of wall clock that the runtime spent decoding
    drafted: int  # draft tokens proposed by the engine's draft decoder
    drafted_right: int  # accepted draft tokens


def stats_of(
    counters: Counters, pending: Sequence[ActiveRequest], dispatcher: Dispatcher, gauges: Gauges
) -> Stats:
    """Collect a snapshot from the counters of the tracker, the dispatcher and the runtime."""
    return Stats(
        **dataclasses.asdict(counters),
        pending=len(pending),
        queued=sum(active.started_s is None for active in pending),
        windows=dispatcher.windows,
        retries=dispatcher.retries,
        loops=dispatcher.loops,
        tokens=gauges.tokens,
        busy_slots=gauges.busy_slots,
        mean_batch=gauges.step_slots / gauges.steps if gauges.steps else 0.0,
        encode_s=gauges.encode_s,
        decode_s=gauges.decode_s,
        drafted=gauges.drafted,
        drafted_right=gauges.drafted_right,
    )
