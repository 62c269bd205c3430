"""Drafting: a small decoder guesses a few tokens of every window, and one step verifies them all.

Speculative decoding (Leviathan et al., 2023), for rows that are decoded greedily: the network is
fed the last known token and the guesses of each row in one step, and the token rules choose
position by position up to the first guess that is not what they choose. So the answer is that of
single steps. Whether it is quicker depends on the network, on the machine and on how many windows
decode: `Pace` measures both ways and takes the quicker one. For CUDA graphs `turns` has the same
without the host.
"""

import dataclasses
import itertools
import logging
from collections.abc import Sequence

import torch

from serve.contract.config import RuntimeConfig
from serve.native.decoder import Cache, Decoder
from serve.native.feeds import Span, feed_of, feed_of_spans, one_token_each, upload
from serve.native.graphs import EagerLoop, GraphLoop, SlotLoop, Snapshot
from serve.native.parts import Parts
from serve.native.rules.choose import Guess
from serve.native.rules.state import Picks, RowState
from serve.native.slots import Place, Slots
from serve.native.stopwatch import Stopwatch
from serve.native.turns import DraftTurns

logger = logging.getLogger(__name__)

Owners = Sequence[tuple[Place, int]]  # (place, job id)
TRIAL = 16  # turns in which each way is measured
HOLD = 1000  # turns for which the quicker one is kept then
_STEPS_PER_SYNC = 4  # with CUDA graphs: decoder steps between two looks at what has ended


class Drafter:
    """Guesses by the second decoder.

    Args:
        decoder, cache: the second decoder, and caches of its own for every slot and row.
        guess: writes its likeliest tokens.
    """

    def __init__(self, decoder: Decoder, cache: Cache, guess: Guess) -> None:
        self.decoder = decoder
        self.cache = cache
        self._guess = guess
        # By first row: whose it is, and that positions below are in the cache.
        self._known: dict[int, tuple[int, int]] = {}

    def guess(self, state: RowState, owners: Owners, positions: Sequence[int], count: int) -> None:
        """Write `count` guesses behind the next token, at `positions`, of every job's row.

        A job's tokens that this decoder was not fed yet, its prompt at first, are fed at once.
        """
        device = self.decoder.device
        spans = [
            Span(place, min(self._known_of(place, job_id), at), at + 1)
            for (place, job_id), at in zip(owners, positions, strict=True)
        ]
        ends = list(itertools.accumulate(map(len, spans)))
        feed = feed_of_spans(state.tokens, spans, device)
        logits = self.decoder.step(feed, self.cache, upload([end - 1 for end in ends], device))
        rows, groups = one_token_each([place for place, _ in owners], device)
        at = upload(positions, device)
        for turn in range(1, count + 1):
            self._guess(state, rows, logits, turn)
            if turn < count:
                feed = feed_of(state, rows, groups, max(positions) + turn + 1)
                feed = dataclasses.replace(feed, positions=at + turn)
                logits = self.decoder.step(feed, self.cache)

        for (place, job_id), position in zip(owners, positions, strict=True):
            self._known[place.first_row] = job_id, position + count

    def keep(self, owners: Owners, positions: Sequence[int]) -> None:
        """Forget what was fed beyond each job's new position: guesses that were wrong."""
        for (place, job_id), position in zip(owners, positions, strict=True):
            known = min(self._known_of(place, job_id), position)
            self._known[place.first_row] = job_id, known

    def _known_of(self, place: Place, job_id: int) -> int:
        """Count a job's positions that are in the cache."""
        owner, known = self._known.get(place.first_row, (job_id, 0))
        return known if owner == job_id else 0


@dataclasses.dataclass
class _Way:
    """One way of decoding in the trial that runs or ran last."""

    seconds: float = 0.0
    tokens: float = 0.0  # of an average row

    @property
    def ms_a_token(self) -> float:
        return 1e3 * self.seconds / max(self.tokens, 1e-9)


@dataclasses.dataclass
class _Trial:
    """Both ways at a number of busy windows, and what has come of it."""

    turns: int = 0  # since the trial began
    drafting: bool = True
    drafted: _Way = dataclasses.field(default_factory=_Way)
    plain: _Way = dataclasses.field(default_factory=_Way)


