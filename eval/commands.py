"""Every command of `python -m eval`: what it is for, its flags, and which function does it.

This loads nothing that a command needs: `eval run` measures memory, and a bench has few packages.
"""

import argparse
import dataclasses
from pathlib import Path

from eval import flags
from eval.arguments import Flag
from eval.corpora.layout import EXPECTED, UNDERSTOOD


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `python -m eval`.

    Attributes:
        name: what it is called.
        help: what it does.
        entry: module and function that does it, by name: what they load, only they need.
        flags: its own.
        config: whether it is of a product, with --config.
        output: whether it has a folder for its results, with --output.
        epilog: ends its help.
    """

    name: str
    help: str
    entry: str
    flags: tuple[Flag, ...] = ()
    config: bool = True
    output: bool = True
    epilog: str | None = None

    def add(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        """Let a parser know it."""
        parser = commands.add_parser(self.name, help=self.help, epilog=self.epilog)
        for flag in self.all_flags:
            flag.add(parser)
        parser.set_defaults(command=self)

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """Its own, and those that all commands of its kind have."""
        where = Flag("--output", "DIR", f"default: {self.reports('<name of the config>')}", Path)
        return (*(_CONFIG,) * self.config, *self.flags, *(where,) * self.output)

    def reports(self, name: str) -> Path:
        """Where the results of a config go unless something else is said."""
        return Path("reports") / (name if self.name == "run" else f"{name}-{self.name}")


_CONFIG = Flag("--config", "TOML", "such as configs/demo.toml", options={"required": True})


COMMANDS = (
    Command(
        "run",
        "run the systems over the clips, write the report",
        "eval.accuracy.commands.evaluate",
        flags.RUN,
        epilog=f"CLIPS is where recordings with references are: {EXPECTED}. Keys: {UNDERSTOOD}.",
    ),
    Command(
        "score",
        "score the predictions of a run again",
        "eval.accuracy.commands.score",
        flags.SCORE,
        config=False,
        output=False,
    ),
    Command(
        "compare",
        "show two report.json side by side",
        "eval.accuracy.commands.compare",
        flags.COMPARE,
        config=False,
        output=False,
    ),
    Command(
        "demo",
        "build the engine unless it is there, serve it and transcribe some clips",
        "eval.demo.demo",
        (Flag("--otherwise", "TOML", "the config where the checkpoint cannot be had"),),
        output=False,
    ),
    Command(
        "bench",
        "speed of the native runtime on one GPU",
        "eval.bench.run.bench",
        flags.BENCH,
        output=False,
    ),
    Command(
        "scale",
        "throughput of a server on one GPU and on several",
        "eval.bench.scale.scale",
        flags.SCALE,
        output=False,
    ),
    Command("soak", "attack a real server: what survives?", "eval.soak.run.soak", flags.SOAK),
    Command(
        "same-tokens",
        "compare our tokens with CTranslate2's, beam by beam",
        "eval.accuracy.same_tokens.compare_tokens",
        flags.SAME_TOKENS,
    ),
    Command(
        "words",
        "compare times of words with faster-whisper's and the truth; their cost",
        "eval.accuracy.words.measure_words",
        flags.WORDS,
    ),
    Command(
        "variants",
        "one checkpoint in several precisions and searches, side by side",
        "eval.accuracy.variants.measure_variants",
        flags.VARIANTS,
    ),
    Command(
        "gateway",
        "what the gateway costs, beside Triton alone",
        "eval.gateway.run.gateway",
        flags.GATEWAY,
    ),
    Command("bulk", "many files by Ray, beside a plain loop", "eval.bulk.bulk", flags.BULK),
    Command("live", "live text: how late, how right", "eval.live.run.live", flags.LIVE),
    Command(
        "plan", "how many GPUs a load needs, and what that costs", "eval.plan.run.plan", flags.PLAN
    ),
    Command(
        "long",
        "long recordings: what is lost, repeated, made up",
        "eval.long.report.long",
        flags.LONG,
    ),
    Command(
        "invented",
        "short clips without speech: in how many is text?",
        "eval.long.invented.invented",
        flags.INVENTED,
    ),
    Command(
        "trtllm-check",
        "on a machine with TensorRT-LLM: compare it with transformers",
        "eval.trtllm.run.check",
        (
            Flag(
                "--python",
                "PATH",
                "of another environment that has release 1.3 or later; default: this one",
                default="",
            ),
        ),
        config=False,
        output=False,
    ),
)
"""All of them, in the order of `--help`."""
