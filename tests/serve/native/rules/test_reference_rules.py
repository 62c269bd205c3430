"""Token rules against transformers' logits processors, row by row."""

import math

import pytest
import torch
import transformers

from serve.contract.engine import DETECT_LANGUAGE
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.state import Picks, new_state
from tests.serve.native.rules.rows import CPU, DIMS, FACTS, N_VOCAB, PROMPT, admit, picks_of, stamp

RULES = TokenRules(FACTS, DIMS, CPU)


def reference_scores(logits, sampled, timestamps):
    """What transformers leaves of the logits."""
    config = transformers.GenerationConfig(
        no_timestamps_token_id=FACTS.no_timestamps, eos_token_id=FACTS.eot, bos_token_id=FACTS.eot
    )
    config.max_initial_timestamp_index = FACTS.max_initial_timestamp_index
    begin = len(PROMPT)
    ids = torch.tensor([[*PROMPT, *sampled]])
    processors = [
        transformers.SuppressTokensLogitsProcessor(list(FACTS.suppress_tokens)),
        transformers.SuppressTokensAtBeginLogitsProcessor(list(FACTS.begin_suppress_tokens), begin),
    ]
    if timestamps:
        processors.append(transformers.WhisperTimeStampLogitsProcessor(config, begin_index=begin))
    scores = logits[None].clone()
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


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
        RULES.advance(state, picks_of(2), torch.stack([torch.randn(N_VOCAB), logits]))
        chosen = int(state.tokens[1, len(PROMPT) + len(history)])
        assert chosen == int(expected.argmax())
        assert math.isclose(
            float(state.logprob_sum[1]), float(expected.log_softmax(-1)[chosen]), abs_tol=1e-5
        )


@pytest.mark.parametrize("timestamps", [True, False])
def test_words_that_the_prompt_begins_with_count_as_said(timestamps):
    """As if they had been sampled, but for the penalties and the score."""
    prefix = (stamp(0), 11, 12) if timestamps else (11, 12)
    for seed in range(25):
        logits = torch.randn(1, N_VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        states = [new_state(1, 32, CPU) for _ in range(2)]
        admit(states[0], 0, PROMPT, prefix, timestamps)
        admit(states[1], 0, [*PROMPT, *prefix], (), timestamps)
        states[1].text_begin[0] = len(PROMPT)
        states[1].last_timestamp[0] = states[0].last_timestamp[0]
        states[1].repetition_penalty[0], states[1].no_repeat_ngram[0] = 9.0, 1
        for state in states:
            RULES.advance(state, picks_of(1), logits)
        assert torch.equal(states[0].tokens, states[1].tokens)
        assert torch.equal(states[0].logprob_sum, states[1].logprob_sum)
        expected = reference_scores(logits[0], prefix, timestamps)
        assert states[1].tokens[0, len(PROMPT) + len(prefix)] == expected.argmax()


def test_start_of_transcript_tells_silence_and_the_language_which_fills_its_place():
    state = new_state(3, 32, CPU)
    prompt = [FACTS.sot_prev, 4, FACTS.sot, DETECT_LANGUAGE, FACTS.transcribe]
    admit(state, 2, prompt)
    logits = torch.zeros(1, N_VOCAB)
    logits[0, FACTS.languages["es"]] = 2.0
    logits[0, FACTS.no_speech] = 1.0
    RULES.record_start(state, torch.tensor([2]), logits)
    spanish = FACTS.languages["es"]
    assert state.tokens[2, :6].tolist() == [*prompt[:3], spanish, FACTS.transcribe, 0]
    assert state.language.tolist() == [-1, -1, spanish]
    assert float(state.language_prob[2]) == pytest.approx(math.exp(2) / (1 + math.exp(2)))
    assert float(state.no_speech_prob[2]) == pytest.approx(
        float(logits.softmax(-1)[0, FACTS.no_speech])
    )
    assert state.no_speech_prob[:2].tolist() == [0.0, 0.0]
    assert state.position[2] == len(prompt) - 1


def test_end_of_text_and_the_length_limit_end_a_slot():
    state = new_state(3, 32, CPU)
    for slot in range(3):
        admit(state, slot, PROMPT, (stamp(0), 11, stamp(4)), limit=7 if slot == 1 else 32)
    logits = torch.zeros(3, N_VOCAB)
    logits[0, FACTS.eot] = 20.0
    logits[1, stamp(5)] = logits[2, stamp(5)] = 20.0
    RULES.advance(state, picks_of(3), logits)
    assert state.finished.tolist() == [True, True, False]
    before = state.tokens.clone()
    RULES.advance(state, picks_of(3), torch.randn(3, N_VOCAB))
    assert torch.equal(state.tokens[:2], before[:2])
    assert state.position.tolist() == [6, 6, 7]


def test_sampling_follows_the_distribution_and_only_the_slots_own_seed():
    logits = torch.full((1, N_VOCAB), -20.0)
    logits[0, 10], logits[0, 20] = 1.0, 0.0
    count, temperature = 4000, 0.5
    state = new_state(count, 32, CPU)
    for slot in range(count):
        admit(state, slot, PROMPT, (11,), False, temperature, seed=slot)
    RULES.advance(state, picks_of(count), logits.expand(count, -1))
    drawn = state.tokens[:, len(PROMPT) + 1]
    share = float((drawn == 10).float().mean())
    expected = 1 / (1 + math.exp(-1 / temperature))
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / count)

    alone = new_state(1, 32, CPU)
    admit(alone, 0, PROMPT, (11,), False, temperature, seed=1234)
    RULES.advance(alone, picks_of(1), logits)
    assert alone.tokens[0, len(PROMPT) + 1] == drawn[1234]


