"""Compute log-mel energies like Kaldi, for CAM++: 80 bands, 25 ms frames every 10 ms.

There is no dither. Samples are scaled to 16-bit integers. Each frame's mean is subtracted, then
pre-emphasis and a Povey window are applied.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from serve.speech.rate import SAMPLE_RATE

FRAME = 400  # samples per frame
HOP = 160  # samples between the starts of frames
BANDS = 80

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
