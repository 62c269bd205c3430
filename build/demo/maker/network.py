"""Whisper's network for training, with Hugging Face's tensor names, for windows of any length.

Differs from the published network only in what training adds: an auxiliary CTC head on the encoder,
dropout, and positions cut to the window's length, so that training may begin with short windows.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Geometry:
    """The network's dimensions."""

    vocab_size: int
    d_model: int = 256
    heads: int = 4
    ffn: int = 1024
    encoder_layers: int = 6
    decoder_layers: int = 4
    n_mels: int = 80
    source_positions: int = 1500
    target_positions: int = 448
    dropout: float = 0.05


def sinusoids(length: int, channels: int) -> torch.Tensor:
    """Whisper's fixed encoder positions: (length, channels)."""
    step = math.log(10_000) / (channels // 2 - 1)
    inverse = torch.exp(-step * torch.arange(channels // 2))
    angles = torch.arange(length)[:, None] * inverse[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Attention(nn.Module):
    """Multi-head attention; keys without bias, as Whisper has them."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        d = geometry.d_model
        self.heads = geometry.heads
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d)
        self.q_proj = nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: torch.Tensor, source: torch.Tensor, causal: bool) -> torch.Tensor:
        """x (batch, t, d) attends to source (batch, s, d)."""
        q, k, v = self._split(self.q_proj(x)), self._split(self.k_proj(source)), self.v_proj(source)
        out = F.scaled_dot_product_attention(q, k, self._split(v), is_causal=causal)
        joined: torch.Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    """One layer; with attention to the encoder if `cross`."""

    def __init__(self, geometry: Geometry, cross: bool) -> None:
        super().__init__()
        d = geometry.d_model
        self.causal = cross
        self.self_attn = Attention(geometry)
        self.self_attn_layer_norm = nn.LayerNorm(d)
        if cross:
            self.encoder_attn = Attention(geometry)
            self.encoder_attn_layer_norm = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, geometry.ffn)
        self.fc2 = nn.Linear(geometry.ffn, d)
        self.final_layer_norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(geometry.dropout)

    def forward(self, x: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        """x (batch, t, d), source (batch, s, d) if the layer is a decoder's."""
        normed = self.self_attn_layer_norm(x)
        x = x + self.dropout(self.self_attn(normed, normed, self.causal))
        if source is not None:
            normed = self.encoder_attn_layer_norm(x)
            x = x + self.dropout(self.encoder_attn(normed, source, False))
        wide = F.gelu(self.fc1(self.final_layer_norm(x)))
        out: torch.Tensor = x + self.dropout(self.fc2(wide))
        return out


class Encoder(nn.Module):
    """Log-mel to encoder states."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        d = geometry.d_model
        self.conv1 = nn.Conv1d(geometry.n_mels, d, 3, padding=1)
        self.conv2 = nn.Conv1d(d, d, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(geometry.source_positions, d)
        self.embed_positions.weight.data.copy_(sinusoids(geometry.source_positions, d))
        self.embed_positions.requires_grad_(False)
        self.layers = nn.ModuleList(
            Block(geometry, cross=False) for _ in range(geometry.encoder_layers)
        )
        self.layer_norm = nn.LayerNorm(d)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        """mel (batch, n_mels, frames) -> (batch, frames / 2, d)."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)
        x = x + self.embed_positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.layer_norm(x)
        return out


class Decoder(nn.Module):
    """Token ids and encoder states to decoder states."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        d = geometry.d_model
        self.embed_tokens = nn.Embedding(geometry.vocab_size, d)
        self.embed_positions = nn.Embedding(geometry.target_positions, d)
        self.layers = nn.ModuleList(
            Block(geometry, cross=True) for _ in range(geometry.decoder_layers)
        )
        self.layer_norm = nn.LayerNorm(d)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        nn.init.normal_(self.embed_positions.weight, std=0.01)

    def forward(self, ids: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """ids (batch, t), source (batch, s, d) -> (batch, t, d)."""
        x = self.embed_tokens(ids) + self.embed_positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, source)
        out: torch.Tensor = self.layer_norm(x)
        return out


class _Body(nn.Module):
    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.encoder = Encoder(geometry)
        self.decoder = Decoder(geometry)


class Whisper(nn.Module):
    """Encoder, decoder and the CTC head; the output projection is the token embedding."""

    def __init__(self, geometry: Geometry, ctc_labels: int) -> None:
        super().__init__()
        self.geometry = geometry
        self.model = _Body(geometry)
        self.ctc_head = nn.Linear(geometry.d_model, ctc_labels)

    def forward(self, mel: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoder logits (batch, t, vocab) and CTC logits (batch, s / 2, labels)."""
        source = self.model.encoder(mel)
        states = self.model.decoder(ids, source)
        logits = F.linear(states, self.model.decoder.embed_tokens.weight)
        halved = F.avg_pool1d(source.transpose(1, 2), 2).transpose(1, 2)
        return logits, self.ctc_head(halved)
