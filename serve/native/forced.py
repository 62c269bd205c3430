"""Teacher forcing: compute the whole texts of windows in one decoder step, for word timestamps.

On a GPU the step is replayed from CUDA graphs, since the host needs longer to launch its kernels
than the GPU needs to run them. There are graphs for several sizes. A pass uses the smallest one
that fits; `batching.FixedBatch` pads them. Without graphs the step has the exact size.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch

from serve.contract.manifest import HEAD_DIM
from serve.native.batching import FixedBatch, upload
from serve.native.decoder import Cache, Decoder
from serve.native.kernels.step_batch import SlotGroups, StepBatch
from serve.native.replay import GraphCache
from serve.native.slots import SlotAllocation
from serve.runtime.protocol import JobEvent

MAX_PASS_TOKENS = 1100  # maximum of the number of windows times the longest window's tokens
MAX_PASS_WINDOWS = 16
# The numbers of tokens that have a graph, by the graph's maximum number of windows, largest first.
_TOKENS_BY_WINDOWS = {
    16: (MAX_PASS_TOKENS, 896, 768, 640, 512),
    8: (384, 320, 256, 192, 128),
    4: (64,),
    2: (16,),
}
SIZES = tuple(
    (n_tokens, windows) for windows, sizes in _TOKENS_BY_WINDOWS.items() for n_tokens in sizes
)


@dataclasses.dataclass(frozen=True)
class ForcedSequence:
    """The tokens of a window's first row, and the part of them to align."""

    event: JobEvent  # the event that waits for the alignment
    allocation: SlotAllocation
    tokens: tuple[int, ...]
    first_index: int  # index of the token before prefix and text
    prefix: tuple[int, ...]  # the text tokens at the end of the prompt
    text: tuple[int, ...]  # at least one token
    frames: int  # audio frames

    @property
    def rows(self) -> int:
        """The rows to align: one per token of prefix and text, and one after them."""
        return len(self.prefix) + len(self.text) + 1


class TeacherForcedStep:
    """Computes the texts of windows in their first rows.

    Args:
        decoder, cache: the decoder, and its cache for all slots and rows.
        alignment_heads: pairs (layer, head), ordered by layer.
        eot: the end-of-text token; all text has lower ids.
        rows: the number of rows.
        sizes: pairs (tokens, windows) to prepare graphs for; other steps run without one.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        alignment_heads: Sequence[tuple[int, int]],
        eot: int,
        rows: int,
        sizes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._eot = eot
        self._device = decoder.device
        self._context = decoder.dims.n_text_ctx
        self._ids = torch.zeros((rows, self._context), dtype=torch.int64, device=self._device)
        self._heads: dict[int, torch.Tensor] = {}  # by layer
        for layer in sorted({layer for layer, _ in alignment_heads}):
            heads = [head for head_layer, head in alignment_heads if head_layer == layer]
            self._heads[layer] = upload(heads, self._device)
        self._sizes = sizes
        self._fixed: dict[int, FixedBatch] = {}  # the graphs' inputs by size
        self._results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the graphs' outputs
        self.replay = GraphCache()
        """The graphs of the prepared sizes; recorded while all rows are free."""
        for size, windows in sizes:
            self._fixed[size] = FixedBatch([size] * 5, windows, self._device)
            self.replay.add(size, functools.partial(self._run_recorded, size))

    def run(self, sequences: Sequence[ForcedSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute at most `MAX_PASS_WINDOWS` sequences, one per window.

        Returns:
            float32 (n,), the probability of each text token among text tokens, window by window;
            and the queries of the alignment heads, (tokens, heads, 64), valid until the next step.
        """
        n_tokens = sum(len(sequence.tokens) for sequence in sequences)
        n_text = sum(len(sequence.text) for sequence in sequences)
        fits = [size for size, limit in self._sizes if size >= n_tokens and limit >= len(sequences)]
        size, longest = min(fits, default=0), max(len(sequence.tokens) for sequence in sequences)
        batch = self._fixed.get(size) or FixedBatch([n_tokens] * 5, len(sequences), self._device)
        _write(batch, sequences)
        if size in self.replay:
            self.replay.launch(size)
            probs, queries = self._results[size]
        else:
            probs, queries = self._step(batch, size or longest)
        return probs[:n_text].clone(), queries  # another stream reads the probabilities later

    def _run_recorded(self, size: int) -> None:
        self._results[size] = self._step(self._fixed[size], size)

    def _step(self, batch: FixedBatch, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step of windows of at most `max_length` tokens each."""
        tokens, rows, positions, logit_indices, text = batch.columns
        self._ids[rows, positions] = tokens
        step = StepBatch(
            ids=self._ids,
            rows=rows,
            positions=positions,
            groups=SlotGroups(*batch.groups, max_length, whole_texts=True),
            source=None,  # the past of a first row is its own until beams are reordered
            multi_token=True,
            length=min(max_length, self._context),
        )
        queries: dict[int, torch.Tensor] = {}
        logits = self._decoder.step(step, self._cache, logit_indices, queries)
        probs = self._decoder.ops.token_probability(logits, text, self._eot)
        attending = [
            queries[layer].view(len(tokens), -1, HEAD_DIM).index_select(1, heads)
            for layer, heads in self._heads.items()
        ]
        return probs, torch.cat(attending, dim=1)


def _write(batch: FixedBatch, sequences: Sequence[ForcedSequence]) -> None:
    """Write the sequences' tokens, rows, positions, indices of logits, and text tokens."""
    lengths = [len(sequence.tokens) for sequence in sequences]
    begins = np.cumsum([0, *lengths[:-1]])
    logit_indices = [
        begin + sequence.first_index + len(sequence.prefix) + np.arange(len(sequence.text))
        for sequence, begin in zip(sequences, begins, strict=True)
    ]
    columns = [
        np.concatenate([sequence.tokens for sequence in sequences]),
        np.repeat([sequence.allocation.first_row for sequence in sequences], lengths),
        np.concatenate([np.arange(length) for length in lengths]),
        np.concatenate(logit_indices),
        np.concatenate([sequence.text for sequence in sequences]),
    ]
    batch.write(columns, [sequence.allocation.slot for sequence in sequences], lengths)
