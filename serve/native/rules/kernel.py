"""Compute `TokenRules.advance` with two Triton kernels: a scan of the logits, a choice per row.

The text tokens of the vocabulary are cut into tiles, and so are the timestamps. For each pick, the
first kernel stores every tile's highest logit, sum of exponentials and best token. For beam
searches and phrases it also stores the tile's best few tokens. The second kernel combines the tiles
in order. The program of a search's leader handles the whole search, see `search_kernel`.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.gpu import is_hopper_or_later
from serve.native.kernels.launch import MAX_OVERLAPPING_ROWS, launch
from serve.native.rules.draft_kernel import DRAFT_BLOCK, draft_kernel
from serve.native.rules.fields import SUMS, WIDEST, RowPointers, SamplingConfig, Scan, fields_of
from serve.native.rules.loops import EVERY, MATCH, PERIODS, REPEATS
from serve.native.rules.phrases import MARGIN, MAX_BOOSTED, Phrasebook
from serve.native.rules.phrases_kernel import Tables, choose_boosted, tables_of
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.search_kernel import extend_search, sum_mass
from serve.native.rules.state import LATER, Picks, RowState

_TILE = tl.constexpr(2048)  # tokens per program
# Tokens that a tile keeps for searches and phrases.
_CANDIDATES_PER_TILE = max(2 * WIDEST.value, MAX_BOOSTED)
_PERIODS, _REPEATS, _MATCH, _EVERY = map(tl.constexpr, (PERIODS, REPEATS, MATCH, EVERY))
_MARGIN = tl.constexpr(MARGIN)
_LATER = tl.constexpr(LATER)


@triton.jit
def _mix(x) -> tl.tensor:
    """Apply SplitMix64's finaliser to uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _penalise(state: RowPointers, row, logits, id, position, n_ctx: int) -> tl.tensor:
    """Apply `TokenRules._penalise` to a tile's logits of the tokens `id`."""
    penalty = tl.load(state.repetition_penalty + row)
    size = tl.load(state.no_repeat_ngram + row)
    if (penalty != 1.0) | (size > 0):
        tokens = state.tokens + row * n_ctx
        begin = tl.load(state.prompt_len + row)
        repeated = id < 0
        for index in range(begin, position + 1):
            repeated = repeated | (id == tl.load(tokens + index))
        penalised = tl.where(logits < 0, logits * penalty, tl.div_rn(logits, penalty))
        logits = tl.where(repeated, penalised, logits)
        if size > 0:
            banned = id < 0
            for index in range(begin + size - 1, position + 1):  # the last token of each n-gram
                matches = index >= 0
                for back in range(1, size):
                    newest = tl.load(tokens + position + 1 - back)
                    matches &= tl.load(tokens + index - back) == newest
                banned = banned | (matches & (id == tl.load(tokens + index)))
            logits = tl.where(banned, float("-inf"), logits)
    return logits


@triton.jit
def _forbidden(
    state: RowPointers, row, id, position, length, n_ctx: int, config: tl.constexpr
) -> tl.tensor:
    """Return the tokens that the timestamp rules forbid, except the rule on their total mass."""
    is_timestamp = id >= config.timestamp_begin
    last = tl.load(state.tokens + row * n_ctx + position)
    previous = tl.load(state.tokens + row * n_ctx + tl.maximum(position - 1, 0))
    after_timestamp = (length >= 1) & (last >= config.timestamp_begin)
    after_pair = after_timestamp & ((length < 2) | (previous >= config.timestamp_begin))
    open_pair = after_timestamp & (after_pair == 0)
    min_timestamp = tl.load(state.last_timestamp + row) + tl.where(open_pair, 0, 1)
    forbidden = (id == config.no_timestamps) | (after_pair & is_timestamp)
    forbidden = forbidden | (open_pair & (id < config.eot))
    forbidden = forbidden | (is_timestamp & (id < min_timestamp))
    return forbidden | ((length == 0) & ((is_timestamp == 0) | (id > config.max_first_timestamp)))


@triton.jit
def _live(state: RowPointers, row, drafted: tl.constexpr) -> tl.tensor:
    is_row = row >= 0  # a negative row is `NO_ROW`
    live = tl.load(state.finished + row, mask=is_row, other=1) == 0
    if drafted:
        live = live & (tl.load(state.trusted + row, mask=is_row, other=0) != 0)
    return live


