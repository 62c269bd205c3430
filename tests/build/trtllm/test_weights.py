"""The TensorRT-LLM checkpoint: a plain network computes from it what transformers computes."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from build.checkpoint import open_checkpoint
from build.trtllm.weights import decoder_config, write_checkpoint
from eval.random_whisper import random_weights
from eval.random_whisper import write_checkpoint as write_hf
from serve.contract.errors import CheckpointError
from tests.checkpoints import NANO
from tests.fake_trtllm.plain_whisper import PlainWhisper


def test_an_unusual_feed_forward_width_is_stated_for_the_decoder_and_refused_for_the_encoder(
    checkpoint, tmp_path
):
    dims = dataclasses.replace(checkpoint.dims, n_text_ffn=192)
    assert decoder_config(dims, "fp16")["intermediate_size"] == 192
    assert "intermediate_size" not in decoder_config(checkpoint.dims, "fp16")
    dims = dataclasses.replace(checkpoint.dims, n_audio_ffn=128)
    with pytest.raises(CheckpointError, match=r"a width of 128; .* 4 x n_audio_state = 256; bui"):
        write_checkpoint(dims, checkpoint.tensors, "fp16", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_written_files_ask_for_int8_but_hold_float16(checkpoint, tmp_path, precision):
    write_checkpoint(checkpoint.dims, checkpoint.tensors, precision, tmp_path)
    for half in ("encoder", "decoder"):
        files = sorted(path.name for path in (tmp_path / half).iterdir())
        assert files == ["config.json", "rank0.safetensors"]
        config = json.loads((tmp_path / half / "config.json").read_text())
        algorithm = {"int8": "W8A16", "fp16": None}[precision]
        assert config["quantization"] == {"quant_algo": algorithm}
        tensors = load_file(tmp_path / half / "rank0.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
        assert not any("per_channel_scale" in name for name in tensors)


def test_a_tensor_beyond_float16_is_refused_by_name(checkpoint, tmp_path):
    tensors = {name: tensor.float() for name, tensor in checkpoint.tensors.items()}
    tensors["decoder.layers.0.mlp.fc1.weight"][3, 4] = 1e6
    with pytest.raises(CheckpointError, match=r"decoder transformer\.layers\.0\.mlp\.fc\.weight"):
        write_checkpoint(checkpoint.dims, tensors, "fp16", tmp_path)


@pytest.mark.parametrize(("width", "mels"), [(128, 80), (192, 128)])
def test_a_plain_network_from_the_written_tensors_equals_transformers(tmp_path, width, mels):
    shape = dataclasses.replace(NANO, width=width, n_mels=mels, decoder_layers=2)
    folder = write_hf(tmp_path / "hf", shape, random_weights(shape))
    kind = transformers.WhisperForConditionalGeneration
    network = kind.from_pretrained(folder, dtype=torch.float32).eval()
    checkpoint = open_checkpoint(str(folder))
    write_checkpoint(checkpoint.dims, checkpoint.tensors, "fp16", tmp_path)
    plain = PlainWhisper(*(read_half(tmp_path / half) for half in ("encoder", "decoder")))

    features = torch.randn(2, mels, 3000, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, shape.n_vocab, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = network(input_features=features, decoder_input_ids=tokens)
        encoded = plain.encode(features.transpose(1, 2))
        logits = plain.logits(tokens, plain.cross(encoded))
    torch.testing.assert_close(encoded, expected.encoder_last_hidden_state, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits, expected.logits, atol=5e-4, rtol=1e-4)


def read_half(folder):
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "rank0.safetensors")
