"""Encode windows into their slots, kernel by kernel or by replaying CUDA graphs."""

import functools
from collections.abc import Sequence

import torch

from serve.native.batching import overwrite
from serve.native.decoder import Cache, Decoder
from serve.native.network import Whisper
from serve.native.replay import GraphCache
from serve.speech.features import N_FRAMES

LENGTHS = (N_FRAMES, 2000, 1500, 1000)  # frames of the graphs: 30, 20, 15 and 10 s
SILENCE = -0.625
"""Log-mel of digital silence next to speech with a loudest bin of 10 ** 1.5, 8 decades above it.

With louder or softer speech it differs by up to 0.2; the demo's text stays the same."""


class WindowEncoder:
    """Encodes windows and fills their slots' cross-attention caches, kernel by kernel.

    Args:
        network: the encoder.
        decoders: each decoder with the cache to fill.
        max_batch: the maximum number of windows of a batch.
    """

    def __init__(
        self, network: Whisper, decoders: Sequence[tuple[Decoder, Cache]], max_batch: int
    ) -> None:
        self._network = network
        self._decoders = decoders
        self._max_batch = max_batch
        self.replay = GraphCache()
        """The recorded graphs, if there are any."""

    def frames_of(self, frames: int) -> int:
        """Return the number of log-mel frames to which a window of `frames` is padded."""
        return frames

    def batch_of(self, waiting: int) -> int:
        """Return the number of queued windows to encode in one batch."""
        return min(waiting, self._max_batch)

    def encode(self, features: list[torch.Tensor], slots: list[int]) -> None:
        """Encode windows, each (n_mels, frames), into slots.

        The number of windows comes from `batch_of`, and `frames_of` is the same for all of them.
        """
        device = self._network.device
        encoded = self._network.encode(torch.stack([window.to(device) for window in features]))
        self._fill(encoded, torch.tensor(slots, device=device))

    def _fill(self, encoded: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the encoder's output, (batch, n_frames, d), and then silence into int64 `slots`."""
        n_frames, full_length = encoded.shape[1], self._network.dims.n_audio_ctx
        if n_frames < full_length:
            shorts = [cache.short for _, cache in self._decoders if cache.short is not None]
            if shorts and shorts[0].fits(n_frames):
                for short, silence in zip(shorts, self._silent_caches, strict=True):
                    short.prepare(n_frames, silence)
            else:
                silence = self._silence[:, n_frames:].expand(len(encoded), -1, -1)
                encoded = torch.cat([encoded, silence], dim=1)
        self._project(encoded, slots)

    def _project(self, encoded: torch.Tensor, slots: torch.Tensor) -> None:
        """Project the encoder's output into the caches of every decoder."""
        for decoder, cache in self._decoders:
            decoder.fill_cross(encoded, cache, slots)

    @functools.cached_property
    def _silence(self) -> torch.Tensor:
        """The encoder's output for silence, (1, n_audio_ctx, d)."""
        dims = self._network.dims
        shape = (1, dims.n_mels, 2 * dims.n_audio_ctx)
        return self._network.encode(torch.full(shape, SILENCE, device=self._network.device))

    @functools.cached_property
    def _silent_caches(self) -> list[torch.Tensor]:
        """Each decoder's keys and values of silence, (layers, 2, heads, n_audio_ctx, 64)."""
        first = torch.zeros(1, dtype=torch.int64, device=self._network.device)
        caches = [decoder.new_cache(1, 1) for decoder, _ in self._decoders]
        for (decoder, _), cache in zip(self._decoders, caches, strict=True):
            decoder.fill_cross(self._silence, cache, first)
        return [cache.cross[:, :, 0] for cache in caches]


class GraphEncoder(WindowEncoder):
    """Encodes by CUDA graphs of 1, 2, 4, … `max_batch` windows, each for 10, 15, 20 and 30 s."""

    def __init__(
        self, network: Whisper, decoders: Sequence[tuple[Decoder, Cache]], max_batch: int
    ) -> None:
        super().__init__(network, decoders, max_batch)
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (windows, slots)
        powers = (2**i for i in range(10) if 2**i < max_batch)
        for count in sorted({max_batch, *powers}, reverse=True):
            features = torch.zeros((count, network.dims.n_mels, N_FRAMES), device=network.device)
            self._inputs[count] = features, torch.arange(count, device=network.device)
            for frames in LENGTHS:
                works = (
                    functools.partial(work, count, frames)
                    for work in (self._encode, self._rehearse)
                )
                self.replay.add((count, frames), *works)

    def _encode(self, count: int, frames: int) -> None:
        features, slots = self._inputs[count]
        self._fill(self._network.encode(features[..., :frames]), slots)

    def _rehearse(self, count: int, frames: int) -> None:
        """Launch each kernel once; the network may be abridged to two layers at this time."""
        features, slots = self._inputs[count]
        encoded = self._network.encode(features[..., :frames])
        if frames == N_FRAMES:
            self._project(encoded, slots)

    def frames_of(self, frames: int) -> int:
        return min(length for length in LENGTHS if length >= frames)

    def batch_of(self, waiting: int) -> int:
        return max(count for count in self._inputs if count <= waiting)

    def encode(self, features: list[torch.Tensor], slots: list[int]) -> None:
        features_input, slots_input = self._inputs[len(features)]
        frames = self.frames_of(features[0].shape[-1])
        for row, window in zip(features_input, features, strict=True):
            n_frames = window.shape[-1]
            row[:, :n_frames].copy_(window, non_blocking=True)
            if n_frames < frames:  # a shorter window ends with silence
                row[:, n_frames:frames] = row[:, n_frames - 1 : n_frames]
        overwrite(slots_input, slots)
        self.replay.launch((len(features), frames))
