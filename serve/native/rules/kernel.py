"""Compute `TokenRules.advance` with two Triton kernels: a scan of the logits, a choice per row.

The text tokens of the vocabulary are cut into tiles, and so are the timestamps. For each pick, a
tile stores the peak, the sum of exponentials and the best token. For searches and phrases it also
stores its best few tokens. The second kernel combines the tiles in order. The program of a beam
search's leader handles the whole search, see `search_kernel`.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.launch import Overlap, launch
from serve.native.rules.fields import SUMS, WIDEST, RowPointers, SamplingConfig, Scan, fields_of
from serve.native.rules.loops import EVERY, MATCH, PERIODS, REPEATS
from serve.native.rules.phrases import LIKELIEST, MARGIN, Phrasebook
from serve.native.rules.phrases_kernel import Tables, choose_boosted, tables_of
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.search_kernel import settle_search, total
from serve.native.rules.state import LATER, Picks, RowState

_TILE = tl.constexpr(2048)  # tokens per program
_KEPT = max(2 * WIDEST.value, LIKELIEST)  # tokens that a tile keeps for searches and phrases
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
def _penalise(state: RowPointers, row, raw, id, at, n_ctx: int) -> tl.tensor:
    """Compute `TokenRules._penalise` for a tile's logits `raw` of the tokens `id`."""
    penalty = tl.load(state.repetition_penalty + row)
    size = tl.load(state.no_repeat_ngram + row)
    if (penalty != 1.0) | (size > 0):
        tokens = state.tokens + row * n_ctx
        begin = tl.load(state.prompt_len + row)
        hit = id < 0
        for place in range(begin, at + 1):
            hit = hit | (id == tl.load(tokens + place))
        raw = tl.where(hit, tl.where(raw < 0, raw * penalty, tl.div_rn(raw, penalty)), raw)
        if size > 0:
            banned = id < 0
            for place in range(begin + size - 1, at + 1):  # the last token of each n-gram
                same = place >= 0
                for back in range(1, size):
                    same &= tl.load(tokens + place - back) == tl.load(tokens + at + 1 - back)
                banned = banned | (same & (id == tl.load(tokens + place)))
            raw = tl.where(banned, float("-inf"), raw)
    return raw


@triton.jit
def _forbidden(
    state: RowPointers, row, id, at, length, n_ctx: int, form: tl.constexpr
) -> tl.tensor:
    """Return the tokens that the timestamp rules forbid, without the rule on their total mass."""
    is_timestamp = id >= form.timestamp_begin
    last = tl.load(state.tokens + row * n_ctx + at)
    before = tl.load(state.tokens + row * n_ctx + tl.maximum(at - 1, 0))
    after = (length >= 1) & (last >= form.timestamp_begin)
    pair = after & ((length < 2) | (before >= form.timestamp_begin))
    half = after & (pair == 0)
    lowest = tl.load(state.last_timestamp + row) + tl.where(half, 0, 1)
    bad = (id == form.no_timestamps) | (pair & is_timestamp) | (half & (id < form.eot))
    bad = bad | (is_timestamp & (id < lowest))
    return bad | ((length == 0) & ((is_timestamp == 0) | (id > form.newest_first)))


@triton.jit
def _live(state: RowPointers, row, drafted: tl.constexpr) -> tl.tensor:
    there = row >= 0  # a negative row is `NO_ROW`
    live = tl.load(state.finished + row, mask=there, other=1) == 0
    if drafted:
        live = live & (tl.load(state.trusted + row, mask=there, other=0) != 0)
    return live


