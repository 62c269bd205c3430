"""Create, list, revoke and expire API keys, and show their usage."""

import argparse
import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve.cli.outputs import print_table
from serve.contract.config import load_config
from serve.contract.errors import ConfigError, FileError
from serve.contract.keys import (
    ENVIRONMENT,
    add_key,
    expire_key,
    hash_of,
    new_key,
    read_keys,
    revoke_key,
)
from serve.gateway.usage import day_of, month_until, read_usage

_TIMES = "in UTC, such as 2027-01-31 or 2027-01-31T12:00Z"
_LIMITS: dict[str, tuple[type, str]] = {
    "requests_per_minute": (int, "default: no limit"),
    "audio_s_per_minute": (float, "default: no limit"),
    "audio_s_per_day": (float, "for a day in UTC; default: no limit"),
    "requests_at_once": (int, "default: half of the server's limit"),
    "live_streams": (int, "default: half of the server's limit"),
}


def add_parser(commands: Any) -> None:
    title = "create, list, revoke and expire API keys, and show their usage"
    parser = commands.add_parser("keys", help=title, description=__doc__)
    keys = parser.add_subparsers(metavar="COMMAND", required=True)
    new = keys.add_parser("new", help="create a key", description=_new_key.__doc__)
    new.set_defaults(run=_new_key)
    new.add_argument("--name", required=True, help="the key's owner; a label of the metrics")
    new.add_argument("--file", type=Path, help="TOML file of keys, named by server.keys_file")
    for limit, (kind, meaning) in _LIMITS.items():
        new.add_argument(f"--{limit.replace('_', '-')}", type=kind, help=meaning)
    new.add_argument("--expires", metavar="TIME", help=f"{_TIMES}; default: never")

    every = keys.add_parser("list", help="list the keys of a file, with limits and expiry")
    every.set_defaults(run=_list_keys)
    title = "remove a key from a file, which a running server reads again"
    revoked = keys.add_parser("revoke", help=title)
    revoked.set_defaults(run=lambda args: _changed_key(revoke_key, args.file, args.name))
    expired = keys.add_parser("expire", help="set the time at which a key expires")
    expired.set_defaults(run=lambda args: _changed_key(expire_key, args.file, args.name, args.at))
    expired.add_argument("--at", required=True, metavar="TIME", help=_TIMES)
    written = "TOML file that `keys new` wrote"
    for command in (every, revoked, expired):
        command.add_argument("--file", type=Path, required=True, help=written)
    for command in (revoked, expired):
        command.add_argument("--name", required=True, help="the key's owner")
    title = "show the usage of all keys, by day (UTC) and model"
    usage = keys.add_parser("usage", help=title, description=_print_usage.__doc__)
    usage.set_defaults(run=_print_usage)
    usage.add_argument("--config", required=True, metavar="TOML", help="has server.usage_file")
    for flag, default in (("--start", "the first of this month"), ("--end", "today")):
        usage.add_argument(flag, metavar="DAY", help=f"such as 2027-01-31; default: {default}")


def _new_key(args: argparse.Namespace) -> int:
    """Create an API key and print it once.

    Only its hash is kept: in --file, which a running server reads again, or printed as a line for
    the environment variable EARSHOT_API_KEYS.
    """
    key = new_key()
    limits = {name: getattr(args, name) for name in (*_LIMITS, "expires")}
    if args.file is not None:
        add_key(args.file, args.name, {"sha256": hash_of(key), **limits})
    elif any(limit is not None for limit in limits.values()):
        raise ConfigError("limits and --expires need a file of keys; name one with --file")
    else:
        print(f"{ENVIRONMENT}={args.name}:{hash_of(key)}", file=sys.stderr)
    print(key)
    return 0


def _list_keys(args: argparse.Namespace) -> int:
    rows: list[tuple[str, ...]] = [("name", "sha256", *_LIMITS, "expires")]
    for name, key in read_keys(args.file).items():
        limits = [getattr(key, limit) for limit in _LIMITS]
        shown = (f"{limit:g}" if limit else "-" for limit in limits)
        end = f"{key.expires} (expired)" if key.expired else key.expires or "-"
        rows.append((name, f"{key.sha256[:8]}…", *shown, end))
    print_table(rows)
    return 0


def _print_usage(args: argparse.Namespace) -> int:
    """Show the usage of all keys, by day (UTC) and model, from server.usage_file."""
    config = load_config(args.config)
    path = Path(config.server.usage_file)
    if not config.server.usage_file:
        raise ConfigError(
            f"server.usage_file is not set in {args.config}, so the server forgets the usage when "
            "it stops; set it, or ask the running server for /v1/usage"
        )
    if not path.is_file():
        raise FileError(f"{path} does not exist; expected the file that a server writes")
    end_day = day_of(args.end or datetime.datetime.now(datetime.UTC).date().isoformat())
    start_day = day_of(args.start or month_until(end_day))
    rows: list[tuple[str, ...]] = [("day", "key", "model", "requests", "audio_s")]
    for row in read_usage(path, start_day, end_day):
        rows.append((row.day, row.key or "-", row.model, f"{row.requests}", f"{row.audio_s:.1f}"))
    print_table(rows)
    return 0


def _changed_key(change: Callable[..., None], file: Path, name: str, *more: str) -> int:
    change(file, name, *more)
    print(f"{file}: {name} has changed; running servers read the file again", file=sys.stderr)
    return 0
