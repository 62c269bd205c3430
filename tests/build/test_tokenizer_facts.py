"""build.tokenizer_facts: the meaning of token ids in a checkpoint, and what is rejected."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from build import known_checkpoints
from build.checkpoint import open_checkpoint
from build.tokenizer_facts import StatedFacts, read_tokenizer_files, tokenizer_facts
from eval.random_whisper import PUBLISHED, special_ids, write_tokenizer
from serve.contract.errors import CheckpointError
from tests.checkpoints import NANO, edit_json, refusal, refused, write_openai
from tests.fake_hub import FakeHub

TOKENS = "model.decoder.embed_tokens.weight"


@pytest.mark.parametrize("size", PUBLISHED)
def test_facts_of_every_published_vocabulary(size, tmp_path):
    shape = PUBLISHED[size]
    write_tokenizer(tmp_path, shape)
    facts = tokenizer_facts(read_tokenizer_files(tmp_path), shape.dims, True)
    english = size.endswith(".en")
    n_vocab, begin, no_speech = 51_864, 50_363, 50_361
    if not english:
        n_vocab, begin, no_speech = 51_865, 50_364, 50_362
    if "large-v3" in size:  # Cantonese
        n_vocab, begin, no_speech = 51_866, 50_365, 50_363
    assert shape.n_vocab == n_vocab
    assert facts.timestamp_begin == begin == facts.no_timestamps + 1
    assert facts.no_speech == no_speech == facts.sot_prev + 1
    assert (facts.eot, facts.sot) == ((50_256, 50_257) if english else (50_257, 50_258))
    assert facts.multilingual != english
    assert facts.languages.get("en") == (None if english else 50_259)
    assert len(facts.languages) == (0 if english else shape.languages)
    assert list(facts.languages.values()) == sorted(facts.languages.values())
    tasks = (None, None) if english else (no_speech - 3, no_speech - 4)
    assert (facts.transcribe, facts.translate) == tasks
    assert facts.max_initial_timestamp_index == 50
    assert facts.suppress_tokens[:3] == (1, 2, 7)
    assert facts.alignment_heads == ((0, 0),)


def facts_of(folder):
    return open_checkpoint(str(folder)).facts


def test_openai_weights_of_a_published_size_have_its_tokenizer(
    tmp_path, folder, weights, monkeypatch
):
    """From the hub, without the weights there; an error says what else one can do."""
    sizes = (NANO.width, NANO.decoder_layers, NANO.n_mels, NANO.n_vocab)
    monkeypatch.setitem(known_checkpoints.ORIGINALS, sizes, "openai/whisper-nano")
    path = write_openai(tmp_path / "a.pt", NANO, weights)
    hub = FakeHub(folder, tmp_path / "cache", "openai/whisper-nano").install(monkeypatch)
    hub.failure = OSError("no route")
    message = refusal(path)
    assert "has only weights; set --tokenizer, or `tokenizer` under [build], to a folder" in message
    assert "the download from the Hugging Face hub failed (no route)" in message
    hub.failure = None
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.facts == open_checkpoint(str(folder)).facts
    told = "the .pt has no tokenizer; using that of openai/whisper-nano@"
    assert checkpoint.notes[0].startswith(told)
    assert "model.safetensors" not in hub.downloaded


def test_missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refusal(folder)


def test_files_that_contradict_each_other(folder):
    edit_json(folder / "generation_config.json", no_timestamps_token_id=7)
    message = refusal(folder)
    expected = special_ids(NANO)["<|notimestamps|>"]
    assert "says no_timestamps_token_id = 7" in message
    assert f"says <|notimestamps|> = {expected}" in message


@pytest.mark.parametrize("missing", ["<|endoftext|>", "<|transcribe|>", "<|de|>"])
def test_missing_special_tokens(folder, missing):
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
    edit_json(path, added_tokens=[t for t in tokens if t["content"] != missing])
    assert missing in refusal(folder)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"suppress_tokens": [5, 99_999]}, "suppress_tokens[1] = 99999; expected less than"),
        ({"suppress_tokens": "5"}, "suppress_tokens = '5'; expected a"),
        ({"alignment_heads": [[0, 1]]}, "alignment_heads[0] = [0, 1]; expected a layer below"),
        ({"max_initial_timestamp_index": 1501}, "max_initial_timestamp_index = 1501"),
        ({"task_to_id": [1]}, "task_to_id = [1]; expected"),
    ],
)
def test_malformed_facts(folder, change, expected):
    edit_json(folder / "generation_config.json", **change)
    assert expected in refusal(folder)


@pytest.mark.parametrize("content", ["<|endoftext|>", "<|transcribe|>"])
def test_special_tokens_are_in_the_vocabulary(tmp_path, content):
    write_tokenizer(tmp_path, NANO)
    files, size = read_tokenizer_files(tmp_path), NANO.n_vocab
    special, stated = {**files.special, content: size}, StatedFacts(is_multilingual=True)
    with pytest.raises(CheckpointError, match=f"tokenizer.* = {size}; expected less than"):
        tokenizer_facts(dataclasses.replace(files, special=special, stated=stated), NANO.dims, True)


def test_what_is_not_stated_is_absent_or_openais_default(folder):
    lists = ("suppress_tokens", "begin_suppress_tokens", "alignment_heads")
    absent = (*lists, "max_initial_timestamp_index")
    edit_json(folder / "generation_config.json", **dict.fromkeys(absent))
    facts = facts_of(folder)
    assert (facts.suppress_tokens, facts.begin_suppress_tokens) == ((), ())
    assert facts.alignment_heads == ()
    assert facts.max_initial_timestamp_index == 50


def test_older_folders_keep_the_lists_in_their_config(folder):
    stated = facts_of(folder)
    content = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    names = ("suppress_tokens", "begin_suppress_tokens")
    edit_json(folder / "config.json", **{name: content[name] for name in names})
    edit_json(folder / "generation_config.json", **dict.fromkeys(names))
    assert facts_of(folder) == stated


def test_older_folders_name_languages_in_the_tokenizer_only(folder):
    stated = facts_of(folder)
    absent = ("lang_to_id", "task_to_id", "no_timestamps_token_id", "prev_sot_token_id")
    edit_json(folder / "generation_config.json", **dict.fromkeys(absent))
    assert facts_of(folder) == stated


def test_older_tokenizers_do_not_list_timestamps(folder):
    stated = facts_of(folder)
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
    edit_json(path, added_tokens=tokens[:-1501])
    assert facts_of(folder) == stated


def test_tokens_after_the_timestamps_are_allowed_in_a_folder_of_its_own(folder, weights):
    """Fine-tuned checkpoints may have added tokens, or padding, at the end."""
    padded = torch.cat([weights[TOKENS], torch.zeros(3, 64, dtype=torch.float16)])
    save_file(weights | {TOKENS: padded}, folder / "model.safetensors")
    edit_json(folder / "config.json", vocab_size=NANO.n_vocab + 3)
    assert open_checkpoint(str(folder)).facts.timestamp_begin + 1501 == NANO.n_vocab


def timestamp_refusal(files, n_vocab=NANO.n_vocab, exact_vocab=False):
    dims = dataclasses.replace(NANO.dims, n_vocab=n_vocab)
    return refused(tokenizer_facts, files, dims, exact_vocab)


def test_timestamps_follow_the_token_before_them_and_end_within_the_vocabulary(tmp_path):
    write_tokenizer(tmp_path, NANO)
    files = read_tokenizer_files(tmp_path)
    begin, size = files.special["<|0.00|>"], NANO.n_vocab
    moved = dataclasses.replace(files, special={**files.special, "<|0.00|>": begin + 1})
    said = timestamp_refusal(moved)
    assert f"timestamps run from {begin + 1} to {begin + 1501}; expected them right after" in said
    said = timestamp_refusal(files, size - 1)
    assert f"within the checkpoint's vocabulary of {size - 1}" in said
    said = timestamp_refusal(files, size + 1, exact_vocab=True)
    assert f"at the end of the checkpoint's vocabulary of {size + 1}" in said
    tokenizer_facts(files, NANO.dims, exact_vocab=True)


def test_a_vocabulary_other_than_the_english_one_is_multilingual(folder):
    stated = facts_of(folder)
    for absent in ("is_multilingual", "lang_to_id"):
        edit_json(folder / "generation_config.json", **{absent: None})
        assert facts_of(folder) == stated
