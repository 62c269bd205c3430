"""Prompt ids, decoding and language names, with a small tokenizer made here."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Pieces
from tokenizers import models, processors

from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import EngineError, OptionError
from serve.speech import languages
from serve.speech.languages import LANGUAGE_NAMES
from serve.speech.tokenizer import Tokenizer
from tests.tiny_engine import N_TEXT_CTX, make_engine


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_engine(tmp_path_factory.mktemp("engine")))


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_engine(tmp_path_factory.mktemp("english"), multilingual=False))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.previous_text(text))


def test_prompt_order(tokenizer: Tokenizer):
    facts = tokenizer.facts
    spanish, english = facts.languages["es"], facts.languages["en"]
    prompt = tokenizer.prompt_ids
    assert prompt("es", "transcribe", True) == (facts.sot, spanish, facts.transcribe)
    translated = (facts.sot, english, facts.translate, facts.no_timestamps)
    assert prompt("en", "translate", False) == translated
    assert prompt(None, "transcribe", True) == (facts.sot, DETECT_LANGUAGE, facts.transcribe)


def test_english_only_prompts_have_no_language_and_no_task(english: Tokenizer):
    facts = english.facts
    assert english.languages == {"en"}
    for language in (None, "en", "English"):
        assert english.prompt_ids(language, "transcribe", True) == (facts.sot,)
    assert english.prompt_ids(None, "transcribe", False) == (facts.sot, facts.no_timestamps)


def test_english_only_refuses_what_it_cannot_do(english: Tokenizer):
    with pytest.raises(OptionError, match="language 'es': this engine is English-only"):
        english.prompt_ids("es", "transcribe", True)
    with pytest.raises(OptionError, match="task 'translate' needs a multilingual engine"):
        english.prompt_ids(None, "translate", True)


def test_previous_text_begins_with_a_space(tokenizer: Tokenizer):
    assert tokenizer.decode(ids_of(tokenizer, "  lazy fox \n")) == " lazy fox"


def test_previous_text_is_encoded_without_what_the_tokenizer_adds_to_a_text(tmp_path: Path):
    """Published tokenizers put special tokens around every text that they encode."""
    engine = make_engine(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    pieces = Pieces.from_file(path)
    eot = engine.manifest.tokenizer.eot
    pieces.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", eot)]
    )
    pieces.save(path)
    assert pieces.encode(" fox").ids[-1] == eot
    tokenizer = Tokenizer(engine)
    assert tokenizer.decode(ids_of(tokenizer, "lazy fox")) == " lazy fox"


def test_special_names(tokenizer: Tokenizer):
    facts = tokenizer.facts
    assert tokenizer.special_name(facts.sot) == "<|startoftranscript|>"
    assert tokenizer.special_name(facts.languages["es"]) == "<|es|>"
    with pytest.raises(EngineError, match=r"no token 100000, .*build the engine again"):
        tokenizer.special_name(100_000)


def test_long_previous_text_keeps_its_end(tokenizer: Tokenizer):
    ids = ids_of(tokenizer, "dog " * 100 + "fox")
    assert len(ids) == N_TEXT_CTX // 2 - 1
    assert tokenizer.decode(ids).endswith(" dog fox")


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|startoftranscript|>", "<|0.00|>", "<|en|>"])
def test_previous_text_cannot_smuggle_special_tokens(tokenizer: Tokenizer, token: str):
    with pytest.raises(OptionError, match="prompt holds the special token"):
        tokenizer.previous_text(f"hello {token} world")


def test_there_are_100_languages_with_names(tokenizer: Tokenizer):
    assert len(LANGUAGE_NAMES) == 100
    assert len(set(LANGUAGE_NAMES.values())) == 100
    assert tokenizer.languages == set(LANGUAGE_NAMES)
    for code, name in LANGUAGE_NAMES.items():
        by_code = tokenizer.prompt_ids(code, "transcribe", True)
        assert tokenizer.prompt_ids(name.title(), "transcribe", True) == by_code
        assert tokenizer.language_code(by_code[1]) == code


@pytest.mark.nightly
def test_names_equal_those_of_transformers():
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    assert LANGUAGE_NAMES == LANGUAGES
    ours = languages.TO_LANGUAGE_CODE
    assert {name: ours[name] for name in TO_LANGUAGE_CODE} == TO_LANGUAGE_CODE


@pytest.mark.parametrize(
    ("language", "code"),
    [
        *(("EN", "en"), (" Spanish ", "es"), ("castilian", "es"), ("haitian creole", "ht")),
        *(("en-US", "en"), ("de-DE", "de"), ("pt_BR", "pt"), ("zh-Hans-CN", "zh"), ("nb-NO", "no")),
    ],
)
def test_language_spellings(tokenizer: Tokenizer, language: str, code: str):
    ids = tokenizer.prompt_ids(language, "transcribe", True)
    assert tokenizer.language_code(ids[1]) == code


@pytest.mark.parametrize(
    ("language", "message"),
    [
        ("englsh", "'englsh' is unknown; expected a code"),
        ("", "'' is unknown; expected a code"),
        ("cantonese", "'cantonese' is not among this engine's 2"),
    ],
)
def test_languages_that_an_engine_lacks(tmp_path: Path, language: str, message: str):
    tokenizer = Tokenizer(make_engine(tmp_path, codes=["en", "es"]))
    assert tokenizer.languages == {"en", "es"}
    with pytest.raises(OptionError, match=message):
        tokenizer.prompt_ids(language, "transcribe", True)


def test_partial_characters_do_not_break(tokenizer: Tokenizer):
    """🎧 is four bytes that the pieces do not join, so any slice cuts it."""
    ids = ids_of(tokenizer, "🎧")
    assert len(ids) == 5  # a space and four bytes
    for begin in range(len(ids)):
        for end in range(begin, len(ids) + 1):
            text = tokenizer.decode(ids[begin:end])
            assert set(text) <= {" ", "🎧", "\ufffd"}
    assert tokenizer.decode(ids) == " 🎧"
    assert tokenizer.decode(ids[:-1]).startswith(" \ufffd")


def test_special_and_timestamp_ids_are_dropped(tokenizer: Tokenizer):
    facts = tokenizer.facts
    text = ids_of(tokenizer, "fox")
    ids = [facts.sot, facts.timestamp_begin, *text, facts.timestamp_begin + 50, facts.eot]
    assert tokenizer.decode([*ids, DETECT_LANGUAGE, 10**6]) == " fox"
    assert tokenizer.decode([]) == ""


def test_a_damaged_or_missing_file(tmp_path: Path):
    engine, path = make_engine(tmp_path), tmp_path / "tokenizer.json"
    for spoil in (lambda: path.write_text("{}", encoding="utf-8"), path.unlink):
        spoil()
        with pytest.raises(EngineError, match=r"cannot read .*tokenizer\.json"):
            Tokenizer(engine)


def test_tokenizer_without_a_decoder(tmp_path: Path):
    engine = make_engine(tmp_path)
    pieces = Pieces(models.BPE())
    pieces.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(EngineError, match="no decoder"):
        Tokenizer(engine)
