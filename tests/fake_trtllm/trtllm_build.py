"""A stand-in for `trtllm-build` 1.2: the real flags, the loader's checks, no compiler.

Unknown flags and values are refused as argparse does; a checkpoint with a missing, misnamed or
misshapen tensor as the real loader does. The "engine" it writes is the checkpoint itself, with
INT8 weights rounded as W8A16 rounds them. No torch, so that it starts at once.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import contract
import facts
import numpy as np
from safetensors.numpy import load_file, save_file


def make_parser():
    """Take the flags that `facts` states, with their values, and nothing else."""
    parser = argparse.ArgumentParser("trtllm-build", allow_abbrev=False)
    for name, kind in facts.FLAGS.items():
        as_int = int if kind == "int" else str
        parser.add_argument(f"--{name}", type=as_int, choices=facts.VALUES.get(kind))
    return parser


def check_checkpoint(config, tensors):
    if config["architecture"] == "WhisperEncoder":
        expected = contract.encoder_shapes(
            config["n_mels"],
            config["hidden_size"],
            config["num_hidden_layers"],  # its feed-forward width is fixed: no key is read
        )
    else:
        assert config["architecture"] == "DecoderModel", config["architecture"]
        expected = contract.decoder_shapes(
            config["hidden_size"],
            config["num_hidden_layers"],
            config["vocab_size"],
            config.get("intermediate_size"),
            config["max_position_embeddings"],
        )
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise SystemExit(f"RuntimeError: Required but not provided tensors:{missing}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise SystemExit(
                f"ValueError: {name} has shape {tuple(tensors[name].shape)} != {shape}"
            )
        if tensors[name].dtype != np.float16:
            raise SystemExit(
                f"TensorRT: {name} is {tensors[name].dtype}, network is strongly typed"
            )


def quantised(name, weight):
    """Round as W8A16 does: per output row, scale max|w| / 128 in float16."""
    if not contract.is_quantised(name):
        return weight
    largest = np.abs(weight.astype(np.float32)).max(axis=1, keepdims=True)
    scale = np.maximum((largest / 128).astype(np.float16).astype(np.float32), 1e-7)
    codes = np.clip(np.round(weight / scale), -128, 127)
    return (codes * scale).astype(np.float16)


def main():
    args = make_parser().parse_args()
    source, target = Path(args.checkpoint_dir), Path(args.output_dir)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "rank0.safetensors")
    print(f"[TRT-LLM] [I] building {config['architecture']} from {source}", flush=True)
    check_checkpoint(config, tensors)
    if config["quantization"]["quant_algo"] == "W8A16":
        tensors = {name: quantised(name, tensor) for name, tensor in tensors.items()}
    elif config["quantization"]["quant_algo"] is not None:
        raise SystemExit(f"unknown quant_algo {config['quantization']['quant_algo']}")
    target.mkdir(parents=True)
    save_file(tensors, target / "rank0.engine")
    shutil.copymode(source / "config.json", target / "rank0.engine")
    given = {name: getattr(args, name) for name in facts.FLAGS}
    build_config = {name: given[name] for name, kind in facts.FLAGS.items() if kind == "int"}
    build_config["max_input_len"] = min(build_config["max_input_len"], build_config["max_seq_len"])
    build_config["kv_cache_type"] = (args.kv_cache_type or "paged").upper()
    build_config["plugin_config"] = {
        name: given[name] for name, kind in facts.FLAGS.items() if kind in ("plugin", "switch")
    }
    text = json.dumps(
        {"version": "1.2.1", "pretrained_config": config, "build_config": build_config}
    )
    (target / "config.json").write_text(text)
    Path("model.cache").write_bytes(b"timings")  # the real one leaves it where it was started
    print("[TRT-LLM] [I] done", flush=True)


if __name__ == "__main__":
    sys.exit(main())
