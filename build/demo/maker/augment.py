"""Making windows harder on the device: reverberation, filters, noise, gain, spectrogram masks.

Sound is float32 (batch, samples); every effect is drawn per window.
"""

import torch
from torch.nn import functional as F

from build.demo.maker.sound import SAMPLE_RATE

_IMPULSE = 8000
_EQ_POINTS = 10
SPEECH_SNR_DB = (4.0, 40.0)


def _chance(batch: int, share: float, device: torch.device) -> torch.Tensor:
    return (torch.rand(batch, 1, device=device) < share).float()


def _uniform(batch: int, low: float, high: float, device: torch.device) -> torch.Tensor:
    return torch.empty(batch, 1, device=device).uniform_(low, high)


def _fft_size(samples: int) -> int:
    """A size not below `samples` whose prime factors are 2, 3 and 5 only."""
    best = 1 << (samples - 1).bit_length()
    for three in (1, 3, 9, 27):
        for five in (1, 5, 25, 125):
            odd = three * five
            best = min(best, odd << max((-(-samples // odd) - 1).bit_length(), 0))
    return best


def impulse_responses(batch: int, device: torch.device) -> torch.Tensor:
    """Room responses (batch, n): the direct sound, then in 40 % of windows a decaying noise."""
    times = torch.arange(_IMPULSE, device=device) / SAMPLE_RATE
    decay = torch.exp(-6.9 * times / _uniform(batch, 0.06, 0.6, device))
    tail = torch.randn(batch, _IMPULSE, device=device) * decay
    tail = tail / tail.norm(dim=1, keepdim=True)
    wet = _uniform(batch, 0.05, 0.7, device) * _chance(batch, 0.4, device)
    response = wet * tail
    response[:, 0] += 1.0
    out: torch.Tensor = response
    return out


def equaliser(batch: int, bins: int, device: torch.device) -> torch.Tensor:
    """Gains per frequency (batch, bins): a smooth random curve, sometimes a narrower band."""
    decibels = torch.randn(batch, 1, _EQ_POINTS, device=device) * 5.0
    curve = F.interpolate(decibels, size=512, mode="linear", align_corners=True)[:, 0]
    hertz = torch.linspace(0, SAMPLE_RATE / 2, bins, device=device)
    warped = (511 * torch.log1p(hertz / 500) / torch.log1p(hertz[-1] / 500)).long()
    curve = curve[:, warped] * _chance(batch, 0.7, device)
    top = _uniform(batch, 2800, 7500, device)
    bottom = _uniform(batch, 60, 350, device)
    cut = 60 * (hertz / top - 1).clamp(0, 1) * _chance(batch, 0.3, device)
    rumble = 40 * (1 - hertz / bottom).clamp(0, 1) * _chance(batch, 0.3, device)
    gains: torch.Tensor = torch.pow(10.0, (curve - cut - rumble) / 20)
    return gains


def _noise_spectrum(batch: int, bins: int, size: int, device: torch.device) -> torch.Tensor:
    """Coloured noise of unit power as a spectrum."""
    slope = _uniform(batch, 0.0, 1.1, device)
    ramp = torch.arange(bins, device=device).clamp_min(bins // 200) / bins
    shape = ramp[None, :] ** -slope * equaliser(batch, bins, device)
    spectrum = torch.randn(batch, bins, 2, device=device)
    spectrum = torch.view_as_complex(spectrum) * shape
    power = spectrum.abs().square().sum(1, keepdim=True) * 2 / size**2
    return spectrum / power.sqrt()


def corrupt(speech: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Noisy, reverberant, filtered speech; digital silence after `ends` (batch,) samples."""
    batch, samples = speech.shape
    device = speech.device
    size = _fft_size(samples + _IMPULSE)
    bins = size // 2 + 1
    response = torch.fft.rfft(impulse_responses(batch, device), size)
    spectrum = torch.fft.rfft(speech, size) * response * equaliser(batch, bins, device)
    active = (speech != 0).float().sum(1, keepdim=True)
    level = (speech.square().sum(1, keepdim=True) / active.clamp_min(1)).sqrt()
    ratio = torch.pow(10.0, -_uniform(batch, *SPEECH_SNR_DB, device) / 20)
    alone = torch.pow(10.0, _uniform(batch, -4.5, -0.7, device))
    amplitude = torch.where(active > 0, level * ratio, alone) * _chance(batch, 0.6, device)
    spectrum = spectrum + amplitude * _noise_spectrum(batch, bins, size, device)
    out = torch.fft.irfft(spectrum, size)[:, :samples]
    times = torch.arange(samples, device=device)
    hum = torch.sin(times[None] * _uniform(batch, 0.01, 1.0, device))
    out = out + hum * _uniform(batch, 0.0, 0.03, device) * _chance(batch, 0.08, device)
    out = out * (times[None, :] < ends[:, None])
    peak = out.abs().amax(1, keepdim=True).clamp_min(1e-6)
    clipped = 1 + 1.5 * torch.rand_like(peak) * _chance(batch, 0.08, device)
    loud = torch.pow(10.0, _uniform(batch, -1.5, 0.0, device))
    has_speech = active > 0
    out = torch.where(has_speech, out / peak * clipped, out).clamp(-1, 1)
    return torch.where(has_speech, out * loud, out)


def warp_mel(mel: torch.Tensor) -> torch.Tensor:
    """Stretch the mel axis of half the windows by up to 12 %: other lengths of vocal tract."""
    batch, bins, frames = mel.shape
    factor = 1 + _uniform(batch, -0.12, 0.12, mel.device) * _chance(batch, 0.6, mel.device)
    position = (torch.arange(bins, device=mel.device)[None] * factor).clamp(0, bins - 1)
    lower = position.long().clamp_max(bins - 2)
    share = (position - lower)[:, :, None]
    index = lower[:, :, None].expand(batch, bins, frames)
    return mel.gather(1, index) * (1 - share) + mel.gather(1, index + 1) * share


def _masks(batch: int, size: int, count: int, widest: int, device: torch.device) -> torch.Tensor:
    """True where kept, (batch, size)."""
    starts = torch.rand(batch, count, 1, device=device) * size
    widths = torch.rand(batch, count, 1, device=device) * widest
    at = torch.arange(size, device=device)
    return ~((at >= starts) & (at < starts + widths)).any(1)


def mask_mel(mel: torch.Tensor) -> torch.Tensor:
    """SpecAugment on two thirds of the windows: bands and moments set to the window's mean."""
    batch, bins, frames = mel.shape
    keep = _masks(batch, bins, 2, 12, mel.device)[:, :, None]
    keep = keep & _masks(batch, frames, max(frames // 250, 1), 18, mel.device)[:, None, :]
    keep = keep | (torch.rand(batch, 1, 1, device=mel.device) < 0.33)
    return torch.where(keep, mel, mel.mean((1, 2), keepdim=True))
