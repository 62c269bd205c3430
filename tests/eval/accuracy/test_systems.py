"""The real systems on a tiny checkpoint with random weights: what they say is nonsense."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from build.checkpoint import open_checkpoint
from build.clips import load_clips
from build.config import BuildConfig
from eval import demo as demo_module
from eval.accuracy import systems
from eval.accuracy.predictions import Prediction
from eval.config import EvalConfig, EvaluationProduct, changed, load_config
from eval.demo import demo, render
from eval.record import verdict
from serve.contract.errors import EarshotError, MissingCheckpointError, UnavailableError
from tests.eval.fakes import timed_call

CLIP = Path("tests/data/en_two.wav")


@pytest.fixture(scope="module")
def config(nano_config, nano_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "nano"
    shutil.copytree(nano_engine.parent / "checkpoint", folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    return EvaluationProduct(
        **vars(nano_config()),
        build=BuildConfig(checkpoint=str(folder)),
        eval=EvalConfig(threads=1, concurrency=2),
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where checkpoints are converted to."""
    monkeypatch.setattr(systems, "CACHE", tmp_path / "cache")
    return systems.CACHE


def said(name, config):
    with systems.open_system(name, config) as system:
        answer = system.transcribe(CLIP.read_bytes(), None)
        with pytest.raises(EarshotError):
            system.transcribe(b"not audio at all", None)
    assert isinstance(answer, Prediction)
    assert answer.language and "<" not in answer.language
    times = [(s.start_s, s.end_s) for s in answer.segments]
    assert all(0 <= start <= end <= 30 for start, end in times), times
    return answer


@pytest.mark.nightly
@pytest.mark.server
def test_earshot_says_the_same_in_process_and_through_triton(config):
    assert said("earshot-int8", config) == said("earshot-triton", config)


@pytest.mark.nightly
def test_faster_whisper_reads_the_converted_checkpoint(config, cache):
    systems.prepare(["faster-whisper-int8"], config, "unused.toml")
    folder = systems.converted_folder(config)
    assert list(cache.iterdir()) == [folder]  # nothing half done beside it
    made = (folder / "model.bin").stat().st_mtime_ns
    systems.prepare(["faster-whisper-int8"], config, "unused.toml")
    assert (folder / "model.bin").stat().st_mtime_ns == made
    said("faster-whisper-int8", config)
    with systems.open_system("faster-whisper-default", config) as peer:
        assert peer.settings["class"] == "WhisperModel"
        assert peer.settings["condition_on_previous_text"] is True
    with systems.open_system("faster-whisper-batched", config) as peer:
        assert peer.settings["class"] == "BatchedInferencePipeline"
        answer = peer.transcribe(CLIP.read_bytes(), None)
    assert {segment.window for segment in answer.segments} == {0}


@pytest.mark.nightly
def test_faster_whisper_has_no_handicap(cache):
    """It knew no languages, suppressed OpenAI's tokens in place of the checkpoint's, and stopped
    each window at half of the limit that it was given; so it looked worse than it is.
    """
    config = load_config("configs/demo.toml")
    systems.prepare_converted(config)
    suppressed = sorted(open_checkpoint(config.build.checkpoint).facts.suppress_tokens)
    spanish = next(clip for clip in load_clips(config.eval.manifest) if clip.language == "es")
    with systems.open_system("faster-whisper-float32", config) as peer:
        assert not {"max_new_tokens", "beam_size"} & peer.settings.keys()
        for _ in range(2):  # the library adds to the list of suppressed tokens
            assert peer.transcribe(spanish.path.read_bytes(), None).language == "es"
            assert peer.settings["suppress_tokens"] == suppressed


def test_a_vocabulary_that_cannot_be_marked_is_refused(tmp_path):
    (tmp_path / "vocabulary.json").write_text(json.dumps(["a", "<|transcribe|>"]))
    with pytest.raises(UnavailableError, match=r"neither an empty token nor <\|startoflm\|>"):
        systems.mark_multilingual(tmp_path)


