"""Compute the embedding of a voice: CAM++ of 3D-Speaker, on log-mel energies.

Residual convolutions over frequency and time are followed by a densely connected TDNN. The mean of
the surrounding frames gates each TDNN layer. Mean and standard deviation over time give the
vector. The weights of a convolution include a normalisation that follows it.
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from serve.speech.rate import SAMPLE_RATE

BANDS = 80  # bands of the log-mel energies
SIZE = 192  # size of a vector

_HEAD = 32  # channels of the residual convolutions
_GROWTH = 32  # channels that a dense layer adds
_BOTTLENECK = 128
_BLOCKS = ((12, 1), (24, 2), (16, 2))  # number and dilation of each block's dense layers
_CONTEXT = 100  # frames in the mean that gates a layer

FRAME = 400  # samples per frame
HOP = 160  # samples between the starts of frames

_FFT = 512
_PREEMPHASIS = 0.97
_LOWEST_HZ, _HIGHEST_HZ = 20.0, SAMPLE_RATE / 2


def fbank(samples: Tensor) -> Tensor:
    """Compute log-mel energies of whole frames.

    Args:
        samples: float32 (..., n) in [-1, 1] at 16 kHz, n >= FRAME.

    Returns:
        float32 (..., (n - FRAME) // HOP + 1, BANDS).
    """
    frames = samples.unfold(-1, FRAME, HOP) * 32768.0
    frames = frames - frames.mean(-1, keepdim=True)
    before = functional.pad(frames, (1, 0), mode="replicate")[..., :-1]
    frames = (frames - _PREEMPHASIS * before) * _window(samples.device)
    power = torch.fft.rfft(frames, _FFT).abs().square()[..., :-1]
    energies: Tensor = power @ _bands(samples.device)
    return energies.clamp_min(torch.finfo(torch.float32).eps).log()


@functools.cache
def _window(device: torch.device) -> Tensor:
    return torch.hann_window(FRAME, periodic=False, device=device).pow(0.85)


@functools.cache
def _bands(device: torch.device) -> Tensor:
    """Return triangular filters, evenly spaced on the mel scale, (_FFT // 2, BANDS)."""
    lowest, highest = (_mel(torch.tensor(hertz)) for hertz in (_LOWEST_HZ, _HIGHEST_HZ))
    step = (highest - lowest) / (BANDS + 1)
    mels = _mel(torch.arange(_FFT // 2) * (SAMPLE_RATE / _FFT))[:, None]
    left = lowest + torch.arange(BANDS) * step
    rise, fall = (mels - left) / step, (left + 2 * step - mels) / step
    return torch.minimum(rise, fall).clamp_min(0).to(device)


def _mel(hertz: Tensor) -> Tensor:
    return 1127.0 * torch.log1p(hertz / 700.0)


class _Residual(nn.Module):
    """Two convolutions with a shortcut; `stride` applies to frequency."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(_HEAD, _HEAD, 3, (stride, 1), padding=1)
        self.conv2 = nn.Conv2d(_HEAD, _HEAD, 3, padding=1)
        self.shortcut = nn.Conv2d(_HEAD, _HEAD, 1, (stride, 1)) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(functional.relu(self.conv1(x)))
        return functional.relu(y + self.shortcut(x))


class _ScaledReLU(nn.Module):
    """A normalisation before a convolution, as one scale and shift per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(torch.addcmul(self.shift, x, self.scale))


class _Dense(nn.Module):
    """A layer that appends channels to its input, gated by the mean of the context."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.enter = _ScaledReLU(channels)
        self.bottleneck = nn.Conv1d(channels, _BOTTLENECK, 1)
        self.local = nn.Conv1d(
            _BOTTLENECK, _GROWTH, 3, padding=dilation, dilation=dilation, bias=False
        )
        self.gate1 = nn.Conv1d(_BOTTLENECK, _BOTTLENECK // 2, 1)
        self.gate2 = nn.Conv1d(_BOTTLENECK // 2, _GROWTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bottleneck(self.enter(x)))
        means = functional.avg_pool1d(y, _CONTEXT, _CONTEXT, ceil_mode=True)
        context = y.mean(-1, keepdim=True) + means
        gate = torch.sigmoid(self.gate2(functional.relu(self.gate1(context))))
        gates = gate.repeat_interleave(_CONTEXT, dim=-1)[..., : y.shape[-1]]
        return torch.cat([x, self.local(y) * gates], dim=1)


class Embedding(nn.Module):
    """The embedding network; vectors of one voice have a high cosine similarity."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, _HEAD, 3, padding=1)
        self.residuals = nn.Sequential(*(_Residual(stride) for stride in (2, 1, 2, 1)))
        self.leave = nn.Conv2d(_HEAD, _HEAD, 3, (2, 1), padding=1)
        channels = 128
        self.tdnn = nn.Conv1d(_HEAD * BANDS // 8, channels, 5, stride=2, padding=2)
        layers = list[nn.Module]()
        for count, dilation in _BLOCKS:
            for _ in range(count):
                layers.append(_Dense(channels, dilation))
                channels += _GROWTH
            layers += [_ScaledReLU(channels), nn.Conv1d(channels, channels // 2, 1, bias=False)]
            channels //= 2
        self.layers = nn.Sequential(*layers, _ScaledReLU(channels))
        self.vector = nn.Linear(2 * channels, SIZE)

    def forward(self, features: Tensor) -> Tensor:
        """Compute vectors, (batch, SIZE), from log-mel energies, (batch, frames, BANDS).

        The energies come from `fbank`, minus their mean over time.
        """
        x = functional.relu(self.enter(features.transpose(1, 2)[:, None]))
        x = functional.relu(self.leave(self.residuals(x))).flatten(1, 2)
        x = self.layers(functional.relu(self.tdnn(x)))
        vectors: Tensor = self.vector(torch.cat([x.mean(-1), x.std(-1)], dim=1))
        return vectors
