"""Define the two networks of diarization: embeddings of voices, and activity of speakers.

The embedding network is CAM++ of 3D-Speaker, on log-mel energies. Residual convolutions over
frequency and time are followed by a densely connected TDNN. The mean of the surrounding frames
gates each TDNN layer. Mean and standard deviation over time give the vector. The weights of a
convolution include a normalisation that follows it.

The segmentation network is pyannote's segmentation-3.0. It detects the activity of up to three
speakers in 10 s of audio. It has sinc filters and two convolutions, each pooled and normalised, a
bidirectional LSTM and linear layers. Its seven classes are the sets of up to two of three speakers
active in a frame.
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
FBANK_HOP = 160  # samples between the starts of frames

_FFT = 512
_PREEMPHASIS = 0.97
_LOWEST_HZ, _HIGHEST_HZ = 20.0, SAMPLE_RATE / 2


def fbank(samples: Tensor) -> Tensor:
    """Compute log-mel energies of whole frames.

    Args:
        samples: float32 (..., n) in [-1, 1] at 16 kHz, n >= FRAME.

    Returns:
        float32 (..., (n - FRAME) // FBANK_HOP + 1, BANDS).
    """
    frames = samples.unfold(-1, FRAME, FBANK_HOP) * 32768.0
    frames = frames - frames.mean(-1, keepdim=True)
    previous = functional.pad(frames, (1, 0), mode="replicate")[..., :-1]
    frames = (frames - _PREEMPHASIS * previous) * _window(samples.device)
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


SAMPLES = 160_000  # samples per window: 10 s at 16 kHz
FRAMES = 589  # frames per window
HOP = 270  # samples between the starts of frames
OFFSET = 360  # samples before the first frame, which starts near its receptive field's middle
SPEAKERS = 3  # maximum speakers per window

_SETS = ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))  # active speakers by class
_CHANNELS = (1, 80, 60, 60)
_KERNELS = (251, 5, 5)
_STRIDES = (10, 1, 1)
_BATCH = 32  # windows per convolution, to limit memory


class Segmentation(nn.Module):
    """The segmentation network; the order of the speakers differs between windows."""

    members: Tensor

    def __init__(self) -> None:
        super().__init__()
        ends = zip(_CHANNELS[:-1], _CHANNELS[1:], _KERNELS, _STRIDES, strict=True)
        self.norm = nn.InstanceNorm1d(1, affine=True)
        self.convs = nn.ModuleList(
            nn.Conv1d(in_channels, out_channels, kernel, stride, bias=in_channels > 1)
            for in_channels, out_channels, kernel, stride in ends
        )
        self.norms = nn.ModuleList(nn.InstanceNorm1d(n, affine=True) for n in _CHANNELS[1:])
        self.lstm = nn.LSTM(60, 128, num_layers=4, bidirectional=True, batch_first=True)
        self.linears = nn.ModuleList([nn.Linear(256, 128), nn.Linear(128, 128)])
        self.classifier = nn.Linear(128, len(_SETS))
        members = torch.tensor([[float(i in active) for i in range(SPEAKERS)] for active in _SETS])
        self.register_buffer("members", members, persistent=False)

    def forward(self, windows: Tensor) -> Tensor:
        """Compute the probability of each set of speakers.

        Args:
            windows: (batch, SAMPLES), 16 kHz mono in [-1, 1].

        Returns:
            (batch, FRAMES, 7), log-probabilities.
        """
        firsts = range(0, len(windows), _BATCH)
        x = torch.cat([self._convolved(windows[first : first + _BATCH]) for first in firsts])
        x, _ = self.lstm(x.transpose(1, 2))
        for linear in self.linears:
            x = functional.leaky_relu(linear(x))
        logits: Tensor = self.classifier(x)
        return functional.log_softmax(logits, dim=-1)

    def _convolved(self, windows: Tensor) -> Tensor:
        x: Tensor = self.norm(windows[:, None])
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = conv(x).abs() if index == 0 else conv(x)
            x = functional.leaky_relu(norm(functional.max_pool1d(x, 3)))
        return x

    def activity(self, windows: Tensor) -> Tensor:
        """Compute the probability of each speaker's activity, (batch, FRAMES, SPEAKERS)."""
        sets: Tensor = self(windows)
        return sets.exp() @ self.members
