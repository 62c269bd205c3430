"""Phrases of requests: what may be asked for, and how it becomes tokens."""

import dataclasses

import pytest

from serve.contract.config import TranscriberConfig
from serve.contract.errors import OptionError
from serve.contract.messages import Request
from serve.contract.phrases import BOOST
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.prompts import phrases_of, trie_of, weighted
from tests.fakes import fake_engine

CONFIG = TranscriberConfig()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(fake_engine(tmp_path_factory.mktemp("engine")))


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
    assert weighted(phrase) == expected


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
