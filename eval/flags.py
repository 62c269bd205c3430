"""The flags of every command of `python -m eval`; a flag stands for a keyword of its function."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.accuracy.normalize import DEFAULT, NORMALIZERS
from eval.arguments import (
    Flag,
    counts,
    names,
    not_negative,
    percentage,
    positive,
    seconds,
    switch,
)
from eval.bench_flags import beam_size
from eval.long import plan as long_plan
from eval.soak.plan import SCENARIOS


def _systems(default: str, sets: str = "") -> Flag:
    return Flag("--systems A,B", f"comma separated; default: {default}", names, sets=sets)


def _setting(name: str, help: str, type: Callable[[str], Any] = str) -> Flag:
    """Declare a flag that stands for the setting of [eval] that is called as it is."""
    setting = f"eval.{Flag(name, help).dest}"
    return Flag(name, f"{help}; default: {setting}", type, sets=setting)


_NORMALIZER = Flag("--normalizer", "", str, DEFAULT, options={"choices": NORMALIZERS})
_DRAWN = (
    "draw N clips of each, 0 for all; of clips with groups each group gives its share, and a "
    "larger draw holds the smaller"
)
_JOINED = "join the held-out clips of a speaker to passages of at most S seconds, 0 for not"
_DRAW_SEED = _setting("--seed N", "of the draw", int)
_AGAIN = switch("--again", "drop what these systems said before, instead of going on with it")

_HALF = _setting("--half NAME", "of a manifest's halves, '' for both")
_TELL = switch("--tell-language", "tell every system what language is spoken", "eval.tell_language")
_CONCURRENCY = _setting("--concurrency N", "calls at a time under load", positive)
RUN = (
    _systems("the config's eval.systems", sets="eval.systems"),
    Flag(
        "--clips CLIPS",
        "your own recordings: all of them are scored and timed, unless --limit is given",
        sets="eval.manifest",
        also={"heldout": "", "limit": 0, "timed_limit": 0, "half": ""},
    ),
    _setting("--manifest CLIPS", "clips to score and to time"),
    _setting("--heldout CLIPS", "clips to score only, '' for none"),
    Flag("--without A,B", "leave these systems out; comma separated", names, ()),
    _setting("--limit N", _DRAWN, not_negative),
    _setting("--timed-limit N", "draw N clips to be timed, 0 for as many as --limit", not_negative),
    _HALF,
    _setting("--join-s S", _JOINED, float),
    _TELL,
    _AGAIN,
    _DRAW_SEED,
    _setting("--language CODE", "of clips whose references do not say it"),
    switch(
        "--full",
        "let every system hear the held-out clips and be timed; takes more than twice as long",
    ),
    _CONCURRENCY,
    _setting("--repeats N", "timed passes", positive),
    _NORMALIZER,
)
REPORT = (
    Flag("a A", "the folder of a run, such as reports/demo", Path),
    Flag(
        "b B",
        "the folder of another run, beside which the first is shown",
        Path,
        None,
        options={"nargs": "?"},
    ),
    _systems("all of the run"),
    _NORMALIZER,
    Flag("--output DIR", "for the page of two runs", Path, Path("reports/compare")),
)
PROFILE = (
    Flag("--clips CLIPS", "what is transcribed, in turn; default: eval.manifest"),
    Flag("--requests N", "after the warm-up", positive, 16),
    Flag("--at-once N", "requests at a time", positive, 8),
    switch("--words", "time words, too"),
    switch(
        "--random-weights",
        "make an engine up, of the shape of build.checkpoint; it says as many tokens as it may",
    ),
    switch("--nsys", "run the load under NVIDIA Nsight Systems instead, which has to be installed"),
    switch("--under-nsys", argparse.SUPPRESS),  # what --nsys starts
)
SOAK = (
    Flag("--minutes M", "that it lasts", positive, 5),
    Flag("--actions N", "after which it ends, if that comes before", positive),
    Flag("--seed S", "says what each client does", int, 0),
    Flag(
        "--scenario NAME",
        "instead, these in turn, each on a server of its own; without a name all. "
        + "; ".join(f"{name}: {title}" for name, title in SCENARIOS.items()),
        options={"nargs": "*", "dest": "scenarios"},
    ),
)
VARIANTS = (
    Flag("--variants A,B", "comma separated; default: all", names),
    Flag("--device DEVICE", "such as cuda; default: runtime.device", sets="runtime.device"),
    _setting("--manifest CLIPS", "clips to score"),
    _setting("--limit N", "draw N clips", not_negative),
    _DRAW_SEED,
    _HALF,
    _TELL,
    _CONCURRENCY,
)
CONFIDENCE = (
    Flag("--beams N,M", "beam sizes, each at most 8", counts, (1, 5)),
    _setting("--manifest CLIPS", "clips to hear, of both halves"),
    _setting("--limit N", "draw N clips, 0 for all", not_negative),
    _DRAW_SEED,
    _TELL,
    _CONCURRENCY,
)
AGREE = (
    Flag(
        "--other ENGINE",
        "folder of another engine, which hears the clips too; default: the same one, greedily",
        default="",
    ),
    Flag(
        "--threshold P",
        "%% of the characters in which two texts may differ that are trusted",
        percentage,
        10.0,
    ),
    _setting("--manifest CLIPS", "clips to hear, or a folder of audio without references"),
    _setting("--limit N", "draw N clips, 0 for all", not_negative),
    _DRAW_SEED,
    _HALF,
    _TELL,
    _CONCURRENCY,
)
LIVE = (
    Flag("--streams N,M", "at a time, one after another", counts, (1, 4)),
    Flag("--clips N", "that each stream plays, at the pace of speech", positive, 6),
    Flag(
        "--speech CLIPS",
        "recordings with their texts; default: eval.manifest",
        sets="eval.manifest",
    ),
    _HALF,
    Flag(
        "--join-s S",
        "clips whose speaker is known are joined to passages of at most so long",
        seconds,
        60.0,
    ),
    Flag(
        "--simulate S",
        "no server: streams run as fast as they are decoded, by a clock by which every "
        "decoding takes so many seconds; accuracy is real, and lateness is what such a machine "
        "has; default: a real server",
        seconds,
        0.0,
    ),
)
PLAN = (
    Flag(
        "--load N",
        "requests of 10 s of audio a second",
        seconds,
        options={"required": True},
    ),
    Flag(
        "--p99 S",
        "seconds within which 99 of 100 are answered",
        seconds,
        options={"required": True},
    ),
    Flag("--price P", "of a GPU for an hour, in any currency", seconds),
    beam_size("of all requests; default: transcriber.beam_size", sets="transcriber.beam_size"),
    Flag(
        "--measured FILE",
        "bench.json that `python -m eval bench` wrote on such a GPU; default: the committed "
        "figures of the config's name, in eval/plan/measured/",
        Path,
    ),
)
_PLANNED = (
    f"{long_plan.minutes_of(long_plan.PLAN):.0f}, of people "
    f"{long_plan.minutes_of(long_plan.PEOPLE_PLAN):.0f} and their passages"
)
LONG = (
    _systems("all, " + ", ".join(long_plan.NAMES)),
    Flag(
        "--minutes M", f"of composed recordings, at least; default: the plan, {_PLANNED}", positive
    ),
    Flag("--seed N", "of them", int, 0),
    _AGAIN,
)
INVENTED = (
    _systems(", ".join(long_plan.HEARING_NOBODY)),
    Flag(
        "--speech CLIPS",
        "of people, with their texts: sources, and heard as they are; default: eval.manifest",
        sets="eval.manifest",
    ),
    Flag("--half NAME", 'of these, such as "report"; default: both', default=""),
    Flag("--limit N", "of them are heard as they are", positive, 60),
    Flag("--seed N", "of everything", int, 0),
)
SPEAKERS = (
    Flag(
        "--recordings FOLDER",
        "besides conversations: audio files, each with an RTTM of its name, such as of meetings",
        Path,
    ),
    Flag(
        "--half NAME",
        "of the clips and the recordings; settings were chosen on the other",
        str,
        "report",
        options={"choices": ("choose", "report")},
    ),
    Flag("--seed N", "of the conversations", int, 0),
    Flag("--device DEVICE", "that our networks compute on", default="cpu"),
    switch("--texts", "also transcribe the conversations of minutes, and tell the cpWER"),
)
DEMO = (Flag("--otherwise TOML", "the config where the checkpoint cannot be had"),)
