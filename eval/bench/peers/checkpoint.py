"""A Hugging Face folder of a published Whisper shape with random weights, for peers that need one.

Its tokenizer has every special token at its published id and fillers for the rest: peers look the
special ones up, and nobody reads what such a model says.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file

from serve.engine import Dims
from serve.speech.features import SAMPLE_RATE, WINDOW_S
from serve.speech.languages import LANGUAGE_NAMES

LANGUAGES, TIMESTAMPS = 100, 1501
PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
END = "<|endoftext|>"
_POOL = 4_000_037


def special_ids(n_vocab: int) -> dict[str, int]:
    """Id of each special token of large-v3's tokenizer, the last ids of the vocabulary."""
    tokens = [
        END,
        "<|startoftranscript|>",
        *(f"<|{code}|>" for code in list(LANGUAGE_NAMES)[:LANGUAGES]),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
        *("<|nospeech|>", "<|notimestamps|>"),
        *(f"<|{i * 0.02:.2f}|>" for i in range(TIMESTAMPS)),
    ]
    return {token: n_vocab - len(tokens) + i for i, token in enumerate(tokens)}


def prompt_ids(n_vocab: int) -> list[int]:
    """What the decoder starts with: English, transcribe, no timestamps."""
    ids = special_ids(n_vocab)
    return [ids[token] for token in PROMPT]


def hugging_face_config(dims: Dims) -> Any:
    """The shape as a transformers.WhisperConfig, with nothing suppressed."""
    import transformers  # noqa: PLC0415 - heavy, and only for peers

    ids = special_ids(dims.n_vocab)
    return transformers.WhisperConfig(
        vocab_size=dims.n_vocab, num_mel_bins=dims.n_mels, d_model=dims.n_audio_state,
        encoder_layers=dims.n_audio_layer, decoder_layers=dims.n_text_layer,
        encoder_attention_heads=dims.n_audio_head, decoder_attention_heads=dims.n_text_head,
        encoder_ffn_dim=dims.n_audio_ffn, decoder_ffn_dim=dims.n_text_ffn,
        max_source_positions=dims.n_audio_ctx, max_target_positions=dims.n_text_ctx,
        pad_token_id=ids[END], bos_token_id=ids[END], eos_token_id=ids[END],
        decoder_start_token_id=ids[PROMPT[0]], suppress_tokens=None, begin_suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"], dtype="float16",
    )  # fmt: skip


def write_checkpoint(folder: Path, dims: Dims) -> None:
    """Write config, FP16 weights, tokenizer and feature extractor of `dims`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hugging_face_config(dims)
    config.save_pretrained(folder)
    _write_tokenizer(folder, dims.n_vocab)
    _write_json(folder / "preprocessor_config.json", _preprocessor(dims.n_mels))
    _write_json(folder / "generation_config.json", _generation(dims.n_vocab))
    weights = _random_weights(config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _random_weights(config: Any) -> dict[str, torch.Tensor]:
    """FP16 tensors on the host, of a spread with which activations stay finite."""
    import transformers  # noqa: PLC0415 - heavy, and only for peers

    with torch.device("meta"):
        shapes = transformers.WhisperForConditionalGeneration(config).state_dict()
    del shapes["proj_out.weight"]  # the embedding's, under a second name
    noise = np.random.default_rng(0).standard_normal(_POOL, np.float32) * 0.02
    pools = {0: noise.astype(np.float16), 1: (noise + 1).astype(np.float16)}
    weights = {}
    for i, (name, tensor) in enumerate(shapes.items()):
        start, size = 7919 * i % _POOL, tensor.numel()
        piece = pools[name.endswith("norm.weight")][start : start + size]
        weights[name] = torch.from_numpy(np.resize(piece, tensor.shape))  # repeats a short piece
    return weights


def _write_tokenizer(folder: Path, n_vocab: int) -> None:
    special = special_ids(n_vocab)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"filler{i}" for i in range(special[END] - len(alphabet))]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *fillers])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END)
    known = {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor"}
    _write_json(folder / "tokenizer_config.json", {**names, **known, "model_max_length": 448})


def _preprocessor(n_mels: int) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": n_mels,
        "sampling_rate": SAMPLE_RATE,
        "chunk_length": round(WINDOW_S),
        "hop_length": 160,
        "n_fft": 400,
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _generation(n_vocab: int) -> dict[str, Any]:
    ids = special_ids(n_vocab)
    codes = [f"<|{code}|>" for code in list(LANGUAGE_NAMES)[:LANGUAGES]]
    return {
        "alignment_heads": [[0, 0]],
        "decoder_start_token_id": ids[PROMPT[0]],
        "eos_token_id": ids[END],
        "pad_token_id": ids[END],
        "is_multilingual": True,
        "lang_to_id": {code: ids[code] for code in codes},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
