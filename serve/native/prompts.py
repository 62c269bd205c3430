"""The step that feeds one window's prompt, replayed from a CUDA graph.

A host needs some 20 us to launch a kernel, and a step of a large decoder is hundreds: longer than
the device needs for one window's encoder and the prompt together. Most prompts have three or four
tokens, so one graph serves them; others, and those of several windows, which are encoded for longer
than the host needs, are launched kernel by kernel.
"""

from collections.abc import Callable, Sequence

import torch

from serve.native.device import capture
from serve.native.feeds import Span, upload
from serve.native.kernels.feed import Feed, Groups

_FEEDS = 4  # start of transcript, language, task, no timestamps
_WANTED = 2  # logits are asked for after the start of transcript and after the last token


class ShortPrompt:
    """A feed of one slot's first row that always has the same shape and memory.

    Shorter prompts are filled up with their last token: as it is fed again at its own position, it
    writes what it has written, and nobody asks for its logits.

    Args:
        ids: int64 (all rows, n_text_ctx), the tokens.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids
        count = 2 * _FEEDS + _WANTED + 1
        self._numbers = torch.zeros(count, dtype=torch.int64, device=ids.device)
        sizes = [_FEEDS, _FEEDS, _WANTED, 1]
        self._rows, self._positions, self.wanted, self._slot = torch.split(self._numbers, sizes)
        self._first, self._count = torch.zeros_like(self._slot), torch.full_like(self._slot, _FEEDS)

    @property
    def feed(self) -> Feed:
        """The feed, in that memory."""
        groups = Groups(self._slot, self._first, self._count, _FEEDS)
        ids = self._ids
        return Feed(ids, self._rows, self._positions, groups, None, True, ids.shape[1], _FEEDS)

    @staticmethod
    def holds(spans: Sequence[Span], wanted: Sequence[int]) -> bool:
        """Whether such a prompt fits."""
        return len(spans) == 1 and len(wanted) <= _WANTED and _length(spans[0]) <= _FEEDS

    def write(self, span: Span, wanted: Sequence[int]) -> None:
        """Feed this from now on; `wanted` are the feeds whose logits are asked for."""
        rows = [span.place.first_row] * _FEEDS
        positions = [min(span.begin + i, span.end - 1) for i in range(_FEEDS)]
        asked = [*wanted, *[wanted[-1]] * (_WANTED - len(wanted))]
        numbers = [*rows, *positions, *asked, span.place.slot]
        self._numbers.copy_(upload(numbers, self._numbers.device))


def _length(span: Span) -> int:
    return span.end - span.begin


class PromptGraph:
    """Feeds short prompts of one window.

    Args:
        ids: int64 (all rows, n_text_ctx), the tokens.
        step: what is recorded: (feed, wanted feeds) -> logits.
        stream: on which replays will be.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        step: Callable[[Feed, torch.Tensor], torch.Tensor],
        stream: torch.cuda.Stream,
    ) -> None:
        self._prompt = ShortPrompt(ids)
        self._step = step
        self._stream = stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor

    def capture(self) -> None:
        """Record the graph, all rows being free."""

        def work() -> None:
            self._logits = self._step(self._prompt.feed, self._prompt.wanted)

        self._graph = capture(work, torch.cuda.graph_pool_handle(), self._stream)

    def holds(self, spans: Sequence[Span], wanted: Sequence[int]) -> bool:
        """Whether it is recorded and such a prompt fits."""
        return self._graph is not None and self._prompt.holds(spans, wanted)

    def step(self, span: Span, wanted: Sequence[int]) -> torch.Tensor:
        """Feed a prompt; float32 logits (wanted, n_vocab), good until the next one is fed."""
        assert self._graph is not None
        self._prompt.write(span, wanted)
        self._graph.replay()
        return self._logits[: len(wanted)]
