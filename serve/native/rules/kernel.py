"""`Rules.advance` as two Triton-language kernels: one reads the logits once, one settles each row.

The text of the vocabulary is cut into tiles, and so are the timestamps. A tile leaves the peak, the
sum of exponentials and the best token of each pick, for a search its best few; the second kernel
adds the tiles up in order. A search is settled by its leader: `search_kernel.py`.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.launch import Overlap, launch
from serve.native.rules.definition import Rules
from serve.native.rules.fields import Fields, fields_of
from serve.native.rules.loops import EVERY, MATCH, PERIODS, REPEATS
from serve.native.rules.phrases import LIKELIEST, Phrasebook
from serve.native.rules.phrases_kernel import Tables, choose_boosted, tables_of
from serve.native.rules.search_kernel import settle_search, total
from serve.native.rules.state import Picks, RowState

_TILE = 2048  # tokens per program
_WIDEST = 8  # rows of a search; a power of two
_KEPT = max(2 * _WIDEST, LIKELIEST)  # tokens that a tile leaves of who searches or is boosted
_PERIODS, _REPEATS, _MATCH, _EVERY = map(tl.constexpr, (PERIODS, REPEATS, MATCH, EVERY))
_SUMS = 4  # float32 numbers that a tile leaves: peak, mass, best score and its logit


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser, on uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _penalise(
    state: Fields, row: tl.tensor, raw: tl.tensor, id: tl.tensor, at: tl.tensor, n_ctx: int
) -> tl.tensor:
    """See `Rules._penalise`; `id` are the tokens that the tile's logits `raw` belong to."""
    penalty = tl.load(state.repetition_penalty + row)
    size = tl.load(state.no_repeat_ngram + row)
    if (penalty != 1.0) | (size > 0):
        said = state.tokens + row * n_ctx
        begin = tl.load(state.prompt_len + row)
        hit = id < 0
        for place in range(begin, at + 1):
            hit = hit | (id == tl.load(said + place))
        raw = tl.where(hit, tl.where(raw < 0, raw * penalty, tl.div_rn(raw, penalty)), raw)
        if size > 0:
            banned = id < 0
            for place in range(begin + size - 1, at + 1):  # where an n-gram ends
                same = place >= 0
                for back in range(1, size):
                    same &= tl.load(said + place - back) == tl.load(said + at + 1 - back)
                banned = banned | (same & (id == tl.load(said + place)))
            raw = tl.where(banned, float("-inf"), raw)
    return raw


