"""Find the audio frames that each text token attends to, by teacher forcing of finished windows.

It follows `find_alignment` in OpenAI's `whisper/timing.py`. One decoder step computes the text in
the row that decoded it, while the slot still holds the window's audio. The input has no timestamps
and no previous text, but it has the words of a prefix, which are in the audio too. The queries of
the checkpoint's alignment heads times the slot's keys give each token's weights over the frames.
The device normalises the weights (z-scores over tokens), smooths them (a median over frames) and
averages them over heads. A kernel also finds the monotonic path through them if there is one;
otherwise the caller does.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from serve.contract.engine import DETECT_LANGUAGE, Dims, TokenizerFacts
from serve.contract.messages import Alignment
from serve.native.batching import upload
from serve.native.decoder import Cache, Decoder
from serve.native.forced import MOST_TOKENS, MOST_WINDOWS, SIZES, ForcedSequence, TeacherForcedStep
from serve.native.kernels.choose import Ops
from serve.native.slots import SlotAllocation
from serve.runtime.protocol import Job, JobEvent

MEDIAN_FRAMES = 7
_COPIES = {True: 3, False: 12}  # copies of the weights in memory, with and without kernels
LEAST = 1e-30  # avoids a division by 0 where no token attends
_EXCHANGES = (  # the part of a sorting network of 7 that decides its median
    *((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6)),
    *((2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4)),
)


@dataclasses.dataclass(frozen=True)
class EndedWindow:
    """A finished window with its audio still in the slot."""

    job: Job
    place: SlotAllocation  # its first row is free to use
    event: JobEvent  # the window's last event


@dataclasses.dataclass(frozen=True)
class _Pass:
    """A pass in flight on the device, and its results on the host."""

    windows: Sequence[ForcedSequence]
    token_probs: torch.Tensor  # float32, of each window's text in turn
    # float32 (windows, tokens, frames): weights; or int64 (windows, tokens): the first frame of
    # each text token and of what follows the text
    attended: torch.Tensor
    copied: torch.cuda.Event | None  # when the results are on the host; None: already
    kept_alive: tuple[object, ...]  # tensors that another stream reads until then

    def ready(self) -> bool:
        return self.copied is None or self.copied.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def events(self) -> Iterator[JobEvent]:
        begin = 0
        for window, attended in zip(self.windows, self.attended, strict=True):
            end, prefix = begin + len(window.text), len(window.prefix)
            probs = self.token_probs[begin:end].numpy()
            if attended.ndim == 1:
                alignment = Alignment(probs, None, attended[prefix : window.rows].numpy(), prefix)
            else:
                matrix = attended[window.first : window.first + window.rows, : window.frames]
                alignment = Alignment(probs, matrix.numpy(), prefix=prefix)
            yield dataclasses.replace(window.event, alignment=alignment)
            begin = end


class Aligner:
    """Aligns finished windows, many in one pass.

    A pass is launched without waiting. Later work on the device's stream, such as that of the next
    windows in these slots and rows, runs after it.

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
        self._max_windows = min(rows, cache.cross.shape[2], MOST_WINDOWS)
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
            count = max(1, sum(size <= MOST_TOKENS for size in sizes))
            count = min(count, MOST_WINDOWS)
            self._passes.append(self._begin(windows[:count]))
            windows = windows[count:]
        return [window.event for window in ended if not self._wants_alignment(window)]

    def by_head(self, ended: Sequence[EndedWindow]) -> list[torch.Tensor]:
        """Return the weights of each window by head, to choose alignment heads from.

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
            _, scores, sizes = self._attended([sequence])
            weights = smoothed(scores, sizes.tokens, sizes.frames)[0]
            rows = slice(sequence.first, sequence.first + sequence.rows)
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
        most = max(1, MOST_TOKENS // self._context)
        sizes = ((1, 8, 0.3), (1, 40, 0.6), (1, 200, 1.0), (most, self._context, 1.0))
        for windows, tokens, seen in sizes:
            event = JobEvent(-1, (0,) * (tokens - 3))
            frames = round(seen * self._frames)
            job = Job(-1, torch.empty(0), (self._facts.sot,), align_frames=frames)
            places = [SlotAllocation(i, i, 1) for i in range(min(windows, self._max_windows))]
            self.launch([EndedWindow(job, place, event) for place in places])
            self.collect(wait=True)

    def _wants_alignment(self, window: EndedWindow) -> bool:
        return window.job.align_frames > 0 and any(t < self._facts.eot for t in window.event.tokens)

    def _sequence_of(self, window: EndedWindow) -> ForcedSequence:
        """Make a window's input: its language and text, without previous text and timestamps.

        End of text is left out if there is no room; only the z-scores use it.
        """
        facts, prompt, scores = self._facts, window.job.prompt, window.event.scores
        begins = len(prompt) - window.job.prefix
        prefix = tuple(token for token in prompt[begins:] if token < facts.eot)
        start = [
            token
            for token in prompt[prompt.index(facts.sot) : begins]
            if token != facts.no_timestamps
        ]
        if scores is not None and scores.language is not None:
            start = [scores.language if token == DETECT_LANGUAGE else token for token in start]
        text = tuple(token for token in window.event.tokens if token < facts.eot)
        tokens = (*start, facts.no_timestamps, *prefix, *text, facts.eot)
        assert len(tokens) <= self._context + 1, f"{len(text)} text tokens"
        return ForcedSequence(
            event=window.event,
            place=window.place,
            tokens=tokens[: self._context],
            first=len(start),
            prefix=prefix,
            text=text,
            frames=min(window.job.align_frames, self._frames),
        )

    def _begin(self, windows: Sequence[ForcedSequence]) -> _Pass:
        """Launch a pass, and start to copy its results to the host, on a GPU beside later work."""
        ops = self._ops
        probs, scores, sizes = self._attended(windows)
        if ops.smooth is None:
            weights = smoothed(scores, sizes.tokens, sizes.frames).mean(dim=1)
        else:
            weights = ops.smooth(scores, sizes.tokens, sizes.frames, LEAST)
        kept_alive, copied, attended = (probs, weights, sizes), None, weights
        if self._side_stream is not None:
            self._side_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side_stream):  # no effect if there is no second stream
            if ops.warp is not None:
                attended = ops.warp(weights, sizes.first, sizes.rows, sizes.frames)
            if self._device.type == "cuda":
                probs, attended = _on_host(probs), _on_host(attended)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
        return _Pass(windows, probs, attended, copied, kept_alive)

    def _attended(
        self, windows: Sequence[ForcedSequence]
    ) -> tuple[torch.Tensor, torch.Tensor, "_Sizes"]:
        """Compute the windows' texts.

        Returns:
            The probabilities of the tokens, float32 (n,); the frames' scores by alignment head,
            float32 (windows, heads, tokens, frames), where a shorter window repeats its last
            token; and the windows' sizes.
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
    first: torch.Tensor  # as in `ForcedSequence`
    rows: torch.Tensor
    token_indices: torch.Tensor  # (windows, tokens), the last one repeated


