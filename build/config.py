"""The configuration of builds: serve's keys, and the section [build] with all its defaults."""

import dataclasses
from pathlib import Path

import serve.contract.config
from serve.contract.config import Precision, read_config
from serve.contract.fields import Device, Name, NameOrNone
from serve.contract.runtimes import RuntimeName


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """How to build an engine from a checkpoint."""

    # `base` or `tiny.en`, a hub id, a Hugging Face or CTranslate2 folder, or an OpenAI .pt file.
    checkpoint: Name = "base"
    # Precision of the weights.
    precision: Precision = "int8"
    # Runtime of the engine.
    runtime: RuntimeName = "native"
    # Folder or hub id with tokenizer.json; only needed for a .pt of another size than OpenAI's.
    tokenizer: NameOrNone = ""
    # Smaller checkpoint with the same encoder; its decoder proposes tokens. Native engines only.
    draft: NameOrNone = ""
    # Whether to compensate INT8 rounding on calibration clips, which the checkpoint decodes first.
    calibrate: bool = False
    # File that `python -m eval trust` has fitted; it turns scores of words into probabilities.
    confidence: NameOrNone = ""
    # Device on which the checkpoint runs for calibration and verification.
    device: Device = "cpu"
    # Manifest of clips of people; an engine is compared with its checkpoint on four of them.
    verify_clips: Name = "tests/data/demo.jsonl"


@dataclasses.dataclass(frozen=True)
class BuildProduct(serve.contract.config.Config):
    """The configuration of one engine: how to build it and how to serve it."""

    build: BuildConfig = BuildConfig()


def load_config(path: str | Path) -> BuildProduct:
    """Read a TOML file; see `serve.contract.config.read_config`."""
    return read_config(path, BuildProduct)