def test_another_conversion_has_another_place(config, tmp_path, monkeypatch):
    """The weights are one part of it; suppressed tokens, say, come from generation_config.json."""
    copy = shutil.copytree(config.build.checkpoint, tmp_path / "nano")
    config = replace(config, build=BuildConfig(checkpoint=str(copy)))
    places = {systems.converted_folder(config)}
    monkeypatch.setattr(systems, "CONVERTED_VERSION", "other")
    places.add(systems.converted_folder(config))
    path = Path(config.build.checkpoint) / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"suppress_tokens": [1]}))
    places.add(systems.converted_folder(config))
    monkeypatch.setattr(systems.importlib.metadata, "version", lambda name: "9.9")
    places.add(systems.converted_folder(config))
    assert len(places) == 4


def test_openais_english_vocabulary_names_languages_and_knows_none(tmp_path):
    """As faster-whisper's tiny.en has it: a token a line."""
    tokens = [str(number) for number in range(51_862)] + ["<|transcribe|>", "<|startoflm|>"]
    (tmp_path / "vocabulary.txt").write_text("".join(f"{token}\n" for token in tokens))
    systems.mark_multilingual(tmp_path)
    assert systems.vocabulary(tmp_path) == tokens
    (tmp_path / "vocabulary.txt").write_text("".join(f"{token}\n" for token in [*tokens, "a"]))
    systems.mark_multilingual(tmp_path)
    assert "" in systems.vocabulary(tmp_path)


@pytest.mark.nightly
def test_a_failed_conversion_leaves_nothing(config, tmp_path, cache):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        (checkpoint / name).write_text("{}")
    config = changed(config, "build", checkpoint=str(checkpoint))
    with pytest.raises(EarshotError, match="converting the checkpoint for faster-whisper failed"):
        systems.prepare_converted(config)
    assert list(cache.iterdir()) == []


def test_openai_checkpoints_are_refused_by_name():
    config = EvaluationProduct(build=BuildConfig(checkpoint="large-v3.pt"))
    with pytest.raises(UnavailableError, match=r"needs a Hugging Face checkpoint, got large-v3.pt"):
        systems.checkpoint_folder(config)


@pytest.mark.nightly
def test_another_config_is_shown_where_a_checkpoint_cannot_be_had(tmp_path, monkeypatch):
    paths = [str(tmp_path / f"{name}.toml") for name in ("a", "b")]
    for path in paths:
        Path(path).write_text(f'[build]\ncheckpoint = "none-of-{Path(path).stem}"\n')
    said = []
    with pytest.raises(MissingCheckpointError, match=rf"exit code 3: .* --config {paths[1]} "):
        demo_module.prepare_config(*paths, said.append)
    assert said == [f"Without none-of-a, so with {paths[1]} in place of {paths[0]}:"]

    def build(config, path, precision):
        said.append((path, precision))

    monkeypatch.setattr(demo_module, "prepare_engine", build)
    assert demo_module.prepare_config(*paths, said.append).build.checkpoint == "none-of-a"
    assert said[1:] == [(paths[0], "int8")]


@pytest.mark.nightly
@pytest.mark.server
def test_demo_sends_every_clip_and_stops_the_server(config, manifest, run_of, monkeypatch):
    stages, config = [], changed(config, "build", verify_clips=manifest({}, {}, {}))
    monkeypatch.setattr(demo_module, "prepare_config", lambda *_: config)
    result = demo(run_of(config, said=stages), otherwise=None)
    assert [call.file for call in result.figures["calls"]] == ["0.wav", "1.wav", "2.wav"]
    assert verdict(result.checks) == "passed"
    assert result.figures["peak_memory_bytes"] > 50_000_000
    assert "Stopped the server." in stages and any("RTFx" in line for line in stages)


def test_demo_output():
    calls = (
        timed_call("a.wav", "Hello there", "Hallo there", latency_s=0.5),
        timed_call("silent.wav", "", "", latency_s=0.25),
        timed_call("lost.wav", "Gone", "", prediction=None, error="AudioError: AUDIO is empty"),
    )
    text = "\n".join(render(calls, 8, 300 * 2**20))
    for part in (
        "a.wav        10.0 s  en  latency  0.50 s  CER   9.1 %",
        "    reference        Hello there",
        "    FAILED           AudioError: AUDIO is empty",
        "(no speech)",
        "clips         3, 8 at a time, 1 failed",
        "peak memory   300 MiB",
        "RTFx          20.0 (20.0 s of audio in 1.0 s",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= demo_module.WIDTH
