"""Tell what the shadow monitor of the running server has found, and the texts that differ most."""

import argparse
import contextlib
import json
import urllib.error
import urllib.request
from typing import Any

from serve.cli.options import api_key, server_url
from serve.contract.config import load_config
from serve.contract.errors import EarshotError, UnavailableError

_WAIT_S = 10.0


def add_parser(commands: Any) -> None:
    """The command, among those of `python -m serve`."""
    title = "tell what the running server's shadow monitor has found"
    parser = commands.add_parser("shadow", help=title, description=__doc__)
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--config", required=True, metavar="TOML", help="names the server's address"
    )


def _run(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    found = _ask(f"{server_url(config, 'http')}/v1/shadow")
    cer, drift = found["cer"], f"{found['drift']:.1f}, the bound is {found['drift_bound']:g}"
    known = any(spread for _, spread in found["baseline"].values())
    print(f"compared  {found['compared']}; {found['pending']} wait")
    print(f"CER       {_rate(cer)}")
    for language, rate in found["cer_by_language"].items():
        print(f"  {language or '-':<8}{_rate(rate)}")
    print(f"drift     {drift if known else 'not told, for the config has no [shadow.baseline]'}")
    for case in found["worst"]:
        print(f"\n{case['compared_at']}  {case['language'] or '-'}  {100 * case['cer']:.1f} %")
        print(f"  served     {case['served']}\n  reference  {case['reference']}")
    print("\nWhile all is well, these requests' gaps are a baseline:\n\n[shadow.baseline]")
    for kind, spread in found["gaps"].items():
        print(f"{kind} = {spread}")
    return 0


def _ask(url: str) -> dict[str, Any]:
    """Ask the server.

    Raises:
        UnavailableError: there is none.
        EarshotError: it refuses.
    """
    key = api_key()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            raise EarshotError(json.load(error)["error"]["message"]) from error
        raise EarshotError(f"{url} answered {error.code}; is it an Earshot?") from error
    except OSError as error:
        raise UnavailableError(f"no server answers at {url}: {error}") from error


def _rate(rate: dict[str, float] | None) -> str:
    if rate is None:
        return "-"
    low, high = 100 * rate["low"], 100 * rate["high"]
    return f"{100 * rate['value']:.2f} % [{low:.2f}, {high:.2f}]"
