"""build.checkpoint and build.tensor_names: both formats, every size, and what is refused."""

import dataclasses
import hashlib
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from build.checkpoint import open_checkpoint
from build.tensor_names import source_tensor_name
from eval.random_whisper import (
    PUBLISHED,
    hugging_face_tensors,
    random_weights,
    write_checkpoint,
    write_json,
    write_tokenizer,
)
from serve.contract.engine import tensor_kinds
from tests.checkpoints import NANO, edit_json, openai_name, refusal, write_openai
from tests.marks import nightly

TOKENS = "model.decoder.embed_tokens.weight"
SOME = "model.decoder.layers.0.encoder_attn.v_proj.weight"


@pytest.fixture
def save(folder):
    """Replace the folder's weights."""
    return lambda tensors: save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("size", PUBLISHED)
def test_names_and_shapes_of_every_published_size(size):
    """Against transformers' own network of the full depth, and OpenAI's names for it."""
    shape = PUBLISHED[size]
    theirs = {name: tuple(tensor.shape) for name, tensor in hugging_face_tensors(shape).items()}
    ours = {name: tensor_shape for name, tensor_shape, _ in tensor_kinds(shape.dims)}
    assert {source_tensor_name(name, "hf"): s for name, s in ours.items()} == theirs
    for name in ours:
        assert source_tensor_name(name, "openai") == openai_name(source_tensor_name(name, "hf"))


@pytest.mark.parametrize("size", ["tiny.en", *nightly("large-v3-turbo")])
def test_both_formats_open_the_same(size, tmp_path):
    """With data: tiny in full, the larger ones with few layers."""
    shape = PUBLISHED[size]
    if not size.startswith("tiny"):
        shape = dataclasses.replace(shape, encoder_layers=2, decoder_layers=1)
    stored = random_weights(shape)
    folder = write_checkpoint(tmp_path / "hf", shape, stored)
    hf = open_checkpoint(str(folder))
    openai = open_checkpoint(str(write_openai(tmp_path / "a.pt", shape, stored)), str(folder))

    assert hf.dims == openai.dims == shape.dims
    assert hf.facts == openai.facts
    assert hf.tokenizer_json == openai.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert hf.notes == openai.notes == ()
    assert list(hf.tensors) == [name for name, _, _ in tensor_kinds(hf.dims)]
    assert all(torch.equal(tensor, openai.tensors[name]) for name, tensor in hf.tensors.items())


def test_source_is_the_hash_of_the_weights(folder):
    checkpoint = open_checkpoint(str(folder))
    file = folder / "model.safetensors"
    assert checkpoint.source.id == str(folder)
    assert checkpoint.weight_bytes == file.stat().st_size
    before = checkpoint.source.sha256
    with file.open("r+b") as opened:  # one bit of one weight
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))
    assert open_checkpoint(str(folder)).source.sha256 != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_kept_as_stored(folder, save, weights, dtype):
    save({name: tensor.to(dtype) for name, tensor in weights.items()})
    assert {t.dtype for t in open_checkpoint(str(folder)).tensors.values()} == {dtype}


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_sharded_weights(folder, weights, ending):
    whole = open_checkpoint(str(folder))
    stem = "model" if ending == "safetensors" else "pytorch_model"
    names = sorted(weights)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-{i:05}-of-00002.{ending}"
        tensors = {name: weights[name] for name in part}
        if ending == "bin":
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    write_json(folder / f"{stem}.{ending}.index.json", {"weight_map": weight_map})
    sharded = open_checkpoint(str(folder))
    assert all(torch.equal(t, whole.tensors[name]) for name, t in sharded.tensors.items())
    shards = b"".join((folder / file).read_bytes() for file in sorted(set(weight_map.values())))
    assert sharded.source.sha256 == hashlib.sha256(shards).hexdigest()
    assert sharded.weight_bytes == len(shards)
    (folder / weight_map[names[0]]).unlink()
    assert weight_map[names[0]] in refusal(folder)


def test_a_tensor_in_two_shards_is_refused(folder, weights):
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file in files:
        save_file(weights, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict(zip(weights, files, strict=False))}
    write_json(folder / "model.safetensors.index.json", index)
    assert "is in another file too" in refusal(folder)


