"""Build the batches of decoder steps: one token per row, or several as in prefill."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from serve.native.kernels.gpu import staged
from serve.native.kernels.step_batch import SlotGroups, StepBatch
from serve.native.slots import SlotAllocation

Values = Sequence[int] | NDArray[np.int64]


def upload(values: Values, device: torch.device) -> torch.Tensor:
    """Copy int64 (n,) values to a device, to a GPU without waiting for the copy."""
    source = staged(torch.as_tensor(values, dtype=torch.int64), device)
    return source.to(device, non_blocking=True)


def overwrite(tensor: torch.Tensor, values: Values) -> None:
    """Copy int64 values into a contiguous tensor; the host does not wait for a GPU's copy."""
    source = staged(torch.as_tensor(values, dtype=torch.int64), tensor.device)
    tensor.copy_(source.view_as(tensor), non_blocking=True)


@dataclasses.dataclass(frozen=True)
class TokenSpan:
    """Positions [begin, end) of an allocation's first row, computed in one step."""

    allocation: SlotAllocation
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


def decode_groups(
    allocations: Sequence[SlotAllocation], device: torch.device
) -> tuple[torch.Tensor, SlotGroups]:
    """Return the rows of some slots, int64 (n,), and their groups by slot, for one token a row."""
    rows = [row for allocation in allocations for row in allocation.rows]
    counts = [allocation.count for allocation in allocations]
    slots = [allocation.slot for allocation in allocations]
    return upload(rows, device), _groups(slots, counts, device)


def prefill_batch(ids: torch.Tensor, spans: Sequence[TokenSpan], device: torch.device) -> StepBatch:
    """Make a batch of several tokens per slot, all in the slots' first rows.

    Args:
        ids: int64 (all rows, n_text_ctx), the tokens.
        spans: the positions to compute.
        device: the device of `ids`.
    """
    rows = [span.allocation.first_row for span in spans for _ in range(span.begin, span.end)]
    positions = [position for span in spans for position in range(span.begin, span.end)]
    counts = [len(span) for span in spans]
    groups = _groups([span.allocation.slot for span in spans], counts, device)
    return StepBatch(
        ids=ids,
        rows=upload(rows, device),
        positions=upload(positions, device),
        groups=groups,
        source=None,  # the past of a first row is its own until beams are reordered
        multi_token=True,
        length=max(positions) + 1,
    )


class FixedBatch:
    """The columns of a batch of tokens at fixed addresses, as a CUDA graph reads them.

    A smaller batch is padded by repeating its last token. The step then writes the same values to
    the same cache position again, and nothing reads the extra outputs.

    Args:
        lengths: the number of values of each column; the first column has one value per token.
        groups: the number of groups; unused groups have no tokens.
        device: the device of the columns.
    """

    def __init__(self, lengths: Sequence[int], groups: int, device: torch.device) -> None:
        sizes = [*lengths, groups, groups, groups]
        self._memory = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._ends = np.cumsum(sizes)
        *self.columns, slots, first, count = torch.split(self._memory, sizes)
        self.groups = (slots, first, count)

    def write(self, columns: Sequence[Values], slots: Values, counts: Sequence[int]) -> None:
        """Write the values of the columns, and each group's slot and number of tokens."""
        begins = np.cumsum([0, *counts[:-1]])
        # The padding belongs to the last group. Without a group its attention output, and then the
        # keys that it writes, would be undefined.
        counts = [*counts[:-1], counts[-1] + len(self.columns[0]) - sum(counts)]
        memory = np.zeros(len(self._memory), np.int64)
        parts = np.split(memory, self._ends[:-1])
        for values, part in zip((*columns, slots, begins, counts), parts, strict=True):
            part[: len(values)] = values
        for values, part in zip(columns, parts, strict=False):
            part[len(values) :] = values[-1]
        overwrite(self._memory, memory)


def _groups(slots: list[int], counts: list[int], device: torch.device) -> SlotGroups:
    first_tokens = list(itertools.accumulate(counts, initial=0))[:-1]
    return SlotGroups(
        slots=upload(slots, device),
        first=upload(first_tokens, device),
        count=upload(counts, device),
        max_count=max(counts),
    )
