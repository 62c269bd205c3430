import dataclasses
import importlib.util
import inspect
import json
import operator
import pkgutil
import re

import pytest

import eval.config
from eval import processes
from eval.__main__ import _parser, main
from eval.accuracy import run as run_module
from eval.accuracy import systems
from eval.accuracy.predictions import read_calls
from eval.bench import BenchPlan
from eval.commands import COMMANDS
from eval.record import write_jsonl
from serve.contract.errors import AudioError
from tests.eval.fakes import open_fake

TWO = "earshot-int8,earshot-fp16"  # each system is a separate process
NAMES = (
    "earshot-triton,earshot-int8,earshot-fp16,faster-whisper-float32,faster-whisper-int8,"
    "faster-whisper-float16"
)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config with fake systems that say what the clips' bytes say."""
    said = {"a.txt": "hello there", "b.txt": "good bye"}
    write_manifest(tmp_path / "heldout.jsonl", said)
    write_manifest(tmp_path / "manifest.jsonl", {**said, "c.txt": ""})
    path = tmp_path / "small.toml"
    path.write_text(
        f'[eval]\nmanifest = "{tmp_path}/manifest.jsonl"\nheldout = "{tmp_path}/heldout.jsonl"\n'
        'timed = ["earshot-int8"]\n'
    )
    monkeypatch.setattr(systems, "open_system", open_fake)
    monkeypatch.setattr(systems, "prepare", lambda *_: None)
    monkeypatch.setattr(systems, "key_of", lambda name, config: str(config.transcriber))
    monkeypatch.setattr(run_module, "decode", decode_unless_bad)
    monkeypatch.setattr(processes, "TERMINATE_TIMEOUT_S", 0.5)
    return path


def decode_unless_bad(audio, limits):
    """Clips here are no audio, but for their names and what fakes say."""
    if audio == b"bad":
        raise AudioError("AUDIO is bad")
    return iter(())


def run(config, *flags):
    folder = config.parent / "out"
    flags = ("--systems", TWO, *flags)
    return main(["run", "--config", str(config), "--output", str(folder), *flags]), folder


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def write_manifest(path, texts):
    """Write clips whose audio is their text, beside a manifest of them."""
    clips = []
    for file, text in texts.items():
        (path.parent / file).write_text(text)
        language = "en" if text else None
        clips.append({"file": file, "text": text, "language": language, "duration": 9.5})
    write_jsonl(path, clips)


def test_run_writes_predictions_and_reports(config, capsys):
    code, folder = run(config, "--systems", NAMES)
    assert code == 0
    out = capsys.readouterr()
    assert "**Passed**" in out.out and f"The report: {folder / 'report.html'} and" in out.out
    assert "manifest.jsonl: a manifest of clips: 3 clips; 0.01 h" in out.err
    assert "Evaluation of small" in (folder / "report.html").read_text()
    report = report_of(folder)
    assert [s["facts"]["name"] for s in report["systems"]] == NAMES.split(",")
    heldout = ("earshot-int8", "earshot-fp16", "faster-whisper-float32", "faster-whisper-int8")
    for found in report["systems"]:
        name = found["facts"]["name"]
        assert list(found["sets"]) == ["heldout", "timed"][name not in heldout :]
        assert {s["overall"]["cer"]["percent"] for s in found["sets"].values()} == {0.0}
        assert (found["speed"] is not None) == (name == "earshot-int8")
    files = {f"{name}.{end}" for name in NAMES.split(",") for end in ("json", "jsonl", "key")}
    found = {path.name for path in (folder / "predictions").iterdir()}
    assert found == files | {"earshot-int8.timed.jsonl"}
    assert "5 clips, 0.8 minutes of audio; " in out.err
    assert re.search(r"faster-whisper-float16 +: 100%.* 35/35 ", out.err), "one bar for all of it"


def test_own_recordings_in_a_table_are_all_heard(config, record, capsys):
    """A limit of the config is for its own clips; --limit draws, and --language fills a gap."""
    folder = config.parent / "mine"
    for number in range(5):
        record(folder / f"{number}.wav", 0.5)
    (folder / "0.wav").write_text("bad")
    rows = "".join(f"{number}.wav;word {number}\n" for number in range(5))
    (folder / "refs.csv").write_text("file;sentence\n" + rows)
    config.write_text(config.read_text() + "\ntimed_limit = 1\n")
    flags = ("--clips", str(folder), "--language", "en", "--systems", "earshot-int8")
    code, out = run(config, *flags)
    assert code == 0
    errors = capsys.readouterr().err
    assert "cannot be read, so no system is given it: 0.wav: AUDIO is bad" in errors
    assert "4 clips, 0.0 minutes of audio;" in errors
    (heard,) = report_of(out)["systems"]
    assert len(heard["sets"]["timed"]["by_clip"]) == 4
    assert list(heard["sets"]["timed"]["by_part"]) == ["en"]
    assert (out / "report.html").read_text().count("<audio") == 4
    run(config, *flags, "--limit", "2", "--seed", "3")
    source = report_of(out)["run"]["sources"]["timed"]
    assert "text from `sentence`: 5 clips, 2 of them drawn with seed 3" in source


