"""The report's page: whole, self-contained, and true to hostile texts."""

import html.parser
import re
from dataclasses import replace
from pathlib import Path

import pytest

from eval import report as reports
from eval.accuracy import report as accuracy_report
from eval.accuracy.normalize import normalizer
from eval.accuracy.report import compare_runs, result_of
from eval.config import EvaluationProduct
from eval.figures import latency_chart, rate_chart
from eval.record import Check, Figure, ReportSection, Result, Run, Table, Text
from eval.report import to_markdown
from serve.contract.errors import ConfigError
from tests.eval.accuracy.runs import calls, report, score

BASIC = normalizer("basic-v1")
VOID = {"meta", "link", "br", "img", "input"}
HOSTILE = "</dd><script>alert(1)</script><img src=x onerror=alert(2)>&lt;b&gt; {{ 7*7 }}"


class Page(html.parser.HTMLParser):
    """What a page holds; a tag that is not closed in its place is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def values(self, *names):
        return [value for name, value in self.attributes if name in names]


def page_of(found, made=None):
    """The page of a run, or of any result."""
    result = found if isinstance(found, Result) else result_of(found, made, BASIC)
    return reports.to_page(Run("run", EvaluationProduct()), result)


def check_self_contained(text):
    page = Page(text)
    (policy,) = (value for value in page.values("content") if "default-src" in value)
    assert policy.startswith("default-src 'none'") and "script" not in policy
    loads = page.values("src", "href", "data", "action", "poster", "srcset", "xlink:href")
    assert not [place for place in loads if not re.match(r"data:|#", place)]
    assert not {"script", "iframe", "object", "embed", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert len(page.values("id")) == len(set(page.values("id")))
    assert not re.search(r"@import|url\((?!#)", text)
    # What a reader jumps to is there.
    assert {place[1:] for place in loads if place[0] == "#"} <= set(page.values("id"))
    return page


@pytest.fixture
def made():
    """Calls of the report's systems with a bundled clip as audio."""
    texts = {"earshot-int8": "hallo", "earshot-fp16": "hello", "faster-whisper-int8": "hello"}
    path = "tests/data/en_question.wav"
    return {name: calls(f"{text} you", path=path) for name, text in texts.items()}


def test_a_page_is_whole_and_needs_nothing_else(made):
    page = check_self_contained(page_of(report("hallo you"), made))
    assert page.tags.count("audio") == 1
    for part in (
        "Evaluation of demo failed",
        "✗ failed CER of earshot-int8 at most 0.2 points above earshot-fp16",
        "earshot-fp16 faster-whisper-int8 ✓ as it was said",
        "500 ms / 500 ms",
    ):
        assert part in page.text, part
    assert re.search("hello( earshot-int8)? hallo you", page.text)


def test_a_run_without_speech_mistakes_or_timing_has_a_page():
    heard = score("transformers-fp32", "hello you")
    heard = replace(heard, sets={"timed": heard.sets["timed"]})
    page = check_self_contained(page_of(replace(report(), systems=(heard,)), {}))
    assert "No system of this run was timed" in page.text
    assert "None of these systems heard them." in page.text


def test_hostile_texts_stay_texts(made):
    """From wherever they come: transcripts, references, errors, names, settings."""
    plain = report("hallo you")
    clean = Page(page_of(plain, made))
    pair = {HOSTILE: HOSTILE}
    texts = {"config_name": HOSTILE, "machine": pair, "sources": {"timed": HOSTILE}}
    run = replace(plain.run, **texts, one_clip=HOSTILE, unreadable={"timed": pair})
    gates = tuple(replace(gate, name=HOSTILE, detail=HOSTILE) for gate in plain.gates)
    rows = calls(HOSTILE, path="x.wav")
    rows[0] = replace(rows[0], reference=HOSTILE, error=HOSTILE, language=HOSTILE)
    facts = replace(plain.systems[0].facts, settings=pair)
    systems = (replace(score("earshot-int8", HOSTILE), facts=facts), *plain.systems[1:])
    found = replace(plain, run=run, gates=gates, systems=systems, normalizer=HOSTILE)
    for system in found.systems:
        for heard in system.sets.values():
            heard.by_part[HOSTILE] = heard.overall
    text = page_of(found, {**made, "earshot-int8": rows})
    page = check_self_contained(text)
    assert "img" not in page.tags and set(page.tags) <= set(clean.tags)
    assert HOSTILE in page.text and "49" not in page.text.replace(HOSTILE, "")
    assert "img" not in check_self_contained(page_of(compare_runs(found, found))).tags


