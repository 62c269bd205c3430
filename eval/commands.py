"""Every command of `python -m eval`: its help, its flags, and the function that runs it.

This loads nothing that a command needs: `eval run` measures memory, and a bench has few packages.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from eval.accuracy.normalize import DEFAULT, NORMALIZERS
from eval.bench.plan import DRAFT_TOKENS, WORKLOADS, BenchPlan
from eval.corpora.layout import EXPECTED, UNDERSTOOD
from eval.long import plan as long_plan
from eval.soak.plan import SCENARIOS
from serve.contract.fields import MAX_BEAMS


@dataclasses.dataclass(frozen=True)
class Flag:
    """An option or an argument of a command.

    Attributes:
        name: as it is written, and what stands for its value; without dashes it is an argument.
        help: says what it is; the default is added unless it names one.
        type: makes the value of text.
        default: the value where it is not given.
        sets: the setting of the config that it stands for, such as eval.limit; "": it is given to
            the command itself.
        options: others of `argparse`.
        also: settings of the same section that it changes, too; later flags change them again.
    """

    name: str
    help: str
    type: Callable[[str], Any] = str
    default: Any = None
    sets: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    also: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Let a parser know it."""
        name, _, metavar = self.name.partition(" ")
        options = {"help": self._help(), "default": self.default, **self.options}
        if metavar:
            options["metavar"] = metavar
        if options.get("action") != "store_const":
            options["type"] = self.type
        parser.add_argument(name, **options)

    def _help(self) -> str:
        silent = self.default in (None, "", ()) or self.default is False
        if silent or "default:" in self.help:
            return self.help
        return "; ".join(filter(None, (self.help, f"default: {shown(self.default)}")))

    @property
    def dest(self) -> str:
        """Return the command's name for its value."""
        name = self.name.partition(" ")[0].lstrip("-")
        return str(self.options.get("dest", name.replace("-", "_")))


def switch(name: str, help: str, sets: str = "") -> Flag:
    """Declare a flag without a value; one that sets something else stays as configured."""
    default = None if sets else False
    return Flag(name, help, str, default, sets, {"action": "store_const", "const": True})


def shown(value: Any) -> str:
    """Write a default as it would be given."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def names(text: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    return not_negative(text, least=1)


def not_negative(text: str, least: int = 0) -> int:
    """Parse a whole number from 0."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers above 0, between commas."""
    return tuple(positive(number) for number in text.split(","))


def seconds(text: str) -> float:
    """Parse a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def within(most: float) -> Callable[[str], float]:
    """Return a parser of numbers from 0 to `most`."""

    def parse(text: str) -> float:
        value = float(text)
        if not 0 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between 0 and {most:g}")
        return value

    return parse


def beam_size(help: str, default: int | None = None, sets: str = "") -> Flag:
    """Declare the flag of a search's width."""
    beams = {"choices": range(1, MAX_BEAMS + 1)}
    return Flag("--beam-size N", help, int, default, sets, beams)