def test_the_last_place_of_the_context_is_used_and_none_beyond_it():
    state = new_state(2, 32, CPU)
    text = tuple([11] * (31 - len(PROMPT)))
    admit(state, 0, PROMPT, text, timestamps=False)
    admit(state, 1, PROMPT, text, timestamps=False)
    state.position[1], state.finished[1] = 31, True  # ended there, and still in the batch
    logits = torch.zeros(2, N_VOCAB)
    logits[:, 13] = 20.0
    RULES.advance(state, picks_of(2), logits)
    assert state.tokens[0, 29:].tolist() == [11, 11, 13]
    assert state.finished.tolist() == [True, True]
    assert state.tokens[1, 31] == 0


def test_a_row_reads_the_line_it_is_told_and_no_other_row_changes():
    state = new_state(4, 32, CPU)
    for row in range(4):
        admit(state, row, PROMPT, (11,), timestamps=False)
    logits = torch.zeros(3, N_VOCAB)
    for line in range(3):
        logits[line, 20 + line] = 20.0
    picks = Picks(torch.tensor([3, 1, 0]), torch.tensor([2, 0, 2]))
    RULES.advance(state, picks, logits)
    assert state.tokens[:, len(PROMPT) + 1].tolist() == [22, 20, 0, 22]
    assert state.position.tolist() == [4, 4, 3, 4]
    assert float(logits.sum()) == 60.0  # they are the caller's


def penalised(logits, said, penalty, size):
    """What is left of a list of logits after a list of tokens, penalised as CTranslate2 does."""
    left = list(logits)
    for token in set(said):
        left[token] = left[token] * penalty if left[token] < 0 else left[token] / penalty
    for begin in range(len(said) - size + 1 if size else 0):
        gram = said[begin : begin + size]
        if gram[:-1] == said[len(said) - size + 1 :]:
            left[gram[-1]] = -math.inf
    return left


SAID = [(), (11,), (11, 11), (11, 12, 13, 11, 12), (11, 12, 11, 12, 11), (9, 9, 9, 9), (9, 8, 9)]


