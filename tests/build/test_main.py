"""python -m build: what a user sees, types and gets wrong."""

import dataclasses
import json
from pathlib import Path

import pytest

from build import verify
from build.__main__ import main
from eval.random_whisper import random_weights, write_json
from serve.contract.codec import to_json
from serve.contract.engine import open_engine
from serve.contract.manifest import MANIFEST_FILE
from tests.checkpoints import NANO, write_ct2, write_nano, write_openai
from tests.fakes import CONFIDENCE
from tests.marks import nightly

CLIP = Path("tests/data/en_thanks.flac").absolute()


@pytest.fixture
def config(nano_folder, tmp_path):
    path, clips = tmp_path / "nano.toml", tmp_path / "clips.jsonl"
    write_json(clips, {"file": str(CLIP), "text": "a", "language": "en", "duration": 1.0})
    path.write_text(
        f'engine = "{tmp_path}/engines/nano"\n[build]\ncheckpoint = "{nano_folder}"\n'
        f'verify_clips = "{clips}"\n'
    )
    return path


@pytest.fixture
def engine(config, capsys):
    assert main(["engine", "--config", str(config), "--no-verify"]) == 0
    capsys.readouterr()
    return config.parent / "engines" / "nano"


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(verify, "MAX_TOKENS", 12)


def error(capsys, *arguments):
    """Exit code and message of a command that fails with one line and no more."""
    code = main([str(argument) for argument in arguments])
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ") and "\n" not in message
    return code, message


def test_build_verifies_and_says_what_it_made(config, capsys):
    assert main(["engine", "--config", str(config)]) == 0
    shown = capsys.readouterr()
    manifest = open_engine(config.parent / "engines" / "nano").manifest
    assert manifest.verification["windows"] == 1
    assert manifest.verification["logits_relative"] < 0.05
    assert "MB checkpoint ->" in shown.out
    assert "INT8 weights" in shown.out
    assert "logits relative" in shown.out and "token agreement" in shown.out
    worst = max(manifest.quantization, key=lambda name: manifest.quantization[name].relative)
    assert worst in shown.out
    assert f"Verifying on {CLIP}\n" in shown.err
    assert "Building" in shown.err and "Verifying:" in shown.err


@pytest.mark.parametrize(
    ("kind", "precision"), [("ct2", "int8"), *nightly(("hf", "fp16"), ("openai", "fp16"))]
)
def test_a_checkpoint_is_built_without_a_config(nano_folder, tmp_path, capsys, kind, precision):
    """Of every format, and compared on the clips of people that the project has."""
    checkpoint, more = nano_folder, []
    if kind == "ct2":
        checkpoint = write_ct2(nano_folder, tmp_path / "ct2")
    elif kind == "openai":
        checkpoint = write_openai(tmp_path / "a.pt", NANO, random_weights(NANO))
        more = ["--tokenizer", str(nano_folder)]
    made = tmp_path / "engine"
    flags = ["--checkpoint", str(checkpoint), "--engine", str(made), "--precision", precision]
    assert main(["engine", *flags, *more]) == 0
    verification = open_engine(made).manifest.verification
    assert verification["windows"] == 4
    assert verification["fp16_greedy_agreement"] == 1.0
    languages = {"de_", "en_", "es_", "fr_"}
    names = capsys.readouterr().err.partition("Verifying on ")[2].partition("\n")[0].split(", ")
    assert {Path(name).name[:3] for name in names} == languages


def test_without_a_config_the_folder_to_write_is_named(nano_folder, capsys):
    code, message = error(capsys, "engine", "--checkpoint", nano_folder)
    assert code == 2 and "expected --engine FOLDER (make build-engine: ENGINE=FOLDER)" in message


