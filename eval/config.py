"""Configuration of evaluations: serve's and build's, and the section [eval], with its defaults."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import build.config
import serve.contract.config
from serve.contract.config import read_config
from serve.contract.fields import Count, CountOrNone, Finite, Name, NameOrNone, SecondsOrNone

HELD_S = 2.0  # live streams are held where 95 of 100 words are final so soon after their end


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Which clips and which systems an evaluation compares."""

    # Clips that are scored and timed: a manifest, a table or a folder.
    manifest: Name = "tests/data/human/manifest.jsonl"
    # Clips that are only scored; the same place as `manifest`: those that were not drawn to be
    # timed; empty: none.
    heldout: NameOrNone = "tests/data/human/manifest.jsonl"
    # Clips drawn from each of the two; 0: all.
    limit: CountOrNone = 0
    # Clips drawn from `manifest` to be timed; 0: `limit`.
    timed_limit: CountOrNone = 0
    seed: CountOrNone = 0  # of the draw
    # The half of a manifest to draw from; settings were chosen on the other. "" = both.
    half: NameOrNone = "report"
    language: NameOrNone = ""  # code, of clips in a layout that does not say it; "" = unknown
    tell_language: bool = False  # whether every system is told the language of each clip
    # Seconds of the passages to which the held-out clips of a speaker are joined; 0: they are not.
    join_s: SecondsOrNone = 0.0
    # Systems that are compared.
    systems: tuple[Name, ...] = (
        *("earshot-triton", "earshot-int8", "earshot-int8-greedy", "earshot-fp16"),
        *("faster-whisper-float32", "faster-whisper-float32-greedy"),
        *("faster-whisper-int8", "faster-whisper-int8-greedy", "faster-whisper-library-defaults"),
    )
    # Systems that hear the held-out clips, too.
    heldout_systems: tuple[Name, ...] = (
        *("earshot-int8", "earshot-fp16"),
        *("faster-whisper-float32", "faster-whisper-int8"),
    )
    # Systems whose speed is measured, too.
    timed: tuple[Name, ...] = (
        *("earshot-triton", "earshot-int8", "earshot-int8-greedy"),
        *("faster-whisper-float32", "faster-whisper-float32-greedy"),
        *("faster-whisper-int8", "faster-whisper-int8-greedy"),
    )
    concurrency: Count = 8
    repeats: Count = 1  # timed passes over the clips
    threads: Count = 2  # CPU threads given to every system
    # Groups of clips on which the gates of accuracy are decided; () = all clips. Text of clips that
    # a network hardly understands changes with every rounding, so it decides nothing. In these
    # groups Whisper base has a CER below 15 %. The others are spelled letters, learners of English,
    # and languages that it hardly knows.
    gate_groups: tuple[Name, ...] = (
        *("de/kerstin", "en/kathleen_arctic", "en/librispeech", "en/ljspeech"),
        *("en/pocketsphinx_librivox", "nl/nathalie", "ru/asterisk"),
    )
    # Points of CER; a run fails where its clips show a larger gap, see eval/accuracy/score.py.
    max_cer_gap_faster_whisper: Finite = 0.1
    max_cer_gap_fp16: Finite = 0.1


@dataclasses.dataclass(frozen=True)
class EvaluationProduct(build.config.BuildProduct):
    """One product: what to build, how to serve it, how to judge it."""

    eval: EvalConfig = EvalConfig()


C = TypeVar("C", bound=serve.contract.config.Config)


def changed(config: C, section: str, **values: Any) -> C:
    """Return the config with other values of some settings of a section."""
    settings = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: settings})


def load_config(path: str | Path) -> EvaluationProduct:
    """Read a product's TOML file; see `serve.contract.config.read_config`."""
    return read_config(path, EvaluationProduct)
