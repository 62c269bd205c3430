"""Configuration of builds: serve's, and the section [build]. The only home of its defaults."""

import dataclasses
from pathlib import Path

import serve.contract.config
from serve.contract.config import Precision, read_config
from serve.contract.fields import Device, Name, NameOrNone
from serve.contract.runtimes import RuntimeName


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """The way from a checkpoint to an engine."""

    # `base` or `tiny.en`, a hub id, a Hugging Face or CTranslate2 folder, or OpenAI's .pt file.
    checkpoint: Name = "base"
    # Precision of the weights.
    precision: Precision = "int8"
    # Runtime that the engine is for.
    runtime: RuntimeName = "native"
    # Folder or hub id with tokenizer.json; needed only for a .pt of a size that is not OpenAI's.
    tokenizer: NameOrNone = ""
    # Smaller checkpoint on the same encoder, whose decoder guesses; native engines alone.
    draft: NameOrNone = ""
    # Whether INT8 rounding is compensated on speech, which the checkpoint hears first.
    calibrate: bool = False
    # File that `python -m eval trust` fitted, by which words say how likely they are right.
    confidence: NameOrNone = ""
    # The one where a checkpoint runs to be calibrated and compared.
    device: Device = "cpu"
    # Manifest of clips of people; an engine is compared with its checkpoint on four of them.
    verify_clips: Name = "tests/data/demo.jsonl"


@dataclasses.dataclass(frozen=True)
class BuildProduct(serve.contract.config.Config):
    """One product: what to build, and how it will be served."""

    build: BuildConfig = BuildConfig()


def load_config(path: str | Path) -> BuildProduct:
    """Read a product's TOML file; see `serve.contract.config.read_config`."""
    return read_config(path, BuildProduct)