def test_index_cannot_name_files_elsewhere(folder):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {SOME: "../outside.safetensors"}}
    write_json(folder / "model.safetensors.index.json", index)
    assert "'../outside.safetensors', which is not in" in refusal(folder)


def test_tied_projection(folder, save, weights):
    save(weights | {"proj_out.weight": weights[TOKENS].clone()})
    open_checkpoint(str(folder))
    save(weights | {"proj_out.weight": weights[TOKENS] + 1})
    assert "proj_out.weight differs from model.decoder.embed_tokens.weight" in refusal(folder)


def test_missing_unknown_and_misshapen_tensors_are_named(folder, save, weights):
    save({name: tensor for name, tensor in weights.items() if name != SOME})
    assert f"missing tensors: {SOME}; unknown tensors: none" in refusal(folder)
    save(weights | {"model.adapter.weight": torch.zeros(1)})
    assert "missing tensors: none; unknown tensors: model.adapter.weight" in refusal(folder)
    save(weights | {SOME: torch.zeros(64, 65)})
    assert f"{SOME} has shape [64, 65]; expected [64, 64]" in refusal(folder)
    save(weights | {SOME: torch.zeros(64, 64, dtype=torch.int8)})
    assert f"{SOME} is torch.int8; expected floating point" in refusal(folder)
    save({f"base.{name}": tensor for name, tensor in weights.items()})
    assert "and " in refusal(folder) and " more" in refusal(folder)


def test_openai_names_are_strict_too(tmp_path, weights):
    tokenizer = tmp_path / "tokenizer"
    write_tokenizer(tokenizer, NANO)
    path = write_openai(tmp_path / "a.pt", NANO, weights)
    content = torch.load(path)
    name = openai_name(SOME)
    assert name == "decoder.blocks.0.cross_attn.value.weight"
    del content["model_state_dict"][name]
    torch.save(content, path)
    assert f"missing tensors: {name}" in refusal(path, tokenizer)
    torch.save({"dims": content["dims"]}, path)
    assert "expected `dims` and `model_state_dict`" in refusal(path, tokenizer)
    del content["dims"]["n_text_state"]
    torch.save(content, path)
    assert "n_text_state = None" in refusal(path, tokenizer)


class Trap:
    """Leaves a mark where unpickling executes what the file asks for."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_pickles_are_not_executed(folder, tmp_path):
    mark = tmp_path / "executed"
    pickle.loads(pickle.dumps(Trap(mark)))  # shows that the trap works
    assert mark.exists()
    mark.unlink()
    (folder / "model.safetensors").unlink()
    torch.save({SOME: Trap(mark)}, folder / "pytorch_model.bin")
    assert "cannot read" in refusal(folder)
    torch.save({"dims": {}, "model_state_dict": Trap(mark)}, tmp_path / "a.pt")
    assert "cannot read" in refusal(tmp_path / "a.pt", folder)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn"])
def test_damaged_files(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    assert "cannot read" in refusal(folder)
    (folder / "a.pt").write_bytes(content)
    assert "cannot read" in refusal(folder / "a.pt", folder)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"encoder_attention_heads": 2}, "n_audio_head = 2; expected n_audio_state = 64 divided"),
        ({"model_type": "wav2vec2"}, "model_type = 'wav2vec2'; expected 'whisper'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False; expected True"),
        ({"max_source_positions": 750}, "n_audio_ctx = 750; expected 1500"),
    ],
)
def test_networks_that_are_not_ours(folder, change, expected):
    edit_json(folder / "config.json", **change)
    assert expected in refusal(folder)


def test_malformed_json(folder):
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "holds a list; expected a JSON object" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json: No such file" in refusal(folder)


def test_legacy_pickles_open_without_mapping(folder, weights):
    """Files older than torch 1.6 are no zip archives and cannot be mapped."""
    buffer = io.BytesIO()
    torch.save(weights, buffer, _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(buffer.getvalue())
    tensors = open_checkpoint(str(folder)).tensors
    assert torch.equal(tensors["decoder.tokens"], weights[TOKENS])
