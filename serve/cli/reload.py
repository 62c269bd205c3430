"""`python -m serve reload`: another engine takes over in a server that runs."""

import argparse
import sys
from typing import Any

from serve.contract.config import load_config
from serve.supervisor.control import MAX_CER, give, order_for


def add_parser(commands: Any) -> None:
    """The command, among those of `python -m serve`."""
    parser = commands.add_parser(
        "reload",
        help="let another engine take over in a server that runs",
        description="Open another engine beside the one that a running server has, let it hear "
        "three clips, and give it all requests that come from then on, while the old one answers "
        "what it has. Where the new one cannot be opened or hears the clips wrong, nothing changes "
        "and the exit status is 1. SIGHUP to the server does the same without clips.",
    )
    parser.set_defaults(run=_reload)
    parser.add_argument("--config", required=True, metavar="TOML", help="that the server has")
    parser.add_argument("--engine", default="", metavar="FOLDER", help="default: the config's")
    parser.add_argument(
        "--clips",
        metavar="JSONL",
        default="",
        help="manifest of clips, the first three of which it has to hear; default: none",
    )
    parser.add_argument(
        "--max-cer",
        type=float,
        metavar="SHARE",
        default=MAX_CER,
        help="most errors in them; default: %(default)s",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="end the old engine first, where memory has no room for both; requests wait meanwhile",
    )


def _reload(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    order = order_for(config, args.engine, args.clips, args.max_cer, args.in_place)
    give(order, lambda text: print(text, file=sys.stderr, flush=True))
    return 0
