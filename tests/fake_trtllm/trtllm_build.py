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
import numpy as np
from safetensors.numpy import load_file, save_file

SWITCH = ("enable", "disable")
DTYPE = ("auto", "float16", "float32", "bfloat16", "int32", "disable")
# Those of tensorrt_llm/commands/build.py and plugin/plugin.py that take a value.
INTS = {
    "max_batch_size": 2048,
    "max_input_len": 1024,
    "max_seq_len": None,
    "max_beam_width": 1,
    "max_num_tokens": 8192,
    "opt_num_tokens": None,
    "max_encoder_input_len": 1024,
    "max_prompt_embedding_table_size": 0,
    "tokens_per_block": 32,
    "workers": 1,
}
SWITCHES = {
    "context_fmha": "enable",
    "bert_context_fmha_fp32_acc": "disable",
    "remove_input_padding": "enable",
    "use_paged_context_fmha": "enable",
    "use_fp8_context_fmha": "disable",
    "multiple_profiles": "disable",
    "paged_state": "enable",
    "streamingllm": "disable",
    "use_fused_mlp": "enable",
    "reduce_fusion": "disable",
    "user_buffer": "disable",
    "norm_quant_fusion": "disable",
    "pp_reduce_scatter": "disable",
}
PLUGINS = {
    "bert_attention_plugin": "auto",
    "gpt_attention_plugin": "auto",
    "gemm_plugin": "disable",
    "moe_plugin": "auto",
    "nccl_plugin": "auto",
    "lora_plugin": "disable",
    "dora_plugin": "disable",
    "mamba_conv1d_plugin": "auto",
    "gemm_swiglu_plugin": "disable",
    "gemm_allreduce_plugin": "disable",
    "low_latency_gemm_plugin": "disable",
    "low_latency_gemm_swiglu_plugin": "disable",
    "fp8_rowwise_gemm_plugin": "disable",
}


def make_parser():
    parser = argparse.ArgumentParser("trtllm-build", allow_abbrev=False)
    for name in ("checkpoint_dir", "output_dir", "model_config", "build_config", "log_level"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--kv_cache_type", choices=("continuous", "paged", "disabled"))
    parser.add_argument("--logits_dtype", choices=("float16", "float32"))
    for name, default in INTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in SWITCHES.items():
        parser.add_argument(f"--{name}", choices=SWITCH, default=default)
    for name, default in PLUGINS.items():
        parser.add_argument(f"--{name}", choices=DTYPE, default=default)
    for name in ("strip_plan", "weight_streaming", "fast_build", "monitor_memory", "dry_run"):
        parser.add_argument(f"--{name}", action="store_true")
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
    build_config = {name: getattr(args, name) for name in INTS}
    if build_config["max_seq_len"] is None:  # deduced, and the input clipped to it
        build_config["max_seq_len"] = config["max_position_embeddings"]
    build_config["max_input_len"] = min(build_config["max_input_len"], build_config["max_seq_len"])
    build_config["kv_cache_type"] = (args.kv_cache_type or "paged").upper()
    build_config["plugin_config"] = {n: getattr(args, n) for n in (*SWITCHES, *PLUGINS)}
    text = json.dumps(
        {"version": "1.2.1", "pretrained_config": config, "build_config": build_config}
    )
    (target / "config.json").write_text(text)
    Path("model.cache").write_bytes(b"timings")  # the real one leaves it where it was started
    print("[TRT-LLM] [I] done", flush=True)


if __name__ == "__main__":
    sys.exit(main())
