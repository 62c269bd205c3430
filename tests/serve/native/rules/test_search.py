"""Beam search against a plain search over Python lists, written as CTranslate2 defines it."""

import itertools
import math

import pytest
import torch

from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.search import best_tokens
from serve.native.rules.state import Picks, new_state
from tests.marks import sample
from tests.serve.native.rules.rows import CPU, DIMS, FACTS, N_VOCAB, PROMPT
from tests.serve.native.rules.test_reference_rules import penalised, reference_scores

N_CTX = 32


def model(seed, eagerness=0.5):
    """A language model: what follows hangs on the last two tokens and on the length."""
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randn(2, N_VOCAB, N_VOCAB, generator=generator) * 1.5

    def logits(tokens):
        found = tables[0, tokens[-1]] + tables[1, tokens[-2]]
        found[FACTS.eot] += eagerness * (len(tokens) - len(PROMPT) - 4)
        return found

    return logits


def plain_search(logits, beam, patience, length_penalty, limit, timestamps, penalties=(1.0, 0)):
    """(sampled tokens, sum, score, whether end of text ended it) of the best, hypotheses, steps."""
    beams, found = [((), 0.0)], []
    for step in itertools.count():
        candidates = []
        for said, total in beams:
            left = penalised(logits([*PROMPT, *said]).tolist(), list(said), *penalties)
            logprobs = reference_scores(torch.tensor(left), said, timestamps).log_softmax(-1)
            candidates += [
                (total + logprob, said, token) for token, logprob in enumerate(logprobs.tolist())
            ]
        candidates.sort(key=lambda candidate: -candidate[0])  # of equals the lower beam and token
        candidates = candidates[: 2 * beam]
        last = len(PROMPT) + step + 1 == limit
        for total, said, token in candidates[:beam]:
            if token == FACTS.eot or last:
                ended = token == FACTS.eot
                text = said if ended else (*said, token)
                score = total / len(text) ** length_penalty if text else -math.inf
                found.append((text, total, score, ended))
        first_ended = candidates[0][2] == FACTS.eot
        enough = (
            first_ended if length_penalty == 0 else len(found) >= math.floor(beam * patience + 0.5)
        )
        if last or enough:
            best = max(found, key=lambda hypothesis: hypothesis[2])  # the first of equals
            return (*best, len(found), step + 1)
        beams = [
            ((*said, token), total) for total, said, token in candidates if token != FACTS.eot
        ][:beam]


def begin_search(
    state, leader, beam, patience, length_penalty, limit, timestamps, penalties=(1, 0)
):
    """As the host begins a search."""
    for row in range(leader, leader + beam):
        state.source[row, : len(PROMPT)] = leader
        state.position[row] = len(PROMPT) - 1
        state.prompt_len[row] = state.text_begin[row] = len(PROMPT)
        state.limit[row] = limit
        state.timestamps[row] = timestamps
        state.leader[row], state.beam[row] = leader, beam
        state.needed[row] = math.floor(beam * patience + 0.5)
        state.length_penalty[row] = length_penalty
        state.repetition_penalty[row], state.no_repeat_ngram[row] = penalties
        state.logprob_sum[row] = 0.0 if row == leader else -math.inf
        state.finished[row] = False
    state.tokens[leader, : len(PROMPT)] = torch.tensor(PROMPT)


def run(advance, state, models):
    """Decode all searches together, each token's past read through `source`: steps of each.

    Args:
        models: leader -> its language model.
    """
    count = len(state.finished)
    cache = torch.full(state.tokens.shape, -7)  # what was fed, by row and position
    rows = torch.arange(count)
    first, steps = True, dict.fromkeys(models, 0)
    for leader in models:
        cache[leader, : len(PROMPT)] = torch.tensor(PROMPT)
    while not bool(state.finished.all()):
        logits = torch.full((count, N_VOCAB), math.nan)
        for row in rows[~state.finished].tolist():
            leader, position = int(state.leader[row]), int(state.position[row])
            steps[leader] += row == leader
            if first and row != leader:
                continue
            cache[row, position] = state.tokens[row, position]
            past = cache[state.source[row, : position + 1].long(), torch.arange(position + 1)]
            assert torch.equal(past, state.tokens[row, : position + 1])
            logits[row] = models[leader](past.tolist())
        advance(state, Picks(rows, state.leader.clone() if first else rows), logits)
        first = False
    return steps