@triton.jit
def _store_best(scan: Scan, tile_index, allowed, id, start, count, keep: tl.constexpr) -> None:
    """Store the best `count` tokens of a tile in descending order, and -inf after them."""
    lane = tl.arange(0, keep)
    values = tl.full((keep,), float("-inf"), tl.float32)
    ids = tl.zeros((keep,), tl.int32)
    remaining = allowed
    for rank in range(0, count):
        value, best = tl.max(remaining, 0, return_indices=True, return_indices_tie_break_left=True)
        values = tl.where(lane == rank, value, values)
        ids = tl.where(lane == rank, start + best, ids)
        remaining = tl.where(id == start + best, float("-inf"), remaining)
    tl.store(scan.tops + tile_index * keep + lane, values)
    tl.store(scan.top_ids + tile_index * keep + lane, ids)


@triton.jit
def _drawn(state: RowPointers, row, at, allowed, id) -> tl.tensor:
    """Compute the scores of `TokenRules._draw`; the sample is the token with the largest."""
    score = allowed
    heat = tl.load(state.temperature + row)
    if heat > 0:
        key = tl.load(state.seed + row) * 1_000_003 + at
        bits = _mix(_mix(key.to(tl.uint64)) + id.to(tl.uint64)) & 0xFFFFFF
        uniform = (bits.to(tl.float64) + 0.5) / 16777216.0
        noise = -tl.log(-tl.log(uniform))
        score = allowed / tl.maximum(heat, 1e-6) + noise.to(tl.float32)
    return score


@triton.jit(do_not_specialize_on_alignment=("logits",))  # the tensor may begin at any row
def _scan_kernel(
    logits,
    pick_rows,
    pick_at,
    state: RowPointers,
    suppress,
    lists,
    scan: Scan,
    n_vocab: int,
    n_ctx: int,
    form: tl.constexpr,
) -> None:
    if form.pdl:
        gdc_launch_dependents()
        gdc_wait()
    tile, pick = tl.program_id(0), tl.program_id(1)
    row = tl.load(pick_rows + pick)
    if _live(state, row, form.drafted):
        at = tl.load(state.position + row)
        length = at + 1 - tl.load(state.text_begin + row)
        timed = tile >= form.text_tiles
        start = tl.where(
            timed, form.timestamp_begin + (tile - form.text_tiles) * _TILE, tile * _TILE
        )
        id = start + tl.arange(0, _TILE)
        there = id < tl.where(timed, n_vocab, form.timestamp_begin)
        line = tl.load(pick_at + pick) * n_vocab
        raw = tl.load(logits + line + id, mask=there, other=float("-inf")).to(tl.float32)
        allowed = _penalise(state, row, raw, id, at, n_ctx)
        allowed += tl.load(suppress + id, mask=there, other=0.0)
        mine = tl.load(state.lists + row).to(tl.int32)
        mine = tl.where(length == 0, mine, mine & _LATER)
        if mine != 0:
            held = tl.load(lists + id, mask=there, other=0).to(tl.int32)
            allowed = tl.where((held & mine) != 0, float("-inf"), allowed)
        if tl.load(state.timestamps + row) != 0:
            bad = _forbidden(state, row, id, at, length, n_ctx, form)
            allowed = tl.where(bad, float("-inf"), allowed)
        peak = tl.max(allowed, 0)
        boosted = tl.load(state.root + row) >= 0
        if boosted:
            tl.atomic_max(scan.peaks + pick, peak)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        place = pick * form.tiles + tile
        left = scan.sums + place * SUMS
        tl.store(left, peak)
        tl.store(left + 1, tl.sum(tl.exp(allowed - base), 0))
        score = _drawn(state, row, at, allowed, id)
        best, which = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(left + 2, best)
        tl.store(left + 3, tl.sum(tl.where(id == start + which, allowed, 0.0), 0))
        tl.store(scan.ids + place, start + which)
        width = tl.load(state.beam + row)
        if (width > 1) | boosted:
            count = tl.where(width > 1, 2 * width, 1)
            if boosted:  # `peaks` may lack tiles, so the count may be too high, never too low
                lowest = tl.load(scan.peaks + pick, volatile=True) - _MARGIN
                near = tl.sum((allowed >= lowest).to(tl.int32), 0)
                count = tl.minimum(tl.maximum(count, near), form.keep)
            _store_best(scan, place, allowed, id, start, count, form.keep)


