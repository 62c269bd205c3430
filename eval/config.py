"""Configuration of evaluations: serve's and build's, and the section [eval], with its defaults."""

import dataclasses
from pathlib import Path

import build.config
from serve.config import Count, read_config


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Which clips and which systems an evaluation compares."""

    manifest: str = "tests/data/manifest.jsonl"
    systems: tuple[str, ...] = (
        "earshot-triton",
        "earshot-int8",
        "earshot-fp16",
        "transformers-fp32",
        "faster-whisper-int8",
        "faster-whisper-float32",
    )
    concurrency: Count = 8
    repeats: Count = 3  # timed passes over the clips, after one warm-up pass
    threads: int = 2  # CPU threads given to every system
    max_cer_gap_faster_whisper: float = 0.3  # points; more fails the run
    max_cer_gap_fp16: float = 0.2  # points; more fails the run


@dataclasses.dataclass(frozen=True)
class Config(build.config.Config):
    """One product: what to build, how to serve it, how to judge it."""

    eval: EvalConfig = EvalConfig()


def load_config(path: str | Path) -> Config:
    """Read a product's TOML file; see `serve.config.read_config`."""
    return read_config(path, Config)
