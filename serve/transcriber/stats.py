"""A transcriber's work so far, as numbers for metrics and reports."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Self

from serve.runtime.protocol import Gauges
from serve.transcriber.active import ActiveRequest
from serve.transcriber.dispatch import Dispatcher

Outcome = Literal["ok", "failed", "cancelled", "timed_out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """The counters of a transcriber's own, since its start, the warm-up included."""

    accepted: int = 0  # requests taken in; each ends in one of the four outcomes
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    timed_out: int = 0
    rejected: int = 0  # requests refused at once; not among the accepted
    audio_s: float = 0.0  # seconds of audio of the requests that ended ok, before padding
    untold_s: float = 0.0  # seconds of voice in it, of which no text came
    busy_s: float = 0.0  # seconds of wall clock in which at least one request was pending

    @property
    def ended(self) -> int:
        """Requests that got their terminal event."""
        return self.ok + self.failed + self.cancelled + self.timed_out

    @property
    def rtfx(self) -> float:
        """Seconds of audio answered for each busy second; 0 before the first."""
        return self.audio_s / self.busy_s if self.busy_s > 0 else 0.0

    def plus(self, **increments: float) -> Self:
        """Return a copy with some counters increased."""
        return dataclasses.replace(
            self, **{name: getattr(self, name) + value for name, value in increments.items()}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats(Counters):
    """One moment of a transcriber; `accepted == ended + pending`."""

    pending: int  # requests accepted and not yet ended
    queued: int  # of these, not yet started: no window of theirs has a slot
    windows: int  # windows submitted to the runtime for the first time
    retries: int  # windows submitted again, nearly always at a higher temperature
    loops: int  # windows ended because their text repeated itself
    tokens: int  # tokens sampled
    busy_slots: int
    mean_batch: float  # slots in use in an average decoder step; 0 before the first
    encode_s: float  # seconds of wall clock that the runtime spent encoding
    decode_s: float  # and decoding
    drafted: int  # tokens guessed by the engine's second decoder
    drafted_right: int  # of these, that saved a step


def stats_of(
    counters: Counters, pending: Sequence[ActiveRequest], dispatcher: Dispatcher, gauges: Gauges
) -> Stats:
    """Put together a moment's numbers out of what the transcriber's parts count."""
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
