"""An engine of a published shape with random weights, for measuring speed without a download.

They say nonsense at the speed of the real ones. The engine's own suppress list holds end-of-text,
so every window goes on to its `max_tokens` under all rules, and the runtime does not know
beforehand: lengths are forced honestly.
"""

from pathlib import Path

import torch

from serve.config import Config
from serve.engine import Dims, Engine, Manifest, Source, TokenizerFacts, tensor_specs
from serve.errors import ConfigError

SHAPES = {  # what `build.checkpoint` ends with -> published sizes
    "whisper-large-v3-turbo": Dims(
        128, 1500, 1280, 20, 32, 5120, 51866, 448, 1280, 20, 4, 5120
    ),
    "whisper-large-v3": Dims(128, 1500, 1280, 20, 32, 5120, 51866, 448, 1280, 20, 32, 5120),
}  # fmt: skip


class RandomEngine(Engine):
    """An engine of a shape whose weights are made up on the device that asks for them."""

    def load_weights(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Random tensors as `Engine.load_weights` gives them."""
        generator = torch.Generator(device).manual_seed(0)
        weights = {}
        for name, spec in tensor_specs(self.manifest.dims, self.manifest.precision).items():
            if spec.dtype == torch.int8:
                value = torch.randint(
                    -127, 128, spec.shape, generator=generator, device=device, dtype=torch.int8
                )
            elif name.endswith("scale"):
                depth = self.manifest.dims.n_audio_state
                value = torch.full(spec.shape, depth**-0.5 / 64, device=device)
            else:
                value = torch.randn(spec.shape, generator=generator, device=device)
                value = value * 0.02 + ("norm.weight" in name)
            weights[name] = value.to(spec.dtype)
        return weights


def random_engine(config: Config) -> Engine:
    """The engine of the config's published shape with random weights.

    Raises:
        ConfigError: the config names no published shape.
    """
    dims = SHAPES.get(config.build.checkpoint.rpartition("/")[2])
    if dims is None:
        raise ConfigError(
            f"--random-weights knows the shapes {', '.join(SHAPES)}, not build.checkpoint = "
            f"{config.build.checkpoint!r}"
        )
    facts = TokenizerFacts(
        eot=50257, sot=50258, sot_prev=50362, no_speech=50363, no_timestamps=50364,
        timestamp_begin=50365, transcribe=50360, translate=50359, languages={"en": 50259},
        suppress_tokens=(50257, 50258), begin_suppress_tokens=(220,),
        max_initial_timestamp_index=50, alignment_heads=(),
    )  # fmt: skip
    manifest = Manifest(
        1, "native", config.build.precision, dims, facts, Source("random", ""), {}, {}, {}, 0,
        None, {},
    )  # fmt: skip
    return RandomEngine(Path(), manifest)
