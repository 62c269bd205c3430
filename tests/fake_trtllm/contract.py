"""What TensorRT-LLM 1.2 expects of a Whisper checkpoint, stated from its converter and loader.

Sources: examples/models/core/whisper/convert_checkpoint.py and models/enc_dec/model.py. Nothing
here comes from Earshot's code.
"""

# name: (mels, width, heads, encoder layers, decoder layers, vocabulary)
SIZES = {
    "tiny": (80, 384, 6, 4, 4, 51865),
    "tiny.en": (80, 384, 6, 4, 4, 51864),
    "base": (80, 512, 8, 6, 6, 51865),
    "base.en": (80, 512, 8, 6, 6, 51864),
    "small": (80, 768, 12, 12, 12, 51865),
    "small.en": (80, 768, 12, 12, 12, 51864),
    "medium": (80, 1024, 16, 24, 24, 51865),
    "medium.en": (80, 1024, 16, 24, 24, 51864),
    "large-v2": (80, 1280, 20, 32, 32, 51865),
    "large-v3": (128, 1280, 20, 32, 32, 51866),
    "large-v3-turbo": (128, 1280, 20, 32, 4, 51866),
    "distil-small.en": (80, 768, 12, 12, 4, 51864),
    "distil-medium.en": (80, 1024, 16, 24, 2, 51864),
    "distil-large-v2": (80, 1280, 20, 32, 2, 51865),
    "distil-large-v3": (128, 1280, 20, 32, 2, 51866),
}


def encoder_shapes(mels, d, layers):
    """name -> shape of every encoder tensor. No other feed-forward width is known there."""
    ffn = 4 * d
    shapes = {
        "transformer.position_embedding.weight": (1500, d),
        "transformer.conv1.weight": (d, mels, 3, 1),
        "transformer.conv1.bias": (d,),
        "transformer.conv2.weight": (d, d, 3, 1),
        "transformer.conv2.bias": (d,),
        "transformer.ln_f.weight": (d,),
        "transformer.ln_f.bias": (d,),
    }
    for i in range(layers):
        p = f"transformer.layers.{i}."
        shapes |= {
            p + "attention_layernorm.weight": (d,),
            p + "attention_layernorm.bias": (d,),
            p + "attention.qkv.weight": (3 * d, d),
            p + "attention.qkv.bias": (3 * d,),
            p + "attention.dense.weight": (d, d),
            p + "attention.dense.bias": (d,),
            p + "mlp_layernorm.weight": (d,),
            p + "mlp_layernorm.bias": (d,),
            p + "mlp.fc.weight": (ffn, d),
            p + "mlp.fc.bias": (ffn,),
            p + "mlp.proj.weight": (d, ffn),
            p + "mlp.proj.bias": (d,),
        }
    return shapes


def decoder_shapes(d, layers, vocab, ffn=None, ctx=448):
    """name -> shape of every decoder tensor."""
    ffn = ffn or 4 * d
    shapes = {
        "transformer.vocab_embedding.weight": (vocab, d),
        "transformer.position_embedding.weight": (ctx, d),
        "lm_head.weight": (vocab, d),
        "transformer.ln_f.weight": (d,),
        "transformer.ln_f.bias": (d,),
    }
    for i in range(layers):
        p = f"transformer.layers.{i}."
        for kind in ("self_attention", "cross_attention"):
            shapes |= {
                p + f"{kind}_layernorm.weight": (d,),
                p + f"{kind}_layernorm.bias": (d,),
                p + f"{kind}.qkv.weight": (3 * d, d),
                p + f"{kind}.qkv.bias": (3 * d,),
                p + f"{kind}.dense.weight": (d, d),
                p + f"{kind}.dense.bias": (d,),
            }
        shapes |= {
            p + "mlp_layernorm.weight": (d,),
            p + "mlp_layernorm.bias": (d,),
            p + "mlp.fc.weight": (ffn, d),
            p + "mlp.fc.bias": (ffn,),
            p + "mlp.proj.weight": (d, ffn),
            p + "mlp.proj.bias": (d,),
        }
    return shapes


def is_quantised(name):
    """Whether the loader turns a tensor into INT8 under W8A16: chosen by its name's end."""
    ends = ("qkv.weight", "dense.weight", "fc.weight", "proj.weight")
    return name.endswith(ends)
