"""Serve engines: `python -m serve COMMAND`, each with --help."""

import sys

from serve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
