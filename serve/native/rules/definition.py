"""What each slot may say next, as tensors on the device: rules, choice, scores, end.

Suppression, timestamp rules, language detection, the no-speech probability and the average
log-probability follow OpenAI's `whisper/decoding.py`. Nothing here waits for the device, and a
slot's result never depends on its neighbours: every operation works row by row, and the noise for
sampling is a hash of the slot's own seed.
"""

import dataclasses
import math

import torch

from serve.engine import DETECT_LANGUAGE, Dims, TokenizerFacts

NEVER = -math.inf


@dataclasses.dataclass(frozen=True)
class SlotState:
    """Every slot's sequence and scores. All tensors but `packed` have one row per slot."""

    packed: torch.Tensor  # uint8: the memory of all that follow but `tokens`, so one copy moves it
    tokens: torch.Tensor  # int64 (slots, n_text_ctx): prompt, then what was sampled
    position: torch.Tensor  # int64: the next token to feed
    prompt_len: torch.Tensor  # int64
    sot_at: torch.Tensor  # int64: where start-of-transcript stands in the prompt
    limit: torch.Tensor  # int64: the sequence ends when it has this many tokens
    seed: torch.Tensor  # int64
    last_timestamp: torch.Tensor  # int64: highest timestamp id sampled; 0 = none yet
    language: torch.Tensor  # int64: detected language's token id; -1 = none asked for
    temperature: torch.Tensor  # float32: 0 = greedy
    logprob_sum: torch.Tensor  # float32: over the sampled tokens, end of text included
    no_speech_prob: torch.Tensor  # float32
    language_prob: torch.Tensor  # float32
    timestamps: torch.Tensor  # bool: timestamp rules apply
    finished: torch.Tensor  # bool; free slots count as finished

    def to(self, device: torch.device) -> "SlotState":
        """A copy on another device; from pinned memory, without waiting."""
        return _carved(
            self.packed.to(device, non_blocking=True), self.tokens.to(device, non_blocking=True)
        )

    def pinned(self) -> "SlotState":
        """A copy in host memory that the device can read and write while the host goes on."""
        return _carved(self.packed.pin_memory(), self.tokens.pin_memory())

    def put(self, slots: torch.Tensor, rows: "SlotState") -> None:
        """Overwrite some slots' rows, int64 `slots`; of `tokens`, as many columns as `rows` has."""
        self.tokens[slots, : rows.tokens.shape[1]] = rows.tokens
        for name in _LAYOUT:
            getattr(self, name).index_copy_(0, slots, getattr(rows, name))


_LAYOUT = {  # the widest first, so that each is aligned
    **dict.fromkeys(
        ("position", "prompt_len", "sot_at", "limit", "seed", "last_timestamp", "language"),
        torch.int64,
    ),
    **dict.fromkeys(
        ("temperature", "logprob_sum", "no_speech_prob", "language_prob"), torch.float32
    ),
    **dict.fromkeys(("timestamps", "finished"), torch.bool),
}


def new_state(slots: int, n_text_ctx: int, device: torch.device) -> SlotState:
    """State of free slots."""
    size = sum(dtype.itemsize for dtype in _LAYOUT.values())
    packed = torch.zeros(slots * size, dtype=torch.uint8, device=device)
    tokens = torch.zeros((slots, n_text_ctx), dtype=torch.int64, device=device)
    state = _carved(packed, tokens)
    state.prompt_len.fill_(1)
    state.language.fill_(-1)
    state.finished.fill_(True)
    return state


def _carved(packed: torch.Tensor, tokens: torch.Tensor) -> SlotState:
    """The fields as views of their memory."""
    fields, begin = {}, 0
    for name, dtype in _LAYOUT.items():
        end = begin + len(tokens) * dtype.itemsize
        fields[name] = packed[begin:end].view(dtype)
        begin = end
    return SlotState(packed=packed, tokens=tokens, **fields)


