"""The rules' kernels against their definition: in Triton's interpreter, or on a GPU."""

import dataclasses
import math

import pytest
import torch

from serve.contract.manifest import Dims, TokenizerFacts
from serve.contract.phrases import build_trie
from serve.native.rules.phrases import Phrasebook
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.state import NO_ROW, Picks, new_state
from tests.marks import nightly
from tests.serve.native.kernels.parity import DEVICE

FACTS = TokenizerFacts(
    eot=2000,
    sot=2001,
    sot_prev=2002,
    no_speech=2003,
    no_timestamps=2004,
    timestamp_begin=2100,
    transcribe=2005,
    translate=2006,
    languages={"en": 2010, "es": 2011, "de": 2019},
    suppress_tokens=(1, 2, 7, 2001),
    begin_suppress_tokens=(220, 2000),
    max_initial_timestamp_index=50,
    alignment_heads=(),
)
VOCAB = Dims(80, 1500, 64, 1, 1, 128, 2100 + 1501, 64, 64, 1, 1, 128)
PROMPT = (2001, 2010, 2005)


def start(state, row, prompt=PROMPT, beam=1, prefix=(), **fields):
    """Let a slot begin: the rows of a search, or one that stands for itself."""
    begin, prompt = len(prompt), (*prompt, *prefix)
    for mine in range(row, row + beam):
        state.tokens[mine, : len(prompt)] = torch.tensor(prompt, device=DEVICE)
        state.position[mine], state.prompt_len[mine] = len(prompt) - 1, len(prompt)
        state.text_begin[mine] = begin
        stamps = [token for token in prefix if token >= FACTS.timestamp_begin]
        state.last_timestamp[mine] = max(stamps, default=0)
        state.leader[mine], state.beam[mine], state.needed[mine] = row, beam, beam
        state.source[mine, : len(prompt)] = row
        state.logprob_sum[mine] = 0.0 if mine == row else -math.inf
        state.finished[mine] = False
        for name, value in {"limit": 40, "seed": mine, **fields}.items():
            getattr(state, name)[mine] = value


def mixed(state):
    """Every kind of slot: 18 rows, of which 5 and 14 stay free."""
    start(state, 0, timestamps=True)
    start(state, 1, (2001, 2011, 2005, 2004))
    start(state, 2, (2002, 9, 8, *PROMPT), timestamps=True, temperature=0.7)
    start(state, 3, prefix=(9, 8), temperature=1.0, limit=11)
    start(state, 4, timestamps=True, repetition_penalty=1.5, no_repeat_ngram=2)
    start(state, 6, prefix=(2100, 9, 8), beam=5, timestamps=True)
    start(state, 11, beam=3, no_repeat_ngram=1, length_penalty=0.5, needed=6)
    start(state, 15, beam=2, timestamps=True, length_penalty=0.0, repetition_penalty=0.8, limit=13)
    start(state, 17, no_repeat_ngram=3, limit=15, lists=3)


