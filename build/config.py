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

    # Name of build/published.py, hub id, Hugging Face's or CTranslate2's folder, or OpenAI .pt.
    checkpoint: Name = "base"
    precision: Precision = "int8"
    runtime: RuntimeName = "native"  # one of serve/contract/runtimes.py
    # Folder or hub id with tokenizer.json; needed only for a .pt of a size that is not OpenAI's.
    tokenizer: NameOrNone = ""
    draft: NameOrNone = (
        ""  # smaller checkpoint on the same encoder, as distil-large-v3; native only
    )
    # Whether INT8 rounding is compensated on speech, which the checkpoint hears first.
    calibrate: bool = False
    calibrate_clips: Name = "tests/data/human/calibration.jsonl"  # manifest of that speech
    # What `python -m eval trust` fitted: words then say how likely they are right. "" = none.
    confidence: NameOrNone = ""
    device: Device = "cpu"  # the one where a checkpoint runs to be calibrated and compared
    # Manifest of clips of people; an engine is compared with its checkpoint on four of them.
    verify_clips: Name = "tests/data/demo.jsonl"
    # With runtime.encoder_precision = "auto" FP8 is proved, where `device` has it, on all of these
    # but their half "report".
    fp8_clips: Name = "tests/data/human/manifest.jsonl"


@dataclasses.dataclass(frozen=True)
class Config(serve.contract.config.Config):
    """One product: what to build, and how it will be served."""

    build: BuildConfig = BuildConfig()


def load_config(path: str | Path) -> Config:
    """Read a product's TOML file; see `serve.contract.config.read_config`."""
    return read_config(path, Config)
