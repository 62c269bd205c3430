"""A small vocabulary with Whisper's kinds of tokens, and rows in the middle of a sequence."""

import torch

from serve.contract.manifest import Dims, TokenizerFacts
from serve.native.rules.state import Picks

TEXT = 50
FACTS = TokenizerFacts(
    eot=TEXT,
    sot=TEXT + 1,
    sot_prev=TEXT + 6,
    no_speech=TEXT + 7,
    no_timestamps=TEXT + 8,
    timestamp_begin=TEXT + 9,
    transcribe=TEXT + 4,
    translate=TEXT + 5,
    languages={"en": TEXT + 2, "es": TEXT + 3},
    suppress_tokens=(3, 7, TEXT + 1),
    begin_suppress_tokens=(0, TEXT),
    max_initial_timestamp_index=10,
    alignment_heads=(),
)
N_VOCAB = TEXT + 9 + 40
DIMS = Dims(80, 1500, 64, 1, 1, 256, N_VOCAB, 32, 64, 1, 1, 256)
PROMPT = [FACTS.sot, FACTS.languages["en"], FACTS.transcribe]
CPU = torch.device("cpu")


def admit(state, row, prompt, sampled=(), timestamps=True, temperature=0.0, seed=0, limit=32):
    """Put a row where it would be after these tokens were sampled."""
    sequence = [*prompt, *sampled]
    state.tokens[row, : len(sequence)] = torch.tensor(sequence)
    state.position[row] = len(sequence) - 1
    state.prompt_len[row] = state.text_begin[row] = len(prompt)
    state.limit[row] = limit
    state.timestamps[row] = timestamps
    state.temperature[row] = temperature
    state.seed[row] = seed
    stamps = [t for t in sampled if t >= FACTS.timestamp_begin]
    state.last_timestamp[row] = stamps[-1] if stamps else 0
    state.finished[row] = False


def picks_of(count):
    """The first rows, one line of logits each."""
    return Picks(torch.arange(count), torch.arange(count))


def stamp(index):
    return FACTS.timestamp_begin + index
