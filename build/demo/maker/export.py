"""Write a checkpoint folder in Hugging Face format: FP16 weights, configurations, tokenizer files.

    python -m build.demo.maker.export --out FOLDER [--weights STATE.pt] [--alignment-heads 2:0,3:1]

Without --weights the weights are random: the right shapes to try a reader on.
"""

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from build.demo.maker.network import Geometry, Whisper
from build.demo.maker.tokenizer import LANGUAGE_CODES, SpecialIds, train_tokenizer, write_tokenizer

Heads = list[tuple[int, int]]


def hugging_face_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the format keeps of a training state: no CTC head, FP16, contiguous."""
    kept = {name: value for name, value in state.items() if not name.startswith("ctc_head.")}
    return {name: value.detach().cpu().half().contiguous() for name, value in kept.items()}


def config(geometry: Geometry, ids: SpecialIds) -> dict[str, object]:
    """config.json."""
    return {
        "activation_dropout": 0.0, "activation_function": "gelu", "apply_spec_augment": False,
        "architectures": ["WhisperForConditionalGeneration"], "attention_dropout": 0.0,
        "begin_suppress_tokens": [_space_id(), ids.eot], "bos_token_id": ids.eot,
        "classifier_proj_size": 256, "d_model": geometry.d_model,
        "decoder_attention_heads": geometry.heads, "decoder_ffn_dim": geometry.ffn,
        "decoder_layerdrop": 0.0, "decoder_layers": geometry.decoder_layers,
        "decoder_start_token_id": ids.sot, "dropout": 0.0, "dtype": "float16",
        "encoder_attention_heads": geometry.heads, "encoder_ffn_dim": geometry.ffn,
        "encoder_layerdrop": 0.0, "encoder_layers": geometry.encoder_layers,
        "eos_token_id": ids.eot, "init_std": 0.02, "is_encoder_decoder": True,
        "max_source_positions": geometry.source_positions,
        "max_target_positions": geometry.target_positions, "model_type": "whisper",
        "num_hidden_layers": geometry.encoder_layers, "num_mel_bins": geometry.n_mels,
        "pad_token_id": ids.eot, "scale_embedding": False, "tie_word_embeddings": True,
        "use_cache": True, "vocab_size": geometry.vocab_size,
    }  # fmt: skip


def _space_id() -> int:
    """The bare space's piece: byte-level alphabets are sorted, the space is their 221st."""
    return 220


def generation_config(ids: SpecialIds, heads: Heads) -> dict[str, object]:
    """generation_config.json."""
    suppressed = [
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
    ]
    return {
        "alignment_heads": [list(head) for head in heads],
        "begin_suppress_tokens": [_space_id(), ids.eot],
        "bos_token_id": ids.eot,
        "decoder_start_token_id": ids.sot,
        "eos_token_id": ids.eot,
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids.language(code) for code in LANGUAGE_CODES},
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "no_timestamps_token_id": ids.tail("<|notimestamps|>"),
        "pad_token_id": ids.eot,
        "prev_sot_token_id": ids.tail("<|startofprev|>"),
        "return_timestamps": False,
        "suppress_tokens": [ids.sot, *(ids.tail(token) for token in suppressed)],
        "task": "transcribe",
        "task_to_id": {
            "transcribe": ids.tail("<|transcribe|>"),
            "translate": ids.tail("<|translate|>"),
        },
    }


def preprocessor_config(geometry: Geometry) -> dict[str, object]:
    """preprocessor_config.json."""
    return {
        "chunk_length": 30, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": geometry.n_mels, "hop_length": 160, "n_fft": 400, "n_samples": 480_000,
        "nb_max_frames": 3000, "padding_side": "right", "padding_value": 0.0,
        "processor_class": "WhisperProcessor", "return_attention_mask": False,
        "sampling_rate": 16_000,
    }  # fmt: skip


def default_heads(geometry: Geometry) -> Heads:
    """All heads of the decoder's second half, until they are measured."""
    layers = range(geometry.decoder_layers // 2, geometry.decoder_layers)
    return [(layer, head) for layer in layers for head in range(geometry.heads)]


def write_checkpoint(
    folder: Path, state: dict[str, torch.Tensor], geometry: Geometry, heads: Heads
) -> None:
    """Write everything but the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = SpecialIds()
    save_file(hugging_face_state(state), folder / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": config(geometry, ids),
        "generation_config.json": generation_config(ids, heads),
        "preprocessor_config.json": preprocessor_config(geometry),
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        text = re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", text)
        (folder / name).write_text(text, encoding="utf-8")


def open_or_train_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, learnt first where there is none."""
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(train_tokenizer(60_000), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _parse_heads(text: str) -> Heads:
    pairs = (pair.split(":") for pair in text.split(",") if pair)
    return [(int(layer), int(head)) for layer, head in pairs]


def main() -> None:
    """Write a checkpoint folder."""
    parser = argparse.ArgumentParser(description="Write a demo checkpoint in Hugging Face format.")
    parser.add_argument("--out", type=Path, default=Path("build/demo/checkpoint"))
    parser.add_argument("--weights", type=Path, help="training state; random weights without it")
    parser.add_argument("--alignment-heads", type=_parse_heads, default=[], help="LAYER:HEAD,...")
    arguments = parser.parse_args()
    tokenizer = open_or_train_tokenizer(arguments.out)
    geometry = Geometry(vocab_size=tokenizer.get_vocab_size())
    if arguments.weights:
        saved = torch.load(arguments.weights, map_location="cpu", weights_only=True)
        state, geometry = saved["model"], Geometry(**saved["geometry"])
    else:
        state = Whisper(geometry, ctc_labels=1).state_dict()
    heads = arguments.alignment_heads or default_heads(geometry)
    write_checkpoint(arguments.out, state, geometry, heads)
    print(json.dumps(asdict(geometry)))  # noqa: T201


if __name__ == "__main__":
    main()
