"""Build engines: `python -m build engine|inspect|verify`; each command has --help.

python -m build engine --checkpoint openai/whisper-small --engine engines/small
python -m build engine --config configs/demo.toml
python -m build inspect engines/demo
python -m build verify engines/demo --checkpoint tests/fixture/checkpoint
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import get_args

from serve.contract.config import Precision
from serve.contract.exits import exit_status, require_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    args = _parser().parse_args(arguments)

    def run() -> int:
        require_text(sys.argv[1:] if arguments is None else arguments)
        from build import commands  # noqa: PLC0415 - Ctrl-C may arrive during this slow import

        commands.COMMANDS[args.command](args)
        return 0

    return exit_status(run, interrupted="interrupted; nothing was changed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m build", description="Turn Whisper checkpoints into Earshot engines."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    _add_engine(commands)
    inspect = commands.add_parser("inspect", help="print a summary of an engine")
    inspect.add_argument("engine", metavar="ENGINE", help="engine folder")
    inspect.add_argument("--json", action="store_true", help="print the manifest itself")
    _add_verify(commands)
    return parser


def _add_engine(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    engine = commands.add_parser("engine", help="build an engine from a checkpoint, and verify it")
    _add_config(engine, "settings of the build; the flags below override them")
    engine.add_argument(
        "--checkpoint",
        help="base or tiny.en, which are downloaded; a hub id; a folder in Hugging Face's or "
        "faster-whisper's format; or an OpenAI .pt file",
    )
    engine.add_argument(
        "--engine", help="folder to write; an engine there is replaced; required without --config"
    )
    engine.add_argument(
        "--precision",
        choices=get_args(Precision),
        help="precision of the weights: int8, or fp16 without quantisation",
    )
    engine.add_argument(
        "--tokenizer",
        help="folder or hub id with tokenizer.json and generation_config.json; default: the "
        "checkpoint's own; for a .pt file that of OpenAI's checkpoint with the same sizes",
    )
    engine.add_argument(
        "--draft",
        help="checkpoint with the same encoder, whose decoder proposes tokens (speculative "
        "decoding); a --checkpoint other than the config's drops the config's draft",
    )
    engine.add_argument(
        "--confidence",
        metavar="FILE",
        help="file that `python -m eval trust` has written, for word probabilities; a --checkpoint "
        "other than the config's drops the config's file",
    )
    engine.add_argument(
        "--calibrate",
        action="store_true",
        help="compensate INT8 rounding on bundled clips of speech",
    )
    engine.add_argument(
        "--if-stale", action="store_true", help="do nothing if the engine is up to date"
    )
    engine.add_argument(
        "--no-verify", action="store_true", help="do not compare the engine with the checkpoint"
    )
    _add_audio(engine)


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verify = commands.add_parser(
        "verify", help="compare an engine's logits and greedy tokens with its checkpoint's"
    )
    verify.add_argument("engine", metavar="ENGINE", help="engine folder")
    verify.add_argument("--checkpoint", help="its checkpoint; default: the one in its manifest")
    verify.add_argument(
        "--tokenizer",
        default="",
        help="folder or hub id with tokenizer.json; default: as for engine",
    )
    _add_config(verify, "settings: [runtime], and build.verify_clips")
    _add_audio(verify)


def _add_config(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--config", metavar="TOML", help=f"{meaning}; default: build/config.py's")


def _add_audio(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--audio",
        nargs="+",
        default=[],
        metavar="FILE",
        help="recordings of speech to compare on; default: four clips of the manifest "
        "build.verify_clips, whose default are bundled clips of people",
    )
    parser.add_argument(
        "--device", help="device for calibration and comparison: cpu (default), cuda or cuda:N"
    )


if __name__ == "__main__":
    # An exception, so that unfinished folders are removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
