"""`Rules.advance` as two Triton-language kernels: one reads the logits once, one settles each slot.

Each slot's vocabulary is cut into tiles; a tile leaves the peak, the sum of exponentials and the
best token of its text and of its timestamps, and the second kernel adds the tiles up in order.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl

from serve.engine import DETECT_LANGUAGE
from serve.native.rules.definition import Rules, SlotState

_TILE = 2048  # tokens per program
_SUMS = 10  # float32 numbers that a tile leaves, see `_scan_kernel`


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser, on uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mass(values: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(peak, sum of exp(value - peak)); (-inf, 0) where every value is -inf."""
    peak = tl.max(values, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, tl.sum(tl.exp(values - base), 0)


@triton.jit
def _scan_kernel(
    logits: tl.tensor, tokens: tl.tensor, position: tl.tensor, prompt_len: tl.tensor,
    sot_at: tl.tensor, timestamps: tl.tensor, temperature: tl.tensor, seed: tl.tensor,
    last_timestamp: tl.tensor, finished: tl.tensor, suppress: tl.tensor, begin: tl.tensor,
    sums: tl.tensor, ids: tl.tensor, n_vocab: int, n_ctx: int,
    eot: tl.constexpr, no_timestamps: tl.constexpr, timestamp_begin: tl.constexpr,
    newest_first: tl.constexpr, tiles: tl.constexpr, block: tl.constexpr, n_sums: tl.constexpr,
) -> None:  # fmt: skip
    """sums: text peak, mass, score, logit; timestamp peak, mass, score, logit; raw peak, mass.

    ids: best text, best timestamp.
    """
    tile = tl.program_id(0)
    slot = tl.program_id(1)
    if tl.load(finished + slot) == 0:
        at = tl.load(position + slot)
        sampled = at + 1 - tl.load(prompt_len + slot)
        id = tile * block + tl.arange(0, block)
        there = id < n_vocab
        raw = tl.load(
            logits + slot.to(tl.int64) * n_vocab + id, mask=there, other=float("-inf")
        ).to(tl.float32)
        left = (slot * tiles + tile) * n_sums
        left_id = ids + (slot * tiles + tile) * 2
        if at == tl.load(sot_at + slot):
            peak, mass = _mass(raw)
            tl.store(sums + left + 8, peak)
            tl.store(sums + left + 9, mass)
        allowed = raw + tl.load(suppress + id, mask=there, other=0.0)
        if sampled == 0:
            allowed += tl.load(begin + id, mask=there, other=0.0)
        is_timestamp = id >= timestamp_begin
        if tl.load(timestamps + slot) != 0:
            last = tl.load(tokens + slot * n_ctx + at)
            before = tl.load(tokens + slot * n_ctx + tl.maximum(at - 1, 0))
            after = (sampled >= 1) & (last >= timestamp_begin)
            pair = after & ((sampled < 2) | (before >= timestamp_begin))
            half = after & (pair == 0)
            lowest = tl.load(last_timestamp + slot) + tl.where(half, 0, 1)
            bad = (id == no_timestamps) | (pair & is_timestamp) | (half & (id < eot))
            bad = bad | (is_timestamp & (id < lowest))
            bad = bad | ((sampled == 0) & ((is_timestamp == 0) | (id > newest_first)))
            allowed = tl.where(bad, float("-inf"), allowed)
        score = allowed
        heat = tl.load(temperature + slot)
        if heat > 0:
            key = tl.load(seed + slot) * 1_000_003 + at
            bits = _mix(_mix(key.to(tl.uint64)) + id.to(tl.uint64)) & 0xFFFFFF
            uniform = (bits.to(tl.float64) + 0.5) / 16777216.0
            noise = -tl.log(-tl.log(uniform))
            score = allowed / tl.maximum(heat, 1e-6) + noise.to(tl.float32)
        for group in tl.static_range(2):
            mine = is_timestamp if group == 1 else is_timestamp == 0
            peak, mass = _mass(tl.where(mine, allowed, float("-inf")))
            best, where = tl.max(
                tl.where(mine, score, float("-inf")), 0, return_indices=True,
                return_indices_tie_break_left=True,
            )  # fmt: skip
            chosen = tile * block + where
            tl.store(sums + left + group * 4, peak)
            tl.store(sums + left + group * 4 + 1, mass)
            tl.store(sums + left + group * 4 + 2, best)
            tl.store(
                sums + left + group * 4 + 3,
                tl.sum(tl.where(id == chosen, tl.where(mine, allowed, 0.0), 0.0), 0),
            )
            tl.store(left_id + group, chosen)


@triton.jit
def _total(peaks: tl.tensor, masses: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(peak, log of the summed mass) of several tiles; (-inf, -inf) of nothing."""
    peak = tl.max(peaks, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, base + tl.log(tl.sum(masses * tl.exp(peaks - base), 0))


@triton.jit
def _settle_kernel(
    logits: tl.tensor, tokens: tl.tensor, position: tl.tensor, prompt_len: tl.tensor,
    sot_at: tl.tensor, limit: tl.tensor, timestamps: tl.tensor, last_timestamp: tl.tensor,
    logprob_sum: tl.tensor, no_speech_prob: tl.tensor, language: tl.tensor,
    language_prob: tl.tensor, finished: tl.tensor, languages: tl.tensor, sums: tl.tensor,
    ids: tl.tensor, n_vocab: int, n_ctx: int, n_languages: int, eot: tl.constexpr,
    no_speech: tl.constexpr, timestamp_begin: tl.constexpr, detect: tl.constexpr,
    tiles: tl.constexpr, tiles_padded: tl.constexpr, languages_padded: tl.constexpr,
    n_sums: tl.constexpr,
) -> None:  # fmt: skip
    slot = tl.program_id(0)
    if tl.load(finished + slot) == 0:
        at = tl.load(position + slot)
        sampled = at + 1 - tl.load(prompt_len + slot)
        tile = tl.arange(0, tiles_padded)
        real = tile < tiles
        left = sums + (slot * tiles + tile) * n_sums
        none = float("-inf")
        row = logits + slot.to(tl.int64) * n_vocab
        heard_id = tl.load(language + slot)
        if at == tl.load(sot_at + slot):
            _, everything = _total(
                tl.load(left + 8, mask=real, other=none), tl.load(left + 9, mask=real, other=0.0)
            )
            silent = tl.load(row + no_speech).to(tl.float32)
            tl.store(no_speech_prob + slot, tl.exp(silent - everything))
            which = tl.arange(0, languages_padded)
            one = which < n_languages
            id = tl.load(languages + which, mask=one, other=0)
            heard = tl.where(one, tl.load(row + id).to(tl.float32), none)
            loudest, index = tl.max(
                heard, 0, return_indices=True, return_indices_tie_break_left=True
            )
            tl.store(language_prob + slot, 1.0 / tl.sum(tl.exp(heard - loudest), 0))
            heard_id = tl.sum(tl.where(which == index, id, 0), 0)
            tl.store(language + slot, heard_id)
        following = tl.minimum(at + 1, n_ctx - 1)
        if sampled >= 0:
            text_peak, text_mass = _total(
                tl.load(left, mask=real, other=none), tl.load(left + 1, mask=real, other=0.0)
            )
            _, time_mass = _total(
                tl.load(left + 4, mask=real, other=none), tl.load(left + 5, mask=real, other=0.0)
            )
            text_score, text_tile = tl.max(
                tl.load(left + 2, mask=real, other=none), 0, return_indices=True,
                return_indices_tie_break_left=True,
            )  # fmt: skip
            time_score, time_tile = tl.max(
                tl.load(left + 6, mask=real, other=none), 0, return_indices=True,
                return_indices_tie_break_left=True,
            )  # fmt: skip
            must = (tl.load(timestamps + slot) != 0) & (time_mass > text_peak)
            timed = must | (time_score > text_score)
            most = tl.maximum(text_mass, time_mass)
            mass = most + tl.log(tl.exp(text_mass - most) + tl.exp(time_mass - most))
            mass = tl.where(must, time_mass, mass)
            group = tl.where(timed, 1, 0)
            from_tile = slot * tiles + tl.where(timed, time_tile, text_tile)
            chosen = tl.load(ids + from_tile * 2 + group).to(tl.int64)
            logit = tl.load(sums + from_tile * n_sums + group * 4 + 3)
            tl.store(tokens + slot * n_ctx + following, chosen)
            tl.store(logprob_sum + slot, tl.load(logprob_sum + slot) + logit - mass)
            if chosen >= timestamp_begin:
                tl.store(last_timestamp + slot, chosen)
            ended = (chosen == eot) | (at + 2 >= tl.load(limit + slot))
            tl.store(finished + slot, ended.to(tl.uint8))
        else:
            forced = tl.load(tokens + slot * n_ctx + following)
            tl.store(
                tokens + slot * n_ctx + following, tl.where(forced == detect, heard_id, forced)
            )
        tl.store(position + slot, at + 1)


class TritonChoice:
    """Chooses the next token of each slot under a checkpoint's rules, all on the device.

    Args:
        rules: the checkpoint's rules, which `Rules.advance` applies in plain torch.
        slots: the most slots of any call.
    """

    def __init__(self, rules: Rules, slots: int) -> None:
        self._rules = rules
        n_vocab = rules.suppress.shape[0]
        device = rules.suppress.device
        self._tiles = triton.cdiv(n_vocab, _TILE)
        shape = (slots, self._tiles)
        self._sums = torch.empty((*shape, _SUMS), dtype=torch.float32, device=device)
        self._ids = torch.empty((*shape, 2), dtype=torch.int32, device=device)

    def advance(self, state: SlotState, logits: torch.Tensor) -> None:
        """See `Rules.advance`; whether a slot samples is read on the device."""
        n, n_vocab = logits.shape
        facts = self._rules.facts
        assert logits.is_contiguous() and n <= self._sums.shape[0]
        n_ctx = state.tokens.shape[1]
        timestamps, finished = state.timestamps.view(torch.uint8), state.finished.view(torch.uint8)
        _scan_kernel[(self._tiles, n)](
            logits, state.tokens, state.position, state.prompt_len, state.sot_at, timestamps,
            state.temperature, state.seed, state.last_timestamp, finished, self._rules.suppress,
            self._rules.begin, self._sums, self._ids, n_vocab, n_ctx, facts.eot,
            facts.no_timestamps, facts.timestamp_begin,
            facts.timestamp_begin + facts.max_initial_timestamp_index, self._tiles, _TILE, _SUMS,
            num_warps=4,
        )  # fmt: skip
        languages = self._rules.languages
        _settle_kernel[(n,)](
            logits, state.tokens, state.position, state.prompt_len, state.sot_at, state.limit,
            timestamps, state.last_timestamp, state.logprob_sum, state.no_speech_prob,
            state.language, state.language_prob, finished, languages, self._sums, self._ids,
            n_vocab, n_ctx, len(languages), facts.eot, facts.no_speech, facts.timestamp_begin,
            DETECT_LANGUAGE, self._tiles, triton.next_power_of_2(self._tiles),
            triton.next_power_of_2(len(languages)), _SUMS, num_warps=1,
        )  # fmt: skip