@triton.jit
def _store_best(scan: Scan, scan_tile, allowed, id, start, count, keep: tl.constexpr) -> None:
    """Store the best `count` tokens of a tile in descending order, and -inf after them."""
    slot = tl.arange(0, keep)
    values = tl.full((keep,), float("-inf"), tl.float32)
    ids = tl.zeros((keep,), tl.int32)
    remaining = allowed
    for rank in range(0, count):
        value, best = tl.max(remaining, 0, return_indices=True, return_indices_tie_break_left=True)
        values = tl.where(slot == rank, value, values)
        ids = tl.where(slot == rank, start + best, ids)
        remaining = tl.where(id == start + best, float("-inf"), remaining)
    tl.store(scan.tops + scan_tile * keep + slot, values)
    tl.store(scan.top_ids + scan_tile * keep + slot, ids)


@triton.jit
def _gumbel_scores(state: RowPointers, row, position, allowed, id) -> tl.tensor:
    """Compute the scores of `TokenRules._draw`; the sample is the token with the largest."""
    score = allowed
    temperature = tl.load(state.temperature + row)
    if temperature > 0:
        key = tl.load(state.seed + row) * 1_000_003 + position
        bits = _mix(_mix(key.to(tl.uint64)) + id.to(tl.uint64)) & 0xFFFFFF
        uniform = (bits.to(tl.float64) + 0.5) / 16777216.0
        noise = -tl.log(-tl.log(uniform))
        score = allowed / tl.maximum(temperature, 1e-6) + noise.to(tl.float32)
    return score


@triton.jit(do_not_specialize_on_alignment=("logits",))  # the tensor may begin at any row
def _scan_kernel(
    logits,
    pick_rows,
    pick_logits,
    state: RowPointers,
    suppress,
    lists,
    scan: Scan,
    n_vocab: int,
    n_ctx: int,
    config: tl.constexpr,
) -> None:
    if config.pdl:
        gdc_launch_dependents()
        gdc_wait()
    tile, pick = tl.program_id(0), tl.program_id(1)
    row = tl.load(pick_rows + pick)
    if _live(state, row, config.drafted):
        position = tl.load(state.position + row)
        length = position + 1 - tl.load(state.text_begin + row)
        is_timestamp_tile = tile >= config.text_tiles
        timestamp_start = config.timestamp_begin + (tile - config.text_tiles) * _TILE
        start = tl.where(is_timestamp_tile, timestamp_start, tile * _TILE)
        id = start + tl.arange(0, _TILE)
        mask = id < tl.where(is_timestamp_tile, n_vocab, config.timestamp_begin)
        logits_begin = tl.load(pick_logits + pick) * n_vocab
        row_logits = tl.load(logits + logits_begin + id, mask=mask, other=float("-inf"))
        masked_logits = _penalise(state, row, row_logits.to(tl.float32), id, position, n_ctx)
        masked_logits += tl.load(suppress + id, mask=mask, other=0.0)
        row_lists = tl.load(state.lists + row).to(tl.int32)
        row_lists = tl.where(length == 0, row_lists, row_lists & _LATER)
        if row_lists != 0:
            token_lists = tl.load(lists + id, mask=mask, other=0).to(tl.int32)
            masked_logits = tl.where((token_lists & row_lists) != 0, float("-inf"), masked_logits)
        if tl.load(state.timestamps + row) != 0:
            forbidden = _forbidden(state, row, id, position, length, n_ctx, config)
            masked_logits = tl.where(forbidden, float("-inf"), masked_logits)
        peak = tl.max(masked_logits, 0)
        boosted = tl.load(state.root + row) >= 0
        if boosted:
            tl.atomic_max(scan.peaks + pick, peak)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        scan_tile = pick * config.tiles + tile
        sums = scan.sums + scan_tile * SUMS
        tl.store(sums, peak)
        tl.store(sums + 1, tl.sum(tl.exp(masked_logits - shift), 0))
        score = _gumbel_scores(state, row, position, masked_logits, id)
        best, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(sums + 2, best)
        tl.store(sums + 3, tl.sum(tl.where(id == start + index, masked_logits, 0.0), 0))
        tl.store(scan.ids + scan_tile, start + index)
        width = tl.load(state.beam + row)
        if (width > 1) | boosted:
            count = tl.where(width > 1, 2 * width, 1)
            if boosted:  # `peaks` may lack tiles, so the count may be too high, never too low
                threshold = tl.load(scan.peaks + pick, volatile=True) - _MARGIN
                n_near = tl.sum((masked_logits >= threshold).to(tl.int32), 0)
                count = tl.minimum(tl.maximum(count, n_near), config.keep)
            _store_best(scan, scan_tile, masked_logits, id, start, count, config.keep)