@pytest.mark.nightly
def test_a_full_run_gives_every_system_everything_but_those_that_are_left_out(config):
    three = ("--systems", "earshot-triton,earshot-int8,faster-whisper-int8")
    _, folder = run(config, *three, "--without", "earshot-int8", "--full")
    report = report_of(folder)
    found = {system["facts"]["name"]: system for system in report["systems"]}
    assert list(found) == ["earshot-triton", "faster-whisper-int8"]
    assert [list(system["sets"]) for system in found.values()] == [["heldout", "timed"]] * 2
    assert all(system["speed"] for system in found.values())


@pytest.mark.nightly
def test_a_kept_run_is_scored_again_and_compared_once_it_is_finished(config, capsys):
    _, folder = run(config, "--systems", NAMES)
    predictions, other = folder / "predictions", ("--systems", "earshot-fp16")
    rows = predictions / "earshot-int8.jsonl"
    text = rows.read_text().replace('"text":"hello there"', '"text":"hallo there"')
    rows.write_text(text.replace('"text":"good bye"', '"text":"good buy"'))
    assert main(["report", str(folder)]) == 1
    err = capsys.readouterr().err
    for bound in ("faster-whisper's default", "earshot-fp16"):
        assert f"FAILED: CER of earshot-int8 at most 0.1 points above {bound}." in err
    assert main(["report", str(folder), *other]) == 0
    out = capsys.readouterr()
    assert "**Not decided**" in out.out
    assert "not decided: CER of earshot-triton at most 0.1 points above" in out.err
    assert main(["report", str(folder), str(folder), "--output", str(folder / "both")]) == 0
    assert "Two runs, compared" in (folder / "both" / "report.html").read_text()
    rows.write_text(rows.read_text().split("\n", 1)[1])
    (predictions / "earshot-fp16.json").unlink()
    for name in ("earshot-int8", "earshot-fp16"):
        assert main(["report", str(folder), "--systems", name]) == 2
        assert f"{name} did not finish in " in capsys.readouterr().err
    (folder / "run.json").write_text('{"id": "x"}')
    assert main(["report", str(folder)]) == 2
    assert "run.json: started is missing; has id; expected a run" in capsys.readouterr().err


@pytest.mark.nightly
def test_ctrl_c_keeps_valid_lines(config, capsys, monkeypatch):
    kept = config.parent / "out" / "predictions" / "earshot-int8.jsonl"
    original = run_module.to_json

    def interrupt(row):
        if kept.exists() and kept.read_text():
            raise KeyboardInterrupt
        return original(row)

    monkeypatch.setattr(run_module, "to_json", interrupt)
    code, folder = run(config, "--systems", "earshot-int8")
    assert code == 130
    assert "interrupted" in capsys.readouterr().err
    assert len(read_calls(kept)) == 1
    assert not (folder / "report.json").exists()
    # A later run goes on there, what was being written when it ended is dropped.
    monkeypatch.setattr(run_module, "to_json", original)
    before = kept.read_text()
    with kept.open("a") as file:
        file.write('{"file": "a')
    code, _ = run(config, "--systems", "earshot-int8")
    assert code == 0 and kept.read_text().startswith(before)


@pytest.mark.nightly
def test_what_was_heard_is_not_heard_again(config, capsys):
    """A larger draw adds clips; other settings drop what was said; --again does, too."""
    _, folder = run(config, "--limit", "1")
    kept = folder / "predictions" / "earshot-fp16.jsonl"
    first = kept.read_text()
    assert run(config)[0] == 0
    assert kept.read_text().startswith(first) and kept.read_text() != first
    every = kept.read_text()
    capsys.readouterr()
    assert run(config)[0] == 0
    assert "nothing is left to be heard" in capsys.readouterr().err and kept.read_text() == every
    config.write_text(config.read_text() + "[transcriber]\nbeam_size = 2\n")
    assert run(config)[0] == 0
    said = "earshot-fp16: its answers were given under other settings, so it hears all again"
    assert said in capsys.readouterr().err
    assert run(config, "--again")[0] == 0
    assert said not in capsys.readouterr().err and kept.read_text() != every


