"""The pages as a browser lays them out: where one is installed, as continuous integration does."""

from dataclasses import replace
from pathlib import Path

import pytest

from eval import report as reports
from eval.accuracy.normalize import normalizer
from eval.accuracy.report import compare_runs, result_of
from eval.config import EvalConfig, EvaluationProduct
from eval.record import Run
from tests.eval.accuracy.runs import calls, report, score
from tests.programs import open_browser

pytestmark = pytest.mark.needs_program("chromium")

NAMES = EvalConfig().systems
MEASURE = (Path(__file__).parent / "overlaps.js").read_text(encoding="utf-8")
PLAYERS = "[...document.querySelectorAll('audio')].map(audio => audio.duration || 0)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages():
    """A run of many systems, one of them far off, and its comparison with another."""

    def run(step):
        scores = [
            score(name, "hello you" + " too" * number, 0.5 + step * number)
            for number, name in enumerate(NAMES)
        ]
        scores[-1] = score(NAMES[-1], "far off " * 40)
        return replace(report(), systems=tuple(scores))

    said = "hello you too, supercalifragilisticexpialidocious" + "expialidocious" * 8
    made = {name: calls(said, path="tests/data/en_question.wav") for name in NAMES}
    results = {
        "report": result_of(run(0.02), made, normalizer("basic-v1")),
        "comparison": compare_runs(run(0.02), run(0.5)),
    }
    product = Run("run", EvaluationProduct())
    return {name: reports.to_page(product, result) for name, result in results.items()}


@pytest.mark.parametrize("page", ["report", "comparison"])
@pytest.mark.parametrize(
    ("width", "scheme", "colour"),
    [(360, "light", "rgb(244, 246, 247)"), (1200, "dark", "rgb(16, 23, 29)")],
)
def test_nothing_overlaps_or_leaves_the_page(browser, pages, page, width, scheme, colour):
    viewport = {"width": width, "height": 900}
    with browser.new_page(viewport=viewport, color_scheme=scheme) as tab:
        tab.set_content(pages[page])
        tab.wait_for_function(f"{PLAYERS}.every(seconds => seconds > 0)")
        players, found = tab.evaluate(PLAYERS), tab.evaluate(MEASURE)
        assert tab.evaluate(BACKGROUND) == colour
    assert found["texts"] > 40
    assert (found["width"] <= 0, found["beyond"]) == (True, [])
    assert found["overlaps"] == found["small"] == []
    assert players == ([pytest.approx(2.57, abs=0.05)] if page == "report" else [])
