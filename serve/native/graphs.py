"""Run decoder steps, one by one or by replaying CUDA graphs.

CUDA graphs are captured when the runtime starts, while all slots are free. The device tracks which
rows have finished, so replayed steps need nothing from the host. The host launches several steps at
a time, and reads their results after the next launch.
"""

import collections
import dataclasses
import enum
import functools
import math
from collections.abc import Sequence

import torch

from serve.contract.fields import MAX_BEAMS
from serve.native.batching import decode_groups, overwrite
from serve.native.kernels.step_batch import SlotGroups, StepBatch
from serve.native.replay import GraphCache
from serve.native.resources import RuntimeResources
from serve.native.rules.state import Picks, RowState, new_state
from serve.native.slots import SlotAllocation, SlotPool
from serve.native.speculative_step import SpeculativeStep, StepLayout

_FEW_SLOTS = 2  # a launch for so few slots has as many steps as this number of layers:
_FEW_SLOTS_LAYERS = 16
_MIN_BEAMS = 2  # the minimum number of rows of a beam search
# A launch has enough steps for this many bytes of cross-attention keys and values: an H200 reads
# them in 1.5 to 2 ms, in which the host prepares the next launch.
_LAUNCH_BYTES = 4 << 30
# Numbers of rows that have graphs.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of the rows after some steps, for the host to read."""

    state: RowState
    owners: Sequence[tuple[SlotAllocation, int]]  # (allocation, job id) at that time


class EagerLoop:
    """Advances the slots and reports their state; runs one step at a time, without CUDA graphs.

    Args:
        resources: the network, its caches and its token rules.
    """

    def __init__(self, resources: RuntimeResources) -> None:
        self._network = resources.network
        self._cache = resources.cache
        self._state = resources.state
        self._rules = resources.rules
        self.replay = GraphCache()
        """The recorded graphs, if there are any."""
        self.drafted = self.accepted = 0
        """The number of draft tokens so far, and of accepted ones."""
        self._snapshot: Snapshot | None = None
        self._version = -1  # the version of the slots' owners that the tensors of a step belong to
        self._groups: SlotGroups
        self._picks: Picks

    def launch(self, slots: SlotPool) -> int:
        """Advance every busy slot; return the number of steps."""
        owners = slots.owners()
        if slots.version != self._version:
            self._version = slots.version
            allocations = [allocation for allocation, _ in owners]
            rows, self._groups = decode_groups(allocations, self._cache.device)
            self._picks = Picks(rows, torch.arange(len(rows), device=rows.device))
        rows, state = self._picks.rows, self._state
        positions = state.position[rows]
        source = state.source if self._groups.max_count > 1 else None
        length = int(positions.max()) + 1
        batch = StepBatch(state.tokens, rows, positions, self._groups, source, False, length)
        logits = self._network.step(batch, self._cache)
        self._rules.advance(self._state, self._picks, logits)
        self._snapshot = Snapshot(self._state, owners)
        return 1

    def read_snapshot(self) -> Snapshot | None:
        """Return the next snapshot; None if reading one would leave the device without work."""
        snapshot, self._snapshot = self._snapshot, None
        return snapshot

    def discard_launched(self) -> None:
        """Drop every unread snapshot, since no job is left."""
        self._snapshot = None


class _StepVariant(enum.Enum):
    """The variants of steps that have their own graphs; the first two need fewer lookups."""

    DIRECT = "row i belongs to slot i, because no window may ever have several rows"
    SINGLE = "every window has one row"
    SEVERAL = "windows may have several rows, which share a slot in a beam search"


