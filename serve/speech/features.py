"""Compute log-mel spectrograms.

The result equals `WhisperFeatureExtractor` of transformers, which follows OpenAI's
`whisper/audio.py`: a 25 ms periodic Hann window every 10 ms, power spectrum, Slaney mel filters,
log10 clamped to 8 decades below the loudest bin of the window, then (x + 4) / 4. FP32 throughout.
"""

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from serve.speech.rate import SAMPLE_RATE as SAMPLE_RATE

Work = Callable[[], None]


def capture(
    work: Work, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Run the work once for compilation and planning, then capture it, and replay it once.

    Graphs captured on the same stream share the libraries' workspaces. The first replay uploads the
    graph to the device, so that no window waits for it.

    The garbage collector is off during the capture: garbage may hold a graph of a closed runtime,
    and CUDA cannot free a graph during a capture.

    Args:
        work: launches kernels without synchronizing with the device.
        pool: the memory pool, shared with graphs that never run at the same time; None: a new one.
        stream: the stream of later replays; None: any.
    """
    stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    gc_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            work()
    finally:
        if gc_enabled:
            gc.enable()
    with torch.cuda.stream(stream):
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


N_FFT = 400
HOP_LENGTH = 160
WINDOW_S = 30
WINDOW_SAMPLES = WINDOW_S * SAMPLE_RATE
N_FRAMES = WINDOW_SAMPLES // HOP_LENGTH


@functools.lru_cache(maxsize=8)
def _hann_window(device: torch.device) -> torch.Tensor:
    return torch.hann_window(N_FFT, periodic=True, device=device)


def log_mel(samples: torch.Tensor, mel_filters: torch.Tensor) -> torch.Tensor:
    """Compute the encoder's input for a batch of windows.

    Args:
        samples: float32 (batch, n), 16 kHz mono in [-1, 1], zero-padded to 30 s, or to fewer whole
            seconds for a shortened encoder window.
        mel_filters: float32 (n_mels, N_FFT // 2 + 1) from `Engine.load_mel_filters`, on the device
            of `samples`.

    Returns:
        float32 (batch, n_mels, n / HOP_LENGTH) on the same device.
    """
    spectrum = torch.stft(
        samples.float(),
        N_FFT,
        HOP_LENGTH,
        window=_hann_window(samples.device),
        center=True,
        return_complex=True,
    )
    power = spectrum[..., :-1].abs().square()  # Whisper drops the frame that begins at the end
    log_power = (mel_filters @ power).clamp_min(1e-10).log10()
    loudest = log_power.amax(dim=(1, 2), keepdim=True)
    return (torch.maximum(log_power, loudest - 8.0) + 4.0) / 4.0


class LogMel:
    """A log-mel computation of single windows on one device.

    Launching the kernels takes longer than computing them on a GPU. Windows of certain lengths are
    therefore replayed from CUDA graphs.

    Args:
        mel_filters: see `log_mel`; on any device.
        device: the device to compute on.
        lengths: lengths of windows in samples to capture.
    """

    def __init__(
        self, mel_filters: torch.Tensor, device: torch.device, lengths: Iterable[int] = ()
    ) -> None:
        self._device = device
        self._mel_filters = mel_filters.to(device)
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        for length in lengths if device.type == "cuda" else ():
            self._record(length)

    def __call__(self, samples: torch.Tensor, length: int) -> torch.Tensor:
        """Compute the log-mel of a window that silence extends to `length` samples.

        Args:
            samples: float32 (n,) on the host. A GPU copies them faster from pinned memory, but
                reads that after this has returned: pinned samples must not change until the result
                is used.
            length: a multiple of `HOP_LENGTH`, at least n.

        Returns:
            float32 (n_mels, length / HOP_LENGTH), as of `log_mel`. A GPU computes it on the
            default stream, beside the decoder's steps.
        """
        if self._device.type != "cuda":
            return self._padded(samples, length)
        with torch.cuda.stream(torch.cuda.default_stream(self._device)):
            if length not in self._recorded:
                return self._padded(samples.to(self._device, non_blocking=True), length)
            graph, samples_buffer, features_buffer = self._recorded[length]
            samples_buffer[0, : len(samples)].copy_(samples, non_blocking=True)
            samples_buffer[0, len(samples) :].zero_()
            graph.replay()
            return features_buffer.clone()

    def _padded(self, samples: torch.Tensor, length: int) -> torch.Tensor:
        padded = torch.nn.functional.pad(samples, (0, length - len(samples)))
        return log_mel(padded[None], self._mel_filters)[0]

    def _record(self, length: int) -> None:
        samples_buffer = torch.zeros((1, length), device=self._device)
        features_buffer = log_mel(samples_buffer, self._mel_filters)[0]

        def work() -> None:
            features_buffer.copy_(log_mel(samples_buffer, self._mel_filters)[0])

        with torch.cuda.device(self._device):
            self._recorded[length] = capture(work), samples_buffer, features_buffer


def with_silence(features: torch.Tensor, frames: int) -> torch.Tensor:
    """Pad log-mel (n_mels, n) that ends with silence to at least `frames` frames."""
    missing = frames - features.shape[-1]
    if missing <= 0:
        return features
    return torch.cat([features, features[:, -1:].expand(-1, missing)], dim=1)
