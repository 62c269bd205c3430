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


class Encoder(Protocol):
    """Encodes windows and fills their slots' cross caches."""

    replay: Replay  # of all that is recorded, if anything is

    def batch_of(self, waiting: int) -> int:
        """Count the waiting windows to encode in one go."""
        ...

    def encode(self, features: list[torch.Tensor], slots: list[int]) -> None:
        """Encode windows, each (n_mels, frames), into slots; as many as `batch_of` said."""
        ...


SILENCE = -0.625
"""Log-mel of digital silence beside speech whose loudest bin is 10 ** 1.5, and so 8 decades above.

Where speech is louder or softer it is up to 0.2 more or less; the demo's text stays the same."""


class EagerEncoder:
    """Kernel by kernel, any number up to `most` at a time, for each decoder with its cache.

    Of a short window only the audio is encoded; behind it stands what a window of silence gives.
    """

    def __init__(
        self, network: Whisper, decoders: Sequence[tuple[Decoder, Cache]], most: int
    ) -> None:
        self._network = network
        self._decoders = decoders
        self._most = most
        self._silence: list[torch.Tensor] = []  # of each decoder, once it is needed
        self.replay = Replay()

    def batch_of(self, waiting: int) -> int:
        """See `Encoder.batch_of`."""
        return min(waiting, self._most)

    def encode(self, features: list[torch.Tensor], slots: list[int]) -> None:
        """See `Encoder.encode`."""
        for frames in {window.shape[-1] for window in features}:
            alike = [i for i, window in enumerate(features) if window.shape[-1] == frames]
            self._encode([features[i] for i in alike], [slots[i] for i in alike])

    def _encode(self, features: list[torch.Tensor], slots: list[int]) -> None:
        device = self._network.device
        encoded = self._network.encode(torch.stack([window.to(device) for window in features]))
        target = torch.tensor(slots, device=device)
        for decoder, cache in self._decoders:
            decoder.fill_cross(encoded, cache, target)
        seen, whole = encoded.shape[1], self._network.dims.n_audio_ctx
        if seen < whole:
            for (_, cache), silence in zip(self._decoders, self._silent(), strict=True):
                for slot in slots:
                    cache.cross[:, :, slot, :, seen:] = silence[..., seen:, :]

    def _silent(self) -> list[torch.Tensor]:
        """Return keys and values of silence, (layers, 2, heads, n_audio_ctx, 64) each."""
        if not self._silence:
            dims, device = self._network.dims, self._network.device
            shape = (1, dims.n_mels, 2 * dims.n_audio_ctx)
            encoded = self._network.encode(torch.full(shape, SILENCE, device=device))
            for decoder, _ in self._decoders:
                cache = decoder.new_cache(1, 1)
                decoder.fill_cross(encoded, cache, torch.zeros(1, dtype=torch.int64, device=device))
                self._silence.append(cache.cross[:, :, 0])
        return self._silence


class GraphEncoder:
    """CUDA graphs of 1, 2, 4, ... windows up to `most`."""

    def __init__(
        self, network: Whisper, decoders: Sequence[tuple[Decoder, Cache]], most: int
    ) -> None:
        dims = network.dims
        self._network = network
        self._decoders = decoders
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # windows, and their slots
        self.replay = Replay()
        for count in sorted({most, *(2**i for i in range(10) if 2**i < most)}, reverse=True):
            features = torch.zeros((count, dims.n_mels, N_FRAMES), device=network.device)
            self._inputs[count] = features, torch.arange(count, device=network.device)
            self.replay.add(count, functools.partial(self._encode, count))

    def _encode(self, count: int) -> None:
        features, slots = self._inputs[count]
        encoded = self._network.encode(features)
        for decoder, cache in self._decoders:
            decoder.fill_cross(encoded, cache, slots)

    def batch_of(self, waiting: int) -> int:
        """See `Encoder.batch_of`."""
        return max(count for count in self._inputs if count <= waiting)

    def encode(self, features: list[torch.Tensor], slots: list[int]) -> None:
        """See `Encoder.encode`."""
        batch, target = self._inputs[len(features)]
        for row, window in zip(batch, features, strict=True):
            row.copy_(window, non_blocking=True)
        target.copy_(upload(slots, target.device))
        self.replay.launch(len(features))


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
