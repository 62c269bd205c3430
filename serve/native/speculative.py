"""Speculative decoding: a small decoder drafts a few tokens per window, one step verifies them.

Speculative decoding (Leviathan et al., 2023) for rows that decode greedily. One step of the network
computes the last known token and the draft of each row. The token rules then choose position by
position and stop after the first choice that differs from the draft, so the text is that of single
steps. Whether this is faster depends on the network, the machine and the number of windows:
`SpeculationPolicy` times both modes and keeps the faster one. `speculative_graph` does the same in
CUDA graphs, without the host.
"""

import dataclasses
import itertools
import logging
from collections.abc import Sequence

import torch

from serve.contract.config import RuntimeConfig
from serve.native.batching import TokenSpan, decode_batch, one_token_each, prefill_batch, upload
from serve.native.decoder import Cache, Decoder
from serve.native.graphs import EagerLoop, GraphLoop, Snapshot
from serve.native.resources import RuntimeResources
from serve.native.rules.choose import DraftSampler
from serve.native.rules.state import Picks, RowState
from serve.native.slots import SlotAllocation, SlotPool
from serve.native.speculative_graph import SpeculativeStep
from serve.native.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

Owners = Sequence[tuple[SlotAllocation, int]]  # (allocation, job id)
TRIAL = 16  # steps in which each mode is measured
HOLD = 1000  # steps for which the faster mode is then kept
_STEPS_PER_SYNC = 4  # with CUDA graphs: decoder steps between two reads of the rows' state


class DraftProposer:
    """Proposes tokens with the draft decoder.

    Args:
        decoder, cache: the draft decoder, and its caches for every slot and row.
        guess: the sampler that writes the draft decoder's likeliest tokens.
    """

    def __init__(self, decoder: Decoder, cache: Cache, guess: DraftSampler) -> None:
        self.decoder = decoder
        self.cache = cache
        self._guess = guess
        # By first row: the job id, and how many positions of the job are in the cache.
        self._known: dict[int, tuple[int, int]] = {}

    def guess(self, state: RowState, owners: Owners, positions: Sequence[int], count: int) -> None:
        """Write `count` draft tokens after the next token, at `positions`, of every job's row.

        The first step also computes the job's tokens that are not in the draft decoder's cache yet,
        such as its prompt.
        """
        device = self.decoder.device
        spans = [
            TokenSpan(place, min(self._known_of(place, job_id), at), at + 1)
            for (place, job_id), at in zip(owners, positions, strict=True)
        ]
        ends = list(itertools.accumulate(map(len, spans)))
        batch = prefill_batch(state.tokens, spans, device)
        logits = self.decoder.step(batch, self.cache, upload([end - 1 for end in ends], device))
        rows, groups = one_token_each([place for place, _ in owners], device)
        at = upload(positions, device)
        for step in range(1, count + 1):
            self._guess(state, rows, logits, step)
            if step < count:
                batch = decode_batch(state, rows, groups, max(positions) + step + 1)
                batch = dataclasses.replace(batch, positions=at + step)
                logits = self.decoder.step(batch, self.cache)

        for (place, job_id), position in zip(owners, positions, strict=True):
            self._known[place.first_row] = job_id, position + count

    def keep(self, owners: Owners, positions: Sequence[int]) -> None:
        """Forget the cache beyond each job's new position, which holds rejected draft tokens."""
        for (place, job_id), position in zip(owners, positions, strict=True):
            known = min(self._known_of(place, job_id), position)
            self._known[place.first_row] = job_id, known

    def _known_of(self, place: SlotAllocation, job_id: int) -> int:
        """Return the number of a job's positions that are in the cache."""
        owner, known = self._known.get(place.first_row, (job_id, 0))
        return known if owner == job_id else 0


@dataclasses.dataclass
class _ModeTiming:
    """The time of one mode of decoding in the current or the last trial."""

    seconds: float = 0.0
    tokens: float = 0.0  # tokens of an average row

    @property
    def ms_a_token(self) -> float:
        return 1e3 * self.seconds / max(self.tokens, 1e-9)


@dataclasses.dataclass
class _Trial:
    """The trial of both modes for one class of batch sizes, and its result."""

    steps: int = 0  # steps since the trial began
    drafting: bool = True
    drafted: _ModeTiming = dataclasses.field(default_factory=_ModeTiming)
    plain: _ModeTiming = dataclasses.field(default_factory=_ModeTiming)


