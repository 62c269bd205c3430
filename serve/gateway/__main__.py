"""The gateway's process, which the supervisor starts: `python -m serve.gateway --folder FOLDER`.

The exit status is 0 where every request was answered, 3 where the drain's limit came first.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from serve.contract.exits import exit_status
from serve.gateway.run import serve_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m serve.gateway", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the run's folder")
    parser.add_argument("--number", type=int, default=0, help="number of this process of several")
    parser.add_argument("--access-log-fd", type=int, help="descriptor for the log of requests")
    args = parser.parse_args(arguments)
    return exit_status(lambda: serve_folder(args.folder, args.number, args.access_log_fd))


if __name__ == "__main__":
    sys.exit(main())