@pytest.mark.parametrize("size", [0, 1, 2, 3])
@pytest.mark.parametrize("penalty", [1.0, 1.5, 0.5])
def test_penalties_for_repetition_read_only_what_was_sampled(penalty, size):
    prompt = [FACTS.sot_prev, 20, 21, *PROMPT]  # said before: not penalised
    for seed, said in enumerate(SAID * 8):
        logits = torch.randn(2, N_VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
        logits[:, list({*said, 20, 21})] += 2.0
        state = new_state(2, 32, CPU)
        for row in range(2):
            admit(state, row, prompt, said, timestamps=False)
        state.repetition_penalty[0], state.no_repeat_ngram[0] = penalty, size
        RULES.advance(state, picks_of(2), logits)
        for row, (p, n) in enumerate([(penalty, size), (1.0, 0)]):
            left = torch.tensor(penalised(logits[row].tolist(), list(said), p, n))
            expected = reference_scores(left, said, timestamps=False)
            assert state.tokens[row, len(prompt) + len(said)] == expected.argmax()
            assert float(state.logprob_sum[row]) == pytest.approx(
                float(expected.log_softmax(-1).max()), abs=1e-5
            )


def test_a_draft_is_followed_as_far_as_it_is_what_would_have_been_chosen():
    """Call by call as single steps would, with logits that each guess alone decides."""
    table = torch.randn(N_VOCAB, N_VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    table[:, FACTS.eot] = -20.0
    single, drafted = (new_state(6, 32, CPU) for _ in "12")
    for state in (single, drafted):
        for row in range(6):
            admit(state, row, PROMPT, (11 + row,), timestamps=False, temperature=0.5 * (row == 5))
            state.seed[row] = row
    for _ in range(6):
        RULES.advance(single, picks_of(6), table[single.tokens[torch.arange(6), single.position]])
    at, guesses = len(PROMPT) + 1, 4
    right = single.tokens[:, at : at + guesses].clone()
    kept = torch.tensor([0, 1, 2, 3, 4, 4])
    wrong = torch.arange(guesses) >= kept[:, None]
    drafted.tokens[:, at : at + guesses] = torch.where(wrong, (right + 1) % 40, right)
    fed = drafted.tokens.clone()
    RULES.begin_draft(drafted, torch.arange(6))
    for step in range(guesses + 1):
        RULES.advance(drafted, picks_of(6), table[fed[:, at - 1 + step]], drafted=True)
    assert drafted.position.tolist() == [at + count for count in kept.tolist()]
    for row, position in enumerate(drafted.position.tolist()):
        assert torch.equal(drafted.tokens[row, : position + 1], single.tokens[row, : position + 1])
    for _ in range(6):  # and on, in single steps
        last = drafted.tokens[torch.arange(6), drafted.position]
        short = drafted.position < single.position
        rows = torch.arange(6)[short]
        picks = Picks(rows, torch.arange(len(rows)))
        RULES.advance(drafted, picks, table[last[short]])
    assert torch.equal(drafted.position, single.position)
    for row, position in enumerate(single.position.tolist()):
        assert torch.equal(drafted.tokens[row, : position + 1], single.tokens[row, : position + 1])
    assert torch.equal(drafted.logprob_sum, single.logprob_sum)


def test_rows_that_begin_anew_find_their_prompt_in_their_leaders_cache():
    state = new_state(6, 16, CPU)
    state.source.fill_(5)  # what a search left
    state.tokens.fill_(9)
    new = new_state(2, 4, CPU)
    new.tokens[0], new.prompt_len[:], new.leader[:] = torch.tensor([1, 2, 3, 0]), 3, 2
    state.write_rows(torch.tensor([2, 4]), new)
    assert state.source[2].tolist() == [2] * 16
    assert state.source[4].tolist() == [2] * 3 + [4] * 13
    assert state.source[3].tolist() == [5] * 16
    assert state.tokens[2].tolist() == [1, 2, 3, 0] + [9] * 12
    assert state.leader.tolist() == [0, 1, 2, 3, 2, 5]
