"""build.tokenizer_facts: the first merge of a tokenizer, put back where it alone is missing."""

import json

import pytest
import tokenizers

from build.tokenizer_facts import with_first_merge

VOCABULARY = ("a", "b", "c", "ab", "abc", "<|endoftext|>")


def tokenizer_json(merges, vocabulary=VOCABULARY):
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(vocabulary)}, "merges": merges}
    return json.dumps({"model": model}).encode()


@pytest.mark.parametrize("merges", [["ab c"], [["ab", "c"]]], ids=["texts", "pairs"])
def test_a_merge_that_is_missing_is_put_back(merges):
    repaired, note = with_first_merge(tokenizer_json(merges))
    model = json.loads(repaired)["model"]
    assert len(model["merges"]) == 2 and model["merges"][1] == merges[0]
    pairs = [tuple(m if isinstance(m, list) else m.split()) for m in model["merges"]]
    bpe = tokenizers.models.BPE(vocab=model["vocab"], merges=pairs)
    assert tokenizers.Tokenizer(bpe).encode("abc").tokens == ["abc"]
    assert "'a' + 'b'" in note


@pytest.mark.parametrize(
    "content",
    [
        tokenizer_json(["a b", "ab c"]),
        tokenizer_json(["a b"]),  # what is missing is not the first
        tokenizer_json(["ab c"], (*VOCABULARY, "bc")),  # nor alone
        tokenizer_json(["ab c"], tuple(reversed(VOCABULARY))),
        b'{"model": {"type": "WordLevel"}}',
        b"{}",
    ],
)
def test_what_is_whole_or_otherwise_is_left(content):
    assert with_first_merge(content) == (content, "")
