"""Show what the shadow monitor of the running server found, and the texts that differ most."""

import argparse
from typing import Any

from serve.cli.api import open_api
from serve.contract.config import load_config


def add_parser(commands: Any) -> None:
    title = "show what the running server's shadow monitor found"
    parser = commands.add_parser("shadow", help=title, description=__doc__)
    parser.set_defaults(run=_run)
    config = "the config of the running server"
    parser.add_argument("--config", required=True, metavar="TOML", help=config)


def _run(args: argparse.Namespace) -> int:
    with open_api(load_config(args.config)) as api:
        report = api.object("GET", "/v1/shadow")
    cer, drift = report["cer"], f"{report['drift']:.1f}, threshold {report['drift_bound']:g}"
    has_baseline = any(spread for _, spread in report["baseline"].values())
    print(f"compared  {report['compared']}; {report['pending']} pending")
    print(f"CER       {_rate(cer)}")
    for language, rate in report["cer_by_language"].items():
        print(f"  {language or '-':<8}{_rate(rate)}")
    print(f"drift     {drift if has_baseline else 'unknown: the config has no [shadow.baseline]'}")
    for case in report["worst"]:
        print(f"\n{case['compared_at']}  {case['language'] or '-'}  {100 * case['cer']:.1f} %")
        print(f"  served     {case['served']}\n  reference  {case['reference']}")
    print("\nWith a healthy engine, the gaps of a few hundred requests are a baseline. Now:")
    print("\n[shadow.baseline]")
    for kind, spread in report["gaps"].items():
        print(f"{kind} = {spread}")
    return 0


def _rate(rate: dict[str, float] | None) -> str:
    if rate is None:
        return "-"
    low, high = 100 * rate["low"], 100 * rate["high"]
    return f"{100 * rate['value']:.2f} % [{low:.2f}, {high:.2f}]"
