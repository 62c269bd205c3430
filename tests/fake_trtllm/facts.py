"""Facts about the real library that our calls, config.pbtxt and the stand-ins are held against.

In our own words; each group names the file of github.com/NVIDIA/TensorRT-LLM where it was read, in
the last version before the engine workflow was removed. Nothing here comes from Earshot's code, and
nothing was observed on the running library.
"""

import dataclasses
import inspect

_NANOBIND = "cpp/tensorrt_llm/nanobind/executor"
_BACKEND = "triton_backend/inflight_batcher_llm/src"


@dataclasses.dataclass(frozen=True)
class Binding:
    """A constructor or method of the bindings.

    One argument a line, in order; those below a lone * go by name only. `kind?` takes None as
    well. Defaults are left out but for "...", which stands for any: the argument may be left out.
    """

    read_in: str
    arguments: str

    def parse(self):
        """(signature, {name: (kind, whether None is taken)})."""
        parameters, kinds = [], {}
        how = inspect.Parameter.POSITIONAL_OR_KEYWORD
        for line in self.arguments.split():
            if line == "*":
                how = inspect.Parameter.KEYWORD_ONLY
                continue
            declared, _, default = line.partition("=")
            name, _, kind = declared.partition(":")
            default = ... if default else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name, how, default=default))
            kinds[name] = kind.removesuffix("?"), kind.endswith("?")
        return inspect.Signature(parameters), kinds


BINDINGS = {
    "KvCacheConfig": Binding(
        f"{_NANOBIND}/executorConfig.cpp",
        """
        enable_block_reuse:bool=... max_tokens:int?=... max_attention_window:ints?=...
        sink_token_length:int?=... free_gpu_memory_fraction:float?=... host_cache_size:int?=...
        onboard_blocks:bool=... cross_kv_cache_fraction:float?=...
        secondary_offload_min_priority:int?=... event_buffer_max_size:int=...
        *
        enable_partial_reuse:bool=... copy_on_partial_reuse:bool=... use_uvm:bool=...
        attention_dp_events_gather_period_ms:int=... runtime_defaults:RuntimeDefaults?=...
        max_gpu_total_bytes:int=...
        """,
    ),
    "ParallelConfig": Binding(
        f"{_NANOBIND}/executorConfig.cpp",
        """
        communication_type:CommunicationType=... communication_mode:CommunicationMode=...
        device_ids:ints?=... participant_ids:ints?=... orchestrator_config:OrchestratorConfig?=...
        num_nodes:int?=...
        """,
    ),
    "LogitsPostProcessorConfig": Binding(
        f"{_NANOBIND}/executorConfig.cpp",
        "processor_map:dict?=... processor_batched:callable?=... replicate:bool=...",
    ),
    "ExecutorConfig": Binding(
        f"{_NANOBIND}/executorConfig.cpp",
        """
        max_beam_width:int=... scheduler_config:SchedulerConfig=...
        kv_cache_config:KvCacheConfig=...
        enable_chunked_context:bool=... normalize_log_probs:bool=...
        iter_stats_max_iterations:int=... request_stats_max_iterations:int=...
        batching_type:BatchingType=... max_batch_size:int?=... max_num_tokens:int?=...
        parallel_config:ParallelConfig?=... peft_cache_config:PeftCacheConfig=...
        logits_post_processor_config:LogitsPostProcessorConfig?=...
        decoding_config:DecodingConfig?=... use_gpu_direct_storage:bool=...
        gpu_weights_percent:float=... max_queue_size:int?=...
        extended_runtime_perf_knob_config:ExtendedRuntimePerfKnobConfig=...
        debug_config:DebugConfig?=... recv_poll_period_ms:int=... max_seq_idle_microseconds:int=...
        spec_dec_config:SpeculativeDecodingConfig?=...
        guided_decoding_config:GuidedDecodingConfig?=... additional_model_outputs:list?=...
        cache_transceiver_config:CacheTransceiverConfig?=... gather_generation_logits:bool=...
        mm_embedding_offloading:bool=... enable_trt_overlap:bool=...
        fail_fast_on_attention_window_too_large:bool=...
        """,
    ),
    "SamplingConfig": Binding(
        f"{_NANOBIND}/request.cpp",
        """
        beam_width:int=...
        *
        top_k:int?=... top_p:float?=... top_p_min:float?=... top_p_reset_ids:int?=...
        top_p_decay:float?=... seed:int?=... temperature:float?=... min_tokens:int?=...
        beam_search_diversity_rate:float?=... repetition_penalty:float?=...
        presence_penalty:float?=... frequency_penalty:float?=... length_penalty:float?=...
        early_stopping:int?=... no_repeat_ngram_size:int?=... num_return_sequences:int?=...
        min_p:float?=... beam_width_array:ints?=...
        """,
    ),
    "OutputConfig": Binding(
        f"{_NANOBIND}/request.cpp",
        """
        return_log_probs:bool?=... return_context_logits:bool?=...
        return_generation_logits:bool?=...
        exclude_input_from_output:bool?=... return_encoder_output:bool?=...
        return_perf_metrics:bool?=... additional_model_outputs:list?=...
        """,
    ),
    "Request": Binding(
        f"{_NANOBIND}/request.cpp",
        """
        input_token_ids:ints max_tokens:int
        *
        streaming:bool=... sampling_config:SamplingConfig=... output_config:OutputConfig=...
        end_id:int?=... pad_id:int?=... position_ids:ints?=... bad_words:list?=...
        stop_words:list?=... embedding_bias:Tensor?=...
        external_draft_tokens_config:ExternalDraftTokensConfig?=...
        prompt_tuning_config:PromptTuningConfig?=... multimodal_input:MultimodalInput?=...
        multimodal_embedding:Tensor?=... mrope_config:MropeConfig?=... lora_config:LoraConfig?=...
        lookahead_config:LookaheadDecodingConfig?=...
        kv_cache_retention_config:KvCacheRetentionConfig?=... logits_post_processor_name:str?=...
        logits_post_processor:callable?=... encoder_input_token_ids:ints?=... client_id:int?=...
        return_all_generated_tokens:bool=... priority:float=... type:RequestType=...
        context_phase_params:ContextPhaseParams?=... encoder_input_features:Tensor?=...
        encoder_output_length:int?=... cross_attention_mask:Tensor?=... num_return_sequences:int=...
        eagle_config:EagleConfig?=... skip_cross_attn_blocks:Tensor?=...
        guided_decoding_params:GuidedDecodingParams?=... language_adapter_uid:int?=...
        allotted_time_ms:timedelta?=... cache_salt_id:int?=...
        """,
    ),
    # One of several constructors: that of two engines in folders.
    "Executor": Binding(
        f"{_NANOBIND}/executor.cpp",
        """
        encoder_model_path:str decoder_model_path:str model_type:ModelType
        executor_config:ExecutorConfig
        """,
    ),
    "Executor.enqueue_request": Binding(f"{_NANOBIND}/executor.cpp", "request:Request"),
    "Executor.await_responses": Binding(f"{_NANOBIND}/executor.cpp", "timeout:timedelta?=..."),
    "Executor.cancel_request": Binding(f"{_NANOBIND}/executor.cpp", "id:int?=..."),
    "Executor.get_latest_iteration_stats": Binding(f"{_NANOBIND}/executor.cpp", ""),
    "Executor.shutdown": Binding(f"{_NANOBIND}/executor.cpp", ""),
}


