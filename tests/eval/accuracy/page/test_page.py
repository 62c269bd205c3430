import dataclasses
import html.parser
import re

import pytest

from eval.accuracy.normalize import normalizer
from eval.accuracy.page import clips as clips_module
from eval.accuracy.page import page as page_module
from eval.accuracy.page.page import write_comparison, write_page
from eval.accuracy.page.panels import LatencyPanel, rows_figure
from tests.eval.accuracy.runs import calls, report, score

BASIC = normalizer("basic-v1")
VOID = {"meta", "link", "br", "img", "input"}
HOSTILE = "</dd><script>alert(1)</script><img src=x onerror=alert(2)>&lt;b&gt; {{ 7*7 }}"


class Page(html.parser.HTMLParser):
    """What a page holds; a tag that is not closed in its place is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.loads, self.policy = [], [], [], [], None
        self.handlers, self.words = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "data", "action", "poster", "srcset", "xlink:href"):
                self.loads.append(value)
            if name.startswith("on"):
                self.handlers.append(name)
        found = dict(attributes)
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(tmp_path, found, made):
    write_page(tmp_path / "report.html", found, made, BASIC)
    return (tmp_path / "report.html").read_text()


def check_self_contained(text):
    page = Page(text)
    assert page.policy.startswith("default-src 'none'") and "script" not in page.policy
    assert not [place for place in page.loads if not re.match(r"data:|#", place)]
    assert not {"script", "iframe", "object", "embed", "form"} & set(page.tags)
    assert page.handlers == []
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"@import|url\((?!#)", text)
    # What a reader jumps to is there.
    assert {place[1:] for place in page.loads if place.startswith("#")} <= set(page.ids)
    return page


@pytest.fixture
def made():
    """Calls of the report's systems whose audio is a bundled clip."""
    path = "tests/data/en_question.wav"
    return {
        "earshot-int8": calls("hallo you", path=path),
        "earshot-fp16": calls("hello you", path=path),
        "faster-whisper-int8": calls("hello you", path=path),
    }


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes most of a page's time."""
    for name in ("accuracy_plot", "latency_plot", "memory_plot"):
        monkeypatch.setattr(page_module, name, lambda *_: None)


def test_a_page_is_whole_and_needs_nothing_else(tmp_path, made):
    page = check_self_contained(page_of(tmp_path, report("hallo you"), made))
    assert page.tags.count("audio") == 1 and page.tags.count("svg") == 2 * 4
    for part in (
        "Evaluation of demo failed",
        "✗ failed CER of earshot-int8 at most 0.2 points above earshot-fp16",
        "11.11 % [11.11, 11.11]",
        "hello → hallo 1",
        "hello hallo you",
        "earshot-fp16 faster-whisper-int8 ✓ as it was said",
        "basic-v1 (compared under)",
        "a chip",
        "RTFx, 8 calls at a time",
    ):
        assert part in page.text, part


def test_a_run_without_speech_mistakes_or_timing_has_a_page(tmp_path):
    found = dataclasses.replace(report(), systems=(score("transformers-fp32", "hello you"),))
    page = check_self_contained(page_of(tmp_path, found, {}))
    assert "None: every clip was heard without an error." in page.text
    assert "No system of this run was timed." in page.text
    nothing = dataclasses.replace(found, systems=())
    assert "No system has a rate on them." in Page(page_of(tmp_path, nothing, {})).text


@pytest.mark.usefixtures("no_figures")
def test_hostile_texts_stay_texts(tmp_path, made):
    """From wherever they come: transcripts, references, errors, names, settings."""
    plain = report("hallo you")
    clean = Page(page_of(tmp_path, plain, made))
    facts = dataclasses.replace(plain.systems[0].facts, settings={HOSTILE: HOSTILE})
    run = dataclasses.replace(
        plain.run,
        config_name=HOSTILE,
        machine={HOSTILE: HOSTILE},
        manifest=HOSTILE,
        sources={"timed": HOSTILE},
        one_clip=HOSTILE,
        unreadable={"timed": {HOSTILE: HOSTILE}},
    )
    gates = tuple(dataclasses.replace(gate, name=HOSTILE, detail=HOSTILE) for gate in plain.gates)
    rows = calls(HOSTILE, path="x.wav")
    rows[0] = dataclasses.replace(rows[0], reference=HOSTILE, error=HOSTILE, language=HOSTILE)
    scored = dataclasses.replace(score("earshot-int8", HOSTILE), facts=facts)
    found = dataclasses.replace(
        plain,
        run=run,
        gates=gates,
        systems=(scored, *plain.systems[1:]),
        normalizers={**plain.normalizers, HOSTILE: HOSTILE},
    )
    for heard in scored.sets.values():
        heard.by_normalizer[HOSTILE] = heard.overall
        heard.by_language[HOSTILE] = heard.overall
        heard.by_group[HOSTILE] = heard.overall
    for other in plain.systems[1:]:
        for heard in other.sets.values():
            heard.by_normalizer[HOSTILE] = heard.overall
            heard.by_language[HOSTILE] = heard.by_group[HOSTILE] = heard.overall
    text = page_of(tmp_path, found, {**made, "earshot-int8": rows})
    page = check_self_contained(text)
    assert "img" not in page.tags and set(page.tags) <= set(clean.tags)
    assert HOSTILE in page.text and "49" not in page.text.replace(HOSTILE, "")
    write_comparison(tmp_path / "c.html", found, found)
    assert "img" not in check_self_contained((tmp_path / "c.html").read_text()).tags


