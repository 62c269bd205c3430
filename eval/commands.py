"""Every command of `python -m eval`: its help, its flags, and the function that runs it.

This imports nothing that a command needs: `eval run` measures memory, and a bench has few packages.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from eval.accuracy.normalize import DEFAULT, NORMALIZERS
from eval.bench import WORKLOADS, BenchPlan
from eval.corpora.layout import EXPECTED, UNDERSTOOD
from eval.soak import SCENARIOS
from serve.contract.fields import MAX_BEAMS

N = TypeVar("N", int, float)


class Flags(argparse.ArgumentParser):
    """The parser of one command."""

    def add(
        self,
        flag: str,
        help: str,
        type: Callable[[str], Any] = str,
        default: Any = None,
        **options: Any,
    ) -> None:
        """Add an option, or an argument if it has no dashes.

        Args:
            flag: its name, and a name for its value, such as "--limit N".
            help: its description; the default is added unless it names one.
            type: parses the value.
            default: the value if the flag is not given.
            options: further ones of `argparse`.
        """
        name, _, metavar = flag.partition(" ")
        if metavar:
            options["metavar"] = metavar
        if default not in (None, "", (), argparse.SUPPRESS) and "default:" not in help:
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            help = f"{help}; default: {shown}"
        self.add_argument(name, help=help, type=type, default=default, **options)

    def switch(self, name: str, help: str, **options: Any) -> None:
        """Add a flag without a value."""
        self.add_argument(name, help=help, action="store_true", **options)

    def setting(
        self, flag: str, help: str, type: Callable[[str], Any] = str, place: str = ""
    ) -> None:
        """Add a flag for a setting of the config, which decides if the flag is not given.

        Args:
            flag, help, type: as in `add`.
            place: section and key; "" is the key of [eval] that is called as the flag. A section
                without a key takes a settings dict.
        """
        place = place or "eval." + flag.partition(" ")[0].lstrip("-").replace("-", "_")
        if not place.endswith("."):
            help = f"{help}; default: {place}"
        self.add(flag, help, type, argparse.SUPPRESS, dest=place)


# ---------------------------------------------------------------- values


def names(text: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def number(kind: type[N], low: float, high: float = math.inf) -> Callable[[str], N]:
    """Return a parser of numbers of a kind from `low` to `high`."""

    def parse(text: str) -> N:
        value = kind(text)
        if not low <= value <= high or value == math.inf:
            limit = "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"got {text}, expected at least {low:g}{limit}")
        return value

    parse.__name__ = kind.__name__  # for argparse's "invalid int value"
    return parse


positive, not_negative, beams = number(int, 1), number(int, 0), number(int, 1, MAX_BEAMS)
above_0 = number(float, 0.001)


def counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers above 0, between commas."""
    return tuple(positive(count) for count in text.split(","))


def own_clips(place: str) -> dict[str, Any]:
    """Return the settings by which all clips of a place are scored and timed."""
    return {"manifest": place, "heldout": "", "limit": 0, "timed_limit": 0, "half": ""}


