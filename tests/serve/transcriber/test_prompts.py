"""Phrases of requests: what may be asked for, and how it becomes tokens.

What windows begin with: hotwords, the client's text, and in sequence the text before them.
"""

import dataclasses

import pytest

from serve.contract.config import TranscriberConfig
from serve.contract.errors import OptionError
from serve.contract.messages import Request
from serve.contract.phrases import BOOST
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.prompts import PromptTexts, phrases_of, split_weight, trie_of
from tests.fakes import Echo, Play, fake_engine
from tests.harness import (
    ABLE,
    FOREVER,
    UNSURE,
    Client,
    TranscriberTests,
    noise,
    quiescent,
    request,
    until,
)

CONFIG = TranscriberConfig()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(fake_engine(tmp_path_factory.mktemp("engine")))


@pytest.mark.parametrize(
    ("phrase", "expected"),
    [
        ("Karenina", ("Karenina", 1.0)),
        (" Anna  Karenina ", ("Anna Karenina", 1.0)),
        ("Anna Karenina^2.5", ("Anna Karenina", 2.5)),
        ("x^2^0.5", ("x^2", 0.5)),
    ],
)
def test_a_weight_may_stand_behind_a_phrase(phrase, expected):
    assert split_weight(phrase) == expected


@pytest.mark.parametrize(
    ("phrase", "message"),
    [
        ("^2", "expected 1 to 100 characters"),
        ("x" * 101, "expected 1 to 100 characters"),
        ("Anna^", "expected a weight above 0 and at most 4"),
        ("Anna^4.1", "expected a weight above 0"),
        ("Anna^nan", "expected a weight above 0"),
    ],
)
def test_what_is_no_phrase_is_refused(phrase, message):
    with pytest.raises(OptionError, match=message):
        phrases_of(Request(b"", phrases=(phrase,)), CONFIG)


def test_a_request_goes_before_the_config():
    config = dataclasses.replace(CONFIG, phrases=("Zoë",))
    assert phrases_of(Request(b""), config) == ("Zoë",)
    assert phrases_of(Request(b"", phrases=["Anna"]), config) == ("Anna",)


def test_more_than_a_thousand_are_refused():
    many = tuple(f"name {i}" for i in range(1001))
    with pytest.raises(OptionError, match="has 1001 entries; expected at most 1000"):
        phrases_of(Request(b"", phrases=many), CONFIG)
    assert phrases_of(Request(b"", phrases=many[:1000]), CONFIG) == many[:1000]


def test_phrases_of_too_many_bytes_are_refused_before_they_are_tokenized():
    long = tuple(f"{i:04}{'é' * 90}" for i in range(400))
    with pytest.raises(OptionError, match="has 73600 bytes; expected at most 65536"):
        phrases_of(Request(b"", phrases=long), CONFIG)
    assert phrases_of(Request(b"", phrases=long[:350]), CONFIG) == long[:350]


def test_a_phrase_is_looked_for_with_a_space_and_without_and_capitalised(tokenizer):
    trie = trie_of(("fox^2",), tokenizer)
    spaced, bare = tokenizer.phrases_ids("phrases", ["fox", "Fox"])
    forms = {*spaced, *bare}
    assert len(forms) == 4
    edges = dict(zip(zip(trie.nodes, trie.tokens, strict=True), trie.targets, strict=True))
    gains = dict(zip(zip(trie.nodes, trie.tokens, strict=True), trie.gains, strict=True))
    for ids in forms:
        node, earned = 0, 0.0
        for token in ids:
            node, earned = edges[node, token], earned + gains[node, token]
        assert earned == pytest.approx(2 * BOOST) and trie.refunds[node] == 0


START = (100, 101)
TEXTS = PromptTexts(99, limit=8, previous_limit=6, hotwords=(1, 2), before=(3, 4, 5, 6, 7))


class TestPrompts:
    """Which ids a window's prompt has."""

    def test_hotwords_stand_first_and_what_precedes_loses_its_oldest(self):
        assert TEXTS.prompt(START, TEXTS.before) == (99, 1, 2, 4, 5, 6, 7, *START)
        assert TEXTS.prompt(START, ()) == (99, 1, 2, *START)
        full = dataclasses.replace(TEXTS, hotwords=tuple(range(6)))
        assert full.prompt(START, TEXTS.before) == (99, *range(6), *START)
        assert PromptTexts(99, 6, 6).prompt(START, ()) == START

    def test_a_prefix_takes_its_room_from_what_precedes(self):
        prompt = TEXTS.prompt(START, TEXTS.before, (50, 51, 52))
        assert prompt == (99, 1, 2, 5, 6, 7, *START, 50, 51, 52)