# ---------------------------------------------------------------- flags


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
    Flag("--minutes M", "duration of the attack", positive, 5),
    Flag("--actions N", "end after so many actions of clients", positive),
    Flag("--seed S", "determines the action of each client", int, 0),
    Flag(
        "--scenario NAME",
        "run these in turn instead, each on a server of its own; without a name all. "
        + "; ".join(f"{name}: {title}" for name, title in SCENARIOS.items()),
        options={"nargs": "*", "dest": "scenarios"},
    ),
)
TRUST = (
    Flag(
        "--other ENGINE",
        "folder of another engine, which hears the clips too; default: the same one, greedily",
        default="",
    ),
    Flag(
        "--threshold P",
        "%% of the characters in which two texts may differ that are trusted",
        within(100.0),
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
    switch("--without-speech", "short clips in which nobody speaks instead: in how many is text?"),
    Flag("--speech CLIPS", "of people, with their texts, for these", sets="eval.manifest"),
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
GREEDY = f"of every request; 1 to {MAX_BEAMS}; default: 1, greedy"
BENCH = (
    Flag(
        "--workloads A,B",
        "default: all. " + "; ".join(f"{name}: {text}" for name, text in WORKLOADS.items()),
        names,
        BenchPlan.workloads,
    ),
    Flag(
        "--slots N,M",
        "throughput with each, latency and open-loop with the first, mlperf with the last",
        counts,
        BenchPlan.slots,
    ),
    Flag(
        "--seconds S", "shortest time of a figure, without its warm-up", positive, BenchPlan.seconds
    ),
    beam_size(GREEDY, BenchPlan.beam_size),
    Flag(
        "--draft-acceptance P",
        "use a draft decoder of two layers and accept this share of its tokens, 0 to 1; it "
        f"proposes runtime.draft_tokens a step, or {DRAFT_TOKENS}; default: no draft",
        within(1.0),
    ),
    Flag(
        "--requests N",
        "number of requests of the latency workload, through Triton too",
        positive,
        BenchPlan.requests,
    ),
    Flag(
        "--request-s S",
        "seconds of audio in a request of latency and open-loop, at most 30",
        seconds,
        BenchPlan.request_s,
    ),
    switch("--through-server", "the same load on a real server over gRPC, audio in, text out"),
    Flag(
        "--peers A,B",
        "of faster-whisper and vllm; '' for none; default: what is installed",
        names,
    ),
    Flag(
        "--device DEVICE",
        "measure only a server on each of these in turn, as in runtime.device, and how its "
        "throughput grows from the first to the last; give it once for each",
        options={"action": "append", "dest": "devices"},
    ),
)


# ---------------------------------------------------------------- commands


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `python -m eval`.

    Attributes:
        name: what it is called.
        help: what it does.
        entry: module of eval and function that does it, by name: only they need what they load.
        flags: its own.
        of: what it has besides: a config, and a folder for its results.
        epilog: ends its help.
    """

    name: str
    help: str
    entry: str
    flags: tuple[Flag, ...] = ()
    of: Literal["nothing", "config", "config and folder"] = "config and folder"
    epilog: str | None = None

    def add(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        """Let a parser know it."""
        parser = commands.add_parser(self.name, help=self.help, epilog=self.epilog)
        for flag in self.all_flags:
            flag.add(parser)
        parser.set_defaults(command=self)

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """Return its own, and those that all commands of its kind have."""
        where = Flag("--output DIR", f"default: {self.reports('<name of the config>')}", Path)
        if self.of == "nothing":
            return self.flags
        return (_CONFIG, *self.flags, *([where] if self.keeps else []))

    @property
    def keeps(self) -> bool:
        """Return whether it has a folder for its results."""
        return self.of == "config and folder"

    def reports(self, name: str) -> Path:
        """Return where the results of a config go unless something else is said."""
        return Path("reports") / (name if self.name == "run" else f"{name}-{self.name}")


_PYTHON = (
    Flag(
        "--python PATH",
        "of another environment that has release 1.3 or later; default: this one",
        default="",
    ),
)
_CONFIG = Flag("--config TOML", "such as configs/demo.toml", options={"required": True})


COMMANDS = (
    Command(
        "run",
        "run the systems over the clips, write the report",
        "accuracy.evaluate.evaluate",
        RUN,
        epilog=f"CLIPS is where recordings with references are: {EXPECTED}. Keys: {UNDERSTOOD}.",
    ),
    Command(
        "report",
        "score a kept run again; with B show two reports side by side",
        "accuracy.evaluate.report",
        REPORT,
        of="nothing",
    ),
    Command(
        "demo",
        "build the engine unless it is there, serve it and transcribe some clips",
        "demo.demo",
        DEMO,
        of="config",
    ),
    Command(
        "bench",
        "speed of the native runtime on one GPU",
        "bench.run.bench",
        BENCH,
    ),
    Command(
        "profile",
        "where the time of a fixed load goes, by phase and kernel",
        "profile.run.profiled",
        PROFILE,
    ),
    Command("soak", "attack a real server: what survives?", "soak.run.soak", SOAK),
    Command(
        "trust",
        "transcripts that two searches agree on, and words that are right as often as they say",
        "trust.run.trust",
        TRUST,
    ),
    Command("live", "live text: how late, how right", "live.run.live", LIVE),
    Command(
        "plan",
        "how many GPUs a load needs, and what that costs",
        "plan.run.plan",
        PLAN,
        of="config",
    ),
    Command("long", "long recordings: what is lost, repeated, made up", "long.run.long", LONG),
    Command(
        "speakers",
        "who speaks when: how right, how fast",
        "speakers.run.speakers",
        SPEAKERS,
    ),
    Command(
        "trtllm-check",
        "on a machine with TensorRT-LLM: compare it with transformers",
        "trtllm.run.check",
        _PYTHON,
        of="nothing",
    ),
)
"""All of them, in the order of `--help`."""
