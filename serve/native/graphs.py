"""The steps of the decoder: one by one, or replayed from CUDA graphs.

A CUDA graph is captured once per bucket (a number of rows) when the runtime starts, all slots being
free then. Replayed steps need no answer from the host: the device itself knows which
rows have finished. So several are launched at a time, and what they did is read only after
the next ones are launched; `SlotLoop.read_snapshot` hides the difference.
"""

import collections
import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Protocol

import torch

from serve.contract.fields import MAX_BEAMS
from serve.native.feeds import feed_of, one_token_each, upload
from serve.native.kernels.feed import Feed, Groups
from serve.native.parts import Parts
from serve.native.replay import Replay
from serve.native.rules.state import Picks, RowState, new_state
from serve.native.slots import Place, Slots
from serve.native.turns import DraftTurns

_FEW_SLOTS = 2  # up to so many slots, the next request gains more than launches cost
_FEWEST_BEAMS = 2  # of a window that searches
_LAUNCH_BYTES = 4 << 30  # of cross-attention's keys and values; an H200 reads them in 1.5 to 2 ms
SPANS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The rows as they were after some steps, for the host to read."""

    state: RowState
    owners: Sequence[tuple[Place, int]]  # (place, job id) at that time


class SlotLoop(Protocol):
    """Advances the slots and tells what became of them."""

    replay: Replay  # of all that is recorded, if anything is
    drafted: int  # guesses so far
    right: int  # those that were what the rules chose

    def launch(self, slots: Slots) -> int:
        """Advance every busy slot; return by how many steps at most."""
        ...

    def read_snapshot(self) -> Snapshot | None:
        """Return the newest snapshot that can be had without letting the device idle, if any."""
        ...

    def discard_launched(self) -> None:
        """Drop every snapshot not yet read: no job is left that it could tell of."""
        ...


class EagerLoop:
    """One step at a time, in plain sight.

    Args:
        parts: what the windows are decoded with.
    """

    def __init__(self, parts: Parts) -> None:
        self._network = parts.network
        self._cache = parts.cache
        self._state = parts.state
        self._advance = parts.advance
        self.replay = Replay()
        self.drafted = self.right = 0
        self._snapshot: Snapshot | None = None
        self._version = -1  # of the owners that these are for
        self._groups: Groups
        self._picks: Picks

    def launch(self, slots: Slots) -> int:
        """See `SlotLoop.launch`."""
        owners = slots.owners()
        if slots.version != self._version:
            self._version = slots.version
            rows, self._groups = one_token_each([place for place, _ in owners], self._cache.device)
            self._picks = Picks(rows, torch.arange(len(rows), device=rows.device))
        rows = self._picks.rows
        length = int(self._state.position[rows].max()) + 1
        feed = feed_of(self._state, rows, self._groups, length)
        logits = self._network.step(feed, self._cache)
        self._advance(self._state, self._picks, logits)
        self._snapshot = Snapshot(self._state, owners)
        return 1

    def read_snapshot(self) -> Snapshot | None:
        """See `SlotLoop.read_snapshot`."""
        snapshot, self._snapshot = self._snapshot, None
        return snapshot

    def discard_launched(self) -> None:
        """See `SlotLoop.discard_launched`."""
        self._snapshot = None


class _Kind(enum.Enum):
    """Properties that the windows of a step share; the fewer kernels look things up for it."""

    DIRECT = "row i is slot i: no window may ever have several rows"
    SINGLE = "one row each"
    SEVERAL = "one row or several, which search and share slots"


class GraphLoop:
    """Several steps at a time, replayed from CUDA graphs; the host reads one launch behind.

    There is a graph for every bucket of rows and kind of company, see `_Kind`.

    Args:
        parts: what the windows are decoded with; all rows are free.
        steps: per launch.
        slots: how many there are.
        turns: what rows that do not search take in place of single steps, if there is a draft.
    """

    def __init__(
        self, parts: Parts, steps: int, slots: int, turns: DraftTurns | None = None
    ) -> None:
        self._network = parts.network
        self._cache = parts.cache
        self._state = parts.state
        self._advances = parts.advances
        self._steps = steps
        self._device = parts.cache.device
        rows, n_text_ctx = parts.state.tokens.shape
        # Of each busy slot: itself, its first row and how many it has; the rest of it zeros.
        self._table = torch.zeros((3, slots), dtype=torch.int64, device=self._device)
        self._rows = torch.arange(rows, device=self._device)  # to make it costs a kernel a step
        self._version = -1  # of the owners in the table
        self._slot_bytes = parts.cache.cross.nbytes // slots
        self._turns = turns
        self.drafted = self.right = 0
        self._seen: dict[int, int] = {}  # by job: its position when it was last looked at
        self._spans: dict[_Kind, list[int]] = {}  # the rows that graphs are of, fewest first
        self.replay = Replay()
        kinds = {_Kind.SEVERAL: rows, _Kind.SINGLE: slots}
        for kind, most in ({_Kind.DIRECT: slots} if rows == slots else kinds).items():
            self._spans[kind] = [span for span in SPANS if span < most] + [most]
            for span in reversed(self._spans[kind]):
                work = functools.partial(self._take_steps, kind, span)
                launch = functools.partial(work, self._steps_of(span, kind))
                self.replay.add((kind, span), launch, rehearsal=functools.partial(work, 1))
        # Three: one being copied into, one being read, one between them.
        mirror = new_state(rows, n_text_ctx, torch.device("cpu"))
        self._mirrors = collections.deque(mirror.pinned() for _ in "123")
        # Of each launch: when it was copied, whether it was a drafted turn, and what it left.
        launched: collections.deque[tuple[torch.cuda.Event, bool, Snapshot]] = collections.deque()
        self._launched = launched

    def _take_steps(self, kind: _Kind, span: int, steps: int) -> None:
        """Let the first rows take some steps, or as many drafted turns."""
        for _ in range(steps):
            if self._turns is not None and self._drafts(kind):
                self._turns.take(self._table, span)
                continue
            feed = self._feed(span, kind)
            logits = self._network.step(feed, self._cache)
            advance = self._advances[kind is _Kind.SEVERAL]
            advance(self._state, Picks(feed.rows, feed.rows), logits)

    def _feed(self, span: int, kind: _Kind) -> Feed:
        """Feed the first rows' next tokens, by views of what changes between replays."""
        state = self._state
        slots, first, count = self._table[:, :span]
        groups = Groups(
            slots=slots,
            first=first,
            count=count,
            most=MAX_BEAMS if kind is _Kind.SEVERAL else 1,
            direct=kind is _Kind.DIRECT,
        )
        source = state.source if kind is _Kind.SEVERAL else None
        length = state.tokens.shape[1]
        return Feed(
            state.tokens, self._rows[:span], state.position[:span], groups, source, False, length
        )

    def discard_launched(self) -> None:
        """See `SlotLoop.discard_launched`."""
        self._launched.clear()

    def launch(self, slots: Slots) -> int:
        """See `SlotLoop.launch`."""
        self._update_table(slots)
        span = slots.span
        kind = self._kind_of(slots)
        bucket = next(size for size in self._spans[kind] if size >= span)
        self.replay.launch((kind, bucket))
        mirror = self._mirrors[0]
        self._mirrors.rotate(-1)
        mirror.follow(self._state, span, searched=kind is _Kind.SEVERAL)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._launched.append((copied, self._drafts(kind), Snapshot(mirror, slots.owners())))
        return self._steps_of(bucket, kind)

    def _kind_of(self, slots: Slots) -> _Kind:
        if slots.rows == slots.slots:
            return _Kind.DIRECT
        single = slots.span <= slots.slots and not slots.several
        return _Kind.SINGLE if single else _Kind.SEVERAL

    def _update_table(self, slots: Slots) -> None:
        """Tell the device who owns which rows now."""
        if slots.version == self._version:
            return
        self._version = slots.version
        columns = [(p.slot, p.first_row, p.count) for p, _ in slots.owners()]
        columns += [(0, 0, 0)] * (slots.slots - len(columns))
        table = upload(
            [number for row in zip(*columns, strict=True) for number in row], self._device
        )
        self._table.copy_(table.view_as(self._table))

    def _steps_of(self, span: int, kind: _Kind) -> int:
        """Count the steps of a launch that lets the host prepare the next; one turn with guesses.

        Steps beyond a window's end cost the next window time. With few slots, which are seldom all
        busy, that is worse than a launch for every step.
        """
        several = kind is _Kind.SEVERAL
        few = _FEW_SLOTS * MAX_BEAMS if several else _FEW_SLOTS
        slots = max(1, span // _FEWEST_BEAMS if several else span)
        enough = math.ceil(_LAUNCH_BYTES / (slots * self._slot_bytes))
        return 1 if span <= few or self._drafts(kind) else min(self._steps, enough)

    def _drafts(self, kind: _Kind) -> bool:
        """Tell whether such windows take drafted turns."""
        return self._turns is not None and kind is not _Kind.SEVERAL

    def read_snapshot(self) -> Snapshot | None:
        """See `SlotLoop.read_snapshot`."""
        if len(self._launched) < 2:
            return None
        copied, drafted, snapshot = self._launched.popleft()
        copied.synchronize()
        if self._turns is not None:
            self._count_guesses(self._turns.count, drafted, snapshot)
        return snapshot

    def _count_guesses(self, most: int, drafted: bool, snapshot: Snapshot) -> None:
        """Note how many guesses of a turn were right, of windows that are seen again and go on."""
        position, finished = snapshot.state.position.tolist(), snapshot.state.finished.tolist()
        now = {job: position[place.first_row] for place, job in snapshot.owners}
        for place, job in snapshot.owners:
            if drafted and job in self._seen and not finished[place.first_row]:
                self.drafted += most
                self.right += now[job] - self._seen[job] - 1
        self._seen = now