@triton.jit
def _settle_kernel(
    pick_rows, state: RowPointers, scan: Scan, book: Tables, n_ctx: int, form: tl.constexpr
) -> None:
    if form.pdl:
        gdc_wait()
    pick = tl.program_id(0)
    row = tl.load(pick_rows + pick)
    tl.store(scan.peaks + pick, float("-inf"))  # for the next step
    if _live(state, row, form.drafted):
        limit = _limit_of(state, row, n_ctx, form.timestamp_begin, form.ctx_padded)
        width = tl.load(state.beam + row)
        if width == 1:
            _settle_one(state, row, limit, pick, scan, book, n_ctx, form)
        elif form.searching:  # noqa: SIM102 - a compile-time condition
            if tl.load(state.leader + row) == row:
                settle_search(state, row, limit, pick, width, scan, book, n_ctx, form)


@triton.jit
def _limit_of(
    state: RowPointers, row, n_ctx: int, timestamp_begin: tl.constexpr, ctx_padded: tl.constexpr
) -> tl.tensor:
    """Return the row's limit; see `loops.end_loops`, which lowers it."""
    limit = tl.load(state.limit + row)
    at = tl.load(state.position + row)
    begin = tl.load(state.prompt_len + row)
    loop_at = tl.load(state.loop_at + row)
    if (at >= loop_at) & ((at + 1 - begin) % _EVERY == 0):
        newest = state.tokens + row * n_ctx + at
        lag = tl.arange(0, _PERIODS) + 1
        same = at - (_MATCH - 1) - lag >= begin
        for back in tl.static_range(0, _MATCH):
            before = tl.load(newest - back - lag, mask=same, other=-1)
            last = tl.minimum(tl.load(newest - back), timestamp_begin)
            same = same & (tl.minimum(before, timestamp_begin) == last)
        period = tl.min(tl.where(same, lag, _PERIODS + 1), 0)
        if period <= _PERIODS:
            away = tl.arange(0, ctx_padded)
            there = at - away - period >= begin
            mine = tl.minimum(tl.load(newest - away, mask=there, other=-1), timestamp_begin)
            earlier = tl.load(newest - away - period, mask=there, other=-2)
            same_as = mine == tl.minimum(earlier, timestamp_begin)
            repeated = tl.min(tl.where(same_as, ctx_padded, away), 0)
            if repeated >= tl.maximum(loop_at + 1 - begin, _REPEATS * period):
                limit = at + 2
                tl.store(state.limit + row, limit)
    return limit


@triton.jit
def _settle_one(
    state: RowPointers, row, limit, pick, scan: Scan, book: Tables, n_ctx: int, form: tl.constexpr
) -> None:
    """Compute `TokenRules._say`: append the chosen token to a row without a beam search."""
    tiles: tl.constexpr = form.tiles
    text_tiles: tl.constexpr = form.text_tiles
    tile = tl.arange(0, form.tiles_padded)
    text, timed = tile < text_tiles, (tile >= text_tiles) & (tile < tiles)
    left = scan.sums + (pick * tiles + tile) * SUMS
    none = float("-inf")
    peak = tl.load(left, mask=tile < tiles, other=none)
    mass = tl.load(left + 1, mask=tile < tiles, other=0.0)
    score = tl.load(left + 2, mask=tile < tiles, other=none)
    text_peak, text_mass = total(tl.where(text, peak, none), tl.where(text, mass, 0.0), 0)
    _, time_mass = total(tl.where(timed, peak, none), tl.where(timed, mass, 0.0), 0)
    must = (tl.load(state.timestamps + row) != 0) & (time_mass > text_peak)
    most = tl.maximum(text_mass, time_mass)
    everything = most + tl.log(tl.exp(text_mass - most) + tl.exp(time_mass - most))
    everything = tl.where(must, time_mass, everything)
    score = tl.where(must & text, none, score)
    _, best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    chosen = tl.load(scan.ids + pick * tiles + best).to(tl.int64)
    logit = tl.load(scan.sums + (pick * tiles + best) * SUMS + 3)
    if tl.load(state.root + row) >= 0:
        chosen, logit = choose_boosted(book, state, row, pick, must, scan, form)
    follow = tl.load(state.position + row) + 1
    place = state.tokens + row * n_ctx + follow
    if form.drafted:
        tl.store(state.trusted + row, (tl.load(place) == chosen).to(tl.uint8))
    tl.store(place, chosen)
    tl.store(state.logprob_sum + row, tl.load(state.logprob_sum + row) + (logit - everything))
    if chosen >= form.timestamp_begin:
        tl.store(state.last_timestamp + row, chosen)
    ended = (chosen == form.eot) | (follow + 1 >= limit)
    tl.store(state.finished + row, ended.to(tl.uint8))
    tl.store(state.position + row, follow)