class Pace:
    """Which way is quicker, measured apart for 1, 2 to 3, 4 to 7, … busy windows.

    At first, and again after `HOLD` turns, `TRIAL` turns are taken the one way and as many the
    other; the quicker one, in seconds a token, is then kept.
    """

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def drafts(self, busy: int) -> bool:
        """Tell whether the next turn of so many windows is to be drafted."""
        return self._of(busy).drafting

    def note(self, busy: int, seconds: float, tokens: float) -> None:
        """Note that a turn went as `drafts` said: its time, and an average row's new tokens."""
        trial = self._of(busy)
        trial.turns += 1
        if trial.turns <= 2 * TRIAL:
            way = trial.drafted if trial.drafting else trial.plain
            way.seconds += seconds
            way.tokens += tokens
            trial.drafting = trial.turns < TRIAL
        if trial.turns == 2 * TRIAL:
            trial.drafting = trial.drafted.ms_a_token < trial.plain.ms_a_token
            logger.info(
                "drafting is %s with %d windows or about as many: %.2f ms a token with it, %.2f "
                "without; both are measured again after %d turns",
                "on" if trial.drafting else "off",
                busy,
                trial.drafted.ms_a_token,
                trial.plain.ms_a_token,
                HOLD,
            )
        if trial.turns == 2 * TRIAL + HOLD:
            del self._trials[busy.bit_length()]

    def _of(self, busy: int) -> _Trial:
        return self._trials.setdefault(busy.bit_length(), _Trial())


class DraftLoop(EagerLoop):
    """Drafts where that pays, and else takes the eager loop's steps.

    Only rows that are decoded greedily and stand alone in their slots are drafted for, and only
    when all that are fed are such.

    Args:
        parts: what the windows are decoded with.
        most: guesses a turn.
    """

    def __init__(self, parts: Parts, most: int) -> None:
        assert parts.draft is not None, "nothing guesses"
        super().__init__(parts)
        self._rules = parts.rules
        self._drafter = Drafter(*parts.draft, parts.guess)
        self._most = most
        self._pace = Pace()

    def launch(self, slots: Slots) -> int:
        """See `SlotLoop.launch`."""
        owners = slots.owners()
        count = self._room(slots, owners)
        if count < 1:
            return super().launch(slots)
        stopwatch, tokens = Stopwatch(self._network.device), 1.0
        if self._pace.drafts(len(owners)):
            tokens = self._turn(owners, count)
        else:
            super().launch(slots)
        stopwatch.stop()
        self._pace.note(len(owners), stopwatch.seconds(), tokens)
        return 1

    def _room(self, slots: Slots, owners: Owners) -> int:
        """Count the tokens that may be guessed for every row; 0 where one is not to be drafted for.

        The rules choose one more than is guessed, and a sequence must not outgrow its limit.
        """
        if slots.several:
            return 0
        rows = [place.first_row for place, _ in owners]
        if bool((self._state.temperature[rows] > 0).any()):
            return 0
        room = int((self._state.limit[rows] - self._state.position[rows]).min()) - 2
        return min(self._most, room)

    def _turn(self, owners: Owners, count: int) -> float:
        """Guess, verify, choose; return how many tokens an average row has gained."""
        device = self._network.device
        rows = upload([place.first_row for place, _ in owners], device)
        before: list[int] = self._state.position[rows].tolist()
        self._drafter.guess(self._state, owners, before, count)
        spans = [
            Span(place, at, at + count + 1) for (place, _), at in zip(owners, before, strict=True)
        ]
        feed = feed_of_spans(self._state.tokens, spans, device)
        logits = self._network.step(feed, self._cache)
        self._rules.begin_draft(self._state, rows)
        lines = torch.arange(len(rows), device=device) * (count + 1)
        for turn in range(count + 1):
            self._advance(self._state, Picks(rows, lines + turn), logits, drafted=True)
            if not bool((self._state.trusted & ~self._state.finished)[rows].any()):
                break
        after: list[int] = self._state.position[rows].tolist()
        self._drafter.keep(owners, after)
        self._snapshot = Snapshot(self._state, list(owners))
        self.drafted += count * len(before)
        self.right += sum(after) - sum(before) - len(before)
        return (sum(after) - sum(before)) / len(before)


def open_loop(config: RuntimeConfig, parts: Parts) -> SlotLoop:
    """Make the loop over the slots that is configured: of CUDA graphs or not, guessing or not."""
    drafts = parts.draft is not None
    if parts.graphs:
        turns = DraftTurns(parts, config.draft_tokens) if drafts else None
        return GraphLoop(parts, _STEPS_PER_SYNC, config.slots, turns)
    return DraftLoop(parts, config.draft_tokens) if drafts else EagerLoop(parts)
