"""Prefill: compute the prompts of new windows in one step, and choose their first tokens.

If the language must be detected, an earlier step computes the prompt up to start-of-transcript. The
detected language then replaces the placeholder in the prompt.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch

from serve.contract.engine import DETECT_LANGUAGE
from serve.native.batching import TokenSpan, prefill_batch, upload
from serve.native.kernels.gpu import staged
from serve.native.kernels.step_batch import StepBatch
from serve.native.language_search import LanguageHypothesis
from serve.native.prefill_batch import PrefillBatch, sizes
from serve.native.replay import GraphCache
from serve.native.resources import RuntimeResources
from serve.native.rules.reference_rules import lists_of
from serve.native.rules.state import NO_DRAFT, NOWHERE, Picks, new_state
from serve.native.slots import SlotAllocation
from serve.native.stopwatch import Stopwatch
from serve.runtime.protocol import Job

# Kernels differ by length: one token, as in language detection; powers of two up to 64; then tiles.
_PROMPT_LENGTHS = (1, 4, 24, 48, 100, 224)
_SHORT_PROMPTS = (1, 4)
_SEED_STEP = 7_919  # seed difference between the samples of one window; any number but 0 works


@dataclasses.dataclass(eq=False)
class SlotJob:
    """A job that owns a slot and rows."""

    submitted: Job
    job: Job  # the submitted job, or its job for another language
    allocation: SlotAllocation
    stopwatch: Stopwatch  # times the batch's encoding
    decode_began: float = 0.0
    hypotheses: tuple[LanguageHypothesis, ...] = ()  # the earlier hypotheses


def rows_of(job: Job) -> int:
    """Return the number of rows that a job needs: its beams, or its samples."""
    options = job.options
    return options.best_of if options.temperature > 0 else options.beam_size


class Prefill:
    """Starts windows after their audio is encoded.

    Args:
        resources: the network, its caches and its token rules.
    """

    def __init__(self, resources: RuntimeResources) -> None:
        self._network = resources.network
        self._cache = resources.cache
        self._state = resources.state
        self._rules = resources.rules
        self._device = resources.network.device
        self._slots = resources.cache.cross.shape[2]
        # CUDA graphs do not track what the draft decoder has computed, so it prefills prompts too.
        self._draft = resources.draft if resources.graphs else None
        self._graph_batches = list[PrefillBatch]()  # smallest first
        self._logits = dict[PrefillBatch, torch.Tensor]()  # the graphs' outputs
        self.replay = GraphCache()
        """Graphs of prefill and of the first choices; recorded while all rows are free."""
        if resources.graphs:
            self.add_graphs()

    def start(self, started: Sequence[SlotJob]) -> None:
        """Prefill prompts that `write` has written, and choose first tokens."""
        detecting = [window for window in started if DETECT_LANGUAGE in window.job.prompt]
        if detecting:
            self._detect(detecting)
        plain = [window for window in started if not self._draft_length(window)]
        drafted = [window for window in started if self._draft_length(window)]
        for group in (plain, drafted):
            if group:
                self._prefill(group)

    def add_graphs(self) -> None:
        """Register the CUDA graphs of prefill and of the first sampling step for recording."""
        for size in sizes(self._slots):
            self._graph_batches.append(PrefillBatch(self._state.tokens, size))
        for graph_batch in reversed(self._graph_batches):
            self.replay.add(graph_batch, functools.partial(self._run_recorded, graph_batch))
            for draft_length in graph_batch.size.draft_lengths:
                sample = functools.partial(self._choose_recorded, graph_batch, draft_length)
                self.replay.add((graph_batch, draft_length), sample)

    def warm_up(self) -> None:
        """Compile the kernels for prompts and drafts of every size; all rows are free.

        A single window uses every prompt length; 2, 4, 8, … windows together use short prompts.
        """
        counts = [2**i for i in range(1, self._slots.bit_length())]
        several_windows = itertools.product(counts, _SHORT_PROMPTS, (False,))
        one_window = itertools.product((1,), _PROMPT_LENGTHS, (False, True))
        first, n_text_ctx = upload([0], self._device), self._state.tokens.shape[1]
        for windows, longest, drafted in (*several_windows, *one_window):
            length = min(longest, n_text_ctx)
            spans = [TokenSpan(SlotAllocation(i, i, 1), 0, length) for i in range(windows)]
            batch = prefill_batch(self._state.tokens, spans, self._device)
            ends = range(0 if drafted else length - 1, windows * length, 1 if drafted else length)
            logits = self._launch(batch, upload(ends, self._device))
            self._rules.advance(self._state, Picks(first, first), logits, drafted)

    def _step(
        self, spans: Sequence[TokenSpan], logit_indices: Sequence[int]
    ) -> tuple[torch.Tensor, PrefillBatch | None]:
        """Compute the tokens of some spans.

        Returns:
            The logits after the tokens at `logit_indices`, float32 (indices, n_vocab), and the
            batch of the graph that computed them; None if no graph did.
        """
        graph_batch = self._graph_for(spans, logit_indices)
        if graph_batch is not None:
            graph_batch.write_spans(spans, logit_indices)
            self.replay.launch(graph_batch)
            return self._logits[graph_batch][: len(logit_indices)], graph_batch
        batch = prefill_batch(self._state.tokens, spans, self._device)
        return self._launch(batch, upload(logit_indices, self._device)), None

    def _graph_for(
        self, spans: Sequence[TokenSpan], logit_indices: Sequence[int]
    ) -> PrefillBatch | None:
        fitting = (one for one in self._graph_batches if one.holds(spans, logit_indices))
        return next((one for one in fitting if one in self.replay), None)

    def _run_recorded(self, graph_batch: PrefillBatch) -> None:
        self._logits[graph_batch] = self._launch(graph_batch.batch, graph_batch.logit_indices)

    def _choose_recorded(self, graph_batch: PrefillBatch, draft_length: int) -> None:
        """Choose first tokens of single rows; a row without a draft counts as an empty draft."""
        self._state.trusted.fill_(True)
        for picks in graph_batch.picks(draft_length):
            self._rules.advance(self._state, picks, self._logits[graph_batch], drafted=True)

    def _launch(self, batch: StepBatch, logit_indices: torch.Tensor) -> torch.Tensor:
        """Compute a batch with every decoder; return the main decoder's logits."""
        if self._draft is not None:
            decoder, cache = self._draft
            decoder.step(batch, cache, logit_indices[:1])
        return self._network.step(batch, self._cache, logit_indices)

    def _sot_index(self, job: Job) -> int:
        return job.prompt.index(self._rules.facts.sot)

    def _detect(self, started: Sequence[SlotJob]) -> None:
        spans = [
            TokenSpan(window.allocation, 0, self._sot_index(window.job) + 1) for window in started
        ]
        ends = [sum(span.end for span in spans[: i + 1]) - 1 for i in range(len(spans))]
        logits, _ = self._step(spans, ends)
        self._record_start(started, logits)

    def _record_start(self, started: Sequence[SlotJob], logits: torch.Tensor) -> None:
        leaders = upload([window.allocation.first_row for window in started], self._device)
        self._rules.record_start(self._state, leaders, logits, self._candidates(started))

    def _candidates(self, started: Sequence[SlotJob]) -> torch.Tensor | None:
        """Return the languages allowed for each job, as `TokenRules.record_start` takes them."""
        if not any(window.job.detection.languages for window in started):
            return None
        languages = self._rules.languages
        allowed = [window.job.detection.languages or languages for window in started]
        rows = torch.tensor([[language in row for language in languages] for row in allowed])
        return staged(rows, self._device).to(self._device, non_blocking=True)

    def _prefill(self, started: Sequence[SlotJob]) -> None:
        """Compute the rest of the prompts and the drafts; either all jobs have a draft or none."""
        spans, sot_indices, last_indices = list[TokenSpan](), list[int](), list[int]()
        without_detection, n_tokens = list[SlotJob](), 0
        drafts, draft_lengths = list[int](), list[int]()
        for window in started:
            job, end = window.job, len(window.job.prompt)
            begin = self._sot_index(job) + 1 if DETECT_LANGUAGE in job.prompt else 0
            if begin == 0:
                without_detection.append(window)
                sot_indices.append(n_tokens + self._sot_index(job))
            spans.append(TokenSpan(window.allocation, begin, end))
            n_tokens += end - begin
            last_indices.append(n_tokens - 1)
            draft_lengths.append(self._draft_length(window))
            if draft_lengths[-1]:
                spans.append(TokenSpan(window.allocation, end, end + draft_lengths[-1]))
            drafts += range(n_tokens, n_tokens + draft_lengths[-1])
            n_tokens += draft_lengths[-1]
        logits, graph_batch = self._step(spans, [*sot_indices, *last_indices, *drafts])
        if without_detection:
            self._record_start(without_detection, logits[: len(without_detection)])
        # Rows of logits: after each start-of-transcript, after each prompt, after the drafts.
        rows = [row for window in started for row in window.allocation.rows]
        first = len(without_detection)
        prompt_rows = [
            first + i for i, window in enumerate(started) for _ in window.allocation.rows
        ]
        begins = itertools.accumulate(draft_lengths[:-1], initial=first + len(started))
        draft_rows = (range(begin, begin + max(draft_lengths)) for begin in begins)
        logit_rows: list[Sequence[int]] = [prompt_rows, *zip(*draft_rows, strict=True)]
        self._choose(graph_batch if len(rows) == len(started) else None, rows, logit_rows, logits)

    def _draft_length(self, window: SlotJob) -> int:
        """Return the number of a job's draft tokens to compute: one less than its limit."""
        job = window.job
        room = min(job.options.max_tokens, self._state.tokens.shape[1] - len(job.prompt)) - 1
        return min(len(job.draft), room) if window.allocation.count == 1 else 0

    def _choose(
        self,
        graph_batch: PrefillBatch | None,
        rows: Sequence[int],
        logit_rows: Sequence[Sequence[int]],
        logits: torch.Tensor,
    ) -> None:
        """Choose first tokens, and one more for each accepted draft token.

        Args:
            prompts: the batch whose graphs may do it; None: none.
            rows, logit_rows: see `PrefillBatch.choose`.
            logits: float32 (lines, n_vocab).
        """
        draft_length = None if graph_batch is None else graph_batch.choose(rows, logit_rows)
        if draft_length is not None:
            self.replay.launch((graph_batch, draft_length))
            return
        row_indices, drafted = upload(rows, self._device), len(logit_rows) > 1
        if drafted:
            self._rules.begin_draft(self._state, row_indices)
        for row_logits in logit_rows:
            picks = Picks(row_indices, upload(row_logits, self._device))
            self._rules.advance(self._state, picks, logits, drafted)

    def write(self, started: Sequence[SlotJob]) -> None:
        """Write the jobs' prompts, drafts and options into their rows."""
        context = self._state.tokens.shape[1]
        window_rows = [(window, row) for window in started for row in window.allocation.rows]
        known_tokens = [
            (*window.job.prompt, *window.job.draft[: self._draft_length(window)])
            for window, _ in window_rows
        ]
        longest = min(max(map(len, known_tokens)) + 1, context)
        rows = new_state(len(window_rows), longest, torch.device("cpu"))
        rows.tokens.fill_(NO_DRAFT)  # an earlier job's token must not count as an accepted draft
        for index, tokens in enumerate(known_tokens):
            rows.tokens.numpy()[index, : len(tokens)] = tokens
        for name, column in self._columns(window_rows, context).items():
            getattr(rows, name).numpy()[:] = column  # a third of the time of torch's copies
        target_rows = upload([row for _, row in window_rows], self._device)
        self._state.write_rows(target_rows, rows)

    def _last_timestamp(self, job: Job) -> int:
        """Return the highest timestamp token in a job's prefix; 0 if there is none."""
        prefix = job.prompt[len(job.prompt) - job.prefix :]
        begin = self._rules.facts.timestamp_begin
        return max((token for token in prefix if token >= begin), default=0)

    def _root(self, window: SlotJob) -> int:
        """Return the root of the trie of a job's phrases; sampled jobs have no phrases."""
        options, book = window.job.options, self._rules.book
        if options.phrases is None or options.temperature > 0 or book is None:
            return -1
        return book.root(window.allocation.slot, options.phrases)

    def _columns(
        self, window_rows: list[tuple[SlotJob, int]], context: int
    ) -> dict[str, list[float]]:
        """Return the initial values of the rows' state by field."""
        columns: dict[str, list[float]] = {}
        for window, row in window_rows:
            prompt, options = window.job.prompt, window.job.options
            index = row - window.allocation.first_row
            searches = window.allocation.count > 1 and options.temperature == 0
            checks_loops = window.job.loop_tokens > 0 and not (searches and index)
            values = {
                "position": len(prompt) - 1,
                "prompt_len": len(prompt),
                "text_begin": len(prompt) - window.job.prefix,
                "last_timestamp": self._last_timestamp(window.job),
                "limit": min(len(prompt) + options.max_tokens, context),
                "loop_at": len(prompt) - 1 + window.job.loop_tokens if checks_loops else NOWHERE,
                "seed": options.seed + index * _SEED_STEP,
                "leader": window.allocation.first_row,
                "beam": window.allocation.count if searches else 1,
                # Round half away from zero, as C does.
                "needed": max(1, int(window.allocation.count * options.patience + 0.5)),
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
