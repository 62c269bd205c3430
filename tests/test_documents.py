"""README.md and the pages behind it: what they link to is there, what they tell to call exists."""

import argparse
import re
from pathlib import Path

import pytest

import build.__main__
import eval.__main__
import serve.cli.main
from serve.contract.codec import to_json
from serve.contract.config import OPTIONS
from serve.contract.messages import SearchOptions, SpeechOptions
from tests import config_page

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
OTHERS = (
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "serve" / "native" / "kernels" / "README.md",
)
PAGES = (README, *sorted(DOCS.glob("*.md")), *OTHERS)
PARSERS = {
    "build": build.__main__._parser(),
    "eval": eval.__main__._parser(),
    "serve": serve.cli.main.parser(),
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
MADE = {"deploy/compose/keys.toml"}  # by the reader

FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?<![\w./-])(?:build|configs|deploy|docs|eval|serve|tests)/[\w./-]*\w")
COMMAND = re.compile(r"python3? -m ((?:build|eval|serve|tests)[\w.]*) ?(.*)")
TARGET = re.compile(r"(?:^|\s)make ([a-z-]+)(.*)")
NUMBER = re.compile(r"\d[\d,.]*\d")
PLACE = re.compile(r"`((?:\w+/)*\w+\.py)(?:: (\w+))?`")  # and what is meant in it

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page):
    return page.read_text(encoding="utf-8")


def prose_of(page):
    return FENCED.sub("", text_of(page))


def code_of(page):
    """The lines of a page's blocks of code, and what its sentences have as code."""
    lines = "".join(FENCED.findall(text_of(page))).replace("\\\n", " ").splitlines()
    spans = re.findall(r"`([^`]+)`", prose_of(page).replace("\\|", "|"))
    return [*lines, *(" ".join(span.split()) for span in spans)]


def anchors_of(page):
    """What a link may have behind `#`: headings in lower case, their words joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_point_to_something(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert "://" in link or target.exists(), link
        assert not anchor or anchor in anchors_of(target), f"{link}: no such heading"


@pages
def test_paths_that_it_names_exist(page):
    for name in PATH.findall("\n".join(code_of(page))):
        assert name in MADE or (ROOT / name).exists() or (page.parent / name).exists(), name


@pages
def test_commands_that_it_names_exist(page):
    for code in code_of(page):
        for module, rest in COMMAND.findall(code):
            if module in PARSERS:
                first, *others = rest.split() or [""]
                for name in first.split("|"):  # `run|score A` are two
                    check(PARSERS[module], [name, *others], code)
            else:
                assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), code
        for target, rest in TARGET.findall(code):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), code
            for variable in re.findall(r"\b([A-Z]+)=", rest):
                assert re.search(rf"^{variable} \??:?=|\({variable}\)", MAKEFILE, re.MULTILINE), (
                    code
                )


def check(parser, words, code):
    """Go down to the command's own parser, and see whether it has the options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words[:1] not in ([], [""], ["…"]):
            assert words[0] in action.choices, code
            return check(action.choices[words[0]], words[1:], code)
    for option in re.findall(r"(?<!\S)\[?(--[\w-]+)", " ".join(words)):
        assert option in parser._option_string_actions, f"{code}: no option {option}"


def test_no_command_of_eval_is_left_out():
    table = text_of(DOCS / "evaluating.md")
    for action in PARSERS["eval"]._actions:
        for name in action.choices or ():
            assert f"`python -m eval {name}" in table, name


def test_the_readme_is_a_short_way_in():
    assert len(text_of(README).splitlines()) <= 120


def test_the_page_on_configuration_is_that_of_the_dataclasses():
    assert text_of(DOCS / "config.md") == config_page.page(), "run python -m tests.config_page"
    told = list(config_page.keys())
    assert len(told) <= 90
    for key in told:
        assert key.meaning.endswith(".") and len(key.meaning.split()) <= 32, key


def test_every_page_is_one_click_away():
    for page in PAGES[1:]:
        assert f"]({page.relative_to(ROOT).as_posix()})" in text_of(README)
    for page in DOCS.glob("*.md"):
        assert "](../README.md)" in text_of(page).split("\n\n")[1], f"{page.name}: no way back"


def test_code_that_pages_for_developers_name_is_there():
    pages = (DOCS / "design.md", ROOT / "CONTRIBUTING.md")
    places = [place for page in pages for place in PLACE.findall(text_of(page))]
    assert len(places) > 150
    for path, name in places:
        (file,) = (one for one in (ROOT / path, ROOT / "serve" / path) if one.exists())
        assert re.search(rf"\b{name}\b", text_of(file)), f"{path}: {name}"


def test_results_in_the_readme_are_those_of_their_page():
    (section,) = re.findall(r"^## Results\n(.*?)^## ", text_of(README), re.MULTILINE | re.DOTALL)
    rows = "".join(re.findall(r"^\|.*\n", section, re.MULTILINE))
    figures = set(NUMBER.findall(rows))
    assert len(figures) > 12
    assert figures - set(NUMBER.findall(text_of(DOCS / "results.md"))) == set()


@pytest.mark.parametrize(
    ("name", "value"), [*vars(SearchOptions()).items(), *vars(SpeechOptions()).items()]
)
def test_an_option_is_described_as_it_is_declared(name, value):
    default = to_json(value).removesuffix(".0")
    begin = f"| `{name}` | {default} | {OPTIONS[name].meaning}"
    rows = [row for row in text_of(DOCS / "decoding.md").splitlines() if row.startswith(begin)]
    assert len(rows) == 1, begin
