"""Configuration of builds: serve's, and the section [build]. The only home of its defaults."""

import dataclasses
from pathlib import Path

import serve.contract.config
from serve.contract.config import Precision, read_config
from serve.contract.fields import Device, Name, NameOrNone, no_key
from serve.contract.runtimes import RuntimeName


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """The way from a checkpoint to an engine."""

    checkpoint: Name = "base"
    """`base` or `tiny.en`, a hub id, a Hugging Face or CTranslate2 folder, or OpenAI's .pt file."""
    precision: Precision = "int8"
    """Precision of the weights."""
    runtime: RuntimeName = "native"
    """Runtime that the engine is for."""
    # Folder or hub id with tokenizer.json; needed only for a .pt of a size that is not OpenAI's.
    tokenizer: NameOrNone = no_key("", "use the flag --tokenizer of `python -m build engine`")
    draft: NameOrNone = ""
    """Smaller checkpoint on the same encoder, whose decoder guesses; native engines alone."""
    # Whether INT8 rounding is compensated on speech, which the checkpoint hears first.
    calibrate: bool = no_key(False, "use the flag --calibrate of `python -m build engine`")
    confidence: NameOrNone = ""
    """File that `python -m eval trust` fitted, by which words say how likely they are right."""
    # The one where a checkpoint runs to be calibrated and compared.
    device: Device = no_key("cpu", "use the flag --device of `python -m build engine`")
    verify_clips: Name = "tests/data/demo.jsonl"
    """Manifest of clips of people; an engine is compared with its checkpoint on four of them."""


@dataclasses.dataclass(frozen=True)
class Config(serve.contract.config.Config):
    """One product: what to build, and how it will be served."""

    build: BuildConfig = BuildConfig()


def load_config(path: str | Path) -> Config:
    """Read a product's TOML file; see `serve.contract.config.read_config`."""
    return read_config(path, Config)
