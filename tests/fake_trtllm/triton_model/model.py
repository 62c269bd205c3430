"""A stand-in for Triton's C++ `tensorrt_llm` model: its tensors, over the stand-in executor.

It reads the same parameters from config.pbtxt as the C++ backend does and refuses tensors whose
shape or type the real model would not take. Requests run one after another.
"""

import json

import facts
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


def truth(text):
    """A boolean as the C++ model reads it."""
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        for name in facts.UNGUARDED:
            if name not in parameters:
                raise RuntimeError(f"Cannot find parameter with name: {name}")
        assert parameters["gpt_model_type"] == "inflight_fused_batching"
        assert not parameters["guided_decoding_backend"]

        def read(name, kind):
            try:
                return kind(parameters[name])
            except (KeyError, ValueError):
                return facts.GUARDED[name]

        self.exclude_input = read("exclude_input_in_output", truth)
        self.executor = trtllm.Executor(
            read("encoder_model_path", str),
            read("gpt_model_path", str),
            trtllm.ModelType.ENCODER_DECODER,
            trtllm.ExecutorConfig(  # of the batch it says nothing: it is the engine's
                max_beam_width=read("max_beam_width", int),
                normalize_log_probs=read("normalize_log_probs", truth),
                enable_chunked_context=read("enable_chunked_context", truth),
                kv_cache_config=trtllm.KvCacheConfig(
                    enable_block_reuse=read("enable_kv_cache_reuse", truth),
                    free_gpu_memory_fraction=read("kv_cache_free_gpu_mem_fraction", float),
                    cross_kv_cache_fraction=read("cross_kv_cache_fraction", float),
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
                    exclude_input_from_output=one.get(
                        "exclude_input_in_output", self.exclude_input
                    ),
                ),
                end_id=numbers["end_id"],
                embedding_bias=torch.from_numpy(tensors["embedding_bias"][0].copy()),
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
