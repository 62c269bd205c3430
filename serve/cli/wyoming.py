"""Serve Home Assistant and other Wyoming clients with the text of a running server.

The bridge runs until Ctrl-C or SIGTERM, and first finishes the current utterances; a second Ctrl-C
stops it at once. The Wyoming protocol has neither API keys nor TLS: every client that reaches the
bridge uses the server with the bridge's key.
"""

import argparse
import asyncio
import ipaddress
import logging
import signal
from pathlib import Path
from typing import Any

from serve.cli.options import api_key, codes, server_url
from serve.contract.config import Config, load_config
from serve.contract.errors import ConfigError, shown
from serve.gateway.observe.log import LogRateLimiter
from serve.speech.languages import LANGUAGE_NAMES, language_code, named_language, script_of
from serve.wyoming.bridge import Bridge
from serve.wyoming.session import BridgeSettings
from serve.wyoming.upstream import SpeechApiClient

LISTEN = "127.0.0.1:10300"

_DRAIN_S = 10.0
_IDLE_S = 60.0


def add_parser(commands: Any) -> None:
    title = "run a Wyoming bridge: Home Assistant uses a running server"
    parser = commands.add_parser("wyoming", help=title, description=__doc__)
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("--config", metavar="TOML", help="the config of the running server")
    add("--server", metavar="URL", help="such as http://127.0.0.1:8000; default: the config's")
    add("--listen", "--uri", default=LISTEN, metavar="ADDRESS:PORT", help="default: %(default)s")
    add("--open", action="store_true", help="allow clients of other machines, without keys")
    add("--key-file", type=Path, help="file with only an API key; default: EARSHOT_API_KEY")
    add("--language", help="language if a client names none; default, and auto: detected")
    languages = "languages for clients; default: transcriber.languages, else all of Whisper's"
    add("--languages", type=codes, metavar="CODE,CODE,…", help=languages)


def _run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives and return the exit status.

    Raises:
        EarshotError: an argument is wrong, or the address is in use.
    """
    if not args.config and args.server is None:
        raise ConfigError("no server is named; expected --config TOML or --server URL")
    config = load_config(args.config) if args.config else Config()
    url = args.server if args.server is not None else server_url(config, "http")
    host, port = _address(args.listen, args.open)
    languages = args.languages or config.transcriber.languages or tuple(LANGUAGE_NAMES)
    settings = BridgeSettings(
        SpeechApiClient(url, api_key(args.key_file), config.transcriber.request_timeout_s),
        tuple(_code(language, "--languages") for language in languages),
        _code(args.language, "--language") if named_language(args.language) else None,
        _IDLE_S,
    )
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimiter())
    asyncio.run(_serve(Bridge(settings), host, port, settings.upstream.url))
    return 0


async def _serve(bridge: Bridge, host: str, port: int, url: str) -> None:
    signals, loop = asyncio.Queue[int](), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    port = await bridge.start(host, port)
    print(f"ready: tcp://{host}:{port}, using {url}", flush=True)
    await signals.get()
    ending, again = asyncio.create_task(bridge.stop(_DRAIN_S)), asyncio.create_task(signals.get())
    await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
    await bridge.stop(0.0)
    await ending


def _address(text: str, open_to_all: bool) -> tuple[str, int]:
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
        valid = port.isascii() and port.isdecimal() and int(port) < 2**16
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"--listen {shown(text)}; expected ADDRESS:PORT, such as {LISTEN}")
    if not (loopback or open_to_all):
        raise ConfigError(
            f"--listen {text} accepts other machines, and the Wyoming protocol has no keys; add "
            "--open if every client that reaches it may use the server"
        )
    return host, int(port)


def _code(language: str, flag: str) -> str:
    code = language_code(language)
    if code is None:
        raise ConfigError(f"{flag} {shown(language)}; expected such as en, English or en-US")
    return language.strip() if script_of(language) else code  # zh-TW also names a script
