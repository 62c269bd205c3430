"""The input of a decoder step: its tokens, and the slots that they belong to."""

import dataclasses
import functools
import itertools

import torch

_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class SlotGroups:
    """The tokens of a step grouped by slot. The tokens of a group share each read of the audio."""

    slots: torch.Tensor  # int64 (groups,)
    first: torch.Tensor  # int64 (groups,), the index of a group's first token; the others follow
    count: torch.Tensor  # int64 (groups,), the number of tokens; 0 = unused group
    max_count: int  # an upper bound of `count`, known to the host
    direct: bool = False  # group i is exactly token i, of slot i: kernels need no lookup
    # Each group is a row's whole text from position 0 on, and no later step continues it. Its
    # cache entries are then not needed, and its results may differ from single steps in low bits.
    whole_texts: bool = False

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """Runs of adjacent slots: (first slot, slots, first token, tokens per slot).

        Only plain torch uses them. On a GPU this waits for the device.
        """
        runs: list[tuple[int, int, int, int]] = []
        columns = (self.slots.tolist(), self.first.tolist(), self.count.tolist())
        for slot, first, count in zip(*columns, strict=True):
            if count == 0:
                continue
            if runs:
                slot_0, slots, first_0, per_slot = runs[-1]
                follows = slot == slot_0 + slots and first == first_0 + slots * per_slot
                if follows and count == per_slot:
                    runs[-1] = (slot_0, slots + 1, first_0, per_slot)
                    continue
            runs.append((slot, 1, first, count))
        return runs


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """The input of one decoder step: n tokens, each of a row at a position.

    A row is one sequence of a slot; the rows of a slot are adjacent. A step may compute several
    consecutive positions of a row. Each attends to all earlier positions, those of the same step
    included.
    """

    ids: torch.Tensor  # int64 (all rows, n_text_ctx), the tokens of every row
    rows: torch.Tensor  # int64 (n,)
    positions: torch.Tensor  # int64 (n,); token i is ids[rows[i], positions[i]]
    groups: SlotGroups
    # int32 (all rows, n_text_ctx), the row that cached each position; None = the row itself
    source: torch.Tensor | None
    multi_token: bool  # whether any row has more than one position
    length: int  # greater than every position
    tokens_per_row: int = 1  # positions per row, if it is known to be the same for all rows

    @functools.cached_property
    def token_entries(self) -> torch.Tensor:
        """Indices of the tokens in a KV cache of (all rows * n_text_ctx) entries: int64 (n,)."""
        return self.rows * self.ids.shape[1] + self.positions

    @property
    def past(self) -> int:
        """Number of positions that plain torch reads: `length` rounded up to whole blocks.

        With whole blocks, additional masked positions do not change a bit of the sums.
        """
        return min(-(-self.length // _BLOCK) * _BLOCK, self.ids.shape[1])

    @functools.cached_property
    def past_entries(self) -> torch.Tensor:
        """Indices of each token's past in such a cache: int64 (n, past)."""
        past = torch.arange(self.past, device=self.rows.device)
        if self.source is None:
            return self.rows[:, None] * self.ids.shape[1] + past
        return self.source[self.rows, : self.past].long() * self.ids.shape[1] + past

    @functools.cached_property
    def adjacent_runs(self) -> dict[tuple[int, int, int], int]:
        """The first row of each of the `runs` whose rows are adjacent and cache their own past.

        Empty on a GPU, where the host would have to wait for the device.
        """
        if self.source is not None or self.rows.is_cuda:
            return {}
        rows = self.rows.tolist()
        return {
            (first, count, per_row): rows[first]
            for first, count, per_row in self.runs
            if rows[first : first + count * per_row : per_row]
            == [*range(rows[first], rows[first] + count)]
        }

    def past_of(self, run: tuple[int, int, int], cache: torch.Tensor) -> torch.Tensor:
        """Return the cached past of a run's rows; the tokens of a row share it.

        Args:
            run: one of `runs`.
            cache: keys or values, (all rows, n_text_ctx, heads, head_dim).

        Returns:
            (rows, past, heads, head_dim).
        """
        first, rows, per_row = run
        if run in self.adjacent_runs:  # a view, without a copy
            row = self.adjacent_runs[run]
            return cache[row : row + rows, : self.past]
        entries = self.past_entries[first : first + rows * per_row : per_row]
        heads, head_dim = cache.shape[2:]
        past = torch.nn.functional.embedding(entries, cache.view(-1, heads * head_dim))
        return past.view(rows, self.past, heads, head_dim)

    @functools.cached_property
    def past_mask(self) -> torch.Tensor:
        """The causal mask, bool (n, past): whether each token attends to each past position."""
        past = torch.arange(self.past, device=self.rows.device)
        return past <= self.positions[:, None]

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs of rows with equally many tokens: (first token, rows, tokens per row).

        Only plain torch uses them. On a GPU this waits for the device.
        """
        if not self.multi_token:
            return [(0, len(self.rows), 1)]
        counts = [len(list(same)) for _, same in itertools.groupby(self.rows.tolist())]
        runs, first = list[tuple[int, int, int]](), 0
        for per_row, same in itertools.groupby(counts):
            rows = len(list(same))
            runs.append((first, rows, per_row))
            first += rows * per_row
        return runs
