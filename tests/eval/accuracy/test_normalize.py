import pytest

from eval.accuracy.normalize import DESCRIPTIONS, NORMALIZERS, normalizer
from serve.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, World!", "hello world"),
        ("  a \t b\n c  ", "a b c"),
        ("Don't — twenty-seven", "dont twenty seven"),
        ("¿Dónde está? «Aquí».", "dónde está aquí"),
        ("cafe\u0301", "caf\u00e9"),  # composed and decomposed accents are the same
        ("ﬁne １２", "fine 12"),  # compatibility forms
        ("STRASSE Straße", "strasse strasse"),
        ("5 € + 3", "5 € + 3"),  # symbols are not punctuation
        ("...", ""),
        ("", ""),
    ],
)
def test_basic_v1(text, expected):
    basic = normalizer("basic-v1")
    assert basic(text) == expected
    assert basic(basic(text)) == basic(text)


def test_raw_only_collapses_whitespace():
    assert normalizer("raw")("  Hello,\n World! ") == "Hello, World!"


def test_unknown_name():
    with pytest.raises(ConfigError, match="unknown normaliser 'basic'; known: basic-v1, raw"):
        normalizer("basic")


def test_each_is_described():
    assert set(DESCRIPTIONS) == set(NORMALIZERS)
