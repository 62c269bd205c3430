"""Token rules against transformers' logits processors, row by row."""

import math

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from serve.engine import DETECT_LANGUAGE, Dims, TokenizerFacts
from serve.native.rules.definition import Rules, new_state

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


def admit(state, slot, prompt, sampled=(), timestamps=True, temperature=0.0, seed=0, limit=32):
    """Put a slot where it would be after these tokens were sampled."""
    sequence = [*prompt, *sampled]
    state.tokens[slot, : len(sequence)] = torch.tensor(sequence)
    state.position[slot] = len(sequence) - 1 if sampled else len(prompt) - 1
    state.prompt_len[slot] = len(prompt)
    state.sot_at[slot] = prompt.index(FACTS.sot)
    state.limit[slot] = limit
    state.timestamps[slot] = timestamps
    state.temperature[slot] = temperature
    state.seed[slot] = seed
    stamps = [t for t in sampled if t >= FACTS.timestamp_begin]
    state.last_timestamp[slot] = stamps[-1] if stamps else 0
    state.finished[slot] = False


def reference_scores(logits, sampled, timestamps):
    """What transformers leaves of the logits."""
    config = GenerationConfig(
        no_timestamps_token_id=FACTS.no_timestamps, eos_token_id=FACTS.eot, bos_token_id=FACTS.eot
    )
    config.max_initial_timestamp_index = FACTS.max_initial_timestamp_index
    begin = len(PROMPT)
    ids = torch.tensor([[*PROMPT, *sampled]])
    processors = [
        SuppressTokensLogitsProcessor(list(FACTS.suppress_tokens)),
        SuppressTokensAtBeginLogitsProcessor(list(FACTS.begin_suppress_tokens), begin),
    ]
    if timestamps:
        processors.append(WhisperTimeStampLogitsProcessor(config, begin_index=begin))
    scores = logits[None].clone()
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


def stamp(index):
    return FACTS.timestamp_begin + index


HISTORIES = [
    (),
    (stamp(0),),
    (stamp(3), 11),
    (stamp(3), 11, 12, stamp(8)),
    (stamp(3), 11, stamp(8), stamp(8)),
    (stamp(3), 11, stamp(8), stamp(9), 13),
    (stamp(0), 1, stamp(39)),
    (5, 6),
    (5, stamp(2)),
    (5, stamp(0), stamp(2)),
]


