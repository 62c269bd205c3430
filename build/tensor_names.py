"""The table of tensor names: those of `serve.contract.engine.tensor_kinds` and of each format.

CTranslate2 stacks some matrices of attention. `build.ct2` splits them, and their parts are called
`….q`, `….k` and `….v` here.
"""

import re
from typing import Literal

Naming = Literal["hf", "openai", "ct2"]

_COLUMNS: tuple[Naming, ...] = ("hf", "openai", "ct2")
# Tensors, or modules with weight and bias.   our name: (Hugging Face, OpenAI, CTranslate2)
_FIXED = {
    "encoder.conv1": ("model.encoder.conv1", "encoder.conv1", "encoder/conv1"),
    "encoder.conv2": ("model.encoder.conv2", "encoder.conv2", "encoder/conv2"),
    "encoder.positions": (
        "model.encoder.embed_positions.weight",
        "encoder.positional_embedding",
        "encoder/position_encodings/encodings",
    ),
    "encoder.norm": ("model.encoder.layer_norm", "encoder.ln_post", "encoder/layer_norm"),
    "decoder.tokens": (
        "model.decoder.embed_tokens.weight",
        "decoder.token_embedding.weight",
        "decoder/embeddings/weight",
    ),
    "decoder.positions": (
        "model.decoder.embed_positions.weight",
        "decoder.positional_embedding",
        "decoder/position_encodings/encodings",
    ),
    "decoder.norm": ("model.decoder.layer_norm", "decoder.ln", "decoder/layer_norm"),
}
# Modules inside a layer.
_IN_LAYER = {
    "attn_norm": ("self_attn_layer_norm", "attn_ln", "self_attention/layer_norm"),
    "attn.q": ("self_attn.q_proj", "attn.query", "self_attention/linear_0.q"),
    "attn.k": ("self_attn.k_proj", "attn.key", "self_attention/linear_0.k"),
    "attn.v": ("self_attn.v_proj", "attn.value", "self_attention/linear_0.v"),
    "attn.out": ("self_attn.out_proj", "attn.out", "self_attention/linear_1"),
    "cross_norm": ("encoder_attn_layer_norm", "cross_attn_ln", "attention/layer_norm"),
    "cross.q": ("encoder_attn.q_proj", "cross_attn.query", "attention/linear_0"),
    "cross.k": ("encoder_attn.k_proj", "cross_attn.key", "attention/linear_1.k"),
    "cross.v": ("encoder_attn.v_proj", "cross_attn.value", "attention/linear_1.v"),
    "cross.out": ("encoder_attn.out_proj", "cross_attn.out", "attention/linear_2"),
    "mlp_norm": ("final_layer_norm", "mlp_ln", "ffn/layer_norm"),
    "mlp.fc1": ("fc1", "mlp.0", "ffn/linear_0"),
    "mlp.fc2": ("fc2", "mlp.2", "ffn/linear_1"),
}
_LAYERS: dict[Naming, str] = {
    "hf": "model.{side}.layers.{index}.",
    "openai": "{side}.blocks.{index}.",
    "ct2": "{side}/layer_{index}/",
}
_CT2_NORM = {"weight": "gamma", "bias": "beta"}
_LAYER = re.compile(r"(?P<side>encoder|decoder)\.layers\.(?P<index>\d+)\.(?P<module>.+)")


def source_tensor_name(name: str, naming: Naming) -> str:
    """Return the name of one of our tensors in a checkpoint's format.

    Raises:
        KeyError: `name` is not one of our tensors.
    """
    column = _COLUMNS.index(naming)
    if name in _FIXED:
        return _FIXED[name][column]
    module, _, leaf = name.rpartition(".")
    match = _LAYER.fullmatch(module)
    if match is None:
        source_name = _FIXED[module][column]
    else:
        layer = _LAYERS[naming].format(side=match["side"], index=match["index"])
        source_name = layer + _IN_LAYER[match["module"]][column]
    if naming != "ct2":
        return f"{source_name}.{leaf}"
    return f"{source_name}/{_CT2_NORM[leaf] if module.endswith('norm') else leaf}"