def bind(name, arguments, options):
    """What the binding of a name gets, by argument; "..." where its default is.

    Raises:
        TypeError: what nanobind would refuse: an argument that is unknown, missing, by position
            where it must go by name, or of another type. Unlike Python it takes no bool for int.
    """
    signature, kinds = BINDINGS[name].parse()
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


# The C++ Triton model. A parameter that is read without a guard must be in config.pbtxt, or the
# instance does not load; it may be empty, which is "not set". Read in model_instance_state.cc.
UNGUARDED = {
    "gpt_model_type",
    "tokenizer_dir",
    "xgrammar_tokenizer_info_path",
    "guided_decoding_backend",
}
# The others that we give, and what holds where one is missing or has no value that can be read;
# None: nothing is handed to the executor. Read there and, the last two, in model_state.cc.
GUARDED = {
    "gpt_model_path": "",
    "encoder_model_path": "",
    "max_beam_width": 1,
    "kv_cache_free_gpu_mem_fraction": None,
    "cross_kv_cache_fraction": None,
    "enable_kv_cache_reuse": True,
    "enable_chunked_context": False,
    "exclude_input_in_output": False,
    "normalize_log_probs": True,
    "gpu_device_ids": None,
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
}
BY_TRITON = {"FORCE_CPU_ONLY_INPUT_TENSORS"}  # read by the server's backend library
TRITON_READ_IN = f"{_BACKEND}/model_instance_state.cc, {_BACKEND}/model_state.cc"