class SpeculationPolicy:
    """Measures which mode is faster, separately for 1, 2 to 3, 4 to 7, … busy windows.

    A trial runs `TRIAL` steps in each mode. The mode with fewer seconds per token then stays for
    `HOLD` steps, and the next trial begins.
    """

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def should_draft(self, busy: int) -> bool:
        """Return whether the next step of `busy` windows should use a draft."""
        return self._trial_of(busy).drafting

    def note(self, busy: int, seconds: float, tokens: float) -> None:
        """Record the seconds of a step and its mean number of new tokens per row."""
        trial = self._trial_of(busy)
        trial.steps += 1
        if trial.steps <= 2 * TRIAL:
            timing = trial.drafted if trial.drafting else trial.plain
            timing.seconds += seconds
            timing.tokens += tokens
            trial.drafting = trial.steps < TRIAL
        if trial.steps == 2 * TRIAL:
            trial.drafting = trial.drafted.ms_a_token < trial.plain.ms_a_token
            logger.info(
                "speculative decoding is %s for about %d windows: %.2f ms a token with it, %.2f "
                "without; the next measurement follows after %d steps",
                "on" if trial.drafting else "off",
                busy,
                trial.drafted.ms_a_token,
                trial.plain.ms_a_token,
                HOLD,
            )
        if trial.steps == 2 * TRIAL + HOLD:
            del self._trials[busy.bit_length()]

    def _trial_of(self, busy: int) -> _Trial:
        return self._trials.setdefault(busy.bit_length(), _Trial())


class SpeculativeLoop(EagerLoop):
    """Steps with a draft where that is faster, and steps of the eager loop otherwise.

    Steps use a draft only if every row decodes greedily and is alone in its slot.

    Args:
        parts: the network, its caches and its samplers.
        max_draft: the maximum number of draft tokens of a step.
    """

    def __init__(self, parts: RuntimeResources, max_draft: int) -> None:
        assert parts.draft is not None, "the engine has no draft decoder"
        super().__init__(parts)
        self._rules = parts.rules
        self._proposer = DraftProposer(*parts.draft, parts.guess)
        self._max_draft = max_draft
        self._policy = SpeculationPolicy()

    def launch(self, slots: SlotPool) -> int:
        owners = slots.owners()
        count = self._draft_length(slots, owners)
        if count < 1:
            return super().launch(slots)
        stopwatch, tokens = Stopwatch(self._network.device), 1.0
        if self._policy.should_draft(len(owners)):
            tokens = self._speculative_step(owners, count)
        else:
            super().launch(slots)
        stopwatch.stop()
        self._policy.note(len(owners), stopwatch.seconds(), tokens)
        return 1

    def _draft_length(self, slots: SlotPool, owners: Owners) -> int:
        """Return the draft length that every row allows; 0 if any row cannot use a draft.

        A step chooses one token more than it drafts, and no sequence may exceed its limit.
        """
        if slots.several:
            return 0
        rows = [place.first_row for place, _ in owners]
        if bool((self._state.temperature[rows] > 0).any()):
            return 0
        room = int((self._state.limit[rows] - self._state.position[rows]).min()) - 2
        return min(self._max_draft, room)

    def _speculative_step(self, owners: Owners, count: int) -> float:
        """Draft, verify and choose; return the number of new tokens of an average row."""
        device = self._network.device
        rows = upload([place.first_row for place, _ in owners], device)
        before: list[int] = self._state.position[rows].tolist()
        self._proposer.guess(self._state, owners, before, count)
        spans = [
            TokenSpan(place, at, at + count + 1)
            for (place, _), at in zip(owners, before, strict=True)
        ]
        batch = prefill_batch(self._state.tokens, spans, device)
        logits = self._network.step(batch, self._cache)
        self._rules.begin_draft(self._state, rows)
        lines = torch.arange(len(rows), device=device) * (count + 1)
        for step in range(count + 1):
            self._advance(self._state, Picks(rows, lines + step), logits, drafted=True)
            if not bool((self._state.trusted & ~self._state.finished)[rows].any()):
                break
        after: list[int] = self._state.position[rows].tolist()
        self._proposer.keep(owners, after)
        self._snapshot = Snapshot(self._state, list(owners))
        self.drafted += count * len(before)
        self.right += sum(after) - sum(before) - len(before)
        return (sum(after) - sum(before)) / len(before)


def open_loop(config: RuntimeConfig, parts: RuntimeResources) -> EagerLoop:
    """Make the configured decoding loop: with or without CUDA graphs, with or without a draft."""
    drafts = parts.draft is not None
    if parts.graphs:
        step = SpeculativeStep(parts, config.draft_tokens) if drafts else None
        return GraphLoop(parts, _STEPS_PER_SYNC, config.slots, step)
    return SpeculativeLoop(parts, config.draft_tokens) if drafts else EagerLoop(parts)
