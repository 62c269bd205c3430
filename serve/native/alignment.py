"""Find the audio frames that each text token attends to, by teacher forcing of finished windows.

The method is that of `find_alignment` in OpenAI's `whisper/timing.py`. One decoder step computes
the text in the row that decoded it, while the slot still holds the window's audio. The input has no
timestamps and no previous text, but it has the words of a prefix, which are in the audio too. The
queries of the checkpoint's alignment heads times the slot's keys give each token's weights over the
frames. The device normalises the weights (z-scores over tokens), smooths them (a median over
frames) and averages them over heads. On a GPU a kernel also finds the monotonic path through the
weights; otherwise the caller finds it.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.manifest import Dims, TokenizerFacts
from serve.contract.messages import Alignment
from serve.native.batching import upload
from serve.native.decoder import Cache, Decoder
from serve.native.forced import (
    MAX_PASS_TOKENS,
    MAX_PASS_WINDOWS,
    SIZES,
    ForcedSequence,
    TeacherForcedStep,
)
from serve.native.kernels.choose import Ops
from serve.native.slots import SlotAllocation
from serve.runtime.protocol import Job, JobEvent

MEDIAN_FRAMES = 7
_COPIES = {True: 3, False: 12}  # copies of the weights in memory, with and without kernels
MIN_DIVISOR = 1e-30  # avoids a division by 0 where no token attends
_EXCHANGES = (  # the comparators of a sorting network of 7 that its median needs
    *((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6)),
    *((2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4)),
)


@dataclasses.dataclass(frozen=True)
class EndedWindow:
    """A finished window with its audio still in the slot."""

    job: Job
    allocation: SlotAllocation  # its first row is free to use
    event: JobEvent  # the window's last event


@dataclasses.dataclass(frozen=True)
class _Pass:
    """A pass in flight on the device, and its results on the host."""

    windows: Sequence[ForcedSequence]
    token_probs: torch.Tensor  # float32, of each window's text in turn
    # float32 (windows, tokens, frames): weights; or int64 (windows, tokens): the first frame of
    # each text token and of the token after the text
    results: torch.Tensor
    copied: torch.cuda.Event | None  # the end of the copy to the host; None: already there
    kept_alive: tuple[object, ...]  # tensors that another stream reads until `copied`

    def ready(self) -> bool:
        return self.copied is None or self.copied.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def events(self) -> Iterator[JobEvent]:
        begin = 0
        for window, result in zip(self.windows, self.results, strict=True):
            end, prefix = begin + len(window.text), len(window.prefix)
            probs = self.token_probs[begin:end].numpy()
            if result.ndim == 1:
                alignment = Alignment(probs, None, result[prefix : window.rows].numpy(), prefix)
            else:
                rows = slice(window.first_index, window.first_index + window.rows)
                matrix = result[rows, : window.frames]
                alignment = Alignment(probs, matrix.numpy(), prefix=prefix)
            yield dataclasses.replace(window.event, alignment=alignment)
            begin = end


class Aligner:
    """Aligns finished windows, many in one pass.

    The host does not wait for a pass. Later work on the device's stream runs after the pass, so
    the slots and rows of its windows may be reused at once.

    Args:
        decoder, cache: the decoder, and its cache for all slots and rows.
        facts: the checkpoint's token ids and alignment heads.
        rows: the number of rows.
        graphs: whether to replay the steps from CUDA graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        facts: TokenizerFacts,
        rows: int,
        *,
        graphs: bool = False,
    ) -> None:
        self._ops = decoder.ops
        self._cache = cache
        self._facts = facts
        self._device = decoder.device
        self._context = decoder.dims.n_text_ctx
        self._frames = decoder.dims.n_audio_ctx
        self._max_windows = min(rows, cache.cross.shape[2], MAX_PASS_WINDOWS)
        heads = sorted(facts.alignment_heads)
        sizes = SIZES if graphs else ()
        self._step = TeacherForcedStep(decoder, cache, heads, facts.eot, rows, sizes)
        self.replay = self._step.replay
        self._layers, self._heads = (
            upload(column, self._device) for column in zip(*heads, strict=True)
        )
        # Finding the path uses few of a GPU's processors, so it runs beside the decoder steps.
        self._side_stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._side_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._passes: list[_Pass] = []
        self._dropped: set[int] = set()  # job ids

    def launch(self, ended: Sequence[EndedWindow]) -> list[JobEvent]:
        """Launch the alignment of the windows that need it; return the events of the others."""
        windows = [self._sequence_of(window) for window in ended if self._wants_alignment(window)]
        while windows:
            longest = itertools.accumulate((len(window.tokens) for window in windows), max)
            sizes = (count * length for count, length in enumerate(longest, start=1))
            count = max(1, sum(size <= MAX_PASS_TOKENS for size in sizes))
            count = min(count, MAX_PASS_WINDOWS)
            self._passes.append(self._begin(windows[:count]))
            windows = windows[count:]
        return [window.event for window in ended if not self._wants_alignment(window)]

    def by_head(self, ended: Sequence[EndedWindow]) -> list[torch.Tensor]:
        """Return the weights of each window by head, to choose the alignment heads by.

        Returns:
            float32 (heads, n + 1, frames) for a window of n text tokens, by layer and head; empty
            for one without text.
        """
        by_window = []
        for window in ended:
            if not self._wants_alignment(window):
                by_window.append(torch.empty(0))
                continue
            sequence = self._sequence_of(window)
            _, scores, sizes = self._score_frames([sequence])
            weights = smoothed(scores, sizes.tokens, sizes.frames)[0]
            rows = slice(sequence.first_index, sequence.first_index + sequence.rows)
            by_window.append(weights[:, rows, : sequence.frames])
        return by_window

    def collect(self, wait: bool) -> list[JobEvent]:
        """Return the events of all aligned windows; with `wait`, wait for the others too."""
        events: list[JobEvent] = []
        while self._passes and (wait or self._passes[0].ready()):
            first = self._passes.pop(0)
            first.wait()
            events += (event for event in first.events() if event.job_id not in self._dropped)
            self._dropped -= {window.event.job_id for window in first.windows}
        return events

    def drop(self, job_id: int) -> bool:
        """Drop a job, which gets no further event; return whether it was being aligned."""
        for in_flight in self._passes:
            if any(window.event.job_id == job_id for window in in_flight.windows):
                self._dropped.add(job_id)
                return True
        return False

    def clear(self) -> None:
        self._passes.clear()
        self._dropped.clear()

    def warm_up(self) -> None:
        """Compile kernels and allocate memory for passes of every size; all rows are free."""
        full_windows = max(1, MAX_PASS_TOKENS // self._context)
        sizes = ((1, 8, 0.3), (1, 40, 0.6), (1, 200, 1.0), (full_windows, self._context, 1.0))
        for windows, tokens, audio_share in sizes:
            event = JobEvent(-1, (0,) * (tokens - 3))
            frames = round(audio_share * self._frames)
            job = Job(-1, torch.empty(0), (self._facts.sot,), align_frames=frames)
            allocations = [SlotAllocation(i, i, 1) for i in range(min(windows, self._max_windows))]
            self.launch([EndedWindow(job, allocation, event) for allocation in allocations])
            self.collect(wait=True)

    def _wants_alignment(self, window: EndedWindow) -> bool:
        return window.job.align_frames > 0 and any(t < self._facts.eot for t in window.event.tokens)

    def _sequence_of(self, window: EndedWindow) -> ForcedSequence:
        """Make a window's input: its language and text, without previous text and timestamps.

        End of text is left out if there is no room; only the z-scores use it.
        """
        facts, prompt, scores = self._facts, window.job.prompt, window.event.scores
        prefix_begin = len(prompt) - window.job.prefix
        prefix = tuple(token for token in prompt[prefix_begin:] if token < facts.eot)
        start = [
            token
            for token in prompt[prompt.index(facts.sot) : prefix_begin]
            if token != facts.no_timestamps
        ]
        if scores is not None and scores.language is not None:
            start = [scores.language if token == DETECT_LANGUAGE else token for token in start]
        text = tuple(token for token in window.event.tokens if token < facts.eot)
        tokens = (*start, facts.no_timestamps, *prefix, *text, facts.eot)
        assert len(tokens) <= self._context + 1, f"{len(text)} text tokens"
        return ForcedSequence(
            event=window.event,
            allocation=window.allocation,
            tokens=tokens[: self._context],
            first_index=len(start),
            prefix=prefix,
            text=text,
            frames=min(window.job.align_frames, self._frames),
        )

    def _begin(self, windows: Sequence[ForcedSequence]) -> _Pass:
        """Launch a pass, and start to copy its results to the host, on a side stream of a GPU."""
        ops = self._ops
        probs, scores, sizes = self._score_frames(windows)
        if ops.smooth is None:
            weights = smoothed(scores, sizes.tokens, sizes.frames).mean(dim=1)
        else:
            weights = ops.smooth(scores, sizes.tokens, sizes.frames, MIN_DIVISOR)
        kept_alive, copied, result = (probs, weights, sizes), None, weights
        if self._side_stream is not None:
            self._side_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side_stream):  # no effect if there is no second stream
            if ops.warp is not None:
                result = ops.warp(weights, sizes.first, sizes.rows, sizes.frames)
            if self._device.type == "cuda":
                probs, result = _on_host(probs), _on_host(result)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
        return _Pass(windows, probs, result, copied, kept_alive)

    def _score_frames(
        self, windows: Sequence[ForcedSequence]
    ) -> tuple[torch.Tensor, torch.Tensor, "_Sizes"]:
        """Compute the windows' texts, and the attention scores of their frames.

        Returns:
            The probabilities of the text tokens, float32 (n,); the scores by alignment head,
            float32 (windows, heads, tokens, frames), padded by repeating a window's last token;
            and the windows' sizes.
        """
        probs, queries = self._step.run(windows)
        longest = max(len(window.tokens) for window in windows)
        sizes = _sizes(windows, longest, self._device)
        frames = max(window.frames for window in windows)
        keys = self._cache.cross_keys(self._layers, sizes.slots, self._heads, frames)
        query = queries[sizes.token_indices].float().transpose(1, 2)
        return probs, query @ keys.transpose(2, 3), sizes


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of each window of a pass for kernels, int64 (windows,), uploaded together."""

    slots: torch.Tensor
    tokens: torch.Tensor  # tokens of the input
    frames: torch.Tensor
    first: torch.Tensor  # `ForcedSequence.first_index`
    rows: torch.Tensor
    token_indices: torch.Tensor  # (windows, tokens), the last one repeated


def _sizes(windows: Sequence[ForcedSequence], longest: int, device: torch.device) -> _Sizes:
    lengths = np.array([len(window.tokens) for window in windows])
    window_facts = [
        (window.allocation.slot, len(window.tokens), window.frames, window.first_index, window.rows)
        for window in windows
    ]
    begins = np.cumsum(lengths) - lengths
    token_indices = begins[:, None] + np.minimum(np.arange(longest), lengths[:, None] - 1)
    # Align each tensor to 16 bytes for any number of windows. Other alignments would compile
    # kernels again and delay a request.
    count = len(windows)
    stride = count + count % 2
    columns = np.zeros((5, stride), np.int64)
    columns[:, :count] = np.array(window_facts).T
    uploaded = upload(np.concatenate([columns.ravel(), token_indices.ravel()]), device)
    slots, tokens, frames, first, rows = uploaded[: 5 * stride].view(5, stride)[:, :count].unbind()
    return _Sizes(slots, tokens, frames, first, rows, uploaded[5 * stride :].view(count, longest))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def pass_bytes(dims: Dims, facts: TokenizerFacts, ops: Ops) -> int:
    """Return the bytes of the largest pass on a device: logits, and the weights to smooth."""
    weights = _COPIES[ops.smooth is not None] * len(facts.alignment_heads) * dims.n_audio_ctx
    return MAX_PASS_TOKENS * (weights + 3 * dims.n_vocab) * 4 if facts.alignment_heads else 0


def smoothed(scores: torch.Tensor, tokens: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Apply a softmax over frames, z-scores over tokens, and a median over adjacent frames.

    Args:
        scores: float32 (windows, heads, tokens, frames).
        tokens, frames: int64 (windows,), the size of each window.

    Returns:
        float32, shaped as `scores`; values beyond a window's size are undefined.
    """
    max_tokens, max_frames = scores.shape[2:]
    time = torch.arange(max_frames, device=scores.device)
    padding = time >= frames[:, None]
    weights = scores.masked_fill(padding[:, None, None], -torch.inf).softmax(dim=-1)
    # z-scores do not depend on scale, and the squares of numbers near 1 do not underflow.
    weights = weights / weights.amax(dim=2, keepdim=True).clamp_min(MIN_DIVISOR)
    is_token = torch.arange(max_tokens, device=scores.device) < tokens[:, None]
    is_token = is_token[:, None, :, None]
    count = tokens[:, None, None, None]
    centred = weights - (weights * is_token).sum(dim=2, keepdim=True) / count
    std = ((centred * centred * is_token).sum(dim=2, keepdim=True) / count).sqrt()
    z_scores = centred / std.clamp_min(MIN_DIVISOR)
    half = MEDIAN_FRAMES // 2
    last = frames[:, None] - 1
    mirrored = torch.arange(-half, max_frames + half, device=scores.device).abs()
    mirrored = torch.where(mirrored > last, 2 * last - mirrored, mirrored).clamp_min(0)
    padded = z_scores.gather(3, mirrored[:, None, None].expand(*z_scores.shape[:3], -1))
    medians = median_of_7([padded[..., i : i + max_frames] for i in range(MEDIAN_FRAMES)])
    is_short = (frames <= half)[:, None, None, None]  # too short to mirror at its ends
    return torch.where(is_short, z_scores, medians)


def median_of_7(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elementwise median of seven tensors; sorting them takes much longer."""
    sorted_so_far = list(values)
    for low, high in _EXCHANGES:
        a, b = sorted_so_far[low], sorted_so_far[high]
        sorted_so_far[low], sorted_so_far[high] = torch.minimum(a, b), torch.maximum(a, b)
    return sorted_so_far[MEDIAN_FRAMES // 2]
