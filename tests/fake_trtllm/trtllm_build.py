"""A stand-in for `trtllm-build` 1.2: the real flags, the loader's checks, no compiler.

Unknown flags and values are refused as argparse does; a checkpoint with a missing, misnamed or
misshapen tensor as the real loader does. The "engine" it writes is the checkpoint itself. No torch,
so that it starts at once.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

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
    """Look for the attention of every layer; tests/build/trtllm/test_weights.py runs all of it."""
    width = config["hidden_size"]
    encoder = config["architecture"] == "WhisperEncoder"
    kinds = ["attention"] if encoder else ["self_attention", "cross_attention"]
    expected = [
        f"transformer.layers.{i}.{kind}.qkv.weight"
        for i in range(config["num_hidden_layers"])
        for kind in kinds
    ]
    missing = sorted(set(expected) - tensors.keys())
    if missing:
        raise SystemExit(f"RuntimeError: Required but not provided tensors:{missing}")
    for name in expected:
        assert tensors[name].shape == (3 * width, width), name
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float16)}


def main():
    args = make_parser().parse_args()
    source, target = Path(args.checkpoint_dir), Path(args.output_dir)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "rank0.safetensors")
    print(f"[TRT-LLM] [I] building {config['architecture']} from {source}", flush=True)
    check_checkpoint(config, tensors)
    if config["quantization"]["quant_algo"] not in (None, "W8A16"):
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