def _sizes(windows: Sequence[ForcedSequence], longest: int, device: torch.device) -> _Sizes:
    lengths = np.array([len(window.tokens) for window in windows])
    facts = [
        (window.place.slot, len(window.tokens), window.frames, window.first, window.rows)
        for window in windows
    ]
    begins = np.cumsum(lengths) - lengths
    token_indices = begins[:, None] + np.minimum(np.arange(longest), lengths[:, None] - 1)
    # Align each tensor to 16 bytes for any number of windows. For other alignments kernels would be
    # compiled again, which would delay a request.
    count = len(windows)
    apart = count + count % 2
    columns = np.zeros((5, apart), np.int64)
    columns[:, :count] = np.array(facts).T
    numbers = upload(np.concatenate([columns.ravel(), token_indices.ravel()]), device)
    slots, tokens, frames, first, rows = numbers[: 5 * apart].view(5, apart)[:, :count].unbind()
    return _Sizes(slots, tokens, frames, first, rows, numbers[5 * apart :].view(count, longest))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def pass_bytes(dims: Dims, facts: TokenizerFacts, ops: Ops) -> int:
    """Return the bytes of the largest pass on a device: logits, and the weights to smooth."""
    weights = _COPIES[ops.smooth is not None] * len(facts.alignment_heads) * dims.n_audio_ctx
    return MOST_TOKENS * (weights + 3 * dims.n_vocab) * 4 if facts.alignment_heads else 0


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
    beyond = time >= frames[:, None]
    weights = scores.masked_fill(beyond[:, None, None], -torch.inf).softmax(dim=-1)
    # z-scores do not depend on scale, and the squares of numbers near 1 do not underflow.
    weights = weights / weights.amax(dim=2, keepdim=True).clamp_min(LEAST)
    fed = torch.arange(max_tokens, device=scores.device) < tokens[:, None]
    fed = fed[:, None, :, None]
    count = tokens[:, None, None, None]
    away = weights - (weights * fed).sum(dim=2, keepdim=True) / count
    deviation = ((away * away * fed).sum(dim=2, keepdim=True) / count).sqrt()
    scored = away / deviation.clamp_min(LEAST)
    half = MEDIAN_FRAMES // 2
    last = frames[:, None] - 1
    mirrored = torch.arange(-half, max_frames + half, device=scores.device).abs()
    mirrored = torch.where(mirrored > last, 2 * last - mirrored, mirrored).clamp_min(0)
    wide = scored.gather(3, mirrored[:, None, None].expand(*scored.shape[:3], -1))
    middle = median_of_7([wide[..., i : i + max_frames] for i in range(MEDIAN_FRAMES)])
    short = (frames <= half)[:, None, None, None]  # too short to mirror at its ends
    return torch.where(short, scored, middle)


def median_of_7(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elementwise median of seven tensors; sorting them takes much longer."""
    sorted_so_far = list(values)
    for low, high in _EXCHANGES:
        a, b = sorted_so_far[low], sorted_so_far[high]
        sorted_so_far[low], sorted_so_far[high] = torch.minimum(a, b), torch.maximum(a, b)
    return sorted_so_far[MEDIAN_FRAMES // 2]
