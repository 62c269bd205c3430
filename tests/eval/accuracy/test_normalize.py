import pytest

from eval.accuracy.normalize import SPELLING_FILE, Spelling, descriptions, normalizer, read_spelling
from serve.contract.errors import ConfigError


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
    assert basic(text, "en") == basic(text, None) == expected
    assert basic(expected, "en") == expected


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("Mr. Smith's paid twenty-one dollars!", "en", "mister smith is paid $21"),
        ("Um, we don't know", "en", "we do not know"),
        ("The colour of the theatre", "en", "the color of the theatre"),
        ("Two (laughs) naïve friends", "en", "2 naive friends"),
        ("Mr. Veintiuno, el niño", "es", "mr veintiuno el niño"),  # English rules are for English
        ("Mr. Twenty-one", None, "mr twenty one"),
    ],
)
def test_whispers_english_normaliser(text, language, expected):
    spelling = Spelling("somewhere", {"colour": "color"})
    assert normalizer("whisper-english", spelling)(text, language) == expected


def test_spellings_come_from_the_checkpoint(tmp_path):
    assert read_spelling(tmp_path) == Spelling()
    (tmp_path / SPELLING_FILE).write_text('{"colour": "color"}')
    spelling = read_spelling(tmp_path)
    assert normalizer("whisper-english", spelling)("Colour", "en") == "color"
    assert normalizer("whisper-english")("Colour", "en") == "colour"
    told = descriptions(spelling)["whisper-english"]
    assert f"1 British spellings of {tmp_path}/normalizer.json made American" in told
    assert "British spellings left as they are" in descriptions(Spelling())["whisper-english"]
    (tmp_path / SPELLING_FILE).write_text("[]")
    with pytest.raises(ConfigError, match=r"normalizer\.json holds \[\]; expected a table"):
        read_spelling(tmp_path)


def test_unknown_name():
    known = "basic-v1, whisper-english, raw"
    with pytest.raises(ConfigError, match=f"unknown normaliser 'basic'; expected one of {known}"):
        normalizer("basic")
