"""Facts about the real library that our calls and the stand-ins are held against.

In our own words; each group names the file of github.com/NVIDIA/TensorRT-LLM where it was read, in
the last version before the engine workflow was removed. Nothing here comes from Earshot's code, and
nothing was observed on the running library.
"""

# trtllm-build: flags that take a value, with its kind. Read in tensorrt_llm/commands/build.py and
# tensorrt_llm/plugin/plugin.py; the values of Whisper in examples/models/core/whisper/README.md.
FLAGS = {
    "checkpoint_dir": "path",
    "output_dir": "path",
    "max_batch_size": "int",
    "max_input_len": "int",
    "max_seq_len": "int",
    "max_beam_width": "int",
    "max_num_tokens": "int",
    "max_encoder_input_len": "int",
    "gemm_plugin": "plugin",
    "gpt_attention_plugin": "plugin",
    "bert_attention_plugin": "plugin",
    "moe_plugin": "plugin",
    "remove_input_padding": "switch",
    "kv_cache_type": "cache",
}
VALUES = {
    "plugin": {"auto", "float16", "float32", "bfloat16", "int32", "disable"},
    "switch": {"enable", "disable"},
    "cache": {"continuous", "paged", "disabled"},
}

# The batched logits post-processor's arguments, by position: ids of the executor's own, logits, the
# beams' tokens as bound vectors, the number of the stream, ids of ours. Read in
# cpp/include/tensorrt_llm/executor/types.h (LogitsPostProcessorBatched).
POST_PROCESSOR = ["req_ids", "logits", "token_ids", "stream_ptr", "client_ids"]
