"""The demo checkpoint as it ships: files, special tokens, and the test clips beside it."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from build.demo.maker.clips import CLIPS
from build.demo.maker.tokenizer import LANGUAGE_CODES, SpecialIds, special_tokens, timestamp_tokens

CHECKPOINT = Path("build/demo/checkpoint")
DATA = Path("tests/data")
IDS = SpecialIds()


def _json(name: str):
    return json.loads((CHECKPOINT / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_special_tokens_have_whispers_order(tokenizer: Tokenizer):
    names = special_tokens() + timestamp_tokens()
    ids = [tokenizer.token_to_id(name) for name in names]
    assert ids == list(range(IDS.pieces, IDS.vocab_size))
    assert len(LANGUAGE_CODES) == 100
    assert names[IDS.timestamp_begin - IDS.pieces] == "<|0.00|>"
    assert names[-1] == "<|30.00|>"
    assert _json("added_tokens.json") == dict(zip(names, ids, strict=True))


@pytest.mark.parametrize("text", [" Hello, twenty-two o'clock.", " ¿Dónde está el niño?", " 7 € ✓"])
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert max(ids) < IDS.eot
    assert tokenizer.decode(ids) == text


def test_weights_are_half_precision_and_small():
    path = CHECKPOINT / "model.safetensors"
    assert path.stat().st_size <= 24_000_000
    with safe_open(path, "pt") as weights:
        names = list(weights.keys())
        assert all(weights.get_slice(name).get_dtype() == "F16" for name in names)
        count = sum(weights.get_tensor(name).numel() for name in names)
    assert 8e6 <= count <= 12e6


def test_generation_config_agrees_with_the_tokenizer(tokenizer: Tokenizer):
    config = _json("generation_config.json")
    assert config["lang_to_id"] == {
        f"<|{code}|>": tokenizer.token_to_id(f"<|{code}|>") for code in LANGUAGE_CODES
    }
    assert config["task_to_id"]["transcribe"] == tokenizer.token_to_id("<|transcribe|>")
    assert config["no_timestamps_token_id"] == tokenizer.token_to_id("<|notimestamps|>")
    assert config["begin_suppress_tokens"] == [tokenizer.token_to_id("Ġ"), IDS.eot]
    assert config["max_initial_timestamp_index"] == 50
    shape = _json("config.json")
    for layer, head in config["alignment_heads"]:
        assert 0 <= layer < shape["decoder_layers"]
        assert 0 <= head < shape["decoder_attention_heads"]
    assert shape["vocab_size"] == IDS.vocab_size == tokenizer.get_vocab_size()


def test_transformers_opens_it():
    transformers = pytest.importorskip("transformers")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(CHECKPOINT)
    tokenizer = transformers.WhisperTokenizerFast.from_pretrained(CHECKPOINT)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(CHECKPOINT)
    assert model.config.d_model // model.config.decoder_attention_heads == 64
    assert tokenizer.convert_tokens_to_ids("<|startoftranscript|>") == IDS.sot
    assert extractor.feature_size == model.config.num_mel_bins == 80


def test_clips_and_manifest_agree():
    soundfile = pytest.importorskip("soundfile")
    lines = (DATA / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    entries = {entry["file"]: entry for entry in map(json.loads, lines)}
    assert list(entries) == [clip.file for clip in CLIPS]
    for clip in CLIPS:
        entry, info = entries[clip.file], soundfile.info(DATA / clip.file)
        assert (info.samplerate, info.channels) == (clip.sample_rate, clip.channels)
        assert info.duration == pytest.approx(entry["duration"], abs=0.1)
        assert entry["text"] == " ".join(clip.sentences)
        assert [segment["text"] for segment in entry["segments"]] == list(clip.sentences)
        ends = [0.0, *(moment for s in entry["segments"] for moment in (s["start"], s["end"]))]
        assert ends == sorted(ends)
    assert sum((DATA / name).stat().st_size for name in entries) < 4_000_000


def test_clips_cover_what_they_must():
    assert len(CLIPS) >= 12
    assert {clip.file.rpartition(".")[2] for clip in CLIPS} == {"wav", "flac", "mp3", "ogg"}
    assert {clip.language for clip in CLIPS} == {"en", "es", ""}
    assert {clip.channels for clip in CLIPS} == {1, 2}
    assert min(clip.sample_rate for clip in CLIPS) == 8_000
    assert max(clip.sample_rate for clip in CLIPS) == 48_000