def check(state, leader, expected):
    text, total, score, ended, _, _ = expected
    length = int(state.best_length[leader])
    begin = len(PROMPT)
    assert state.best_tokens[leader, begin : begin + length].tolist() == list(text)
    assert length == len(text)
    assert bool(state.best_is_ended[leader]) == ended
    assert float(state.best_logprob_sum[leader]) == pytest.approx(total, abs=1e-4)
    if text:
        assert float(state.best_score[leader]) == pytest.approx(score, abs=1e-4)


CASES = [  # beam, patience, length_penalty, limit, timestamps, penalties
    (2, 1.0, 1.0, 20, False, (1.0, 0)),
    (5, 1.0, 1.0, 20, False, (1.0, 0)),
    (5, 1.0, 1.0, 20, True, (1.0, 0)),
    (8, 2.0, 1.0, 20, True, (1.0, 0)),
    (3, 0.5, 0.6, 20, False, (1.0, 0)),
    (4, 1.0, 0.0, 20, False, (1.0, 0)),
    (4, 0.25, 0.0, 20, False, (1.0, 0)),
    (5, 2.0, -0.5, 20, False, (1.0, 0)),
    (5, 9.0, 1.0, 8, False, (1.0, 0)),
    (5, 1.0, 1.0, len(PROMPT) + 1, False, (1.0, 0)),
    (3, 1.0, 1.0, 20, True, (1.3, 2)),
    (2, 1.0, 1.0, 20, False, (0.7, 3)),
]


@pytest.mark.parametrize("case", sample([(case,) for case in CASES], 4), ids=str)
def test_a_search_equals_the_plain_one(case):
    for seed in range(6):
        state = new_state(case[0], N_CTX, CPU)
        begin_search(state, 0, *case)
        expected = plain_search(model(seed), *case)
        steps = run(TokenRules(FACTS, DIMS, CPU).advance, state, {0: model(seed)})
        check(state, 0, expected)
        assert int(state.ended[0]) == expected[4]
        assert steps[0] == expected[5]


def test_searches_of_several_widths_and_a_greedy_row_decode_side_by_side():
    rules = TokenRules(FACTS, DIMS, CPU)
    cases = {0: CASES[0], 3: CASES[2], 8: CASES[1], 13: CASES[-2]}  # row 2 is greedy
    state = new_state(16, N_CTX, CPU)
    models = {leader: model(20 + leader) for leader in (*cases, 2)}
    for leader, case in cases.items():
        begin_search(state, leader, *case)
    begin_search(state, 2, 1, 1.0, 1.0, 20, True)
    alone = new_state(1, N_CTX, CPU)
    begin_search(alone, 0, 1, 1.0, 1.0, 20, True)
    run(rules.advance, state, models)
    for leader, case in cases.items():
        check(state, leader, plain_search(models[leader], *case))
    run(rules.advance, alone, {0: models[2]})
    assert torch.equal(state.tokens[2], alone.tokens[0])
    assert torch.equal(state.logprob_sum[2], alone.logprob_sum[0])
    assert int(state.best_length[2]) == 0


@pytest.mark.parametrize("n", [5, 64, 99, 128, 1000])
def test_the_best_tokens_are_those_of_a_stable_sort(n):
    kinds = torch.tensor([-math.inf, -3.5, -1.25, -0.0, 0.0, 1e-30, 2.0, 1e30])
    for some in (kinds, kinds[:4]):
        generator = torch.Generator().manual_seed(n)
        values = some[torch.randint(0, len(some), (20, n), generator=generator)]
        expected = values.sort(dim=1, descending=True, stable=True).indices[:, :5]
        assert torch.equal(best_tokens(values, 5), expected)
