"""The pages as a browser lays them out: where one is installed, as continuous integration does."""

import dataclasses
import json
import re
import subprocess

import pytest

from eval import report as reports
from eval.accuracy.normalize import normalizer
from eval.accuracy.report import compare_runs, result_of
from eval.config import EvaluationProduct
from eval.record import Run
from tests.eval.accuracy.runs import calls, report, score
from tests.programs import path_of

pytestmark = pytest.mark.needs_program("chromium")

NAMES = (
    "earshot-triton",
    "earshot-int8",
    "earshot-fp16",
    "faster-whisper-float32",
    "faster-whisper-float32-greedy",
    "faster-whisper-int8",
    "faster-whisper-int8-greedy",
    "transformers-fp32",
)
MEASURE = """
<script>
addEventListener("load", () => setTimeout(() => {
  for (const closed of document.querySelectorAll("details")) closed.open = true;
  const seen = box => box.width > 0 && box.height > 0;
  const name = element => element.textContent.trim();
  const found = {beyond: [], overlaps: [], small: [], texts: 0, players: []};
  for (const element of document.querySelectorAll("main *")) {
    const box = element.getBoundingClientRect();
    if (!element.closest(".scroll") && seen(box) && box.right > innerWidth + 1)
      found.beyond.push(`${element.tagName} ${name(element).slice(0, 40)}`);
  }
  for (const chart of document.querySelectorAll(".charts > *")) {
    const texts = [...chart.querySelectorAll("span, small, h4, p")].filter(
      text => !text.children.length).filter(
      text => name(text) && seen(text.getBoundingClientRect()));
    const boxes = texts.map(text => text.getBoundingClientRect());
    found.texts += texts.length;
    boxes.forEach((a, i) => {
      if (a.height < 9) found.small.push(name(texts[i]));
      boxes.slice(i + 1).forEach((b, j) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3)
          found.overlaps.push(`${name(texts[i])} | ${name(texts[i + 1 + j])}`);
      });
    });
  }
  found.width = document.documentElement.scrollWidth - innerWidth;
  found.players = [...document.querySelectorAll("audio")].map(audio => audio.duration);
  found.dark = getComputedStyle(document.body).backgroundColor;
  document.body.innerHTML = "";
  document.body.dataset.found = JSON.stringify(found);
}, 500));
</script>
"""


def measured(path, width, *flags):
    """The page's layout at a width, everything unfolded, as a script inside a copy measures it."""
    text = path.read_text(encoding="utf-8")
    policy = "default-src 'none';"
    assert policy in text
    text = text.replace(policy, f"{policy} script-src 'unsafe-inline';")
    copy = path.with_name("measured.html")
    copy.write_text(text.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    command = [path_of("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"--window-size={width},900", *flags]
    done = subprocess.run(
        [*command, f"--user-data-dir={path.parent / 'profile'}", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A run of many systems, one of them far off, and its comparison with another."""
    folder = tmp_path_factory.mktemp("pages")

    def run(step):
        scores = [
            score(name, "hello you" + " too" * number, 0.5 + step * number)
            for number, name in enumerate(NAMES)
        ]
        scores.append(score("faster-whisper-library-defaults", "far off " * 40))
        return dataclasses.replace(report(), systems=tuple(scores))

    said = "hello you too, supercalifragilisticexpialidocious" + "expialidocious" * 8
    made = {name: calls(said, path="tests/data/en_question.wav") for name in NAMES}
    results = {
        "report.html": result_of(run(0.02), made, normalizer("basic-v1")),
        "compare.html": compare_runs(run(0.02), run(0.5)),
    }
    for name, result in results.items():
        (folder / name).write_text(
            reports.to_page(Run("run", EvaluationProduct()), result), encoding="utf-8"
        )
    return folder


@pytest.mark.parametrize("page", ["report.html", "compare.html"])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_overlaps_or_leaves_the_page(pages, page, width):
    found = measured(pages / page, width)
    assert found["texts"] > 40
    assert (found["width"] <= 0, found["beyond"]) == (True, [])
    assert found["overlaps"] == []
    assert found["small"] == []
    players = [pytest.approx(2.57, abs=0.05)] if page == "report.html" else []
    assert found["players"] == players


def test_the_page_follows_dark_and_light(pages):
    colours = {
        measured(pages / "report.html", 800, *flags)["dark"]
        for flags in ((), ("--blink-settings=preferredColorScheme=0",))
    }
    assert colours == {"rgb(244, 246, 247)", "rgb(16, 23, 29)"}
