"""Prefill: compute the prompts of new windows in one step, and choose their first tokens.

If the language must be detected, a step before that computes the prompt up to start-of-transcript.
The detected language then takes its place in the prompt.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch

from serve.contract.engine import DETECT_LANGUAGE
from serve.native.batching import TokenSpan, prefill_batch, upload
from serve.native.kernels.step_batch import StepBatch
from serve.native.prefill_batch import PrefillBatch, sizes
from serve.native.replay import GraphCache
from serve.native.resources import RuntimeResources
from serve.native.rules.reference_rules import lists_of
from serve.native.rules.state import NO_GUESS, NOWHERE, Picks, new_state
from serve.native.slots import SlotAllocation
from serve.runtime.protocol import Job

# Kernels differ by length: one token, as in language detection; powers of two up to 64; then tiles.
_PROMPT_LENGTHS = (1, 4, 24, 48, 100, 224)
_SHORT_PROMPTS = (1, 4)
_SEED_STEP = 7_919  # seed difference between the samples of one window; any number but 0 works


@dataclasses.dataclass(frozen=True)
class StartedJob:
    """A job with its slot and rows."""

    job: Job
    place: SlotAllocation


def rows_of(job: Job) -> int:
    """Return the number of rows that a job needs: its beams, or its samples."""
    options = job.options
    return options.best_of if options.temperature > 0 else options.beam_size


class Prefill:
    """Starts windows after their audio is encoded.

    Args:
        parts: the network, its caches and its samplers.
    """

    def __init__(self, parts: RuntimeResources) -> None:
        self._network = parts.network
        self._cache = parts.cache
        self._state = parts.state
        self._rules = parts.rules
        self._advance = parts.advance
        self._device = parts.network.device
        self._slots = parts.cache.cross.shape[2]
        # CUDA graphs do not track what the draft decoder has computed, so it prefills prompts too.
        self._draft = parts.draft if parts.graphs else None
        self._graph_batches = list[PrefillBatch]()  # smallest first
        self._logits = dict[PrefillBatch, torch.Tensor]()  # the graphs' outputs
        self.replay = GraphCache()
        """Graphs of prefill and of the first choices; recorded while all rows are free."""
        if parts.graphs:
            self.add_graphs()

    def start(self, started: Sequence[StartedJob]) -> None:
        """Write the jobs' prompts and options into their rows, prefill, choose first tokens."""
        self._write(started)
        detecting = [window for window in started if DETECT_LANGUAGE in window.job.prompt]
        if detecting:
            self._detect(detecting)
        plain = [window for window in started if not self._draft_length(window)]
        drafted = [window for window in started if self._draft_length(window)]
        for some in (plain, drafted):
            if some:
                self._prefill(some)

    def add_graphs(self) -> None:
        """Register the CUDA graphs of prefill and of the first sampling step for recording."""
        for size in sizes(self._slots):
            self._graph_batches.append(PrefillBatch(self._state.tokens, size))
        for prompts in reversed(self._graph_batches):
            self.replay.add(prompts, functools.partial(self._run_recorded, prompts))
            for draft_length in prompts.size.draft_lengths:
                sample = functools.partial(self._choose_recorded, prompts, draft_length)
                self.replay.add((prompts, draft_length), sample)

    def warm_up(self) -> None:
        """Compile the kernels for prompts and drafts of every size, with rows that are free.

        One window has prompts of any length, several windows at a time (2, 4, 8, …) short ones.
        """
        counts = [2**i for i in range(1, self._slots.bit_length())]
        together = itertools.product(counts, _SHORT_PROMPTS, (False,))
        alone = itertools.product((1,), _PROMPT_LENGTHS, (False, True))
        first, n_text_ctx = upload([0], self._device), self._state.tokens.shape[1]
        for windows, longest, drafted in (*together, *alone):
            length = min(longest, n_text_ctx)
            spans = [TokenSpan(SlotAllocation(i, i, 1), 0, length) for i in range(windows)]
            batch = prefill_batch(self._state.tokens, spans, self._device)
            ends = range(0 if drafted else length - 1, windows * length, 1 if drafted else length)
            logits = self._launch(batch, upload(ends, self._device))
            self._advance(self._state, Picks(first, first), logits, drafted=drafted)

    def _step(
        self, spans: Sequence[TokenSpan], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, PrefillBatch | None]:
        """Compute the tokens of some spans.

        Returns:
            The logits after the wanted tokens, float32 (wanted, n_vocab), and the batch with the
            graph that computed them, if one did.
        """
        prompts = self._graph_for(spans, wanted)
        if prompts is not None:
            prompts.write_spans(spans, wanted)
            self.replay.launch(prompts)
            return self._logits[prompts][: len(wanted)], prompts
        batch = prefill_batch(self._state.tokens, spans, self._device)
        return self._launch(batch, upload(wanted, self._device)), None

    def _graph_for(self, spans: Sequence[TokenSpan], wanted: Sequence[int]) -> PrefillBatch | None:
        fit = (prompts for prompts in self._graph_batches if prompts.holds(spans, wanted))
        return next((prompts for prompts in fit if prompts in self.replay), None)

    def _run_recorded(self, prompts: PrefillBatch) -> None:
        self._logits[prompts] = self._launch(prompts.batch, prompts.wanted)

    def _choose_recorded(self, prompts: PrefillBatch, draft_length: int) -> None:
        """Choose first tokens of single rows; a row without a draft counts as an empty draft."""
        self._state.trusted.fill_(True)
        for picks in prompts.picks(draft_length):
            self._advance(self._state, picks, self._logits[prompts], drafted=True)

    def _launch(self, batch: StepBatch, wanted: torch.Tensor) -> torch.Tensor:
        """Return the logits after the wanted tokens; a draft decoder computes the same tokens."""
        if self._draft is not None:
            decoder, cache = self._draft
            decoder.step(batch, cache, wanted[:1])
        return self._network.step(batch, self._cache, wanted)

    def _sot_at(self, job: Job) -> int:
        return job.prompt.index(self._rules.facts.sot)

    def _detect(self, started: Sequence[StartedJob]) -> None:
        spans = [TokenSpan(window.place, 0, self._sot_at(window.job) + 1) for window in started]
        ends = [sum(span.end for span in spans[: i + 1]) - 1 for i in range(len(spans))]
        logits, _ = self._step(spans, ends)
        self._note_start(started, logits)

    def _note_start(self, started: Sequence[StartedJob], logits: torch.Tensor) -> None:
        leaders = upload([window.place.first_row for window in started], self._device)
        self._rules.note_start(self._state, leaders, logits, self._candidates(started))

    def _candidates(self, started: Sequence[StartedJob]) -> torch.Tensor | None:
        """Return the languages allowed for each job, as `TokenRules.note_start` takes them."""
        if not any(window.job.detection.languages for window in started):
            return None
        known = self._rules.languages
        among = [window.job.detection.languages or known for window in started]
        rows = torch.tensor([[language in some for language in known] for some in among])
        rows = rows.pin_memory() if self._device.type == "cuda" else rows
        return rows.to(self._device, non_blocking=True)

    def _prefill(self, started: Sequence[StartedJob]) -> None:
        """Compute the rest of the prompts, and the drafts; all of the jobs have one or none has."""
        spans, starts, lasts = list[TokenSpan](), list[int](), list[int]()
        noting, fed = list[StartedJob](), 0
        drafts, draft_lengths = list[int](), list[int]()
        for window in started:
            job, end = window.job, len(window.job.prompt)
            begin = self._sot_at(job) + 1 if DETECT_LANGUAGE in job.prompt else 0
            if begin == 0:
                noting.append(window)
                starts.append(fed + self._sot_at(job))
            spans.append(TokenSpan(window.place, begin, end))
            fed += end - begin
            lasts.append(fed - 1)
            draft_lengths.append(self._draft_length(window))
            if draft_lengths[-1]:
                spans.append(TokenSpan(window.place, end, end + draft_lengths[-1]))
            drafts += range(fed, fed + draft_lengths[-1])
            fed += draft_lengths[-1]
        logits, prompts = self._step(spans, [*starts, *lasts, *drafts])
        if noting:
            self._note_start(noting, logits[: len(noting)])
        # The logits are those after the starts, then after the prompts, then after the drafts.
        rows = [row for window in started for row in window.place.rows]
        first = len(noting)
        lines: list[Sequence[int]]
        lines = [[first + i for i, window in enumerate(started) for _ in window.place.rows]]
        first_lines = itertools.accumulate(draft_lengths[:-1], initial=first + len(started))
        lines += zip(*(range(line, line + max(draft_lengths)) for line in first_lines), strict=True)
        self._choose(prompts if len(rows) == len(started) else None, rows, lines, logits)

    def _draft_length(self, window: StartedJob) -> int:
        """Return the number of a job's draft tokens to compute: one less than its limit."""
        job = window.job
        room = min(job.options.max_tokens, self._state.tokens.shape[1] - len(job.prompt)) - 1
        return min(len(job.draft), room) if window.place.count == 1 else 0

    def _choose(
        self,
        prompts: PrefillBatch | None,
        rows: Sequence[int],
        lines: Sequence[Sequence[int]],
        logits: torch.Tensor,
    ) -> None:
        """Choose first tokens, and one more for each accepted draft token.

        Args:
            prompts: the batch whose graphs may do it; None: none.
            rows, lines: see `PrefillBatch.choose`.
            logits: float32 (lines, n_vocab).
        """
        draft_length = None if prompts is None else prompts.choose(rows, lines)
        if draft_length is not None:
            self.replay.launch((prompts, draft_length))
            return
        on_device, drafted = upload(rows, self._device), len(lines) > 1
        if drafted:
            self._rules.begin_draft(self._state, on_device)
        for line in lines:
            picks = Picks(on_device, upload(line, self._device))
            self._advance(self._state, picks, logits, drafted=drafted)

    def _write(self, started: Sequence[StartedJob]) -> None:
        """Write the jobs' prompts, drafts and options into their rows."""
        context = self._state.tokens.shape[1]
        lines = [(window, row) for window in started for row in window.place.rows]
        known = [
            (*window.job.prompt, *window.job.draft[: self._draft_length(window)])
            for window, _ in lines
        ]
        longest = min(max(map(len, known)) + 1, context)
        rows = new_state(len(lines), longest, torch.device("cpu"))
        rows.tokens.fill_(NO_GUESS)  # an earlier job's token must not count as an accepted draft
        for line, tokens in enumerate(known):
            rows.tokens[line, : len(tokens)] = torch.tensor(tokens)
        for name, column in self._columns(lines, context).items():
            field: torch.Tensor = getattr(rows, name)
            field.copy_(torch.tensor(column))
        where = upload([row for _, row in lines], self._device)
        if self._device.type == "cuda":  # do not wait for the encoder, which is still running
            rows = rows.pinned()
        self._state.put(where, rows.to(self._device))

    def _last_timestamp(self, job: Job) -> int:
        """Return the highest timestamp token in a job's prefix; 0 if there is none."""
        prefix = job.prompt[len(job.prompt) - job.prefix :]
        begin = self._rules.facts.timestamp_begin
        return max((token for token in prefix if token >= begin), default=0)

    def _root(self, window: StartedJob) -> int:
        """Return the root of the trie of a job's phrases; sampled jobs have no phrases."""
        options, book = window.job.options, self._rules.book
        if options.phrases is None or options.temperature > 0 or book is None:
            return -1
        return book.root(window.place.slot, options.phrases)

    def _columns(self, lines: list[tuple[StartedJob, int]], context: int) -> dict[str, list[float]]:
        """Return the initial values of the rows' state by field."""
        columns: dict[str, list[float]] = {}
        for window, row in lines:
            prompt, options = window.job.prompt, window.job.options
            index = row - window.place.first_row
            searches = window.place.count > 1 and options.temperature == 0
            looked_at = window.job.loop_tokens > 0 and not (searches and index)
            values = {
                "position": len(prompt) - 1,
                "prompt_len": len(prompt),
                "text_begin": len(prompt) - window.job.prefix,
                "last_timestamp": self._last_timestamp(window.job),
                "limit": min(len(prompt) + options.max_tokens, context),
                "loop_at": len(prompt) - 1 + window.job.loop_tokens if looked_at else NOWHERE,
                "seed": options.seed + index * _SEED_STEP,
                "leader": window.place.first_row,
                "beam": window.place.count if searches else 1,
                # Round half away from zero, as C does.
                "needed": max(1, int(window.place.count * options.patience + 0.5)),
                "no_repeat_ngram": options.no_repeat_ngram_size,
                "root": self._root(window),
                "node": self._root(window),
                "temperature": options.temperature,
                "length_penalty": options.length_penalty,
                "repetition_penalty": options.repetition_penalty,
                # All candidates of the first step of a beam search come from its first row.
                "logprob_sum": float("-inf") if searches and index else 0.0,
                "timestamps": options.timestamps,
                "lists": lists_of(options),
                "finished": False,
            }
            for name, value in values.items():
                columns.setdefault(name, []).append(value)
        return columns
