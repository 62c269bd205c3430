"""Every command of `python -m eval`: what it is for, its flags, and which function does it.

This loads nothing that a command needs: `eval run` measures memory, and a bench has few packages.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Literal

from eval import bench_flags, flags
from eval.arguments import Flag
from eval.corpora.layout import EXPECTED, UNDERSTOOD


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
        flags.RUN,
        epilog=f"CLIPS is where recordings with references are: {EXPECTED}. Keys: {UNDERSTOOD}.",
    ),
    Command(
        "report",
        "score a kept run again; with B show two reports side by side",
        "accuracy.evaluate.report",
        flags.REPORT,
        of="nothing",
    ),
    Command(
        "demo",
        "build the engine unless it is there, serve it and transcribe some clips",
        "demo.demo",
        flags.DEMO,
        of="config",
    ),
    Command(
        "bench",
        "speed of the native runtime on one GPU",
        "bench.run.bench",
        bench_flags.BENCH,
    ),
    Command(
        "profile",
        "where the time of a fixed load goes, by phase and kernel",
        "profile.run.profiled",
        flags.PROFILE,
    ),
    Command(
        "scale",
        "throughput of a server on one GPU and on several",
        "bench.scale.scale",
        bench_flags.SCALE,
    ),
    Command("soak", "attack a real server: what survives?", "soak.run.soak", flags.SOAK),
    Command(
        "variants",
        "one checkpoint in several precisions and searches, side by side",
        "accuracy.variants.measure_variants",
        flags.VARIANTS,
    ),
    Command(
        "confidence",
        "how likely words are right: is it true? and the fit that makes it so",
        "accuracy.confidence.measure_confidence",
        flags.CONFIDENCE,
    ),
    Command(
        "agree",
        "transcripts that can be trusted, for two passes hear the same",
        "accuracy.agreement.measure_agreement",
        flags.AGREE,
    ),
    Command("live", "live text: how late, how right", "live.run.live", flags.LIVE),
    Command(
        "plan",
        "how many GPUs a load needs, and what that costs",
        "plan.run.plan",
        flags.PLAN,
        of="config",
    ),
    Command(
        "long", "long recordings: what is lost, repeated, made up", "long.report.long", flags.LONG
    ),
    Command(
        "invented",
        "short clips without speech: in how many is text?",
        "long.invented.invented",
        flags.INVENTED,
    ),
    Command(
        "speakers",
        "who speaks when: how right, how fast, beside peers",
        "speakers.run.speakers",
        flags.SPEAKERS,
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
