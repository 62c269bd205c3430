"""Flags of `python -m eval run`, `score`, `words`, `variants`; what they make of a config."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.accuracy.normalize import DEFAULT, NORMALIZERS
from eval.arguments import add_config, add_output, add_systems, names, not_negative, positive
from eval.config import Config

_WORD_CLIPS = 60  # in which times of words are compared
_SENTENCES = 80  # spoken to measure them by


def add_run(parser: argparse.ArgumentParser) -> None:
    """Of `run`."""
    add_config(parser)
    add_systems(parser, "default: the config's eval.systems")
    add = parser.add_argument
    add("--manifest", metavar="CLIPS", help="clips to score and to time; default: eval.manifest")
    add(
        "--heldout", metavar="CLIPS",
        help="clips to score only, '' for none; default: eval.heldout",
    )  # fmt: skip
    add(
        "--without", type=names, default=(), metavar="A,B",
        help="leave these systems out; comma separated",
    )  # fmt: skip
    add(
        "--limit", type=not_negative, metavar="N",
        help="draw N clips of each, 0 for all; of clips with groups each group gives its share, "
        "and a larger draw holds the smaller; default: eval.limit",
    )  # fmt: skip
    add(
        "--timed-limit", type=not_negative, metavar="N",
        help="draw N clips to be timed, 0 for as many as --limit; default: eval.timed_limit",
    )  # fmt: skip
    add(
        "--half", metavar="NAME",
        help="of a manifest's halves, '' for both; default: eval.half",
    )  # fmt: skip
    add(
        "--join-s", type=float, metavar="S",
        help="join the held-out clips of a speaker to passages of at most S seconds, 0 for not; "
        "default: eval.join_s",
    )  # fmt: skip
    add(
        "--tell-language", action="store_const", const=True,
        help="tell every system what language is spoken",
    )  # fmt: skip
    add(
        "--again", action="store_true",
        help="drop what these systems said before, instead of going on with it",
    )  # fmt: skip
    add("--seed", type=int, metavar="N", help="of the draw; default: eval.seed")
    add("--language", metavar="CODE", help="of clips whose references do not say it")
    add(
        "--full", action="store_true",
        help="let every system hear the held-out clips and be timed; takes more than twice as long",
    )  # fmt: skip
    add("--concurrency", type=positive, metavar="N", help="calls at a time under load")
    add("--repeats", type=positive, metavar="N", help="timed passes")
    add_output(parser)
    _add_normalizer(parser)


def add_score(parser: argparse.ArgumentParser) -> None:
    """Of `score`."""
    parser.add_argument("folder", type=Path, help="what `run` wrote, such as reports/demo")
    add_systems(parser, "default: all of the run")
    _add_normalizer(parser)


def add_words(parser: argparse.ArgumentParser) -> None:
    """Of `words`."""
    add_config(parser)
    add = parser.add_argument
    add(
        "--limit", type=not_negative, default=_WORD_CLIPS, metavar="N",
        help="draw N clips of eval.manifest, 0 for all; default: %(default)s",
    )  # fmt: skip
    add(
        "--spoken", default="tests/data/heldout/manifest.jsonl", metavar="JSONL",
        help="texts that espeak-ng speaks; default: %(default)s",
    )  # fmt: skip
    add(
        "--sentences", type=not_negative, default=_SENTENCES, metavar="N",
        help="of these, 0 for none, which needs no espeak-ng; default: %(default)s",
    )  # fmt: skip


def add_variants(parser: argparse.ArgumentParser) -> None:
    """Of `variants`."""
    add_config(parser)
    add = parser.add_argument
    add("--variants", type=names, metavar="A,B", help="comma separated; default: all")
    add("--device", metavar="DEVICE", help="such as cuda; default: runtime.device")
    add("--manifest", metavar="CLIPS", help="clips to score; default: eval.manifest")
    add("--limit", type=not_negative, metavar="N", help="draw N clips; default: eval.limit")
    add("--seed", type=int, metavar="N", help="of the draw; default: eval.seed")
    add("--half", metavar="NAME", help="of a manifest's halves, '' for both")
    add(
        "--tell-language", action="store_const", const=True,
        help="tell the language of each clip",
    )  # fmt: skip
    add("--concurrency", type=positive, metavar="N", help="calls at a time")
    add_output(parser, "variants")


def variants_config(config: Config, options: argparse.Namespace) -> Config:
    """The config with the flags of `variants` that were given."""
    flags = ("manifest", "limit", "seed", "half", "tell_language", "concurrency")
    evaluation = dataclasses.replace(config.eval, **_given(options, flags))
    runtime = dataclasses.replace(config.runtime, device=options.device or config.runtime.device)
    return dataclasses.replace(config, eval=evaluation, runtime=runtime)


def _given(options: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    return {flag: getattr(options, flag) for flag in flags if getattr(options, flag) is not None}


def _add_normalizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--normalizer", choices=NORMALIZERS, default=DEFAULT, help="default: %(default)s"
    )


def with_flags(config: Config, options: argparse.Namespace) -> Config:
    """The config with the flags that were given."""
    flags = (
        "systems",
        "manifest",
        "heldout",
        "concurrency",
        "repeats",
        "limit",
        "timed_limit",
        "seed",
        "half",
        "language",
        "tell_language",
        "join_s",
    )
    evaluation = dataclasses.replace(config.eval, **_given(options, flags))
    left = tuple(name for name in evaluation.systems if name not in options.without)
    evaluation = dataclasses.replace(evaluation, systems=left)
    if options.full:
        everyone = evaluation.systems
        evaluation = dataclasses.replace(evaluation, heldout_systems=everyone, timed=everyone)
    return dataclasses.replace(config, eval=evaluation)