# ---------------------------------------------------------------- commands


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `python -m eval`.

    Attributes:
        name: its name on the command line.
        help: its purpose.
        entry: the module of eval and the function that run the command. They are given by name,
            so that only the command in use imports its packages.
        flags: adds its own flags.
        takes_config: whether it has --config.
        keeps_results: whether it has --output, a folder for its results.
    """

    name: str
    help: str
    entry: str
    flags: "AddFlags"
    takes_config: bool = True
    keeps_results: bool = True

    def add(self, commands: "argparse._SubParsersAction[Flags]") -> None:
        """Add the command to a parser."""
        flags = commands.add_parser(self.name, help=self.help)
        flags.set_defaults(command=self)
        if self.takes_config:
            flags.add("--config TOML", "such as configs/demo.toml", required=True)
        self.flags(flags)
        if self.keeps_results:
            flags.add("--output DIR", f"default: {self.reports('<name of the config>')}", Path)

    def reports(self, name: str) -> Path:
        """Return the default folder for the results of a config."""
        return Path("reports") / (name if self.name == "run" else f"{name}-{self.name}")


AddFlags = Callable[[Flags], None]
COMMANDS: list[Command] = []
"""All of them, in the order of `--help`."""


def command(name: str, help: str, entry: str, **options: Any) -> Callable[[AddFlags], None]:
    """Make a command of the function that adds its flags; arguments are fields of `Command`."""
    return lambda flags: COMMANDS.append(Command(name, help, entry, flags, **options))


# ---------------------------------------------------------------- flags


_AGAIN = "drop earlier answers of these systems instead of continuing"
_HALF = "the half of a manifest to use; '' for both"


def _normalizer(flags: Flags) -> None:
    options = {"choices": NORMALIZERS, "dest": "normalizer_name"}
    flags.add("--normalizer", "of compared texts", str, DEFAULT, **options)


def _tell_language(flags: Flags) -> None:
    place = {"dest": "eval.tell_language", "default": argparse.SUPPRESS}
    flags.switch("--tell-language", "tell every system what language is spoken", **place)


@command(
    "run",
    "compare systems on clips: accuracy, latency, throughput and memory",
    "accuracy.run.evaluate",
)
def _run(flags: Flags) -> None:
    flags.setting("--systems A,B", "systems to run, comma separated", names)
    clips = f"your own recordings, of which all are used: {EXPECTED.removeprefix('expected ')}"
    flags.setting("--clips CLIPS", f"{clips}; keys of a table: {UNDERSTOOD}", own_clips, "eval.")
    flags.add("--without A,B", "systems to leave out, comma separated", names, ())
    flags.setting("--limit N", "draw N clips, a share of each group; 0 for all", not_negative)
    flags.setting("--half NAME", _HALF)
    _tell_language(flags)
    flags.switch("--again", _AGAIN)
    flags.setting("--seed N", "seed of the draw", int)
    flags.setting("--language CODE", "language of clips if their references do not state it")
    flags.switch("--full", "every system transcribes all clips and is timed: takes twice as long")
    _normalizer(flags)


@command(
    "report",
    "score a kept run again; with B show two runs side by side",
    "accuracy.run.report",
    takes_config=False,
    keeps_results=False,
)
def _report(flags: Flags) -> None:
    flags.add("a A", "the folder of a run, such as reports/demo", Path)
    flags.add("b B", "the folder of a run to compare with", Path, nargs="?")
    scored = "systems to score, comma separated; default: all of the run"
    flags.add("--systems A,B", scored, names, (), dest="names")
    _normalizer(flags)
    flags.add("--output DIR", "folder for the report on two runs", Path, Path("reports/compare"))


@command("demo", "build an engine, serve it, transcribe clips", "demo.demo", keeps_results=False)
def _demo(flags: Flags) -> None:
    flags.add("--otherwise TOML", "config to use if the checkpoint cannot be fetched")


@command("bench", "speed of the native runtime on one GPU", "bench.run.bench")
def _bench(flags: Flags) -> None:
    workloads = "; ".join(f"{name}: {text}" for name, text in WORKLOADS.items())
    flags.add("--workloads A,B", f"default: all. {workloads}", names, BenchPlan.workloads)
    flags.add("--slots N,M", "numbers of slots: throughput uses each", counts, BenchPlan.slots)
    flags.add("--seconds S", "seconds of a figure after its warm-up", positive, BenchPlan.seconds)
    flags.add("--beam-size N", f"of every request, 1 to {MAX_BEAMS}", beams, BenchPlan.beam_size)
    flags.add("--requests N", "requests of the latency workload", positive, BenchPlan.requests)
    flags.add("--request-s S", "seconds of a request's audio", above_0, BenchPlan.request_s)
    flags.switch("--ablate", "also measure each option: CUDA graphs, kernels, INT8, FP8")
    flags.switch("--through-server", "also send the load to a real server over gRPC")
    flags.add("--peers A,B", "faster-whisper, vllm or ''; default: the installed ones", names)
    device = "measure only a server on this device; repeat the flag to compare devices"
    flags.add("--device DEVICE", device, action="append", dest="devices")


@command("profile", "time of a fixed load by phase and kernel", "profile.profiled")
def _profile(flags: Flags) -> None:
    flags.add("--clips CLIPS", "clips to transcribe, in turn; default: eval.manifest")
    flags.add("--requests N", "number of requests after the warm-up", positive, 16)
    flags.add("--at-once N", "number of requests at a time", positive, 8)
    flags.switch("--words", "also compute the times of words")
    flags.switch("--random-weights", "random weights in the shape of build.checkpoint")


@command("soak", "load and attack a real server", "soak.run.soak")
def _soak(flags: Flags) -> None:
    titles = "; ".join(f"{name}: {title}" for name, (_, title) in SCENARIOS.items())
    flags.add("--minutes M", "duration of the attack", positive, 5)
    flags.add("--seed S", "seed of the clients' actions", int, 0)
    scenarios = f"scenarios to run, each on its own server; no NAME: all but mixed. {titles}"
    flags.add("--scenario NAME", scenarios, nargs="*", choices=SCENARIOS, dest="scenarios")


@command("trust", "trusted transcripts; calibration of confidence", "trust.run.trust")
def _trust(flags: Flags) -> None:
    flags.add("--other ENGINE", "of the second pass; default: the same, greedily", default="")
    difference = "maximum difference of trusted texts, %% of their characters"
    flags.add("--threshold P", difference, number(float, 0, 100), 10.0)
    flags.setting("--manifest CLIPS", "clips, or a folder of audio without references")
    flags.setting("--limit N", "draw N clips; 0 for all", not_negative)
    flags.setting("--half NAME", _HALF)
    _tell_language(flags)


@command("live", "live text: delay and accuracy", "live.live")
def _live(flags: Flags) -> None:
    flags.add("--streams N,M", "streams at a time, measured one after another", counts, (1, 4))
    flags.add("--clips N", "number of clips that each stream plays in real time", positive, 6)
    flags.setting("--speech CLIPS", "recordings with their texts", place="eval.manifest")
    flags.setting("--half NAME", _HALF)
    flags.add("--join-s S", "join clips of one speaker to at most S seconds", above_0, 60.0)
    simulate = "every decoding takes S seconds of a simulated clock; default: a real server"
    flags.add("--simulate S", simulate, above_0, 0.0)


@command("plan", "GPUs for a load, and their cost", "plan.run.plan", keeps_results=False)
def _plan(flags: Flags) -> None:
    flags.add("--load N", "requests a second, each of 10 s of audio", above_0, required=True)
    flags.add("--p99 S", "seconds within which 99 %% are answered", above_0, required=True)
    flags.add("--price P", "price of a GPU hour, in any currency", above_0)
    flags.setting("--beam-size N", "beam size of all requests", beams, "transcriber.beam_size")
    measured = "bench.json of such a GPU; default: that of the config in eval/plan/measured/"
    flags.add("--measured FILE", measured, Path)


@command("long", "long recordings: words lost, repeated and invented", "long.run.long")
def _long(flags: Flags) -> None:
    flags.add("--systems A,B", "systems to run; an unknown name lists them; default: all", names)
    flags.add("--minutes M", "least minutes of audio; default: each kind once, about 30", positive)
    flags.add("--seed N", "seed of the recordings", int, 0)
    flags.switch("--again", _AGAIN)
    flags.switch("--without-speech", "short clips without speech instead: how many get text?")
    flags.setting("--speech CLIPS", "clips of speech with their texts", place="eval.manifest")


@command("speakers", "diarization: error rate, number of speakers, speed", "speakers.run.speakers")
def _speakers(flags: Flags) -> None:
    flags.add("--recordings FOLDER", "meetings or the like: audio files, each with its .rttm", Path)
    halves = ("choose", "report")
    flags.add("--half NAME", "half of clips and recordings", default="report", choices=halves)
    flags.add("--seed N", "seed of the conversations", int, 0)
    flags.add("--device DEVICE", "device of the diarization networks", default="cpu")
    flags.switch("--texts", "also transcribe short recordings, and report the cpWER")


@command(
    "trtllm-check",
    "compare TensorRT-LLM with transformers, where it is installed",
    "trtllm.check.trtllm_check",
    takes_config=False,
    keeps_results=False,
)
def _trtllm_check(flags: Flags) -> None:
    python = "of an environment with release 1.3 or later; default: this one"
    flags.add("--python PATH", python, default="")
