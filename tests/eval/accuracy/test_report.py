import dataclasses

import pytest

from eval.accuracy.evaluate import compared
from eval.accuracy.normalize import normalizer
from eval.accuracy.report import result_of
from eval.config import EvaluationProduct
from eval.record import Run
from eval.report import table, to_markdown
from serve.contract.errors import ConfigError
from tests.eval.accuracy.runs import report


def markdown(found):
    """The whole report.md of a scored run, or of a result."""
    result = found if hasattr(found, "sections") else result_of(found, {}, normalizer("basic-v1"))
    return to_markdown(Run("run", EvaluationProduct()), result)


@pytest.fixture(autouse=True)
def no_clips(monkeypatch):
    monkeypatch.setattr("eval.accuracy.report.worst_clips", lambda *_: [])


def test_markdown_states_figures_conditions_and_gates():
    text = markdown(report("hallo you"))
    for part in (
        "**FAILED**: CER of earshot-int8 at most 0.2 points above earshot-fp16. "
        "11.11 % - 0.00 % (earshot-fp16) = +11.11 points [+11.11, +11.11] at 95 % on 2 clips, of "
        "which 1 have as many errors with both; about 1 such clips decide a gap of this size",
        "the language is found out by every system",
        "the held-out clips: 1 of `h.jsonl`, 10.0 s; the timed clips: 2 of `m.jsonl`, 20.0 s",
        "## Accuracy on the held-out clips",
        "| 11.11 % [11.11, 11.11] |",
        "1/0/0 of 9",
        "- `basic-v1` (compared under): Unicode NFKC",
        "### By language, CER / WER in %",
        "| 11.11 / 50.00 |",
        "### By group, CER / WER in %",
        "| studio |     1 | 11.11 / 50.00 |",
        "Clips that no system can read, 1, which count for nothing:\n\n- `gone.wav`: it is gone",
        "- `whisper-english`: English as Whisper's EnglishTextNormalizer of transformers ",
        "### By normaliser, CER / WER in %",
        "500 / 500 / 500",
        "- CPU: a chip",
        "The 7.7 s clip is `a.wav`",
        "| 7.7 s clip, ms |",
        "2 calls alone, 2 under load",
    ):
        assert part in text
    assert "**FAILED**" not in markdown(report())


def test_the_verdict_is_passed_only_where_every_gate_is():
    undecided, failed = report(), report("hallo you")
    assert (undecided.verdict, failed.verdict) == ("not decided", "failed")
    assert "\n**Not decided**\n" in markdown(undecided)
    sure = tuple(gate for gate in undecided.gates if gate.passed)
    assert dataclasses.replace(undecided, gates=sure).verdict == "passed"


def test_compare_shows_differences():
    a, b = report(), report("hallo you", seconds=0.25)
    text = markdown(compared(a, b))
    lines = {line.replace(" ", "") for line in text.splitlines()}
    assert "|earshot-int8|CER%,timed|0.00|11.11|+11.11|" in lines
    assert "|earshot-int8|oneclipms|500|250|-250|" in lines
    assert "|earshot-int8|a.wav|0|1|+1|" in lines
    assert "|faster-whisper-int8|RTFxloaded|20.0|20.0|+0.0|" in lines
    assert not [line for line in lines if line.startswith("|earshot-fp16|RTFx")]  # not timed
    assert "differs" not in text


def test_compare_warns_of_other_conditions_and_refuses_what_is_not_comparable():
    a = report()
    settings = dataclasses.replace(a.run.settings, threads=4)
    b = dataclasses.replace(a, run=dataclasses.replace(a.run, settings=settings))
    assert "threads differs: 2 and 4" in markdown(compared(a, b))
    with pytest.raises(ConfigError, match="share no system"):
        compared(a, dataclasses.replace(b, systems=()))


def test_table_lines_up():
    assert table(["a", "bb"], [["long", "1"]]).splitlines() == [
        "| a    | bb |",
        "|------|---:|",
        "| long |  1 |",
    ]
