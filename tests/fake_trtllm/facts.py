"""Facts about the real library that our calls and the stand-ins are held against.

In our own words; each group names the file of github.com/NVIDIA/TensorRT-LLM where it was read, in
the last version before the engine workflow was removed. Nothing here comes from Earshot's code, and
nothing was observed on the running library.
"""

import inspect

# Arguments of the bindings' constructors and methods: those that Earshot or the stand-ins pass, in
# order; the real ones take more. Arguments behind a lone * go by name only. `kind?` takes None as
# well. "=..." marks an argument that has a default. Read in executorConfig.cpp, request.cpp and
# executor.cpp of cpp/tensorrt_llm/nanobind/executor.
BINDINGS = {
    "KvCacheConfig": """
        *
        enable_block_reuse:bool=... free_gpu_memory_fraction:float?=...
        cross_kv_cache_fraction:float?=...
    """,
    "ParallelConfig": "* device_ids:ints?=...",
    "LogitsPostProcessorConfig": "* processor_batched:callable?=...",
    "ExecutorConfig": """
        *
        max_beam_width:int=... kv_cache_config:KvCacheConfig=...
        normalize_log_probs:bool=... batching_type:BatchingType=... max_batch_size:int?=...
        parallel_config:ParallelConfig?=...
        logits_post_processor_config:LogitsPostProcessorConfig?=...
        gather_generation_logits:bool=...
    """,
    "SamplingConfig": """
        beam_width:int=...
        *
        top_k:int?=... top_p:float?=... seed:int?=... temperature:float?=...
        length_penalty:float?=...
    """,
    "OutputConfig": """
        *
        return_log_probs:bool?=... return_generation_logits:bool?=...
        exclude_input_from_output:bool?=...
    """,
    "Request": """
        input_token_ids:ints max_tokens:int
        *
        streaming:bool=... sampling_config:SamplingConfig=... output_config:OutputConfig=...
        end_id:int?=... pad_id:int?=...
        logits_post_processor_name:str?=... client_id:int?=... encoder_input_features:Tensor?=...
        encoder_output_length:int?=...
    """,
    # One of several constructors: that of two engines in folders.
    "Executor": """
        encoder_model_path:str decoder_model_path:str model_type:ModelType
        executor_config:ExecutorConfig
    """,
    "Executor.enqueue_request": "request:Request",
    "Executor.await_responses": "timeout:timedelta?=...",
    "Executor.cancel_request": "id:int?=...",
}


def parse(arguments):
    """Return the signature, and by name the kind and whether None is taken."""
    parameters, kinds = [], {}
    how = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for word in arguments.split():
        if word == "*":
            how = inspect.Parameter.KEYWORD_ONLY
            continue
        declared, _, default = word.partition("=")
        name, _, kind = declared.partition(":")
        default = ... if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, how, default=default))
        kinds[name] = kind.removesuffix("?"), kind.endswith("?")
    return inspect.Signature(parameters), kinds


def bind(name, arguments, options):
    """What the binding of a name gets, by argument; "..." where its default is.

    Raises:
        TypeError: what nanobind would refuse: an argument that is unknown, missing, by position
            where it must go by name, or of another type. Unlike Python it takes no bool for int.
    """
    signature, kinds = parse(BINDINGS[name])
    bound = signature.bind(*arguments, **options)
    bound.apply_defaults()
    for argument, value in bound.arguments.items():
        kind, takes_none = kinds[argument]
        if value is not ... and not (value is None and takes_none) and not _is(value, kind):
            raise TypeError(f"{name}: incompatible function arguments: {argument} = {value!r}")
    return bound.arguments


def _is(value, kind):
    if kind == "callable":
        return callable(value)
    if kind == "ints":
        return isinstance(value, list) and all(type(item) is int for item in value)
    return type(value).__name__ == kind


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
