"""The one table of tensor names: ours (`serve.engine.tensor_kinds`), Hugging Face's, OpenAI's."""

import re
from typing import Literal

Naming = Literal["hf", "openai"]

# Whole names, or modules whose `.weight` and `.bias` follow.   ours: (Hugging Face, OpenAI)
_FIXED = {
    "encoder.conv1": ("model.encoder.conv1", "encoder.conv1"),
    "encoder.conv2": ("model.encoder.conv2", "encoder.conv2"),
    "encoder.positions": ("model.encoder.embed_positions.weight", "encoder.positional_embedding"),
    "encoder.norm": ("model.encoder.layer_norm", "encoder.ln_post"),
    "decoder.tokens": ("model.decoder.embed_tokens.weight", "decoder.token_embedding.weight"),
    "decoder.positions": ("model.decoder.embed_positions.weight", "decoder.positional_embedding"),
    "decoder.norm": ("model.decoder.layer_norm", "decoder.ln"),
}
# Modules inside a layer.
_IN_LAYER = {
    "attn_norm": ("self_attn_layer_norm", "attn_ln"),
    "attn.q": ("self_attn.q_proj", "attn.query"),
    "attn.k": ("self_attn.k_proj", "attn.key"),
    "attn.v": ("self_attn.v_proj", "attn.value"),
    "attn.out": ("self_attn.out_proj", "attn.out"),
    "cross_norm": ("encoder_attn_layer_norm", "cross_attn_ln"),
    "cross.q": ("encoder_attn.q_proj", "cross_attn.query"),
    "cross.k": ("encoder_attn.k_proj", "cross_attn.key"),
    "cross.v": ("encoder_attn.v_proj", "cross_attn.value"),
    "cross.out": ("encoder_attn.out_proj", "cross_attn.out"),
    "mlp_norm": ("final_layer_norm", "mlp_ln"),
    "mlp.fc1": ("fc1", "mlp.0"),
    "mlp.fc2": ("fc2", "mlp.2"),
}
_LAYERS = {"hf": "model.{side}.layers.{index}", "openai": "{side}.blocks.{index}"}
_LAYER = re.compile(r"(?P<side>encoder|decoder)\.layers\.(?P<index>\d+)\.(?P<module>.+)")


def foreign_name(name: str, naming: Naming) -> str:
    """The name that a checkpoint gives to one of our tensors.

    Raises:
        KeyError: `name` is not one of ours.
    """
    column = 0 if naming == "hf" else 1
    if name in _FIXED:
        return _FIXED[name][column]
    module, _, leaf = name.rpartition(".")
    match = _LAYER.fullmatch(module)
    if match is None:
        return f"{_FIXED[module][column]}.{leaf}"
    layer = _LAYERS[naming].format(side=match["side"], index=match["index"])
    return f"{layer}.{_IN_LAYER[match['module']][column]}.{leaf}"