@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_the_choice_and_its_log_probability_equal_transformers(history, timestamps):
    for seed in range(25):
        logits = torch.randn(N_VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        expected = reference_scores(logits, history, timestamps)
        state = new_state(2, 32, CPU)
        admit(state, 1, PROMPT, history, timestamps)
        rules = Rules(FACTS, DIMS, CPU)
        rules.advance(state, torch.stack([torch.randn(N_VOCAB), logits]), sampling=False)
        chosen = int(state.tokens[1, len(PROMPT) + len(history)])
        assert chosen == int(expected.argmax())
        assert math.isclose(
            float(state.logprob_sum[1]), float(expected.log_softmax(-1)[chosen]), abs_tol=1e-5
        )


def test_forced_tokens_are_kept_and_the_language_fills_its_place():
    state = new_state(1, 32, CPU)
    prompt = [FACTS.sot_prev, 4, FACTS.sot, DETECT_LANGUAGE, FACTS.transcribe]
    admit(state, 0, prompt)
    state.position[0] = 0
    rules = Rules(FACTS, DIMS, CPU)
    logits = torch.zeros(1, N_VOCAB)
    logits[0, FACTS.languages["es"]] = 2.0
    logits[0, FACTS.no_speech] = 1.0
    for expected in prompt[1:3]:
        rules.advance(state, torch.randn(1, N_VOCAB), sampling=False)
        assert state.tokens[0, state.position[0]] == expected
    rules.advance(state, logits, sampling=False)
    assert state.tokens[0, 3] == state.language[0] == FACTS.languages["es"]
    assert float(state.language_prob[0]) == pytest.approx(math.exp(2) / (1 + math.exp(2)))
    assert float(state.no_speech_prob[0]) == pytest.approx(
        float(logits.softmax(-1)[0, FACTS.no_speech])
    )
    rules.advance(state, torch.randn(1, N_VOCAB), sampling=False)
    assert state.tokens[0, 4] == FACTS.transcribe
    assert state.logprob_sum[0] == 0
    assert not state.finished[0]


def test_end_of_text_and_the_length_limit_end_a_slot():
    state = new_state(3, 32, CPU)
    rules = Rules(FACTS, DIMS, CPU)
    for slot in range(3):
        admit(state, slot, PROMPT, (stamp(0), 11, stamp(4)), limit=7 if slot == 1 else 32)
    logits = torch.zeros(3, N_VOCAB)
    logits[0, FACTS.eot] = 20.0
    logits[1, stamp(5)] = logits[2, stamp(5)] = 20.0
    rules.advance(state, logits, sampling=False)
    assert state.finished.tolist() == [True, True, False]
    before = state.tokens.clone()
    rules.advance(state, torch.randn(3, N_VOCAB), sampling=False)
    assert torch.equal(state.tokens[:2], before[:2])
    assert state.position.tolist() == [6, 6, 7]


def test_sampling_follows_the_distribution_and_only_the_slots_own_seed():
    rules = Rules(FACTS, DIMS, CPU)
    logits = torch.full((1, N_VOCAB), -20.0)
    logits[0, 10], logits[0, 20] = 1.0, 0.0
    count, temperature = 4000, 0.5
    state = new_state(count, 32, CPU)
    for slot in range(count):
        admit(state, slot, PROMPT, (11,), False, temperature, seed=slot)
    rules.advance(state, logits.expand(count, -1), sampling=True)
    drawn = state.tokens[:, len(PROMPT) + 1]
    share = float((drawn == 10).float().mean())
    expected = 1 / (1 + math.exp(-1 / temperature))
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / count)

    alone = new_state(1, 32, CPU)
    admit(alone, 0, PROMPT, (11,), False, temperature, seed=1234)
    rules.advance(alone, logits, sampling=True)
    assert alone.tokens[0, len(PROMPT) + 1] == drawn[1234]


def test_a_greedy_slot_is_greedy_beside_one_that_samples():
    rules = Rules(FACTS, DIMS, CPU)
    logits = torch.randn(2, N_VOCAB)
    state = new_state(2, 32, CPU)
    admit(state, 0, PROMPT, (11,), False)
    admit(state, 1, PROMPT, (11,), False, temperature=1.0)
    rules.advance(state, logits, sampling=True)
    expected = reference_scores(logits[0], (11,), False).argmax()
    assert state.tokens[0, len(PROMPT) + 1] == expected


def test_the_last_place_of_the_context_is_used_and_none_beyond_it():
    state = new_state(2, 32, CPU)
    text = tuple([11] * (31 - len(PROMPT)))
    admit(state, 0, PROMPT, text, timestamps=False)
    admit(state, 1, PROMPT, text, timestamps=False)
    state.position[1], state.finished[1] = 31, True  # ended there, and still in the batch
    logits = torch.zeros(2, N_VOCAB)
    logits[:, 13] = 20.0
    Rules(FACTS, DIMS, CPU).advance(state, logits, sampling=False)
    assert state.tokens[0, 29:].tolist() == [11, 11, 13]
    assert state.finished.tolist() == [True, True]
    assert state.tokens[1, 31] == 0


def splitmix64(x):
    """As published, on Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_the_noise_is_splitmix64_of_seed_position_and_token():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published generator's first number
    rules = Rules(FACTS, DIMS, CPU)
    seeds = [0, 1, 7, 2**31 - 1, 2**40 + 5, 123_456_789]
    state = new_state(len(seeds), 32, CPU)
    for slot, seed in enumerate(seeds):
        admit(state, slot, PROMPT, (11,) * (1 + slot), False, temperature=1.0, seed=seed)
    positions = state.position.tolist()
    flat = torch.zeros(len(seeds), N_VOCAB)  # so that the noise alone decides
    drawn = rules._draw(state, flat, state.position).tolist()
    for seed, position, token in zip(seeds, positions, drawn, strict=True):
        key = splitmix64((seed * 1_000_003 + position) % 2**64)
        uniform = [(splitmix64((key + id) % 2**64) & 0xFFFFFF) for id in range(N_VOCAB)]
        assert token == max(range(N_VOCAB), key=uniform.__getitem__)
