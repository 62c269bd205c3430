"""Serve engines: `python -m serve COMMAND`, each with --help.

python -m serve start --config configs/demo.toml
python -m serve reload --config configs/demo.toml --engine engines/new
python -m serve transcribe --config configs/demo.toml --format srt talk.mp3
python -m serve bulk --config configs/demo.toml --input recordings --output transcripts
python -m serve live --config configs/demo.toml talk.mp3
python -m serve jobs submit --config configs/demo.toml talk.mp3
python -m serve shadow --config configs/demo.toml
python -m serve wyoming --config configs/demo.toml
python -m serve tensors
python -m serve keys new --name alice --file keys.toml
python -m serve phrases --config configs/demo.toml names.txt
"""

import argparse
import sys
from collections.abc import Sequence

from serve.cli import bulk, jobs, keys, live, phrases, reload, shadow, start, transcribe, wyoming
from serve.contract.exits import exit_status, require_text
from serve.wire import tensors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    return exit_status(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    require_text(arguments, files=True)
    args = parser().parse_args(arguments)
    return int(args.run(args))


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; each sets `run`, which returns the exit status."""
    root = argparse.ArgumentParser(
        prog="python -m serve", description="Transcribe with Earshot engines."
    )
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    for command in (start, reload, transcribe, bulk, live, jobs, shadow, wyoming, keys, phrases):
        command.add_parser(commands)
    title = "list the inputs and outputs of the Triton models, as KServe v2 tensors"
    commands.add_parser("tensors", help=title, description=title).set_defaults(run=_tensors)
    return root


def _tensors(args: argparse.Namespace) -> int:
    print(tensors.describe(), end="")
    return 0
