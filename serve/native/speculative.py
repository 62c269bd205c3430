"""Speculative decoding: a small decoder drafts a few tokens per window, one step verifies them.

Speculative decoding (Leviathan et al., 2023) for rows that decode greedily. One step of the network
computes the last known token and the draft of each row. The token rules then choose position by
position and stop after the first choice that differs from the draft, so the text is that of single
steps. Whether this is faster depends on the network, the machine and the number of windows:
`SpeculationPolicy` times both modes and keeps the faster one.
"""

import dataclasses
import logging
from collections.abc import Sequence

import torch

from serve.contract.config import RuntimeConfig
from serve.native.batching import TokenSpan, prefill_batch, upload
from serve.native.graphs import EagerLoop, GraphLoop, Snapshot
from serve.native.resources import RuntimeResources
from serve.native.slots import SlotAllocation, SlotPool
from serve.native.speculative_step import SpeculativeStep
from serve.native.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

Owners = Sequence[tuple[SlotAllocation, int]]  # (allocation, job id)
TRIAL_STEPS = 16  # steps in which each mode is measured
KEEP_STEPS = 1000  # steps for which the faster mode is then kept
_STEPS_PER_SYNC = 4  # with CUDA graphs: decoder steps between two reads of the rows' state


@dataclasses.dataclass
class _Trial:
    """The trial of both modes for one class of batch sizes, and its result.

    The keys of `seconds` and `tokens` are whether steps use a draft; tokens are those of an average
    row.
    """

    steps: int = 0  # steps since the trial began
    drafting: bool = True
    seconds: dict[bool, float] = dataclasses.field(default_factory=lambda: {True: 0, False: 0})
    tokens: dict[bool, float] = dataclasses.field(default_factory=lambda: {True: 0, False: 0})

    def ms_per_token(self, drafting: bool) -> float:
        return 1e3 * self.seconds[drafting] / max(self.tokens[drafting], 1e-9)


class SpeculationPolicy:
    """A policy that measures which mode is faster, for 1, 2 to 3, 4 to 7, … busy windows each.

    A trial runs `TRIAL_STEPS` steps in each mode. The mode with fewer seconds per token then stays
    for `KEEP_STEPS` steps, and the next trial begins.
    """

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def should_draft(self, busy: int) -> bool:
        """Return whether the next step of `busy` windows should use a draft."""
        return self._trial_of(busy).drafting

    def record(self, busy: int, seconds: float, tokens: float) -> None:
        """Record the seconds of a step and its mean number of new tokens per row."""
        trial = self._trial_of(busy)
        trial.steps += 1
        if trial.steps <= 2 * TRIAL_STEPS:
            trial.seconds[trial.drafting] += seconds
            trial.tokens[trial.drafting] += tokens
            trial.drafting = trial.steps < TRIAL_STEPS
        if trial.steps == 2 * TRIAL_STEPS:
            drafted_ms, plain_ms = trial.ms_per_token(True), trial.ms_per_token(False)
            trial.drafting = drafted_ms < plain_ms
            logger.info(
                "speculative decoding is %s for about %d windows: %.2f ms a token with it, %.2f "
                "without; the next measurement follows after %d steps",
                "on" if trial.drafting else "off",
                *(busy, drafted_ms, plain_ms, KEEP_STEPS),
            )
        if trial.steps == 2 * TRIAL_STEPS + KEEP_STEPS:
            del self._trials[busy.bit_length()]

    def _trial_of(self, busy: int) -> _Trial:
        return self._trials.setdefault(busy.bit_length(), _Trial())


class SpeculativeLoop(EagerLoop):
    """A loop whose steps use a draft if that is faster, and are those of the eager loop otherwise.

    Steps use a draft only if every row decodes greedily and is alone in its slot.

    Args:
        resources: the network, its caches and its token rules.
        max_draft: the maximum number of draft tokens of a step.
    """

    def __init__(self, resources: RuntimeResources, max_draft: int) -> None:
        super().__init__(resources)
        assert resources.draft is not None, "the engine has no draft decoder"
        self._decoder, self._draft_cache = resources.draft
        self._step = SpeculativeStep(resources, max_draft)
        self._policy = SpeculationPolicy()
        # By first row: the job id, and how many of its positions are in the draft decoder's cache.
        self._cached: dict[int, tuple[int, int]] = {}

    def launch(self, slots: SlotPool) -> int:
        owners = slots.owners()
        rows = [allocation.first_row for allocation, _ in owners]
        if slots.has_multi_row_jobs or bool((self._state.temperature[rows] > 0).any()):
            return super().launch(slots)
        stopwatch, tokens = Stopwatch(self._network.device), 1.0
        if self._policy.should_draft(len(owners)):
            tokens = self._speculative_step(owners, rows)
        else:
            super().launch(slots)
        stopwatch.stop()
        self._policy.record(len(owners), stopwatch.seconds(), tokens)
        return 1

    def _speculative_step(self, owners: Owners, rows: list[int]) -> float:
        """Draft, verify and choose; return the number of new tokens of an average row."""
        count = self._step.count
        begins: list[int] = self._state.position[rows].tolist()
        room = (self._state.limit[rows] - self._state.position[rows] - 2).clamp(0, count)
        self._catch_up(owners, begins)
        slots = [allocation.slot for allocation, _ in owners]
        columns = [slots, range(len(rows)), [1] * len(rows)]
        empty = [0] * (len(rows) % 2)  # an even width, or a GPU's kernels would be compiled again
        length = min(max(begins) + count + 1, self._state.tokens.shape[1])
        table = torch.tensor([[*column, *empty] for column in columns], device=self._network.device)
        self._step.run(self._step.layout_of(rows), table, length)
        ends: list[int] = self._state.position[rows].tolist()
        # If all draft tokens are accepted, the draft decoder has not computed the last one.
        for (allocation, job_id), begin, end in zip(owners, begins, ends, strict=True):
            self._cached[allocation.first_row] = job_id, min(end, begin + count)
        self._snapshot = Snapshot(self._state, list(owners))
        self.drafted += int(room.sum())
        self.accepted += sum(ends) - sum(begins) - len(begins)
        return (sum(ends) - sum(begins)) / len(begins)

    def _catch_up(self, owners: Owners, positions: Sequence[int]) -> None:
        """Compute tokens, such as prompts, that the draft decoder's cache lacks.

        A step itself computes the last two known tokens.
        """
        spans = []
        for (allocation, job_id), position in zip(owners, positions, strict=True):
            owner, n_cached = self._cached.get(allocation.first_row, (job_id, 0))
            begin = n_cached if owner == job_id else 0
            if begin < position - 1:
                spans.append(TokenSpan(allocation, begin, position - 1))
        if spans:
            device = self._network.device
            batch = prefill_batch(self._state.tokens, spans, device)
            self._decoder.step(batch, self._draft_cache, upload([0], device))


def open_loop(config: RuntimeConfig, resources: RuntimeResources) -> EagerLoop:
    """Make the configured decoding loop: with or without CUDA graphs, with or without a draft."""
    drafts = resources.draft is not None
    if resources.graphs:
        step = SpeculativeStep(resources, config.draft_tokens) if drafts else None
        return GraphLoop(resources, _STEPS_PER_SYNC, config.slots, step)
    return SpeculativeLoop(resources, config.draft_tokens) if drafts else EagerLoop(resources)
