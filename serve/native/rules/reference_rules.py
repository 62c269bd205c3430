"""Reference implementation of sampling in plain torch: token rules, choice, scores, end of text.

Suppression, timestamp rules, language detection, the no-speech probability and the average
log-probability follow OpenAI's `whisper/decoding.py`. Repetition penalties follow CTranslate2's
`src/decoding_utils.cc`, and `search.py` follows its beam search. A row's result depends only on the
row and its search's other beams: every operation works row by row, and the sampling noise is a
hash of the row's seed.
"""

import torch

from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.manifest import Dims, TokenizerFacts
from serve.contract.messages import SearchOptions
from serve.native.rules.loops import end_loops
from serve.native.rules.phrases import MARGIN, MAX_BOOSTED, Phrasebook, trie_steps
from serve.native.rules.search import best_tokens, extend
from serve.native.rules.state import LATER, NEG_INF, NO_ROW, Picks, RowState

LISTS = ("suppress_blank", "suppress_numerals")
"""Options that forbid a list of tokens; each has a bit in `RowState.lists`. The first list applies
only to the first token of a text."""


def lists_of(options: SearchOptions) -> int:
    """Return the bits of the lists that apply to a row; see `RowState.lists`."""
    return sum(getattr(options, name) << bit for bit, name in enumerate(LISTS))


