"""Log-mel spectrograms, batched, on whatever device the samples are on.

Equal to `WhisperFeatureExtractor` of transformers, which follows OpenAI's `whisper/audio.py`: a
25 ms periodic Hann window every 10 ms, power spectrum, Slaney mel filters, log10 clamped to 8
decades below the loudest bin of the window, then (x + 4) / 4. FP32 throughout.
"""

import functools
import math

import torch

SAMPLE_RATE = 16_000
N_FFT = 400
HOP_LENGTH = 160
WINDOW_S = 30
WINDOW_SAMPLES = WINDOW_S * SAMPLE_RATE
N_FRAMES = WINDOW_SAMPLES // HOP_LENGTH

_LINEAR_STEP_HZ = 200.0 / 3.0  # Slaney's scale is linear below 1 kHz, logarithmic above
_LOG_BEGIN_HZ = 1000.0
_LOG_BEGIN_MEL = _LOG_BEGIN_HZ / _LINEAR_STEP_HZ
_LOG_STEP = math.log(6.4) / 27.0


def _mel_to_hz(mels: torch.Tensor) -> torch.Tensor:
    above = _LOG_BEGIN_HZ * torch.exp(_LOG_STEP * (mels - _LOG_BEGIN_MEL))
    return torch.where(mels >= _LOG_BEGIN_MEL, above, mels * _LINEAR_STEP_HZ)


def mel_filters(n_mels: int) -> torch.Tensor:
    """Slaney-normalised triangular filters from 0 to 8 kHz, as in librosa.

    Returns float32 (n_mels, N_FFT // 2 + 1).
    """
    nyquist = SAMPLE_RATE / 2
    top_mel = _LOG_BEGIN_MEL + math.log(nyquist / _LOG_BEGIN_HZ) / _LOG_STEP
    edges = _mel_to_hz(torch.linspace(0, top_mel, n_mels + 2, dtype=torch.float64))
    bins = torch.linspace(0, nyquist, N_FFT // 2 + 1, dtype=torch.float64)
    widths = edges.diff()
    slopes = edges[:, None] - bins[None, :]
    rising = -slopes[:-2] / widths[:-1, None]
    falling = slopes[2:] / widths[1:, None]
    triangles = torch.minimum(rising, falling).clamp_min(0)
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]).float()


@functools.lru_cache(maxsize=8)
def _constants(n_mels: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    window = torch.hann_window(N_FFT, periodic=True, device=device)
    return window, mel_filters(n_mels).to(device)


@functools.lru_cache(maxsize=8)
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def upload(samples: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Samples on a device; from pinned memory, beside the work that the device has in hand."""
    if device.type != "cuda":
        return samples.to(device)
    with torch.cuda.stream(_copies(device)):
        there = samples.to(device, non_blocking=True)
    user = torch.cuda.current_stream(device)
    user.wait_stream(_copies(device))
    there.record_stream(user)
    return there


def log_mel(samples: torch.Tensor, n_mels: int) -> torch.Tensor:
    """Compute the encoder's input for a batch of windows.

    Args:
        samples: float32 (batch, WINDOW_SAMPLES), 16 kHz mono in [-1, 1], zero-padded to 30 s.
        n_mels: 80, or 128 for large-v3 and turbo.

    Returns:
        float32 (batch, n_mels, N_FRAMES) on the device of `samples`.
    """
    if samples.ndim != 2 or samples.shape[1] != WINDOW_SAMPLES:
        raise ValueError(
            f"expected samples of shape (batch, {WINDOW_SAMPLES}), got {tuple(samples.shape)}"
        )
    window, filters = _constants(n_mels, samples.device)
    spectrum = torch.stft(
        samples.float(), N_FFT, HOP_LENGTH, window=window, center=True, return_complex=True
    )
    power = spectrum[..., :-1].abs().square()
    log_power = (filters @ power).clamp_min(1e-10).log10()
    loudest = log_power.amax(dim=(1, 2), keepdim=True)
    return (torch.maximum(log_power, loudest - 8.0) + 4.0) / 4.0