class Rules:
    """The checkpoint's decoding rules for one device.

    Args:
        facts: special tokens and suppress lists from the engine's manifest.
        dims: sizes from the engine's manifest.
        device: where logits live.
    """

    def __init__(self, facts: TokenizerFacts, dims: Dims, device: torch.device) -> None:
        self.facts = facts
        self.suppress = self._bias(dims.n_vocab, facts.suppress_tokens, device)
        self.begin = self._bias(dims.n_vocab, facts.begin_suppress_tokens, device)
        self._ids = torch.arange(dims.n_vocab, device=device)
        self.languages = torch.tensor(
            sorted(facts.languages.values()) or [facts.sot], device=device
        )

    @staticmethod
    def _bias(n_vocab: int, ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
        bias = torch.zeros(n_vocab, device=device)
        bias[list(ids)] = NEVER
        return bias

    def advance(self, state: SlotState, logits: torch.Tensor, sampling: bool) -> None:
        """Choose the next token of the first n slots and update their state in place.

        Args:
            state: of at least n slots; rows already finished do not change.
            logits: float32 (n, n_vocab), what followed the tokens at `state.position`.
            sampling: whether any slot's temperature is above 0; False skips making noise.
        """
        n = logits.shape[0]
        rows = torch.arange(n, device=logits.device)
        position = state.position[:n]
        live = ~state.finished[:n]
        sampled = position + 1 - state.prompt_len[:n]  # index of the token chosen now
        choosing = live & (sampled >= 0)
        self._note_start(state, logits, live)

        allowed = self.apply(state, logits, sampled)
        chosen = allowed.argmax(dim=-1)
        if sampling:
            chosen = torch.where(
                state.temperature[:n] > 0, self._draw(state, allowed, position), chosen
            )
        logprob = allowed.log_softmax(dim=-1)[rows, chosen]

        follow = (position + 1).clamp_max(state.tokens.shape[1] - 1)
        forced = state.tokens[rows, follow]
        forced = torch.where(forced == DETECT_LANGUAGE, state.language[:n], forced)
        following = torch.where(choosing, chosen, forced)
        state.tokens[rows, follow] = torch.where(live, following, state.tokens[rows, follow])
        state.logprob_sum[:n] += torch.where(choosing, logprob, 0.0)
        is_timestamp = choosing & (chosen >= self.facts.timestamp_begin)
        state.last_timestamp[:n] = torch.where(is_timestamp, chosen, state.last_timestamp[:n])
        ended = choosing & ((chosen == self.facts.eot) | (position + 2 >= state.limit[:n]))
        position += live.long()
        state.finished[:n] |= ended

    def _note_start(self, state: SlotState, logits: torch.Tensor, live: torch.Tensor) -> None:
        """At start-of-transcript, keep the no-speech probability and the likeliest language."""
        n = logits.shape[0]
        at_start = live & (state.position[:n] == state.sot_at[:n])
        no_speech = (logits[:, self.facts.no_speech] - logits.logsumexp(dim=-1)).exp()
        state.no_speech_prob[:n] = torch.where(at_start, no_speech, state.no_speech_prob[:n])
        prob, index = logits[:, self.languages].softmax(dim=-1).max(dim=-1)
        state.language[:n] = torch.where(at_start, self.languages[index], state.language[:n])
        state.language_prob[:n] = torch.where(at_start, prob, state.language_prob[:n])

    def apply(self, state: SlotState, logits: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Logits with every forbidden token at -inf: float32 (n, n_vocab)."""
        n = logits.shape[0]
        first = (sampled == 0)[:, None]
        logits = logits + self.suppress + torch.where(first, self.begin, 0.0)
        timed = self._timestamp_rules(state, logits, sampled)
        return torch.where(state.timestamps[:n, None], timed, logits)

    def _timestamp_rules(
        self, state: SlotState, logits: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """Timestamps come in pairs, never go back, and open the text; see `ApplyTimestampRules`."""
        n = logits.shape[0]
        begin = self.facts.timestamp_begin
        rows = torch.arange(n, device=logits.device)
        position = state.position[:n]
        last = state.tokens[rows, position]
        before = state.tokens[rows, (position - 1).clamp_min(0)]
        after_timestamp = (sampled >= 1) & (last >= begin)
        after_pair = after_timestamp & ((sampled < 2) | (before >= begin))
        open_pair = after_timestamp & ~after_pair

        lowest = state.last_timestamp[:n] + (~open_pair).long()
        first = sampled == 0
        newest_first = begin + self.facts.max_initial_timestamp_index
        ids = self._ids
        is_timestamp = ids >= begin
        forbidden = ids == self.facts.no_timestamps
        forbidden = forbidden | (after_pair[:, None] & is_timestamp)
        forbidden = forbidden | (open_pair[:, None] & (ids < self.facts.eot))
        forbidden = forbidden | (is_timestamp & (ids < lowest[:, None]))
        forbidden = forbidden | (first[:, None] & (~is_timestamp | (ids > newest_first)))
        logits = logits.masked_fill(forbidden, NEVER)

        timestamp_mass = logits[:, begin:].logsumexp(dim=-1)
        best_text = logits[:, :begin].amax(dim=-1)
        must = (timestamp_mass > best_text)[:, None]
        return logits.masked_fill(must & ~is_timestamp, NEVER)

    def _draw(
        self, state: SlotState, allowed: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """Sample by the Gumbel-max trick, with noise that only seed and position decide."""
        n = allowed.shape[0]
        key = state.seed[:n] * 1_000_003 + position
        bits = _mix(_mix(key)[:, None] + self._ids)
        uniform = ((bits & 0xFFFFFF).double() + 0.5) / 2**24
        gumbel = -(-uniform.log()).log()
        temperature = state.temperature[:n, None].clamp_min(1e-6)
        return (allowed / temperature + gumbel.float()).argmax(dim=-1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Steele, Lea and Flood's SplitMix64 finaliser on int64, which wraps as C's does."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    """A 64-bit constant as the int64 with the same bits."""
    return value - (1 << 64)
