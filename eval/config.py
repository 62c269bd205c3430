"""Configuration of evaluations: serve's and build's, and the section [eval], with its defaults."""

import dataclasses
from pathlib import Path

import build.config
from serve.config import read_config
from serve.fields import Count, CountOrNone, Finite, Name, NameOrNone


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Which clips and which systems an evaluation compares."""

    # A manifest, a folder or a data set of a hub; eval/corpora/find.py knows the layouts.
    manifest: Name = "tests/data/manifest.jsonl"  # scored, and timed
    heldout: NameOrNone = "tests/data/heldout/manifest.jsonl"  # scored only; "" = none
    limit: CountOrNone = 0  # clips drawn from each of the two; 0 = all
    seed: CountOrNone = 0  # of the draw
    language: NameOrNone = ""  # code, of clips whose layout does not say it; "" = unknown
    systems: tuple[Name, ...] = (
        "earshot-triton",
        "earshot-int8",
        "earshot-int8-greedy",
        "earshot-fp16",
        "faster-whisper-float32",
        "faster-whisper-float32-greedy",
        "faster-whisper-int8",
        "faster-whisper-int8-greedy",
        "faster-whisper-library-defaults",
        "transformers-fp32",
    )
    heldout_systems: tuple[Name, ...] = (  # those of `systems` that hear the held-out clips too
        "earshot-int8",
        "earshot-fp16",
        "faster-whisper-float32",
        "faster-whisper-int8",
    )
    timed: tuple[Name, ...] = (  # those of `systems` whose speed is measured too
        "earshot-triton",
        "earshot-int8",
        "earshot-int8-greedy",
        "faster-whisper-float32",
        "faster-whisper-float32-greedy",
        "faster-whisper-int8",
        "faster-whisper-int8-greedy",
    )
    concurrency: Count = 8
    repeats: Count = 2  # timed passes over the clips
    threads: Count = 2  # CPU threads given to every system
    # Points of CER; a run fails where its clips show a larger gap, see eval/accuracy/gates.py.
    max_cer_gap_faster_whisper: Finite = 0.1
    max_cer_gap_fp16: Finite = 0.1


@dataclasses.dataclass(frozen=True)
class Config(build.config.Config):
    """One product: what to build, how to serve it, how to judge it."""

    eval: EvalConfig = EvalConfig()


def load_config(path: str | Path) -> Config:
    """Read a product's TOML file; see `serve.config.read_config`."""
    return read_config(path, Config)
