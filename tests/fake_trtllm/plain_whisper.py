"""Whisper in plain torch, from the tensors of a TensorRT-LLM checkpoint and nothing else.

Written from TensorRT-LLM's model definition (models/enc_dec/model.py: WhisperEncoder,
DecoderModel), not from Earshot's code, so that it can judge what Earshot writes.
"""

import torch.nn.functional as F


class PlainWhisper:
    """Both halves, computed in float32.

    Args:
        encoder, decoder: (config.json as a dictionary, tensors by name) of each half.
    """

    def __init__(self, encoder, decoder):
        self.encoder_config, tensors = encoder
        self.enc = {name: tensor.float() for name, tensor in tensors.items()}
        self.decoder_config, tensors = decoder
        self.dec = {name: tensor.float() for name, tensor in tensors.items()}

    def encode(self, features):
        """(batch, frames, n_mels), time first -> (batch, frames / 2, hidden)."""
        w = self.enc
        x = features.float().transpose(1, 2).unsqueeze(-1)  # the library's convolutions are 2-D
        for name, stride in (("conv1", 1), ("conv2", 2)):
            weight, bias = w[f"transformer.{name}.weight"], w[f"transformer.{name}.bias"]
            x = F.gelu(F.conv2d(x, weight, bias, stride=(stride, 1), padding=(1, 0)))
        x = x.squeeze(-1).transpose(1, 2)
        x = x + w["transformer.position_embedding.weight"][: x.shape[1]]
        heads = self.encoder_config["num_attention_heads"]
        for i in range(self.encoder_config["num_hidden_layers"]):
            p = f"transformer.layers.{i}"
            normed = self.norm(w, f"{p}.attention_layernorm", x)
            q, k, v = self.linear(w, f"{p}.attention.qkv", normed).chunk(3, dim=-1)
            x = x + self.linear(w, f"{p}.attention.dense", attend(q, k, v, heads))
            x = self.mlp(w, p, x)
        return self.norm(w, "transformer.ln_f", x)

    def cross(self, encoded):
        """Keys and values of every decoder layer's cross-attention."""
        result = []
        for i in range(self.decoder_config["num_hidden_layers"]):
            p = f"transformer.layers.{i}.cross_attention.qkv"
            result.append(self.linear(self.dec, p, encoded).chunk(3, dim=-1)[1:])
        return result

    def logits(self, tokens, cross):
        """Teacher-forced logits: (batch, time) and `cross` -> (batch, time, vocab)."""
        w = self.dec
        x = w["transformer.vocab_embedding.weight"][tokens]
        x = x + w["transformer.position_embedding.weight"][: tokens.shape[1]]
        heads = self.decoder_config["num_attention_heads"]
        for i in range(self.decoder_config["num_hidden_layers"]):
            p = f"transformer.layers.{i}"
            normed = self.norm(w, f"{p}.self_attention_layernorm", x)
            q, k, v = self.linear(w, f"{p}.self_attention.qkv", normed).chunk(3, dim=-1)
            x = x + self.linear(w, f"{p}.self_attention.dense", attend(q, k, v, heads, True))
            normed = self.norm(w, f"{p}.cross_attention_layernorm", x)
            q = self.linear(w, f"{p}.cross_attention.qkv", normed).chunk(3, dim=-1)[0]
            x = x + self.linear(w, f"{p}.cross_attention.dense", attend(q, *cross[i], heads))
            x = self.mlp(w, p, x)
        return F.linear(self.norm(w, "transformer.ln_f", x), w["lm_head.weight"])

    def mlp(self, w, p, x):
        hidden = F.gelu(self.linear(w, f"{p}.mlp.fc", self.norm(w, f"{p}.mlp_layernorm", x)))
        return x + self.linear(w, f"{p}.mlp.proj", hidden)

    @staticmethod
    def linear(w, name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    @staticmethod
    def norm(w, name, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)


def attend(q, k, v, heads, causal=False):
    """Softmax attention with `q_scaling` 1: scores are divided by the root of the head's size."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # scale 1 / sqrt(head size)
    return mixed.transpose(1, 2).flatten(2)