class TritonSampler:
    """A sampler that applies a checkpoint's rules on the device.

    Args:
        rules: the checkpoint's rules; `TokenRules.advance` is the reference implementation.
        most: the maximum number of picks of a call.
        searching: whether any row may be part of a beam search; if not, kernels are smaller.
    """

    def __init__(self, rules: TokenRules, most: int, searching: bool) -> None:
        self._rules = rules
        n_vocab, device = rules.suppress.shape[0], rules.suppress.device
        begin = rules.facts.timestamp_begin
        self._text_tiles = triton.cdiv(begin, _TILE.value)
        self._tiles = self._text_tiles + triton.cdiv(n_vocab - begin, _TILE.value)
        self._searching = searching
        self._tables = tables_of(rules.book or Phrasebook(1, device))
        self._overlap = Overlap.of(device)
        self._most, shape = most, (most, self._tiles)
        self._scan = Scan(
            peaks=torch.full((most,), float("-inf"), dtype=torch.float32, device=device),
            sums=torch.empty((*shape, SUMS.value), dtype=torch.float32, device=device),
            ids=torch.empty(shape, dtype=torch.int32, device=device),
            tops=torch.empty((*shape, _KEPT), dtype=torch.float32, device=device),
            top_ids=torch.empty((*shape, _KEPT), dtype=torch.int32, device=device),
        )

    def advance(
        self, state: RowState, picks: Picks, logits: torch.Tensor, drafted: bool = False
    ) -> None:
        """Compute `TokenRules.advance`; the kernels read the rows' options on the device."""
        n, n_vocab, n_ctx = len(picks.rows), logits.shape[1], state.tokens.shape[1]
        assert logits.is_contiguous() and n <= self._most
        fields, rules, form = fields_of(state), self._rules, self._form(n, n_ctx, drafted)
        read = (logits, picks.rows, picks.at, fields, rules.suppress, rules.lists)
        launch(_scan_kernel, self._tiles, n)(
            *read, self._scan, n_vocab, n_ctx, form, num_warps=4, launch_pdl=form.pdl
        )
        warps = 4 if self._searching else 1
        launch(_settle_kernel, n)(
            picks.rows,
            fields,
            self._scan,
            self._tables,
            n_ctx,
            form,
            num_warps=warps,
            launch_pdl=form.pdl,
        )

    def _form(self, picks: int, n_ctx: int, drafted: bool) -> SamplingConfig:
        facts = self._rules.facts
        return SamplingConfig(
            eot=facts.eot,
            no_timestamps=facts.no_timestamps,
            timestamp_begin=facts.timestamp_begin,
            newest_first=facts.timestamp_begin + facts.max_initial_timestamp_index,
            tiles=self._tiles,
            text_tiles=self._text_tiles,
            tiles_padded=triton.next_power_of_2(self._tiles),
            keep=_KEPT,
            searching=self._searching,
            ctx_padded=triton.next_power_of_2(n_ctx),
            drafted=drafted,
            pdl=self._overlap.gains(picks),
        )
