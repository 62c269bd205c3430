"""`python -m serve reload`: another engine takes over in a server that runs."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from serve.contract.config import load_config
from serve.supervisor.control import give, order_for


def add_parser(commands: Any) -> None:
    """The command, among those of `python -m serve`."""
    parser = commands.add_parser(
        "reload",
        help="let another engine take over in a server that runs",
        description="Open another engine beside the one that a running server has, let it hear "
        "three clips, and give it all requests that come from then on, while the old one answers "
        "what it has. Where the new one cannot be opened or hears the clips wrong, nothing changes "
        "and the exit status is 1. SIGHUP to the server does the same.",
    )
    parser.set_defaults(run=_reload)
    parser.add_argument("--config", required=True, metavar="TOML", help="that the server has")
    parser.add_argument("--engine", default="", metavar="FOLDER", help="default: the config's")
    parser.add_argument(
        "--clips",
        metavar="JSONL",
        help="manifest of clips, the first three of which it has to hear; default: "
        "server.reload_clips",
    )
    parser.add_argument(
        "--max-cer",
        type=float,
        metavar="SHARE",
        help="most errors in them, as 0.25; default: server.reload_max_cer",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="end the old engine first, where memory has no room for both; requests wait meanwhile",
    )


def _reload(args: argparse.Namespace) -> int:
    order = order_for(load_config(args.config), args.engine, args.in_place)
    if args.clips is not None:
        order = dataclasses.replace(order, clips=str(Path(args.clips).absolute()))
    if args.max_cer is not None:
        order = dataclasses.replace(order, max_cer=args.max_cer)
    give(order, lambda text: print(text, file=sys.stderr, flush=True))
    return 0