@triton.jit
def _choose_kernel(
    pick_rows, state: RowPointers, scan: Scan, tables: Tables, n_ctx: int, config: tl.constexpr
) -> None:
    if config.pdl:
        gdc_wait()
    pick = tl.program_id(0)
    row = tl.load(pick_rows + pick)
    tl.store(scan.peaks + pick, float("-inf"))  # for the next step
    if _live(state, row, config.drafted):
        limit = _lower_limit(state, row, n_ctx, config.timestamp_begin, config.ctx_padded)
        width = tl.load(state.beam + row)
        if width == 1:
            _choose_token(state, row, limit, pick, scan, tables, n_ctx, config)
        elif config.searching:  # noqa: SIM102 - a compile-time condition
            if tl.load(state.leader + row) == row:
                extend_search(state, row, limit, pick, width, scan, tables, n_ctx, config)


@triton.jit
def _lower_limit(
    state: RowPointers, row, n_ctx: int, timestamp_begin: tl.constexpr, ctx_padded: tl.constexpr
) -> tl.tensor:
    """Return the row's limit; see `loops.end_loops`, which lowers it."""
    limit = tl.load(state.limit + row)
    position = tl.load(state.position + row)
    begin = tl.load(state.prompt_len + row)
    loop_at = tl.load(state.loop_at + row)
    if (position >= loop_at) & ((position + 1 - begin) % _EVERY == 0):
        newest = state.tokens + row * n_ctx + position
        lag = tl.arange(0, _PERIODS) + 1
        period_matches = position - (_MATCH - 1) - lag >= begin
        for back in tl.static_range(0, _MATCH):
            previous = tl.load(newest - back - lag, mask=period_matches, other=-1)
            newest_token = tl.minimum(tl.load(newest - back), timestamp_begin)
            previous = tl.minimum(previous, timestamp_begin)
            period_matches = period_matches & (previous == newest_token)
        period = tl.min(tl.where(period_matches, lag, _PERIODS + 1), 0)
        if period <= _PERIODS:
            distance = tl.arange(0, ctx_padded)
            mask = position - distance - period >= begin
            newer = tl.minimum(tl.load(newest - distance, mask=mask, other=-1), timestamp_begin)
            earlier = tl.load(newest - distance - period, mask=mask, other=-2)
            matches = newer == tl.minimum(earlier, timestamp_begin)
            repeated = tl.min(tl.where(matches, ctx_padded, distance), 0)
            if repeated >= tl.maximum(loop_at + 1 - begin, _REPEATS * period):
                limit = position + 2
                tl.store(state.limit + row, limit)
    return limit


@triton.jit
def _choose_token(
    state: RowPointers,
    row,
    limit,
    pick,
    scan: Scan,
    tables: Tables,
    n_ctx: int,
    config: tl.constexpr,
) -> None:
    """Compute `TokenRules._say`: append the chosen token to a row without a beam search."""
    tiles: tl.constexpr = config.tiles
    text_tiles: tl.constexpr = config.text_tiles
    tile = tl.arange(0, config.tiles_padded)
    is_text, is_timestamp = tile < text_tiles, (tile >= text_tiles) & (tile < tiles)
    sums = scan.sums + (pick * tiles + tile) * SUMS
    none = float("-inf")
    peak = tl.load(sums, mask=tile < tiles, other=none)
    mass = tl.load(sums + 1, mask=tile < tiles, other=0.0)
    score = tl.load(sums + 2, mask=tile < tiles, other=none)
    text_peak, text_mass = sum_mass(tl.where(is_text, peak, none), tl.where(is_text, mass, 0.0), 0)
    timestamp_peak = tl.where(is_timestamp, peak, none)
    _, timestamp_mass = sum_mass(timestamp_peak, tl.where(is_timestamp, mass, 0.0), 0)
    must_be_timestamp = (tl.load(state.timestamps + row) != 0) & (timestamp_mass > text_peak)
    max_mass = tl.maximum(text_mass, timestamp_mass)
    total_mass = max_mass + tl.log(tl.exp(text_mass - max_mass) + tl.exp(timestamp_mass - max_mass))
    total_mass = tl.where(must_be_timestamp, timestamp_mass, total_mass)
    score = tl.where(must_be_timestamp & is_text, none, score)
    _, best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(scan.ids + pick * tiles + best).to(tl.int64)
    logit = tl.load(scan.sums + (pick * tiles + best) * SUMS + 3)
    if tl.load(state.root + row) >= 0:
        token, logit = choose_boosted(tables, state, row, pick, must_be_timestamp, scan, config)
    next_position = tl.load(state.position + row) + 1
    token_pointer = state.tokens + row * n_ctx + next_position
    if config.drafted:
        tl.store(state.trusted + row, (tl.load(token_pointer) == token).to(tl.uint8))
    tl.store(token_pointer, token)
    tl.store(state.logprob_sum + row, tl.load(state.logprob_sum + row) + (logit - total_mass))
    if token >= config.timestamp_begin:
        tl.store(state.last_timestamp + row, token)
    ended = (token == config.eot) | (next_position + 1 >= limit)
    tl.store(state.finished + row, ended.to(tl.uint8))
    tl.store(state.position + row, next_position)