@triton.jit
def _forbidden(
    state: Fields, row: tl.tensor, id: tl.tensor, at: tl.tensor, said: tl.tensor, n_ctx: int,
    eot: tl.constexpr, no_timestamps: tl.constexpr, timestamp_begin: tl.constexpr,
    newest_first: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which tokens the timestamp rules forbid, but for what timestamps together decide."""
    is_timestamp = id >= timestamp_begin
    last = tl.load(state.tokens + row * n_ctx + at)
    before = tl.load(state.tokens + row * n_ctx + tl.maximum(at - 1, 0))
    after = (said >= 1) & (last >= timestamp_begin)
    pair = after & ((said < 2) | (before >= timestamp_begin))
    half = after & (pair == 0)
    lowest = tl.load(state.last_timestamp + row) + tl.where(half, 0, 1)
    bad = (id == no_timestamps) | (pair & is_timestamp) | (half & (id < eot))
    bad = bad | (is_timestamp & (id < lowest))
    return bad | ((said == 0) & ((is_timestamp == 0) | (id > newest_first)))


@triton.jit
def _live(state: Fields, row: tl.tensor, drafted: tl.constexpr) -> tl.tensor:
    live = tl.load(state.finished + row) == 0
    if drafted:
        live = live & (tl.load(state.trusted + row) != 0)
    return live


@triton.jit(do_not_specialize_on_alignment=("logits",))  # they may begin at any row
def _scan_kernel(
    logits: tl.tensor, pick_rows: tl.tensor, pick_at: tl.tensor, state: Fields,
    suppress: tl.tensor, begin: tl.tensor, sums: tl.tensor, ids: tl.tensor, tops: tl.tensor,
    top_ids: tl.tensor, n_vocab: int, n_ctx: int,
    eot: tl.constexpr, no_timestamps: tl.constexpr, timestamp_begin: tl.constexpr,
    newest_first: tl.constexpr, tiles: tl.constexpr, text_tiles: tl.constexpr, block: tl.constexpr,
    n_sums: tl.constexpr, keep: tl.constexpr, drafted: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    """sums: see `_SUMS`; ids: best token; tops, top_ids: (picks, tiles, keep), the best first."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    pick = tl.program_id(1)
    row = tl.load(pick_rows + pick)
    if _live(state, row, drafted):
        at = tl.load(state.position + row)
        said = at + 1 - tl.load(state.text_begin + row)
        timed = tile >= text_tiles
        start = tl.where(timed, timestamp_begin + (tile - text_tiles) * block, tile * block)
        id = start + tl.arange(0, block)
        there = id < tl.where(timed, n_vocab, timestamp_begin)
        line = tl.load(pick_at + pick) * n_vocab
        raw = tl.load(logits + line + id, mask=there, other=float("-inf")).to(tl.float32)
        allowed = _penalise(state, row, raw, id, at, n_ctx)
        allowed += tl.load(suppress + id, mask=there, other=0.0)
        if said == 0:
            allowed += tl.load(begin + id, mask=there, other=0.0)
        if tl.load(state.timestamps + row) != 0:
            bad = _forbidden(
                state, row, id, at, said, n_ctx, eot, no_timestamps, timestamp_begin,
                newest_first,
            )  # fmt: skip
            allowed = tl.where(bad, float("-inf"), allowed)
        peak = tl.max(allowed, 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        place = pick * tiles + tile
        left = sums + place * n_sums
        tl.store(left, peak)
        tl.store(left + 1, tl.sum(tl.exp(allowed - base), 0))
        width = tl.load(state.beam + row)
        boosted = tl.load(state.root + row) >= 0
        if (width > 1) | boosted:
            rest = allowed
            for rank in range(0, tl.where(boosted, keep, 2 * width)):
                value, which = tl.max(
                    rest, 0, return_indices=True, return_indices_tie_break_left=True
                )  # fmt: skip
                tl.store(tops + place * keep + rank, value)
                tl.store(top_ids + place * keep + rank, start + which)
                rest = tl.where(id == start + which, float("-inf"), rest)
        score = allowed
        heat = tl.load(state.temperature + row)
        if heat > 0:
            key = tl.load(state.seed + row) * 1_000_003 + at
            bits = _mix(_mix(key.to(tl.uint64)) + id.to(tl.uint64)) & 0xFFFFFF
            uniform = (bits.to(tl.float64) + 0.5) / 16777216.0
            noise = -tl.log(-tl.log(uniform))
            score = allowed / tl.maximum(heat, 1e-6) + noise.to(tl.float32)
        best, which = tl.max(
            score, 0, return_indices=True, return_indices_tie_break_left=True
        )  # fmt: skip
        tl.store(left + 2, best)
        tl.store(left + 3, tl.sum(tl.where(id == start + which, allowed, 0.0), 0))
        tl.store(ids + place, start + which)


@triton.jit
def _settle_kernel(
    pick_rows: tl.tensor, state: Fields, sums: tl.tensor, ids: tl.tensor, tops: tl.tensor,
    top_ids: tl.tensor, book: Tables, n_ctx: int, eot: tl.constexpr,
    timestamp_begin: tl.constexpr, tiles: tl.constexpr, text_tiles: tl.constexpr,
    tiles_padded: tl.constexpr, n_sums: tl.constexpr, keep: tl.constexpr, searching: tl.constexpr,
    beams_padded: tl.constexpr, ctx_padded: tl.constexpr, drafted: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        gdc_wait()
    pick = tl.program_id(0)
    row = tl.load(pick_rows + pick)
    if _live(state, row, drafted):
        limit = _limit_of(state, row, n_ctx, timestamp_begin, ctx_padded)
        width = tl.load(state.beam + row)
        if width == 1:
            _settle_one(
                state, row, limit, pick, sums, ids, tops, top_ids, book, n_ctx, eot,
                timestamp_begin, tiles, text_tiles, tiles_padded, n_sums, keep, drafted,
            )  # fmt: skip
        elif searching:  # noqa: SIM102 - decided when it is compiled
            if tl.load(state.leader + row) == row:
                settle_search(
                    state, book, row, limit, pick, width, sums, tops, top_ids, n_ctx, eot,
                    timestamp_begin, tiles, text_tiles, tiles_padded, n_sums, keep, beams_padded,
                    ctx_padded,
                )  # fmt: skip


@triton.jit
def _limit_of(
    state: Fields, row: tl.tensor, n_ctx: int, timestamp_begin: tl.constexpr,
    ctx_padded: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The row's limit; see `loops.end_loops`, which lowers it."""
    limit = tl.load(state.limit + row)
    at = tl.load(state.position + row)
    begin = tl.load(state.prompt_len + row)
    loop_at = tl.load(state.loop_at + row)
    if (at >= loop_at) & ((at + 1 - begin) % _EVERY == 0):
        said = state.tokens + row * n_ctx + at
        lag = tl.arange(0, _PERIODS) + 1
        same = at - (_MATCH - 1) - lag >= begin
        for back in tl.static_range(0, _MATCH):
            before = tl.load(said - back - lag, mask=same, other=-1)
            last = tl.minimum(tl.load(said - back), timestamp_begin)
            same = same & (tl.minimum(before, timestamp_begin) == last)
        period = tl.min(tl.where(same, lag, _PERIODS + 1), 0)
        if period <= _PERIODS:
            away = tl.arange(0, ctx_padded)
            there = at - away - period >= begin
            mine = tl.minimum(tl.load(said - away, mask=there, other=-1), timestamp_begin)
            earlier = tl.load(said - away - period, mask=there, other=-2)
            same_as = mine == tl.minimum(earlier, timestamp_begin)
            repeated = tl.min(tl.where(same_as, ctx_padded, away), 0)
            if repeated >= tl.maximum(loop_at + 1 - begin, _REPEATS * period):
                limit = at + 2
                tl.store(state.limit + row, limit)
    return limit


@triton.jit
def _settle_one(
    state: Fields, row: tl.tensor, limit: tl.tensor, pick: tl.tensor, sums: tl.tensor,
    ids: tl.tensor, tops: tl.tensor, top_ids: tl.tensor, book: Tables, n_ctx: int,
    eot: tl.constexpr, timestamp_begin: tl.constexpr, tiles: tl.constexpr, text_tiles: tl.constexpr,
    tiles_padded: tl.constexpr, n_sums: tl.constexpr, keep: tl.constexpr, drafted: tl.constexpr,
) -> None:  # fmt: skip
    """See `Rules._say`: append the token that was chosen to a row that stands for itself."""
    tile = tl.arange(0, tiles_padded)
    text, timed = tile < text_tiles, (tile >= text_tiles) & (tile < tiles)
    left = sums + (pick * tiles + tile) * n_sums
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
    chosen = tl.load(ids + pick * tiles + best).to(tl.int64)
    logit = tl.load(sums + (pick * tiles + best) * n_sums + 3)
    if tl.load(state.root + row) >= 0:
        which = tl.arange(0, tiles_padded * keep)
        there = (which < tiles * keep) & ((must == 0) | (which >= text_tiles * keep))
        first = pick * tiles * keep
        rest = tl.load(tops + first + which, mask=there, other=none)
        chosen, logit = choose_boosted(
            book, state, row, rest, top_ids + first, tiles_padded * keep, keep
        )
    follow = tl.load(state.position + row) + 1
    place = state.tokens + row * n_ctx + follow
    if drafted:
        tl.store(state.trusted + row, (tl.load(place) == chosen).to(tl.uint8))
    tl.store(place, chosen)
    tl.store(state.logprob_sum + row, tl.load(state.logprob_sum + row) + (logit - everything))
    if chosen >= timestamp_begin:
        tl.store(state.last_timestamp + row, chosen)
    ended = (chosen == eot) | (follow + 1 >= limit)
    tl.store(state.finished + row, ended.to(tl.uint8))
    tl.store(state.position + row, follow)


class TritonChoice:
    """Chooses the next token of rows under a checkpoint's rules, all on the device.

    Args:
        rules: the checkpoint's rules, which `Rules.advance` applies in plain torch.
        most: the most picks of any call.
        searching: whether any row may be part of a search; without, nobody pays for it.
    """

    def __init__(self, rules: Rules, most: int, searching: bool) -> None:
        self._rules = rules
        n_vocab, device = rules.suppress.shape[0], rules.suppress.device
        begin = rules.facts.timestamp_begin
        self._text_tiles = triton.cdiv(begin, _TILE)
        self._tiles = self._text_tiles + triton.cdiv(n_vocab - begin, _TILE)
        self._searching = searching
        self._tables = tables_of(rules.book or Phrasebook(1, device))
        self._overlap = Overlap.of(device)
        shape = (most, self._tiles)
        self._sums = torch.empty((*shape, _SUMS), dtype=torch.float32, device=device)
        self._ids = torch.empty(shape, dtype=torch.int32, device=device)
        self._tops = torch.empty((*shape, _KEPT), dtype=torch.float32, device=device)
        self._top_ids = torch.empty((*shape, _KEPT), dtype=torch.int32, device=device)

    def advance(
        self, state: RowState, picks: Picks, logits: torch.Tensor, drafted: bool = False
    ) -> None:
        """See `Rules.advance`; what the rows ask for is read on the device."""
        n, n_vocab = len(picks.rows), logits.shape[1]
        facts = self._rules.facts
        assert logits.is_contiguous() and n <= self._sums.shape[0]
        n_ctx = state.tokens.shape[1]
        fields = fields_of(state)
        pdl = self._overlap.gains(n)
        launch(_scan_kernel, self._tiles, n)(
            logits, picks.rows, picks.at, fields, self._rules.suppress, self._rules.begin,
            self._sums, self._ids, self._tops, self._top_ids, n_vocab, n_ctx, facts.eot,
            facts.no_timestamps, facts.timestamp_begin,
            facts.timestamp_begin + facts.max_initial_timestamp_index, self._tiles,
            self._text_tiles, _TILE, _SUMS, _KEPT, drafted, pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        launch(_settle_kernel, n)(
            picks.rows, fields, self._sums, self._ids, self._tops, self._top_ids, self._tables,
            n_ctx, facts.eot, facts.timestamp_begin, self._tiles, self._text_tiles,
            triton.next_power_of_2(self._tiles), _SUMS, _KEPT, self._searching, _WIDEST,
            triton.next_power_of_2(n_ctx), drafted, pdl, num_warps=4 if self._searching else 1,
            launch_pdl=pdl,
        )  # fmt: skip
