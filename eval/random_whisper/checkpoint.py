"""A Hugging Face folder of a Whisper shape with random weights.

Its tokenizer has every special token at its published id and fillers for the rest: readers of the
folder look the special tokens up, and the text of such a model means nothing.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from eval.random_whisper.shapes import END, START, Shape, language_tokens, special_ids

_POOL = 1_000_003  # prime: rows of a large matrix made from the pool differ


def hugging_face_config(shape: Shape) -> Any:
    """Return the shape as a transformers.WhisperConfig, with nothing suppressed."""
    import transformers  # noqa: PLC0415 - heavy, and only for checkpoints

    dims, ids = shape.dims, special_ids(shape)
    return transformers.WhisperConfig(
        vocab_size=dims.n_vocab,
        num_mel_bins=dims.n_mels,
        d_model=dims.n_audio_state,
        encoder_layers=dims.n_audio_layer,
        decoder_layers=dims.n_text_layer,
        encoder_attention_heads=dims.n_audio_head,
        decoder_attention_heads=dims.n_text_head,
        encoder_ffn_dim=dims.n_audio_ffn,
        decoder_ffn_dim=dims.n_text_ffn,
        max_source_positions=dims.n_audio_ctx,
        max_target_positions=dims.n_text_ctx,
        pad_token_id=ids[END],
        bos_token_id=ids[END],
        eos_token_id=ids[END],
        decoder_start_token_id=ids[START],
        suppress_tokens=None,
        begin_suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"],
        dtype="float16",
    )


def hugging_face_tensors(shape: Shape) -> dict[str, torch.Tensor]:
    """Return tensors without data by Hugging Face's names, the tied projection left out."""
    import transformers  # noqa: PLC0415 - heavy, and only for checkpoints

    with torch.device("meta"):
        network = transformers.WhisperForConditionalGeneration(hugging_face_config(shape))
    tensors: dict[str, torch.Tensor] = network.state_dict()
    del tensors["proj_out.weight"]
    return tensors


def random_weights(shape: Shape, seed: int = 0, spread: float = 0.05) -> dict[str, torch.Tensor]:
    """Make FP16 tensors for `hugging_face_tensors`, spread so that activations stay finite."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(_POOL, generator=generator) * spread
    pools = {False: noise.half(), True: (noise + 1.0).half()}
    weights = {}
    for i, (name, tensor) in enumerate(hugging_face_tensors(shape).items()):
        pool = pools[name.endswith("norm.weight")].roll(-7919 * i)
        values = pool.repeat(tensor.numel() // _POOL + 1)[: tensor.numel()]
        weights[name] = values.reshape(tensor.shape)
    return weights


def write_checkpoint(folder: Path, shape: Shape, weights: dict[str, torch.Tensor]) -> Path:
    """Write config, tokenizer and weights, as published folders have them; returns the folder."""
    write_tokenizer(folder, shape)
    hugging_face_config(shape).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def byte_alphabet() -> list[str]:
    """Return how a byte-level vocabulary writes each byte, in order of id."""
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def byte_level_tokenizer(pieces: list[str]) -> tokenizers.Tokenizer:
    """Make a byte-level tokenizer without merges; a piece's id is its place."""
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def write_tokenizer(folder: Path, shape: Shape) -> None:
    """Write tokenizer.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = byte_alphabet()
    fillers = [f"filler{i}" for i in range(shape.pieces - len(alphabet))]
    tokenizer = byte_level_tokenizer([*alphabet, *fillers])
    special = special_ids(shape)
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "generation_config.json", generation_config(shape))


def generation_config(shape: Shape) -> dict[str, Any]:
    """Return the content of generation_config.json; the suppress lists are short ones."""
    ids = special_ids(shape)
    fields = {
        "alignment_heads": [[0, 0]],
        "begin_suppress_tokens": [220, ids[END]],
        "decoder_start_token_id": ids[START],
        "eos_token_id": ids[END],
        "is_multilingual": shape.multilingual,
        "max_initial_timestamp_index": 50,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": [1, 2, 7, ids[START], ids["<|startoflm|>"]],
    }
    if shape.multilingual:
        fields["lang_to_id"] = {token: ids[token] for token in sorted(language_tokens(shape))}
        fields["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return fields


def write_processor(folder: Path, shape: Shape) -> None:
    """Write the other files that transformers' WhisperProcessor reads."""
    import transformers  # noqa: PLC0415 - heavy, and only for checkpoints

    names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END)
    known = {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor"}
    write_json(folder / "tokenizer_config.json", {**names, **known, "model_max_length": 448})
    extractor: Any = transformers.WhisperFeatureExtractor
    extractor(feature_size=shape.n_mels).save_pretrained(folder)


def write_peer_checkpoint(folder: Path, shape: Shape) -> None:
    """Write all that vLLM, CTranslate2's converter and transformers read; nothing is suppressed."""
    write_checkpoint(folder, shape, random_weights(shape, spread=0.02))
    write_processor(folder, shape)
    free: dict[str, list[int]] = {"suppress_tokens": [], "begin_suppress_tokens": []}
    pad = {"pad_token_id": special_ids(shape)[END]}
    write_json(folder / "generation_config.json", {**generation_config(shape), **free, **pad})


def write_json(path: Path, content: object) -> None:
    """Write one JSON file."""
    path.write_text(json.dumps(content), encoding="utf-8")
