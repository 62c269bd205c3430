"""The feed of a decoder step: tokens of rows, and which rows share a slot."""

import dataclasses
import functools
import itertools

import torch

_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class SlotGroups:
    """Which feeds of a step share a slot, and so one reading of its audio. One entry a group."""

    slots: torch.Tensor  # int64 (groups,)
    first: torch.Tensor  # int64: index of its first feed; the others follow it
    count: torch.Tensor  # int64: how many; 0 = no group
    most: int  # no count is larger
    # What the host knows and kernels need not look up: that group i is feed i of slot i, alone.
    direct: bool = False
    # That each group is a row's whole text, fed from position 0 on, from which no step goes on:
    # what its feeds leave in the caches, and the last bits of what they get, are nobody's concern.
    whole: bool = False

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """(first slot, slots, first feed, feeds a slot) where one follows the other evenly.

        Read by plain torch, which must know them on the host.
        """
        runs: list[tuple[int, int, int, int]] = []
        columns = (self.slots.tolist(), self.first.tolist(), self.count.tolist())
        for slot, first, count in zip(*columns, strict=True):
            if count == 0:
                continue
            if runs:
                slot_0, slots, first_0, each = runs[-1]
                follows = slot == slot_0 + slots and first == first_0 + slots * each
                if follows and count == each:
                    runs[-1] = (slot_0, slots + 1, first_0, each)
                    continue
            runs.append((slot, 1, first, count))
        return runs


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """The input of one decoder step: n tokens, each of a row at a position.

    A row is one sequence of a slot; those of a slot stand side by side. A row may be fed several
    positions that follow each other: each sees its row's past, the others before it included.
    """

    ids: torch.Tensor  # int64 (all rows, n_text_ctx): every row's tokens
    rows: torch.Tensor  # int64 (n,)
    positions: torch.Tensor  # int64 (n,): feed i is the token ids[rows[i], positions[i]]
    groups: SlotGroups
    # int32 (all rows, n_text_ctx): whose cache holds each position of a row's past; None = its own.
    source: torch.Tensor | None
    several: bool  # whether any row is fed more than one position
    length: int  # every position is below it
    each: int = 1  # positions that each row is fed, if that is known to be the same for all

    @functools.cached_property
    def own_places(self) -> torch.Tensor:
        """Place of each feed's key and value in a cache of (all rows * n_text_ctx): int64 (n,)."""
        return self.rows * self.ids.shape[1] + self.positions

    @property
    def past(self) -> int:
        """Positions that plain torch looks at: `length`, in whole blocks.

        Sums over more positions of which none is attended to are the same then, to the last bit.
        """
        return min(-(-self.length // _BLOCK) * _BLOCK, self.ids.shape[1])

    @functools.cached_property
    def past_places(self) -> torch.Tensor:
        """Places of each feed's past in such a cache: int64 (n, past)."""
        past = torch.arange(self.past, device=self.rows.device)
        if self.source is None:
            return self.rows[:, None] * self.ids.shape[1] + past
        return self.source[self.rows, : self.past].long() * self.ids.shape[1] + past

    @functools.cached_property
    def side_by_side(self) -> dict[tuple[int, int, int], int]:
        """The first row of those `runs` whose rows follow each other, with a past of their own.

        On a GPU none, for the host would have to wait to know.
        """
        if self.source is not None or self.rows.is_cuda:
            return {}
        rows = self.rows.tolist()
        return {
            (first, count, each): rows[first]
            for first, count, each in self.runs
            if rows[first : first + count * each : each]
            == [*range(rows[first], rows[first] + count)]
        }

    def past_of(self, run: tuple[int, int, int], cache: torch.Tensor) -> torch.Tensor:
        """Return what a cache holds of the past of a run's rows, which all feeds of a row share.

        Args:
            run: one of `runs`.
            cache: (all rows, n_text_ctx, heads, head_dim).

        Returns:
            (rows, past, heads, head_dim).
        """
        first, rows, each = run
        if run in self.side_by_side:  # they are read as they lie
            row = self.side_by_side[run]
            return cache[row : row + rows, : self.past]
        places = self.past_places[first : first + rows * each : each]
        heads, head_dim = cache.shape[2:]
        past = torch.nn.functional.embedding(places, cache.view(-1, heads * head_dim))
        return past.view(rows, self.past, heads, head_dim)

    @functools.cached_property
    def seen(self) -> torch.Tensor:
        """Which of those each feed attends to: bool (n, past)."""
        past = torch.arange(self.past, device=self.rows.device)
        return past <= self.positions[:, None]

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(first feed, rows, feeds a row) in which a row's feeds share its past.

        Read by plain torch, which must know them on the host.
        """
        if not self.several:
            return [(0, len(self.rows), 1)]
        counts = [len(list(same)) for _, same in itertools.groupby(self.rows.tolist())]
        runs, first = list[tuple[int, int, int]](), 0
        for each, same in itertools.groupby(counts):
            rows = len(list(same))
            runs.append((first, rows, each))
            first += rows * each
        return runs
