"""The encoding of windows into their slots: kernel by kernel, or replayed from CUDA graphs."""

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

from serve.contract.config import RuntimeConfig
from serve.native.decoder import Cache, Decoder
from serve.native.feeds import upload
from serve.native.network import Whisper
from serve.native.parts import Parts
from serve.native.replay import Replay
from serve.speech.features import N_FRAMES

_LENGTHS = (N_FRAMES, 2000, 1500, 1000)  # of graphs: 30, 20, 15 and 10 s, the largest first


class Encoder(Protocol):
    """Encodes windows and fills their slots' cross caches."""

    replay: Replay  # of all that is recorded, if anything is

    def frames_of(self, frames: int) -> int:
        """Tell in how many frames of log-mel a window of so many is encoded."""
        ...

    def batch_of(self, waiting: int) -> int:
        """Count the waiting windows to encode in one go."""
        ...

    def encode(self, features: list[torch.Tensor], slots: list[int]) -> None:
        """Encode windows, each (n_mels, frames), into slots.

        There are as many as `batch_of` said, and `frames_of` says the same of each.
        """
        ...


SILENCE = -0.625
"""Log-mel of digital silence beside speech whose loudest bin is 10 ** 1.5, and so 8 decades above.

Where speech is louder or softer it is up to 0.2 more or less; the demo's text stays the same."""


class _Slots:
    """Fills slots with what windows give, and behind a short one with what silence gives."""

    def __init__(self, network: Whisper, decoders: Sequence[tuple[Decoder, Cache]]) -> None:
        self._network = network
        self._decoders = decoders

    def fill(self, encoded: torch.Tensor, slots: torch.Tensor) -> None:
        """Fill int64 `slots` with the encoder's output, (batch, seen, d)."""
        seen, whole = encoded.shape[1], self._network.dims.n_audio_ctx
        if seen < whole:
            shorts = [cache.short for _, cache in self._decoders if cache.short is not None]
            if shorts and shorts[0].fits(seen):
                for short, silence in zip(shorts, self._silent_caches, strict=True):
                    short.prepare(seen, silence)
            else:
                behind = self._silence[:, seen:].expand(len(encoded), -1, -1)
                encoded = torch.cat([encoded, behind], dim=1)
        self.project(encoded, slots)

    def project(self, encoded: torch.Tensor, slots: torch.Tensor) -> None:
        """Fill slots as far as the encoder's output goes."""
        for decoder, cache in self._decoders:
            decoder.fill_cross(encoded, cache, slots)

    @functools.cached_property
    def _silence(self) -> torch.Tensor:
        """What the encoder gives for silence, (1, n_audio_ctx, d)."""
        dims = self._network.dims
        shape = (1, dims.n_mels, 2 * dims.n_audio_ctx)
        return self._network.encode(torch.full(shape, SILENCE, device=self._network.device))

    @functools.cached_property
    def _silent_caches(self) -> list[torch.Tensor]:
        """Keys and values of silence, (layers, 2, heads, n_audio_ctx, 64), of each decoder."""
        first = torch.zeros(1, dtype=torch.int64, device=self._network.device)
        caches = [decoder.new_cache(1, 1) for decoder, _ in self._decoders]
        for (decoder, _), cache in zip(self._decoders, caches, strict=True):
            decoder.fill_cross(self._silence, cache, first)
        return [cache.cross[:, :, 0] for cache in caches]


class EagerEncoder:
    """Kernel by kernel, any number up to `most` at a time, for each decoder with its cache."""

    def __init__(
        self, network: Whisper, decoders: Sequence[tuple[Decoder, Cache]], most: int
    ) -> None:
        self._network = network
        self._slots = _Slots(network, decoders)
        self._most = most
        self.replay = Replay()

    def frames_of(self, frames: int) -> int:
        """See `Encoder.frames_of`."""
        return frames

    def batch_of(self, waiting: int) -> int:
        """See `Encoder.batch_of`."""
        return min(waiting, self._most)

    def encode(self, features: list[torch.Tensor], slots: list[int]) -> None:
        """See `Encoder.encode`."""
        device = self._network.device
        encoded = self._network.encode(torch.stack([window.to(device) for window in features]))
        self._slots.fill(encoded, torch.tensor(slots, device=device))


class GraphEncoder:
    """CUDA graphs of 1, 2, 4, ... windows up to `most`, each of 10, 15, 20 and 30 s."""

    def __init__(
        self, network: Whisper, decoders: Sequence[tuple[Decoder, Cache]], most: int
    ) -> None:
        self._network = network
        self._slots = _Slots(network, decoders)
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # windows, and their slots
        self.replay = Replay()
        for count in sorted({most, *(2**i for i in range(10) if 2**i < most)}, reverse=True):
            features = torch.zeros((count, network.dims.n_mels, N_FRAMES), device=network.device)
            self._inputs[count] = features, torch.arange(count, device=network.device)
            for frames in _LENGTHS:
                works = (
                    functools.partial(work, count, frames)
                    for work in (self._encode, self._rehearse)
                )
                self.replay.add((count, frames), *works)

    def _encode(self, count: int, frames: int) -> None:
        features, slots = self._inputs[count]
        self._slots.fill(self._network.encode(features[..., :frames]), slots)

    def _rehearse(self, count: int, frames: int) -> None:
        """Launch the kernels, on what layers the network has then."""
        features, slots = self._inputs[count]
        encoded = self._network.encode(features[..., :frames])
        if frames == N_FRAMES:
            self._slots.project(encoded, slots)

    def frames_of(self, frames: int) -> int:
        """See `Encoder.frames_of`."""
        return min(length for length in _LENGTHS if length >= frames)

    def batch_of(self, waiting: int) -> int:
        """See `Encoder.batch_of`."""
        return max(count for count in self._inputs if count <= waiting)

    def encode(self, features: list[torch.Tensor], slots: list[int]) -> None:
        """See `Encoder.encode`."""
        batch, target = self._inputs[len(features)]
        frames = self.frames_of(features[0].shape[-1])
        for row, window in zip(batch, features, strict=True):
            seen = window.shape[-1]
            row[:, :seen].copy_(window, non_blocking=True)
            row[:, seen:frames] = row[:, seen - 1 : seen]  # a short one ends with silence
        target.copy_(upload(slots, target.device))
        self.replay.launch((len(features), frames))


def open_encoder(config: RuntimeConfig, parts: Parts, batch: int) -> Encoder:
    """Make the encoder of windows that is configured.

    Args:
        config: how many at a time without graphs.
        parts: whose slots are filled.
        batch: the most windows of a graph.
    """
    if parts.graphs:
        return GraphEncoder(parts.network, parts.decoders, batch)
    return EagerEncoder(parts.network, parts.decoders, config.encoder_batch)