def test_audio_that_cannot_be_embedded_is_explained(tmp_path, made, monkeypatch):
    monkeypatch.setattr(accuracy_report, "MAX_BYTES_PER_CLIP", 1000)
    big = tmp_path / "big.wav"
    big.write_bytes(b"x" * 1001)
    reasons = {
        str(big): f"not embedded, for it has 0.0 MB: {big}",
        "gone.wav": "cannot read gone.wav: No such file or directory",
        "a.sph": "browsers do not play this file: a.sph",
    }
    for path, said in reasons.items():
        made = {name: calls("hallo you", path=path) for name in made}
        page = Page(page_of(report("hallo you"), made))
        assert "audio" not in page.tags and f"No player: {said}" in page.text


def test_two_runs_are_drawn_on_one_page():
    a, b = report(), report("hallo you", seconds=0.25)
    page = check_self_contained(page_of(compare_runs(a, b)))
    for part in (
        "A: earshot-int8 0.00",
        "B: earshot-int8 250 ms / 250 ms",
        "earshot-int8 a.wav 0 1 +1",
        "B: earshot-int8 11.11 % [11.11, 11.11] 1/0/0 of 9",
    ):
        assert part in page.text
    assert "Conditions that differ None." in page.text
    settings = replace(a.run.settings, threads=4)
    run = replace(a.run, settings=settings)
    other = replace(a, run=run, systems=a.systems[1:2])
    text = Page(page_of(compare_runs(a, other))).text
    assert "threads differs: 2 and 4" in text and "No system of this run was timed" in text
    with pytest.raises(ConfigError, match="share no system"):
        compare_runs(a, replace(b, systems=()))


def test_charts_lie_within_their_axes():
    heard = score("earshot-int8", "hello you", 0.3).speed.alone
    assert latency_chart("alone", {"earshot-int8": heard}).rows[0].text == "300 ms / 300 ms"
    rates = {name: score(name, text).sets["timed"].overall.cer for name, text in FAR.items()}
    chart = rate_chart("CER, %", rates)
    spans = [span for row in chart.rows for span in row.spans]
    assert all(0 <= left <= left + width <= 100 for left, width, _ in spans)
    assert [row.mark is None for row in chart.rows] == [False, False, True]  # beyond the axis
    assert rate_chart("CER, %", {}) is None


FAR = {"earshot-int8": "hallo you", "earshot-fp16": "hallo yuu", "other": "far off " * 40}


def test_the_same_result_is_written_as_text_and_printed_in_part(run_of, tmp_path):
    table = Table(("n", "v"), [("a|b", "1")], "T", "note")
    parts = [Text("`x` is", items=["a"]), table, Figure([])]
    sections = (ReportSection("One", parts), ReportSection("Two", [Text("details")], printed=False))
    result = Result({}, (Check("good", True, "yes"), Check("open", None, "few")), sections)
    run = run_of(command="live")
    reports.write(tmp_path, run, result)
    whole = (tmp_path / "report.md").read_text()
    printed = reports.to_markdown(run, result, whole=False)
    for text in (whole, printed):
        assert text.startswith("# live: ") and "**Not decided**\n\n- passed: good. yes" in text
        assert "## One\n\n`x` is\n\n- a\n\n### T\n\nnote\n\n| n    | v |" in text
        assert "| a\\|b | 1 |" in text
    assert "details" in whole and "### Machine" in whole
    assert "details" not in printed and "### Machine" not in printed
    assert "a|b" in (tmp_path / "report.html").read_text()


def test_the_report_of_a_run_is_the_kept_one(made):
    """Every figure, condition and gate; the page shows the same."""
    result = result_of(report("hallo you"), made, BASIC)
    expected = Path(__file__).parent / "accuracy" / "report.txt"
    assert to_markdown(Run("run", EvaluationProduct()), result) == expected.read_text()