class Counting:
    """Windows that say "a", "b", …, from their first second to their second; scores by window."""

    def __init__(self, tokenizer, scores=()):
        self.facts = tokenizer.facts
        self.letters = [tokenizer.previous_text(letter) for letter in "abcdefgh"]
        self.scores = dict(scores)
        self.seen = {}

    def said(self, index):
        begin = self.facts.timestamp_begin
        return (begin + 50, *self.letters[index], begin + 100)

    def __call__(self, job):
        number = self.seen.setdefault(job.features.data_ptr(), len(self.seen))
        return Play(self.said(number), delay=number % 2, **self.scores.get(number, {}))


class TestSequence(TranscriberTests):
    """Through the transcriber: which text reaches which job."""

    def text_before(self, tokenizer, job):
        start = job.prompt.index(tokenizer.facts.sot)
        return job.prompt[1:start]

    def test_each_window_knows_what_was_said_before_it(self, start, tokenizer):
        script = Counting(tokenizer)
        transcriber, runtime = start(script)
        audio = noise(100.0)
        answer = transcriber.transcribe(request("", audio=audio, mode="sequential"))
        assert len(runtime.jobs) >= 4
        assert answer.text == " ".join("abcdefgh"[: len(runtime.jobs)])
        before = ()
        for index, job in enumerate(runtime.jobs):
            assert self.text_before(tokenizer, job) == before
            before += script.said(index)
        assert runtime.most_in_hand == 1
        quiescent(transcriber, runtime)

    def test_a_network_may_want_less_of_it_and_no_timestamps(self, start, tokenizer):
        script = Counting(tokenizer)
        transcriber, runtime = start(script, previous_tokens=2, previous_timestamps=False)
        transcriber.transcribe(request("", audio=noise(130.0), mode="sequential"))
        said = ()
        for index, job in enumerate(runtime.jobs):
            assert self.text_before(tokenizer, job) == said[-2:]
            said += script.letters[index]

    def test_a_window_that_failed_is_not_gone_on_from_and_a_silent_one_says_nothing(
        self, start, tokenizer
    ):
        silent = {"no_speech_prob": 0.9, **UNSURE}  # at any temperature
        script = Counting(tokenizer, {1: UNSURE, 2: silent})
        transcriber, runtime = start(script, temperatures=(0.0,))
        asked = {"hotwords": "fox", "mode": "sequential"}
        transcriber.transcribe(request("x", audio=noise(130.0), **asked))
        hotwords, x = (tokenizer.previous_text(text) for text in ("fox", "x"))
        said = [self.text_before(tokenizer, job) for job in runtime.jobs[:5]]
        assert said == [
            (*hotwords, *x),
            (*hotwords, *x, *script.said(0)),
            hotwords,
            hotwords,
            (*hotwords, *script.said(3)),
        ]

    def test_what_is_left_out_of_the_answer_is_not_gone_on_from(
        self, start, tokenizer, monkeypatch
    ):
        monkeypatch.setattr(
            "serve.speech.judging.without_hallucinations",
            lambda segments, *_: [s for s in segments if s.text != " b"],
        )
        script = Counting(tokenizer, {i: {"text_below": tokenizer.facts.eot} for i in range(8)})
        transcriber, runtime = start(script, ABLE)
        odd = {"mode": "sequential", "hallucination_silence_threshold": 1.0}
        answer = transcriber.transcribe(request("", audio=noise(130.0), **odd))
        assert answer.text.startswith("a c d")
        before = [self.text_before(tokenizer, job) for job in runtime.jobs[:4]]
        a, c = script.said(0), script.said(2)
        assert before == [(), a, a, (*a, *c)]
        quiescent(transcriber, runtime)

    @pytest.mark.parametrize("timestamps", [True, False])
    def test_the_first_window_goes_on_from_the_prefix(self, start, tokenizer, timestamps):
        script = Counting(tokenizer)
        transcriber, runtime = start(script)
        options = {"mode": "sequential", "timestamps": timestamps, "prefix": "  fox "}
        answer = transcriber.transcribe(request("", audio=noise(70.0), **options))
        facts, fox = tokenizer.facts, tokenizer.previous_text("fox")
        stamp = (facts.timestamp_begin,) if timestamps else ()
        first, second = runtime.jobs[:2]
        begun = first.prompt[len(first.prompt) - first.prefix :]
        assert begun == (*stamp, *fox)
        before = script.said(0) if timestamps else script.letters[0]
        assert self.text_before(tokenizer, second) == before
        assert second.prefix == 0
        assert answer.text.startswith("a b"), "the prefix is not answered"

    def test_requests_in_sequence_decode_beside_each_other(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, delay=FOREVER))
        one = request(audio=noise(70.0), mode="sequential")
        clients = [Client().send(transcriber, one) for _ in range(3)]
        until(lambda: len(runtime.jobs) == 3)
        for client in clients:
            client.handle.cancel()
            assert client.error
        assert len(runtime.jobs) == 3, "one window of each at a time"