@pytest.mark.nightly
def test_corrected_unreadable_and_failed_clips(config, capsys):
    """A corrected one is heard again; what cannot be decoded stands apart; a failed call fails."""
    one = ("--systems", "earshot-int8")
    manifest = config.parent / "manifest.jsonl"
    config.write_text(re.sub('heldout = ".*"', 'heldout = ""', config.read_text()))
    _, folder = run(config, *one)
    manifest.write_text(manifest.read_text().replace('"good bye"', '"good bya"'))
    run(config, *one)
    counts = report_of(folder)["systems"][0]["sets"]["timed"]["by_clip"]
    assert counts["b.txt"]["substitutions"] == 1
    calls = read_calls(folder / "predictions" / "earshot-int8.jsonl")
    assert [call.file for call in calls].count("b.txt") == 2  # before and after
    (config.parent / "a.txt").write_text("bad")
    (config.parent / "b.txt").write_text("fail")
    code, _ = run(config, *one)
    assert "so no system is given it: a.txt: AUDIO is bad" in capsys.readouterr().err
    report = report_of(folder)
    assert report["run"]["unreadable"] == {"timed": {"a.txt": "AUDIO is bad"}}
    assert report["systems"][0]["sets"]["timed"]["by_clip"].keys() == {"b.txt", "c.txt"}
    assert report["gates"][-1]["passed"] is False and code == 1
    assert "b.txt: AudioError: AUDIO: cannot be decoded" in report["gates"][-1]["detail"]
    assert "which count for nothing:" in (folder / "report.md").read_text()


@pytest.mark.nightly
def test_one_place_may_be_timed_in_part_and_held_out_for_the_rest(config, capsys):
    config.write_text(config.read_text().replace("heldout.j", "manifest.j") + "timed_limit = 1\n")
    _, folder = run(config, "--systems", "earshot-int8")
    report = report_of(folder)
    assert report["run"]["clips"] == {"heldout": 2, "timed": 1}
    sets = report["systems"][0]["sets"].values()
    assert len({file for found in sets for file in found["by_clip"]}) == 3
    config.write_text(config.read_text().replace("timed_limit = 1", "timed_limit = 0"))
    assert run(config)[0] == 0
    assert "every clip was drawn to be timed, so none is held out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--systems", "whisper.cpp"], "unknown system 'whisper.cpp'; known: earshot-triton"),
        (["--systems", "earshot-int8,earshot-int8"], "expected different names"),
        (["--clips", "none.jsonl"], "cannot read none.jsonl: No such file or directory; expected"),
        ([], "unknown system 'x'; known: earshot-triton"),
    ],
)
def test_mistakes_end_in_one_line(config, capsys, flags, said):
    if not flags:  # a name in the config
        config.write_text(config.read_text().replace('timed = ["earshot-int8"]', 'timed = ["x"]'))
    code, _ = run(config, *flags)
    err = capsys.readouterr().err
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_missing_package_is_named_before_anything_runs(config, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, folder = run(config, "--systems", "faster-whisper-int8")
    assert code == 1
    assert "faster-whisper-int8 needs the package faster_whisper" in capsys.readouterr().err
    assert not folder.exists()


def test_a_value_out_of_range_is_refused_by_the_flag(config, capsys):
    for value in ("101", "-1", "much"):
        with pytest.raises(SystemExit):
            main(["trust", "--config", str(config), "--threshold", value])
    assert "argument --threshold: invalid float value: 'much'" in capsys.readouterr().err


def parser_of(command):
    (commands,) = (action for action in _parser()._actions if action.choices)
    return commands.choices[command.name]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_flag_is_a_keyword_of_what_does_the_command(command):
    """The table names functions by text, which no type checker follows."""
    function, of_main = pkgutil.resolve_name(f"eval.{command.entry}"), {"help", "config", "output"}
    parameters = inspect.signature(function).parameters.values()
    named = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    if command.name == "bench":
        named = {field.name for field in dataclasses.fields(BenchPlan)}
    flags = {action.dest for action in parser_of(command)._actions}
    assert {name for name in flags if "." not in name} - of_main == named - of_main
    config = eval.config.EvaluationProduct()
    for place in (name.rstrip(".") for name in flags if "." in name):
        assert operator.attrgetter(place)(config) is not None


def test_help_fits_a_screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parsers = [parser_of(command) for command in COMMANDS]
    assert all(len(parser.format_help().splitlines()) <= 40 for parser in parsers)
    assert sum(len(parser._actions) for parser in parsers) <= 100
