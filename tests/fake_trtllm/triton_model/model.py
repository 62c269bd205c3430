"""A stand-in for Triton's C++ `tensorrt_llm` model: its tensors, over the stand-in executor.

It reads the same parameters from config.pbtxt as the C++ backend does and refuses tensors whose
shape or type the real model would not take. Requests run one after another.
"""

import json

import numpy as np
import tensorrt_llm.bindings.executor as trtllm
import torch
import triton_python_backend_utils as pb_utils

NUMBERS = (
    "encoder_output_lengths",
    "input_lengths",
    "decoder_input_lengths",
    "request_output_len",
    "end_id",
    "pad_id",
    "beam_width",
)
# What the C++ model reads outside any try block; without them its instance does not load.
UNGUARDED = (
    "gpt_model_type",
    "tokenizer_dir",
    "xgrammar_tokenizer_info_path",
    "guided_decoding_backend",
)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        for name in UNGUARDED:
            if name not in parameters:
                raise RuntimeError(f"Cannot find parameter with name: {name}")
        assert parameters["gpt_model_type"] == "inflight_fused_batching"
        assert not any(parameters[name] for name in UNGUARDED[1:])  # no guided decoding
        assert parameters["exclude_input_in_output"] == "true"
        self.executor = trtllm.Executor(
            parameters["encoder_model_path"],
            parameters["gpt_model_path"],
            trtllm.ModelType.ENCODER_DECODER,
            trtllm.ExecutorConfig(
                max_beam_width=int(parameters["max_beam_width"]),
                max_batch_size=config["max_batch_size"],
                normalize_log_probs=parameters["normalize_log_probs"] == "true",
                kv_cache_config=trtllm.KvCacheConfig(
                    enable_block_reuse=parameters["enable_kv_cache_reuse"] == "true",
                    free_gpu_memory_fraction=float(parameters["kv_cache_free_gpu_mem_fraction"]),
                    cross_kv_cache_fraction=float(parameters["cross_kv_cache_fraction"]),
                ),
            ),
        )

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensors = {t.name(): t.as_numpy() for t in request.inputs()}
        numbers = {name: int(tensors[name].reshape(())) for name in NUMBERS}
        features = tensors["encoder_input_features"]
        assert features.dtype == np.float16 and features.shape[0] == 1
        prompt = tensors["decoder_input_ids"][0].tolist()
        assert len(prompt) == numbers["decoder_input_lengths"]
        assert features.shape[1] == numbers["input_lengths"]
        one = {
            name: tensors[name].reshape(()).item() for name in tensors if tensors[name].size == 1
        }
        sampling = trtllm.SamplingConfig(
            numbers["beam_width"],
            top_k=one.get("runtime_top_k"),
            top_p=one.get("runtime_top_p"),
            temperature=one.get("temperature"),
            seed=one.get("seed"),
            length_penalty=one.get("len_penalty"),
        )
        self.executor.enqueue_request(
            trtllm.Request(
                prompt,
                numbers["request_output_len"],
                sampling_config=sampling,
                output_config=trtllm.OutputConfig(
                    return_log_probs=one["return_log_probs"],
                    exclude_input_from_output=one["exclude_input_in_output"],
                ),
                end_id=numbers["end_id"],
                embedding_bias=torch.from_numpy(tensors["embedding_bias"][0]).half(),
                encoder_input_features=torch.from_numpy(features[0].copy()),
                encoder_output_length=numbers["encoder_output_lengths"],
            )
        )
        responses = []
        while not responses:
            responses = self.executor.await_responses()
        (response,) = responses
        if response.has_error():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(response.error_msg))
        tokens = response.result.output_token_ids[0]
        padded = tokens or [numbers["pad_id"]]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("output_ids", np.array([[padded]], np.int32)),
                pb_utils.Tensor("sequence_length", np.array([[len(tokens)]], np.int32)),
                pb_utils.Tensor(
                    "cum_log_probs", np.array([response.result.cum_log_probs], np.float32)
                ),
            ]
        )
