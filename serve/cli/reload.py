"""Replace the engine of a running server.

Open a new engine beside the one of a running server, check it with three clips, and send all later
requests to it. The old engine finishes its requests. If the new engine cannot be opened or fails
the check, nothing changes and the exit status is 1. SIGHUP to the server does the same without
clips.
"""

import argparse
import sys
from typing import Any

from serve.contract.config import load_config
from serve.supervisor.control import MAX_CER, ReloadRequest, send_request


def add_parser(commands: Any) -> None:
    title = "replace the engine of a running server"
    parser = commands.add_parser("reload", help=title, description=__doc__)
    parser.set_defaults(run=_reload)
    add = parser.add_argument
    add("--config", required=True, metavar="TOML", help="the server's config")
    add("--engine", default="", metavar="FOLDER", help="default: the config's")
    clips = "manifest of clips; the new engine is checked with the first three; default: none"
    add("--clips", metavar="JSONL", default="", help=clips)
    max_cer = "highest character error rate on these clips; default: %(default)s"
    add("--max-cer", type=float, metavar="SHARE", default=MAX_CER, help=max_cer)
    in_place = "stop the old engine first, if memory cannot hold both; requests wait meanwhile"
    add("--in-place", action="store_true", help=in_place)


def _reload(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    request = ReloadRequest(config, args.engine, args.clips, args.max_cer, args.in_place)
    send_request(request, lambda text: print(text, file=sys.stderr, flush=True))
    return 0
