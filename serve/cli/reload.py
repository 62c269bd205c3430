"""`python -m serve reload`: replace the engine of a running server."""

import argparse
import sys
from typing import Any

from serve.contract.config import load_config
from serve.supervisor.control import MAX_CER, ReloadRequest, send_request


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "reload",
        help="replace the engine of a running server",
        description="Open a new engine beside the one of a running server, check it with three "
        "clips, and send all later requests to it. The old engine finishes its requests. If the "
        "new engine cannot be opened or fails the check, nothing changes and the exit status is "
        "1. SIGHUP to the server does the same without clips.",
    )
    parser.set_defaults(run=_reload)
    parser.add_argument("--config", required=True, metavar="TOML", help="the server's config")
    parser.add_argument("--engine", default="", metavar="FOLDER", help="default: the config's")
    parser.add_argument(
        "--clips",
        metavar="JSONL",
        default="",
        help="manifest of clips; the new engine is checked with the first three; default: none",
    )
    parser.add_argument(
        "--max-cer",
        type=float,
        metavar="SHARE",
        default=MAX_CER,
        help="highest character error rate on these clips; default: %(default)s",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="stop the old engine first, if memory cannot hold both; requests wait meanwhile",
    )


def _reload(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    request = ReloadRequest(config, args.engine, args.clips, args.max_cer, args.in_place)
    send_request(request, lambda text: print(text, file=sys.stderr, flush=True))
    return 0
