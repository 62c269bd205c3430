"""Rows with phrases: what they say, alone and in a search, and what is told of it."""

import pytest
import torch

from serve.contract.phrases import build_trie
from serve.native.rules.phrases import MARGIN, MAX_BOOSTED, Phrasebook
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.state import Picks, new_state
from tests.serve.native.rules.rows import CPU, DIMS, FACTS, N_VOCAB, PROMPT, admit, picks_of

PHRASE = (20, 21, 22)


def rules_of(*phrases, slots=1):
    """Rules, and the root of a list of phrases."""
    book = Phrasebook(slots, CPU)
    return TokenRules(FACTS, DIMS, CPU, book), book.root(0, build_trie(phrases))


def start(state, row, root, limit=12):
    admit(state, row, PROMPT, timestamps=False, limit=limit)
    state.root[row] = state.node[row] = root


def logits_of(lines):
    """Logits by token; all others are as unlikely as can be."""
    logits = torch.full((len(lines), N_VOCAB), -30.0)
    for line, values in zip(logits, lines, strict=True):
        for token, value in values.items():
            line[token] = value
    return logits


def said_by(rules, root, *steps):
    state = new_state(1, 32, CPU)
    start(state, 0, root)
    for values in steps:
        rules.advance(state, picks_of(1), logits_of([values]))
    return state.tokens[0, len(PROMPT) : int(state.position[0]) + 1].tolist(), state


def test_a_phrase_is_said_where_it_is_nearly_as_likely():
    steps = ({20: 1.0, 30: 1.5}, {21: 1.0, 31: 1.5}, {22: 1.0, 32: 1.5}, {20: 1.0, 30: 3.5})
    assert said_by(*rules_of((PHRASE, 6.0)), *steps)[0] == [20, 21, 22, 30]
    assert said_by(*rules_of((PHRASE, 0.9)), *steps)[0] == [30, 31, 32, 30]


def test_its_score_is_the_models_own():
    _, state = said_by(*rules_of((PHRASE, 6.0)), {20: 1.0, 30: 1.5})
    expected = logits_of([{20: 1.0, 30: 1.5}]).log_softmax(1)[0, 20]
    assert float(state.logprob_sum[0]) == pytest.approx(float(expected), abs=1e-5)


def test_nothing_is_said_that_is_not_likely_enough():
    far = {20: 1.0, 30: 1.0 + MARGIN + 0.1}
    crowd = {20: 1.0} | {30 + i: 1.5 for i in range(MAX_BOOSTED)}
    for values in (far, crowd):
        assert said_by(*rules_of((PHRASE, 60.0)), values)[0] == [30]


def test_rows_without_phrases_say_what_they_say_without():
    rules, root = rules_of((PHRASE, 60.0))
    state = new_state(2, 32, CPU)
    start(state, 0, root), start(state, 1, -1)
    rules.advance(state, picks_of(2), logits_of([{20: 1.0, 30: 1.5}] * 2))
    assert state.tokens[:, len(PROMPT)].tolist() == [20, 30]


def test_a_draft_is_followed_as_single_steps_are():
    rules, root = rules_of((PHRASE, 6.0))
    steps = [{20: 1.0, 30: 1.5}, {21: 1.0, 31: 1.5}, {22: 1.0, 32: 1.5}]
    state = new_state(1, 32, CPU)
    start(state, 0, root)
    state.tokens[0, len(PROMPT) : len(PROMPT) + 2] = torch.tensor(PHRASE[:2])
    rules.begin_draft(state, torch.tensor([0]))
    for line in range(3):
        picks = Picks(torch.tensor([0]), torch.tensor([line]))
        rules.advance(state, picks, logits_of(steps), drafted=True)
    alone = said_by(rules, root, *steps)[1]
    assert torch.equal(state.tokens[0, :6], alone.tokens[0, :6])
    assert int(state.node[0]) == int(alone.node[0]) != root


def test_a_search_finds_a_phrase_and_takes_back_what_breaks_off():
    """The phrase's first token costs 2, which only all of it makes good."""
    rules, root = rules_of((PHRASE, 6.0))
    ends = {FACTS.eot: 5.0, 33: 0.0}
    begins = [{20: 1.0, 30: 3.0}, {20: 1.0, 30: 3.0}]

    def best(after):
        state = new_state(2, 32, CPU)
        for row in range(2):
            start(state, row, root)
            state.leader[row], state.beam[row], state.needed[row] = 0, 2, 2
        state.logprob_sum[1] = -torch.inf
        total = []
        for values in (begins, after, after, [ends, ends]):
            logits = logits_of(values)
            if values is after:
                follow = state.tokens[:2, int(state.position[0])].tolist()
                logits = logits_of([after[0] if t in PHRASE else {31: 2.0} for t in follow])
            total.append(logits.log_softmax(1))
            rules.advance(state, Picks(torch.arange(2), torch.arange(2)), logits)
        end = len(PROMPT) + int(state.best_length[0])
        return state, state.best_tokens[0, len(PROMPT) : end].tolist()

    state, said = best([{21: 2.0, 22: 2.0}])
    assert said == list(PHRASE)
    expected = -2.1269 - 2 * 0.6931 - 0.0067
    assert float(state.best_logprob_sum[0]) == pytest.approx(expected, abs=1e-3)
    state, said = best([{35: 2.0, 36: 2.0}])
    assert said[0] == 30 and not state.boost.any()


def test_a_list_stays_where_it_is_while_a_slot_uses_it():
    book = Phrasebook(2, CPU)
    first, second, third = (build_trie([((token, 9), 1.0)]) for token in (1, 2, 3))
    root = book.root(0, first)
    assert book.root(1, first) == root
    other = book.root(1, second)
    assert other != root and book.root(0, first) == root
    assert book.root(0, third) == root and book.root(1, second) == other