def test_without_clips_nothing_is_built(config, nano_folder, tmp_path, capsys, monkeypatch):
    """Neither where a config names a file that is not there, nor outside the project's folder."""
    (tmp_path / "clips.jsonl").unlink()
    code, message = error(capsys, "engine", "--config", config)
    assert code == 2 and f"cannot read {tmp_path}/clips.jsonl: No such file" in message
    assert "name recordings of speech with --audio, or build with --no-verify" in message
    monkeypatch.chdir(tmp_path)
    code, message = error(capsys, "engine", "--checkpoint", nano_folder, "--engine", "engine")
    assert code == 2 and "cannot read tests/data/demo.jsonl: No such file" in message
    assert not (tmp_path / "engine").exists() and not (tmp_path / "engines").exists()


def test_a_draft_can_be_named(config, nano_folder, capsys):
    flags = ["engine", "--config", str(config), "--no-verify", "--draft"]
    assert main([*flags, str(nano_folder)]) == 0
    assert f"1 decoder layer, from {nano_folder} (SHA" in capsys.readouterr().out
    assert open_engine(config.parent / "engines" / "nano").manifest.draft.n_text_layer == 1
    code, message = error(capsys, *flags, config.parent)
    assert code != 0 and "has no weights" in message


def test_another_checkpoint_leaves_the_configs_draft_out(config, nano_folder, tmp_path, capsys):
    config.write_text(config.read_text() + f'draft = "{nano_folder}"\n')
    made = tmp_path / "engines" / "nano"
    build = ["engine", "--config", str(config), "--no-verify"]
    other = write_nano(tmp_path / "other", seed=5)
    for flags, drafts in (([], True), (["--checkpoint", str(other)], False)):
        assert main([*build, *flags]) == 0
        assert (open_engine(made).manifest.draft is not None) == drafts


def test_an_engine_holds_the_confidence_that_was_fitted_to_its_checkpoint(
    config, nano_folder, tmp_path, capsys
):
    fit = tmp_path / "fit.json"
    fit.write_text(to_json(CONFIDENCE))
    made = tmp_path / "engines" / "nano"
    build = ["engine", "--config", str(config), "--no-verify", "--if-stale"]
    assert main(build) == 0
    assert open_engine(made).manifest.confidence is None
    config.write_text(config.read_text() + f'confidence = "{fit}"\n')
    capsys.readouterr()
    assert main(build) == 0
    told = "logistic, fitted to 100 words of 10 clips (en), transcribed by fake"
    assert f"confidence  {told}" in capsys.readouterr().out
    assert open_engine(made).manifest.confidence == CONFIDENCE
    assert main(build) == 0
    assert f"{made} is up to date" in capsys.readouterr().out
    other = write_nano(tmp_path / "other", seed=5)
    assert main([*build, "--checkpoint", str(other)]) == 0
    assert open_engine(made).manifest.confidence is None
    assert main([*build, "--checkpoint", str(other), "--confidence", str(fit)]) == 0
    assert open_engine(made).manifest.confidence == CONFIDENCE


def test_a_fit_that_is_none_is_refused_before_anything_is_built(config, tmp_path, capsys):
    flags = ["engine", "--config", config, "--confidence"]
    _, message = error(capsys, *flags, tmp_path / "no.json")
    assert "no.json" in message and "`python -m eval trust` has written" in message
    falling = tmp_path / "falling.json"
    falling.write_text(to_json(dataclasses.replace(CONFIDENCE, probability=-1.0)))
    _, message = error(capsys, *flags, falling)
    assert "probability" in message and "at least 0" in message
    assert not (tmp_path / "engines").exists()


def test_if_stale_builds_only_what_is_stale(config, engine, capsys):
    command = ["engine", "--config", str(config), "--if-stale", "--no-verify"]
    before = (engine / MANIFEST_FILE).stat().st_ino
    assert main(command) == 0
    assert f"{engine} is up to date" in capsys.readouterr().out
    assert (engine / MANIFEST_FILE).stat().st_ino == before
    assert main([*command, "--precision", "fp16"]) == 0
    assert open_engine(engine).manifest.precision == "fp16"
    verified = [flag for flag in command if flag != "--no-verify"]
    assert main(verified) == 0
    assert open_engine(engine).manifest.verification is not None
    capsys.readouterr()
    assert main(verified) == 0
    assert "is up to date" in capsys.readouterr().out


