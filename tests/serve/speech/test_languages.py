"""Chinese scripts: the one that a tag names, the one of a text, and texts in another one."""

import pytest

from serve.speech.languages import convert, script_in, script_of

SIMPLE, TAIWAN, HONG_KONG = "台湾的头发里面", "臺灣的頭髮裡面", "台灣的頭髮裏面"


@pytest.mark.parametrize(
    ("tag", "script"),
    [
        *((tag, "Hant") for tag in ("zh-TW", "zh_tw", "zh-Hant", "zh-Hant-TW", "cmn-Hant")),
        *((tag, "Hant-HK") for tag in ("zh-HK", "zh-MO", "zh-Hant-HK")),
        *((tag, "Hans") for tag in ("zh-CN", "ZH-HANS", "zh-Hans-HK", "zh-SG", "zh-cmn-Hans-CN")),
        *((tag, None) for tag in ("zh", "chinese", "yue-HK", "en-HK", "ja", "")),
    ],
)
def test_a_tag_names_a_script_by_itself_or_by_its_region(tag, script):
    assert script_of(tag) == script


@pytest.mark.parametrize(
    ("text", "script"),
    [(SIMPLE, "Hans"), (TAIWAN, "Hant"), ("这個國家", "Hant"), ("你好 OK é ¡", None)],
)
def test_a_text_has_the_script_of_most_of_its_characters(text, script):
    assert script_in(text) == script


@pytest.mark.parametrize(
    ("script", "written"), [("Hans", SIMPLE), ("Hant", TAIWAN), ("Hant-HK", HONG_KONG)]
)
def test_a_text_is_converted_by_its_phrases(script, written):
    assert convert(SIMPLE, script) == written
    assert convert("我要 OpenAI", script) == "我要 OpenAI"


def test_of_a_text_in_the_script_only_what_it_lacks_is_changed():
    assert convert("皇后說这個國家的後來", "Hant") == "皇后說這個國家的後來"
    assert convert("皇后说這个国家的后来", "Hans") == "皇后说这个国家的后来"
    assert convert("台北這個國家", "Hant") == "台北這個國家"