# Its tensors as far as we use them: (type, dims, whether it may be left out). Dims of one number
# are reshaped to none. Features have the type that the template is filled with: FP16 for Whisper.
TENSORS_READ_IN = "triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"
INPUTS = {
    "encoder_input_features": ("TYPE_FP16", [-1, -1], True),
    "encoder_output_lengths": ("TYPE_INT32", [1], True),
    "input_lengths": ("TYPE_INT32", [1], False),
    "request_output_len": ("TYPE_INT32", [1], False),
    "decoder_input_ids": ("TYPE_INT32", [-1], True),
    "decoder_input_lengths": ("TYPE_INT32", [1], True),
    "end_id": ("TYPE_INT32", [1], True),
    "pad_id": ("TYPE_INT32", [1], True),
    "embedding_bias": ("TYPE_FP32", [-1], True),
    "beam_width": ("TYPE_INT32", [1], True),
    "len_penalty": ("TYPE_FP32", [1], True),
    "temperature": ("TYPE_FP32", [1], True),
    "runtime_top_k": ("TYPE_INT32", [1], True),
    "runtime_top_p": ("TYPE_FP32", [1], True),
    "seed": ("TYPE_UINT64", [1], True),
    "return_log_probs": ("TYPE_BOOL", [1], True),
    "exclude_input_in_output": ("TYPE_BOOL", [1], True),
    "streaming": ("TYPE_BOOL", [1], True),
}
OUTPUTS = {
    "output_ids": ("TYPE_INT32", [-1, -1]),
    "sequence_length": ("TYPE_INT32", [-1]),
    "cum_log_probs": ("TYPE_FP32", [-1]),
    "output_log_probs": ("TYPE_FP32", [-1, -1]),
}

# trtllm-build: flags that take a value, with its kind. Read in tensorrt_llm/commands/build.py and
# tensorrt_llm/plugin/plugin.py; the values of Whisper in examples/models/core/whisper/README.md.
FLAGS_READ_IN = "tensorrt_llm/commands/build.py, tensorrt_llm/plugin/plugin.py"
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

# The LLM API with Whisper: keywords that NVIDIA's own Whisper test passes, and, of `backend`, the
# guide; with their kinds, as above. Read in tests/integration/defs/llmapi/
# test_llm_api_pytorch_whisper.py, docs/source/models/encoder-decoder.md,
# tensorrt_llm/llmapi/llm_args.py and tensorrt_llm/sampling_params.py.
LLM_API_READ_IN = "tests/integration/defs/llmapi/test_llm_api_pytorch_whisper.py"
LLM_API = {
    "LLM": Binding(
        LLM_API_READ_IN,
        """
        model:str
        *
        backend:str=... attn_backend:str=... dtype:str=... model_kwargs:dict?=...
        max_batch_size:int=... max_beam_width:int=... max_input_len:int=... max_num_tokens:int=...
        enable_chunked_prefill:bool=... disable_overlap_scheduler:bool=...
        cuda_graph_config:CudaGraphConfig?=... kv_cache_config:KvCacheConfig=...
        scheduler_config:SchedulerConfig=...
        """,
    ),
    "KvCacheConfig": Binding(
        LLM_API_READ_IN,
        """
        *
        enable_block_reuse:bool=... free_gpu_memory_fraction:float=...
        cross_kv_cache_fraction:float?=... use_kv_cache_manager_v2:bool=...
        """,
    ),
    "SchedulerConfig": Binding(LLM_API_READ_IN, "* use_python_scheduler:bool=..."),
    "CudaGraphConfig": Binding(
        LLM_API_READ_IN, "* batch_sizes:list?=... enable_padding:bool=... max_batch_size:int=..."
    ),
    # Not end_id, pad_id or seed: no test of the library passes them with Whisper.
    "SamplingParams": Binding(
        LLM_API_READ_IN,
        """
        *
        max_tokens:int=... temperature:float?=... n:int=... best_of:int?=...
        use_beam_search:bool=... length_penalty:float?=... logprobs:int?=... detokenize:bool=...
        """,
    ),
}

# Types of an embedding bias that FP16 logits take: their own, and FP32 in host memory, which is
# converted. Read in cpp/tensorrt_llm/batch_manager/createNewDecoderRequests.cpp.
BIAS = ("torch.float16", "torch.float32")

# The batched logits post-processor's arguments, by position: ids of the executor's own, logits, the
# beams' tokens as bound vectors, the number of the stream, ids of ours. Read in
# cpp/include/tensorrt_llm/executor/types.h (LogitsPostProcessorBatched).
POST_PROCESSOR = ["req_ids", "logits", "token_ids", "stream_ptr", "client_ids"]