@pytest.mark.usefixtures("no_figures")
def test_audio_that_cannot_be_embedded_is_explained(tmp_path, made, monkeypatch):
    monkeypatch.setattr(clips_module, "MOST_BYTES_A_CLIP", 1000)
    big = tmp_path / "big.wav"
    big.write_bytes(b"x" * 1001)
    for path, said in (
        (None, "these predictions do not say where the audio lies"),
        (str(big), f"not embedded, for it has 0.0 MB: {big}"),
        ("gone.wav", "the audio is not there any more: gone.wav"),
        ("a.sph", "browsers do not play .sph files: a.sph"),
    ):
        made = {name: calls("hallo you", path=path) for name in made}
        page = Page(page_of(tmp_path, report("hallo you"), made))
        assert "audio" not in page.tags and f"No player: {said}." in page.text


def test_embedded_audio_stays_within_its_size(tmp_path, monkeypatch):
    for name in ("a.wav", "b.wav", "c.wav"):
        (tmp_path / name).write_bytes(b"x" * 600)
    monkeypatch.setattr(clips_module, "MOST_BYTES", 1300)
    rows = [
        dataclasses.replace(
            calls("hallo you")[0], file=name, path=str(tmp_path / name), clip_set="timed"
        )
        for name in ("a.wav", "b.wav", "c.wav")
    ]
    base = report("hallo you")
    heard = base.systems[0].sets["timed"]
    counts = heard.by_clip["a.wav"]
    heard.by_clip.clear()
    heard.by_clip.update(dict.fromkeys(("a.wav", "b.wav", "c.wav"), counts))
    found = clips_module.worst_clips(base, {"earshot-int8": rows}, BASIC)
    assert [clip.audio is not None for clip in found] == [True, True, False]


def test_differences_are_by_word_or_by_character():
    part = clips_module.Part
    assert clips_module.differences("the cat sat", "a cat", "en") == [
        part("the", "a"),
        part("cat", "cat"),
        part("sat", ""),
    ]
    assert clips_module.differences("我愛貓", "我愛狗", "zh") == [
        part("我愛", "我愛"),
        part("貓", "狗"),
    ]
    assert clips_module.differences("", "oh", None) == [part("", "oh")]


@pytest.mark.usefixtures("no_figures")
def test_long_stretches_without_a_mistake_are_shortened(tmp_path, made):
    words = [f"w{number}" for number in range(60)]
    said, heard = " ".join(words), " ".join([*words[:30], "x", *words[31:]])
    made["earshot-int8"][0] = dataclasses.replace(
        made["earshot-int8"][0],
        reference=said,
        prediction=dataclasses.replace(made["earshot-int8"][0].prediction, text=heard),
    )
    text = Page(page_of(tmp_path, report("hallo you"), made)).text
    assert "w6 w7 […] w22 w23" in text and "w29 w30 x w31" in text


def test_two_runs_are_drawn_on_one_page(tmp_path):
    a, b = report(), report("hallo you", seconds=0.25)
    write_comparison(tmp_path / "compare.html", a, b)
    page = check_self_contained((tmp_path / "compare.html").read_text())
    assert page.tags.count("svg") == 2 * 4
    for part in (
        "0.00 → 11.11",
        "500 ms → 250 ms",
        "earshot-int8 a.wav 0 1 +1",
        "earshot-int8 CER %, timed 0.00 11.11 +11.11",
    ):
        assert part in page.text
    assert "Not the same in both" not in page.text


@pytest.mark.usefixtures("no_figures")
def test_a_comparison_says_what_was_not_the_same(tmp_path):
    a = report()
    b = dataclasses.replace(a, run=dataclasses.replace(a.run, threads=4))
    write_comparison(tmp_path / "compare.html", a, b)
    text = Page((tmp_path / "compare.html").read_text()).text
    assert "threads differs: 2 and 4" in text and "No system was timed in both runs" in text


def test_the_checker_sees_what_it_looks_for():
    with pytest.raises(AssertionError):
        Page("<p><b></p></b>")
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    for wrong in ('<img src="http://a.b/c.png">', "<script></script>", '<a href="#none">x</a>'):
        with pytest.raises(AssertionError):
            check_self_contained(policy + wrong)


def test_latencies_that_lie_between_two_marks_of_the_axis_are_drawn():
    heard = score("earshot-int8", "hello you", 0.3).speed.alone
    panel = LatencyPanel("alone", {"earshot-int8": [heard]})
    assert rows_figure([panel], "alone", "latencies", narrow=False).startswith("<svg")