def test_inspect(engine, capsys):
    assert main(["inspect", str(engine)]) == 0
    shown = capsys.readouterr().out
    for expected in ("1 decoder layers", "80 mel bins", "100, with translation", "earshot 0."):
        assert expected in shown
    assert "matrices; at most" in shown
    assert main(["inspect", str(engine), "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["dims"]["n_mels"] == 80
    assert len(manifest["quantization"]) == 1 + 2 * 6 + 10


def test_verify_writes_the_deviation(engine, capsys):
    """On clips of people, too, where no config names others."""
    assert open_engine(engine).manifest.verification is None
    assert main(["verify", str(engine)]) == 0
    verification = open_engine(engine).manifest.verification
    assert verification["windows"] == 4 and verification["greedy_agreement"] > 0.5
    shown = capsys.readouterr()
    assert "greedy agreement" in shown.out
    assert "Verifying on tests/data/human/" in shown.err


@pytest.mark.nightly
def test_verify_compares_with_the_runtime_of_the_config(engine, config, capsys):
    """What the server's precision costs is in the deviation; its GPU's graphs need no GPU here."""

    def deviation(*arguments):
        assert main(["verify", str(engine), *arguments]) == 0
        return open_engine(engine).manifest.verification["logits_relative"]

    config.write_text(
        config.read_text() + '[runtime]\ndevice = "cuda"\ncuda_graph = true\ncross_kv = "int8"\n'
    )
    assert deviation("--config", str(config)) != deviation()


def test_mistakes_get_one_line(config, engine, nano_folder, tmp_path, capsys):
    assert error(capsys, "inspect", tmp_path / "none") == (
        1,
        f"error: no engine at {tmp_path}/none ({tmp_path}/none/engine.json: No such file or "
        "directory); build one with `make build-engine CONFIG=…`, or in a container with "
        "`python3 -m build engine --config …`",
    )
    code, message = error(capsys, "engine", "--config", tmp_path / "none.toml")
    assert code == 2 and "none.toml: No such file" in message
    code, message = error(
        capsys, "engine", "--checkpoint", "no/such/folder", "--engine", tmp_path / "new"
    )
    assert code == 3 and "no checkpoint at no/such/folder" in message
    code, message = error(
        capsys, "engine", "--config", config, "--engine", nano_folder, "--no-verify"
    )
    assert code == 1 and "is not an engine" in message
    code, message = error(capsys, "verify", engine, "--checkpoint", "no/such/folder")
    assert code == 3 and "no checkpoint at no/such/folder" in message
    (engine / MANIFEST_FILE).write_text("{}")
    code, message = error(capsys, "inspect", engine)
    assert code == 1 and "format_version is missing" in message


@pytest.mark.parametrize("command", [[], ["engine"], ["inspect"], ["verify"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert "usage: python -m build" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("runtime", "flag"),
    [
        ("tensorrt_llm", ["--device", "cuda"]),
        ("tensorrt_llm", ["--calibrate"]),
        ("tensorrt_llm_api", ["--audio", "a.wav"]),
        ("tensorrt_llm_api", ["--draft", "a/draft"]),
    ],
)
def test_flags_that_a_runtime_would_pass_over_are_refused(config, capsys, runtime, flag):
    text = config.read_text().replace("[build]", f'[build]\nruntime = "{runtime}"')
    config.write_text(text)
    code, message = error(capsys, "engine", "--config", config, "--precision", "fp16", *flag)
    assert code == 2
    name = "build.draft" if flag[0] == "--draft" else flag[0]
    assert f"{name} is for native engines, but build.runtime = {runtime!r}; leave it" in message
    assert "with its checkpoint, run `python -m eval trtllm-check`" in message