def steps_of(count, seed=5, rows=18):
    """Random logits that favour timestamps, a few words and the end now and then."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        logits = torch.randn((rows, VOCAB.n_vocab), generator=generator) * 3
        logits[:, FACTS.timestamp_begin :] += [-6.0, 4.0][step % 3 == 2]
        logits[:, FACTS.eot] += 8.0 + step if step > 6 else 0.0
        logits[:, 30:34] += 8.0
        yield logits.to(DEVICE)


def same(mine, twin, step):
    """All that means anything is equal, what is added up as far as float32 tells."""
    for field in dataclasses.fields(twin)[4:]:  # what is in `packed`
        a, b = getattr(mine, field.name), getattr(twin, field.name)
        if a.is_floating_point():
            assert torch.allclose(a, b, atol=2e-4), (step, field.name, a, b)
        else:
            assert torch.equal(a, b), (step, field.name, a, b)
    for row, position in enumerate(twin.position.tolist()):
        for table in ("tokens", "source"):
            a, b = getattr(mine, table)[row], getattr(twin, table)[row]
            assert torch.equal(a[: position + 1], b[: position + 1]), (step, table, row, a, b)
        end = int(twin.prompt_len[row] + twin.best_length[row])
        assert torch.equal(mine.best_tokens[row, :end], twin.best_tokens[row, :end]), (step, row)


class Both:
    """The kernels and the rules, and the state of so many rows for each; `more`: of the rules."""

    def __init__(self, kernels, rows, *more, facts=FACTS, searching=True):
        arguments = (facts, VOCAB, DEVICE, *more)
        self.kernels = kernels[1].TritonRules(*arguments, max_picks=rows, searching=searching)
        self.rules = TokenRules(*arguments)
        self.mine, self.twin = (new_state(rows, VOCAB.n_text_ctx, DEVICE) for _ in range(2))
        self.states = (self.mine, self.twin)

    def advance(self, step, picks, logits, drafted=False):
        self.rules.advance(self.twin, picks, logits, drafted)
        self.kernels.advance(self.mine, picks, logits.contiguous(), drafted)
        same(self.mine, self.twin, step)


def picks_of(state, first, rows):
    """These rows, a line of the logits each; at first a slot's all read its leader's."""
    rows = torch.tensor(rows, device=DEVICE)
    lines = torch.arange(len(rows), device=DEVICE)
    if first:
        lines = (state.leader[rows][:, None] == rows).int().argmax(dim=1)
    return Picks(rows, lines)


@pytest.mark.parametrize("steps", [2, *nightly(14)])
def test_the_choice_equals_the_rules_step_by_step(kernels, steps):
    both = Both(kernels, 18, None, (30, 31, 33))  # numerals
    mixed(both.mine), mixed(both.twin)
    order = [*range(6, 18), 0, 1, 2, 3, 4, 5]  # picks need not stand as rows do
    twin = both.twin
    for step, logits in enumerate(steps_of(steps)):
        both.advance(step, picks_of(twin, step == 0, order), logits)
    said = twin.tokens[:, len(PROMPT) :]
    assert not set(said[17].tolist()) & {30, 31, 33} and set(said.flatten().tolist()) & {30, 31, 33}
    if steps > 2:
        assert int(twin.finished.sum()) >= 12
        leaders = [6, 11, 15]
        assert twin.finished[leaders].all() and twin.ended[leaders].min() > 0
        assert twin.best_is_ended[leaders].any()


def test_a_blank_comes_first_where_the_row_lets_it(kernels):
    both, (blank, _) = Both(kernels, 5), FACTS.begin_suppress_tokens
    for state in both.states:
        start(state, 0)
        start(state, 1, lists=0)
        start(state, 2, timestamps=True, lists=0)
        start(state, 3, beam=2, lists=0)
    for step, logits in enumerate(steps_of(2, rows=5)):
        logits[:, blank] = 20.0
        both.advance(step, picks_of(both.twin, step == 0, list(range(5))), logits)
    first = both.twin.tokens[:4, len(PROMPT)].tolist()
    assert [token == blank for token in first] == [False, True, False, True]


def test_a_guess_is_the_likeliest_token_that_is_not_suppressed(kernels):
    """Of equals the first; behind the last place there is none."""
    both = Both(kernels, 18)
    mine, twin = both.states
    rows = torch.tensor([4, 0, 17, 9], device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    for state in both.states:
        state.position[rows] = torch.tensor([3, 0, VOCAB.n_text_ctx - 3, 40], device=DEVICE)
    for ahead in (1, 2, 3):
        logits = torch.randn((4, VOCAB.n_vocab), generator=generator)
        logits[0, list(FACTS.suppress_tokens)] = 50.0
        logits[1, [3000, 70, 2500]] = 9.0
        logits = logits.to(DEVICE)
        both.kernels.write_draft(mine, rows, logits, ahead)
        both.rules.write_draft(twin, rows, logits, ahead)
    assert torch.equal(mine.tokens, twin.tokens)
    assert twin.tokens[0, 1:4].tolist() == [70, 70, 70]
    both.kernels.write_draft(mine, rows, torch.full_like(logits, float("nan")), 1)
    assert ((mine.tokens >= 0) & (mine.tokens < VOCAB.n_vocab)).all()
    assert twin.tokens[17].count_nonzero() == 2 and not twin.tokens[[1, 5]].any()


def test_loops_end_where_the_rules_end_them(kernels):
    both, stamps = Both(kernels, 8), FACTS.timestamp_begin
    # By row: what it said in 23 tokens, and how many repeated ones are too many.
    said = {
        0: ([300] * 23, 16),
        1: ([300, 301, 302] * 8, 20),
        2: ([300 + i % 4 if i % 4 in (1, 2) else stamps + i for i in range(23)], 17),
        3: ([300, 301, 302] * 8, 22),  # one word short of it
        4: ([300 + i % 12 for i in range(23)], 8),  # not often enough
        5: ([300, 301, 302] * 8, 0),  # may
        6: ([300, 301] * 12, 16),  # and 7: a search
    }
    for state in both.states:
        for row, (tokens, need) in said.items():
            start(state, row, beam=2 if row == 6 else 1, limit=60)
            for one in (6, 7) if row == 6 else (row,):
                state.tokens[one, 3:26] = torch.tensor(tokens[:23])
                state.position[one], state.logprob_sum[one] = 25, -1.0 - one
            state.loop_at[row] = 2 + need if need else 60
    follow = [300, 302, stamps + 23, 302, 311, 302, 301, 301]
    for step, logits in enumerate(steps_of(2, rows=8)):
        logits[range(8), follow if step == 0 else 320] += 40.0
        both.advance(step, picks_of(both.twin, False, list(range(8))), logits)
    assert both.twin.finished.tolist() == [True, True, True, False, False, False, True, True]
    assert int(both.twin.best_length[6]) == 25


def test_a_draft_is_followed_as_the_rules_follow_it(kernels):
    both, rows = Both(kernels, 18, searching=False), [0, 1, 2, 3, 4, 17]
    guide = new_state(18, VOCAB.n_text_ctx, DEVICE)
    mixed(guide)
    for logits in steps_of(4):
        both.rules.advance(guide, picks_of(guide, False, rows), logits[:6])
    for state in both.states:
        mixed(state)
        for kept, row in enumerate(rows):
            at = int(state.prompt_len[row])
            state.tokens[row, at : at + 4] = guide.tokens[row, at : at + 4]
            state.tokens[row, at + kept] += 1  # beyond the draft of the last
        both.rules.begin_draft(state, torch.tensor(rows, device=DEVICE))
    for step, logits in enumerate(steps_of(5)):
        picks = Picks(
            *(torch.tensor(x, device=DEVICE) for x in ([*rows, NO_ROW, NO_ROW], range(8)))
        )
        both.advance(step, picks, logits[:6], drafted=True)
    advanced = both.twin.position[rows] + 1 - both.twin.prompt_len[rows]
    assert advanced.tolist() == [1, 2, 3, 4, 5, 5]


@pytest.mark.nightly
def test_a_beam_without_a_continuation_stays_without(kernels):
    both = Both(kernels, 5)
    start(both.mine, 0, beam=5), start(both.twin, 0, beam=5)
    logits = torch.full((5, VOCAB.n_vocab), -math.inf, device=DEVICE)
    for step in range(3):
        logits[:, [11, 12, 13]] = torch.tensor([2.0, 3.1, 1.3 + step], device=DEVICE)
        both.advance(step, picks_of(both.twin, step == 0, list(range(5))), logits)
        assert int(both.twin.logprob_sum.isfinite().sum()) == (3 if step == 0 else 5)


@pytest.mark.nightly
def test_an_empty_hypothesis_is_kept_where_there_is_no_other(kernels):
    both = Both(kernels, 8, facts=dataclasses.replace(FACTS, begin_suppress_tokens=()))
    for state in both.states:
        for row, length_penalty in ((0, 1.0), (2, 0.0), (4, -0.5), (6, 1.0)):
            start(state, row, beam=2, length_penalty=length_penalty, needed=1 + row // 6)
    logits = torch.full((8, VOCAB.n_vocab), -20.0, device=DEVICE)
    logits[:, 11], logits[:, FACTS.eot] = 5.0, 4.0
    for step in range(2):
        both.advance(step, picks_of(both.twin, step == 0, list(range(8))), logits)
        logits[:, FACTS.eot] = 6.0
    assert both.twin.best_length[[0, 2, 4, 6]].tolist() == [0, 1, 0, 1]


@pytest.mark.nightly
def test_phrases_are_boosted_as_the_rules_boost_them(kernels):
    """Alone, in searches, of one list or another; beside rows that have none."""
    book = Phrasebook(3, DEVICE)
    lists = [
        build_trie([((30, 31, 32), 6.0), ((31, 30), 3.0), ((33,), 2.0), ((30, 31), 1.0)]),
        build_trie([((33, 33, 30), 9.0), ((33, 30, 31, 32), 4.0)]),
    ]
    both = Both(kernels, 18, book)
    roots = [book.root(slot, trie) for slot, trie in enumerate(lists)]
    for state in both.states:
        mixed(state)
        for rows, root in (([0, 1, 4], roots[1]), (range(6, 11), roots[0]), ([15, 16], roots[1])):
            state.root[list(rows)], state.node[list(rows)] = root, root
    been, twin = set(), both.twin
    for step, logits in enumerate(steps_of(12)):
        both.advance(step, picks_of(twin, step == 0, list(range(18))), logits)
        been |= set(twin.node[twin.root >= 0].tolist())
    assert len(been) > 8
    assert twin.boost[6:11].any() and not twin.boost[[2, 3, 11, 12, 17]].any()