class TritonRules(TokenRules):
    """A checkpoint's token rules in kernels, which read the rows' options on the device.

    Args:
        arguments: those of `TokenRules`, which is the reference implementation.
        max_picks: the maximum number of picks of a call.
        searching: whether any row may ever be part of a beam search.
    """

    def __init__(self, *arguments: Any, max_picks: int, searching: bool) -> None:
        super().__init__(*arguments)
        begin, device = self.facts.timestamp_begin, self.suppress.device
        self._text_tiles = triton.cdiv(begin, _TILE.value)
        self._tiles = self._text_tiles + triton.cdiv(len(self.suppress) - begin, _TILE.value)
        self._searching = searching
        self._tables = tables_of(self.book or Phrasebook(1, device))
        self._overlaps = is_hopper_or_later(device)
        self._max_picks, shape = max_picks, (max_picks, self._tiles)
        self._scan = Scan(
            peaks=torch.full((max_picks,), float("-inf"), dtype=torch.float32, device=device),
            sums=torch.empty((*shape, SUMS.value), dtype=torch.float32, device=device),
            ids=torch.empty(shape, dtype=torch.int32, device=device),
            tops=torch.empty((*shape, _CANDIDATES_PER_TILE), dtype=torch.float32, device=device),
            top_ids=torch.empty((*shape, _CANDIDATES_PER_TILE), dtype=torch.int32, device=device),
        )

    def write_draft(
        self, state: RowState, rows: torch.Tensor, logits: torch.Tensor, offset: int
    ) -> None:
        assert logits.is_contiguous() and rows.is_contiguous()
        inputs, sizes = (state.tokens, state.position), (logits.shape[1], state.tokens.shape[1])
        launch(draft_kernel, len(rows))(
            logits, self.suppress, rows, *inputs, offset, *sizes, DRAFT_BLOCK, num_warps=16
        )

    def advance(
        self, state: RowState, picks: Picks, logits: torch.Tensor, drafted: bool = False
    ) -> None:
        n, n_vocab, n_ctx = len(picks.rows), logits.shape[1], state.tokens.shape[1]
        assert logits.is_contiguous() and n <= self._max_picks
        fields, config = fields_of(state), self._config(n, n_ctx, drafted, picks.searching)
        inputs = (logits, picks.rows, picks.logit_rows, fields, self.suppress, self.lists)
        launch(_scan_kernel, self._tiles, n)(
            *inputs, self._scan, n_vocab, n_ctx, config, num_warps=4, launch_pdl=config.pdl
        )
        warps = 4 if config.searching else 1
        tensors = (picks.rows, fields, self._scan, self._tables)
        launch(_choose_kernel, n)(*tensors, n_ctx, config, num_warps=warps, launch_pdl=config.pdl)

    def _config(self, picks: int, n_ctx: int, drafted: bool, searching: bool) -> SamplingConfig:
        facts = self.facts
        return SamplingConfig(
            eot=facts.eot,
            no_timestamps=facts.no_timestamps,
            timestamp_begin=facts.timestamp_begin,
            max_first_timestamp=facts.timestamp_begin + facts.max_initial_timestamp_index,
            tiles=self._tiles,
            text_tiles=self._text_tiles,
            tiles_padded=triton.next_power_of_2(self._tiles),
            keep=_CANDIDATES_PER_TILE,
            searching=searching and self._searching,
            ctx_padded=triton.next_power_of_2(n_ctx),
            drafted=drafted,
            pdl=self._overlaps and picks <= MAX_OVERLAPPING_ROWS,
        )