class GraphLoop(EagerLoop):
    """A loop that replays several steps per launch from CUDA graphs.

    The host reads a launch's results after the next launch. There is a graph for every number of
    rows in `BUCKETS` and every `_StepVariant`.

    Args:
        resources: the network, its caches and its token rules; all rows are free.
        steps: the number of steps per launch.
        slots: the number of slots.
        speculative_step: the step with a draft for rows without a beam search; None: no draft
            decoder.
    """

    def __init__(
        self,
        resources: RuntimeResources,
        steps: int,
        slots: int,
        speculative_step: SpeculativeStep | None = None,
    ) -> None:
        super().__init__(resources)
        self._steps = steps
        self._device = resources.cache.device
        rows, n_text_ctx = resources.state.tokens.shape
        # For each busy slot its index, its first row and its number of rows; zeros after these.
        self._table = torch.zeros((3, slots), dtype=torch.int64, device=self._device)
        self._rows = torch.arange(rows, device=self._device)  # kept, since making it is a kernel
        self._slot_bytes = resources.cache.cross.nbytes // slots
        self._speculative_step = speculative_step
        self._positions: dict[int, int] = {}  # the last known position by job
        # Numbers of rows that have a graph, in ascending order.
        self._row_counts: dict[_StepVariant, list[int]] = {}
        variants = {_StepVariant.SEVERAL: rows, _StepVariant.SINGLE: slots}
        if rows == slots:
            variants = {_StepVariant.DIRECT: slots}
        for variant, max_rows in variants.items():
            buckets = [*(n_rows for n_rows in BUCKETS if n_rows < max_rows), max_rows]
            self._row_counts[variant] = buckets
            for n_rows in reversed(buckets):
                layout = None
                if speculative_step is not None and self._uses_draft(variant):
                    layout = speculative_step.layout_of(range(n_rows))
                work = functools.partial(self._run_steps, variant, n_rows, layout)
                launch = functools.partial(work, self._steps_per_launch(n_rows, variant))
                self.replay.add((variant, n_rows), launch, rehearsal=functools.partial(work, 1))
        # Three: one is being written, one is being read, one is in between.
        host_state = new_state(rows, n_text_ctx, torch.device("cpu"))
        self._host_states = collections.deque(host_state.pinned() for _ in "123")
        # For each launch: when its copy ends, whether it used a draft, and its snapshot.
        launched: collections.deque[tuple[torch.cuda.Event, bool, Snapshot]] = collections.deque()
        self._launched = launched

    def _run_steps(
        self, variant: _StepVariant, n_rows: int, layout: StepLayout | None, steps: int
    ) -> None:
        """Run some steps of the first rows; `layout` is that of steps with a draft."""
        for _ in range(steps):
            if self._speculative_step is not None and layout is not None:
                length = self._state.tokens.shape[1]
                self._speculative_step.run(layout, self._table, length)
                continue
            batch = self._batch_of_rows(n_rows, variant)
            logits = self._network.step(batch, self._cache)
            picks = Picks(batch.rows, batch.rows, searching=variant is _StepVariant.SEVERAL)
            self._rules.advance(self._state, picks, logits)

    def _batch_of_rows(self, n_rows: int, variant: _StepVariant) -> StepBatch:
        """Make the batch of the first rows' next tokens, as views of the memory of replays."""
        state = self._state
        slots, first, count = self._table[:, :n_rows]
        groups = SlotGroups(
            slots=slots,
            first=first,
            count=count,
            max_count=MAX_BEAMS if variant is _StepVariant.SEVERAL else 1,
            direct=variant is _StepVariant.DIRECT,
        )
        source = state.source if variant is _StepVariant.SEVERAL else None
        length = state.tokens.shape[1]
        rows, positions = self._rows[:n_rows], state.position[:n_rows]
        return StepBatch(state.tokens, rows, positions, groups, source, False, length)

    def discard_launched(self) -> None:
        self._launched.clear()

    def launch(self, slots: SlotPool) -> int:
        self._update_table(slots)
        row_end = slots.row_end
        variant = self._variant_of(slots)
        n_rows = next(size for size in self._row_counts[variant] if size >= row_end)
        self.replay.launch((variant, n_rows))
        host_state = self._host_states[0]
        self._host_states.rotate(-1)
        host_state.follow(self._state, row_end, searched=variant is _StepVariant.SEVERAL)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        snapshot = Snapshot(host_state, slots.owners())
        self._launched.append((copied, self._uses_draft(variant), snapshot))
        return self._steps_per_launch(n_rows, variant)

    def _variant_of(self, slots: SlotPool) -> _StepVariant:
        if slots.rows == slots.slots:
            return _StepVariant.DIRECT
        single = slots.row_end <= slots.slots and not slots.has_multi_row_jobs
        return _StepVariant.SINGLE if single else _StepVariant.SEVERAL

    def _update_table(self, slots: SlotPool) -> None:
        """Write the owners of the rows to the device."""
        if slots.version == self._version:
            return
        self._version = slots.version
        columns = [(a.slot, a.first_row, a.count) for a, _ in slots.owners()]
        columns += [(0, 0, 0)] * (slots.slots - len(columns))
        numbers = [number for row in zip(*columns, strict=True) for number in row]
        overwrite(self._table, numbers)

    def _steps_per_launch(self, n_rows: int, variant: _StepVariant) -> int:
        """Return the number of steps of a launch.

        A launch has enough steps that the host can prepare the next launch meanwhile. With few
        slots it has at most `_FEW_SLOTS_LAYERS` layers, or one step: steps after a window's end
        delay the next window. It has one step with a draft.
        """
        several = variant is _StepVariant.SEVERAL
        if self._uses_draft(variant):
            enough = 1
        elif n_rows <= (_FEW_SLOTS * MAX_BEAMS if several else _FEW_SLOTS):
            enough = max(1, _FEW_SLOTS_LAYERS // self._network.dims.n_text_layer)
        else:
            slots = max(1, n_rows // _MIN_BEAMS if several else n_rows)
            enough = math.ceil(_LAUNCH_BYTES / (slots * self._slot_bytes))
        return min(self._steps, enough)

    def _uses_draft(self, variant: _StepVariant) -> bool:
        """Return whether windows of this variant use a draft."""
        return self._speculative_step is not None and variant is not _StepVariant.SEVERAL

    def read_snapshot(self) -> Snapshot | None:
        if len(self._launched) < 2:
            return None
        copied, drafted, snapshot = self._launched.popleft()
        copied.synchronize()
        if self._speculative_step is not None:
            self._count_accepted(self._speculative_step.count, drafted, snapshot)
        return snapshot

    def _count_accepted(self, draft_length: int, drafted: bool, snapshot: Snapshot) -> None:
        """Count the accepted draft tokens of windows that still decode."""
        position, finished = snapshot.state.position.tolist(), snapshot.state.finished.tolist()
        positions = {job: position[allocation.first_row] for allocation, job in snapshot.owners}
        for allocation, job in snapshot.owners:
            if drafted and job in self._positions and not finished[allocation.first_row]:
                self.drafted += draft_length
                self.accepted += positions[job] - self._positions[job] - 1
        self._positions = positions