class TokenRules:
    """A checkpoint's token rules on one device.

    Args:
        facts: special tokens and suppress lists from the engine's manifest.
        dims: sizes from the engine's manifest.
        device: the device of the logits.
        book: the phrase lists of rows; None: no row has phrases.
        numerals: the ids of tokens that hold numbers.
    """

    def __init__(
        self,
        facts: TokenizerFacts,
        dims: Dims,
        device: torch.device,
        book: Phrasebook | None = None,
        numerals: tuple[int, ...] = (),
    ) -> None:
        self.facts = facts
        self.book = book
        self.suppress = torch.zeros(dims.n_vocab, device=device)
        self.suppress[list(facts.suppress_tokens)] = NEG_INF
        lists = (facts.begin_suppress_tokens, numerals)
        self.lists = torch.zeros(dims.n_vocab, dtype=torch.uint8, device=device)
        """Bits of the lists that hold each token."""
        self._lists = {
            bit: torch.tensor(ids, device=device) for bit, ids in enumerate(lists) if ids
        }
        for bit, tokens in self._lists.items():
            self.lists[tokens] |= 1 << bit
        self._ids = torch.arange(dims.n_vocab, device=device)
        self.languages = sorted(facts.languages.values()) or [facts.sot]
        """Token ids of the languages; start-of-transcript stands in if there are none."""
        self._languages = torch.tensor(self.languages, device=device)

    def record_start(
        self,
        state: RowState,
        rows: torch.Tensor,
        logits: torch.Tensor,
        candidates: torch.Tensor | None = None,
    ) -> None:
        """Record the no-speech probability and the likeliest language, and write its token.

        The call does not wait for the device.

        Args:
            state: changed at `rows`.
            rows: int64 (m,), rows that computed start-of-transcript.
            logits: float32 (m, n_vocab), the logits after it.
            candidates: bool (m, languages), the languages allowed for each row; the probability
                is that among these. None: all.
        """
        logprobs = logits.log_softmax(dim=-1)
        language_logits = logits[:, self._languages]
        if candidates is not None:
            language_logits = language_logits.masked_fill(~candidates, NEG_INF)
        prob, index = language_logits.softmax(dim=-1).max(dim=-1)
        language = self._languages[index]
        tokens = state.tokens[rows]
        state.tokens[rows] = torch.where(tokens == DETECT_LANGUAGE, language[:, None], tokens)
        state.no_speech_prob[rows] = logprobs[:, self.facts.no_speech].exp()
        state.language[rows] = language
        state.language_prob[rows] = prob

    def write_draft(
        self, state: RowState, rows: torch.Tensor, logits: torch.Tensor, offset: int
    ) -> None:
        """Write a draft token of each row: the likeliest one that is not suppressed.

        Args:
            state: the state, whose tokens are written; a row that has no room stays as it is.
            rows: int64 (m,).
            logits: float32 (m, n_vocab) of the draft decoder.
            offset: the position relative to the last known token; 1 is the next token.
        """
        positions = state.position[rows] + offset
        fits = positions < state.tokens.shape[1]
        likeliest = (logits + self.suppress).argmax(dim=-1)
        state.tokens[rows[fits], positions[fits]] = likeliest[fits]

    def begin_draft(self, state: RowState, rows: torch.Tensor) -> None:
        """Start to verify the drafts of some rows, int64 (m,)."""
        state.trusted.index_fill_(0, rows, True)

    def advance(
        self, state: RowState, picks: Picks, logits: torch.Tensor, drafted: bool = False
    ) -> None:
        """Choose the next token of rows that are not finished, and update their state in place.

        The call reads the rows' options from the state, and would wait for a GPU.

        Args:
            state: changed at the rows.
            picks: m rows; the rows of one search are adjacent.
            logits: float32 (lines, n_vocab), the logits after the tokens at the rows' `position`.
            drafted: whether the token after `position` is a draft token. Rows with a rejected
                draft token since `begin_draft` are skipped. No row may be part of a beam search.
        """
        is_live = (picks.rows != NO_ROW) & ~state.finished[picks.rows]
        if drafted:
            is_live &= state.trusted[picks.rows]
        picks = Picks(picks.rows[is_live], picks.logit_rows[is_live])
        rows = picks.rows
        if len(rows) == 0:
            return
        end_loops(state, rows, self.facts.timestamp_begin)
        allowed = logits.index_select(0, picks.logit_rows)
        self._penalise(state, rows, allowed)
        self.apply(state, rows, allowed)
        logprobs = allowed.log_softmax(dim=-1)
        beam = state.beam[rows]
        for width in sorted(set(beam.tolist())):
            of_width = (beam == width).nonzero()[:, 0]
            if width == 1:
                chosen = self._choose(state, rows, allowed)
                logprob = logprobs[of_width, chosen[of_width]]
                self._append_token(state, rows[of_width], chosen[of_width], logprob, drafted)
                continue
            searched = logprobs if len(of_width) == len(rows) else logprobs[of_width]
            searches = rows[of_width].view(-1, width)
            book = self._book_of(state, searches.flatten())
            extend(state, searches, searched, self.facts.eot, self.facts.timestamp_begin, book)

    def _append_token(
        self,
        state: RowState,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        logprob: torch.Tensor,
        drafted: bool,
    ) -> None:
        """Append a token to each of some rows without a beam search; all tensors are (m,)."""
        next_position = state.position[rows] + 1
        if drafted:
            state.trusted[rows] = state.tokens[rows, next_position] == chosen
        state.tokens[rows, next_position] = chosen
        state.logprob_sum[rows] += logprob
        if (book := self._book_of(state, rows)) is not None:
            # The chosen token is always likely.
            boostable = torch.ones_like(chosen, dtype=torch.bool)
            nodes, _ = trie_steps(book, state, rows, chosen[:, None], boostable[:, None])
            state.node[rows] = nodes[:, 0]
        is_timestamp = chosen >= self.facts.timestamp_begin
        state.last_timestamp[rows] = torch.where(is_timestamp, chosen, state.last_timestamp[rows])
        state.finished[rows] = (chosen == self.facts.eot) | (next_position + 1 >= state.limit[rows])
        state.position[rows] = next_position

    def _choose(self, state: RowState, rows: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens, or samples at temperatures above 0: int64 (m,)."""
        chosen = allowed.argmax(dim=-1)
        if (book := self._book_of(state, rows)) is not None:
            chosen = _likeliest_boosted(book, state, rows, allowed)
        sampled = (state.temperature[rows] > 0).nonzero()[:, 0]
        if len(sampled):
            chosen[sampled] = self._draw(state, rows[sampled], allowed[sampled])
        return chosen

    def _book_of(self, state: RowState, rows: torch.Tensor) -> Phrasebook | None:
        """Return the phrase lists if any of the rows has phrases, otherwise None."""
        return self.book if bool((state.root[rows] >= 0).any()) else None

    def _penalise(self, state: RowState, rows: torch.Tensor, allowed: torch.Tensor) -> None:
        """Apply the rows' repetition penalties in place."""
        penalties, sizes = state.repetition_penalty[rows], state.no_repeat_ngram[rows]
        for index in ((penalties != 1) | (sizes > 0)).nonzero()[:, 0].tolist():
            row = rows[index]
            sampled = state.tokens[row, state.prompt_len[row] : state.position[row] + 1]
            values = allowed[index, sampled]
            penalty, size = penalties[index], int(sizes[index])
            allowed[index, sampled] = torch.where(values < 0, values * penalty, values / penalty)
            if 0 < size <= len(sampled):
                grams = sampled.unfold(0, size, 1)
                repeats = (grams[:, :-1] == sampled[len(sampled) - size + 1 :]).all(dim=1)
                allowed[index, grams[repeats, -1]] = NEG_INF

    def apply(self, state: RowState, rows: torch.Tensor, logits: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to -inf in place.

        As in OpenAI's `ApplyTimestampRules`, timestamps come in pairs, never decrease, and begin
        the text. The call waits for the device only if there are numerals.

        Args:
            state: read at `rows`: `tokens`, `position`, `text_begin`, `lists` and both
                timestamp fields.
            rows: int64 (m,).
            logits: float32 (m, n_vocab).
        """
        begin, eot = self.facts.timestamp_begin, self.facts.eot
        position = state.position[rows]
        length = position + 1 - state.text_begin[rows]  # tokens of the text so far
        last = state.tokens[rows, position]
        previous = state.tokens[rows, (position - 1).clamp_min(0)]
        has_timestamps, is_first = state.timestamps[rows], length == 0
        after_timestamp = has_timestamps & (length >= 1) & (last >= begin)
        after_pair = after_timestamp & ((length < 2) | (previous >= begin))
        open_pair = after_timestamp & ~after_pair

        logits += self.suppress
        lists = torch.where(is_first, state.lists[rows], state.lists[rows] & LATER)
        for bit, ids in self._lists.items():
            forbids = (lists >> bit & 1).bool()
            if bit == 0 or bool(forbids.any()):
                logits[:, ids] = logits[:, ids].masked_fill(forbids[:, None], NEG_INF)
        logits[:, self.facts.no_timestamps].masked_fill_(has_timestamps, NEG_INF)
        text, special, times = logits[:, :eot], logits[:, eot:begin], logits[:, begin:]
        timestamp_ids = self._ids[begin:]
        min_timestamp = state.last_timestamp[rows] + (~open_pair).long()
        max_first = begin + self.facts.max_initial_timestamp_index
        max_timestamp = torch.where(is_first, max_first, len(self._ids)).masked_fill(after_pair, -1)
        too_late = timestamp_ids > max_timestamp[:, None]
        out_of_range = (timestamp_ids < min_timestamp[:, None]) | too_late
        times.masked_fill_(out_of_range & has_timestamps[:, None], NEG_INF)

        # If timestamps together are likelier than any text, all text is forbidden.
        best_text = torch.maximum(text.amax(1).masked_fill(open_pair, NEG_INF), special.amax(1))
        # log-sum-exp; torch's own is several times slower with many -inf
        mass = times.amax(1) - times.log_softmax(1).amax(1)
        must_be_timestamp = has_timestamps & (is_first | (mass > best_text))
        text.masked_fill_((must_be_timestamp | open_pair)[:, None], NEG_INF)
        special.masked_fill_(must_be_timestamp[:, None], NEG_INF)

    def _draw(self, state: RowState, rows: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Sample by the Gumbel-max trick, with noise from the row's seed and position."""
        key = state.seed[rows] * 1_000_003 + state.position[rows]
        bits = _mix(_mix(key)[:, None] + self._ids)
        uniform = ((bits & 0xFFFFFF).double() + 0.5) / 2**24
        gumbel = -(-uniform.log()).log()
        temperature = state.temperature[rows, None].clamp_min(1e-6)
        return (allowed / temperature + gumbel.float()).argmax(dim=-1)


def _likeliest_boosted(
    book: Phrasebook, state: RowState, rows: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Return the likeliest token of each row with its phrases' boosts: int64 (m,)."""
    likeliest = best_tokens(allowed, MAX_BOOSTED)
    values = allowed.gather(1, likeliest)
    boostable = values >= values[:, :1] - MARGIN
    _, gains = trie_steps(book, state, rows, likeliest, boostable)
    return likeliest.gather(1, (values + gains).argmax(dim=1, keepdim=True))[:, 0]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood) to int64, which wraps as in C."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    """Return the int64 with the bits of a 64-bit constant."""
    return value - (1 << 64)
