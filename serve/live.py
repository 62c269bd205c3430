"""Stream a file to the running server as it is spoken, and print each word once it is final."""

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

from serve.config import LiveConfig
from serve.errors import ConfigError
from serve.files import read_bytes
from serve.options import codes

TITLE = "stream a file to the running server, and see its text come word by word"
FASTEST = 1000.0  # seconds of audio in a second

Say = Callable[[str], None]
"""Prints some text as it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add = parser.add_argument
    add("--config", required=True, metavar="TOML", help="names the server's address")
    add("file", metavar="FILE", help="WAV, FLAC, MP3, OGG, …")
    add("--language", help="such as en, English or en-US; found in each utterance without")
    add("--languages", type=codes, metavar="CODE,CODE,…", help="it is found among these")
    add("--prompt", help="text before the audio: names, spelling, style")
    add(
        "--pace",
        type=float,
        default=1.0,
        metavar="X",
        help="seconds of audio in a second; 0: as many as the server takes; default: %(default)g",
    )


def run(server: str, args: argparse.Namespace, key: str | None, say: Say, complain: Say) -> int:
    """Stream the file and say each word once it is final; returns the exit status.

    Args:
        server: ws://host:port.
        args: of `add_arguments`.
        key: an API key.
        say, complain: print text, and what failed.

    Raises:
        EarshotError: the file or an argument is wrong, or there is no such server.
    """
    if not 0 <= args.pace <= FASTEST:
        raise ConfigError(f"--pace {args.pace:g}; expected 0 to {FASTEST:g} seconds in a second")
    given = {
        "language": args.language,
        "languages": args.languages,
        "prompt": args.prompt,
    }
    transcription = {name: value for name, value in given.items() if value is not None}
    audio = read_bytes(args.file)
    return asyncio.run(_stream(server, audio, transcription, args.pace, key, say, complain))


async def _stream(
    server: str,
    audio: bytes,
    transcription: dict[str, Any],
    pace: float,
    key: str | None,
    say: Say,
    complain: Say,
) -> int:
    # Other commands do without these and what they load.
    from serve.gateway.live.client import transcribe_live  # noqa: PLC0415
    from serve.speech.audio import decode  # noqa: PLC0415
    from serve.speech.meter import Limits  # noqa: PLC0415

    failed = 0
    blocks = decode(audio, Limits(LiveConfig.max_session_s))
    async for heard in transcribe_live(server, blocks, transcription, pace=pace, key=key):
        event = heard.event
        kind = event["type"].rpartition(".")[2]
        if kind == "delta":
            say(event["delta"])
        elif kind == "completed":
            say("\n")
        elif kind == "failed":
            failed += 1
            complain(f"error: {event['error']['message']}\n")
    return 1 if failed else 0
