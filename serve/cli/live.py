"""Stream a file to the running server at speaking speed, and print each word once it is final."""

import argparse
import asyncio
import sys
from typing import Any

from serve.cli.options import api_key, codes, server_url
from serve.contract.config import load_config
from serve.contract.files import read_bytes


def add_parser(commands: Any) -> None:
    title = "stream a file to the running server and print its text word by word"
    parser = commands.add_parser("live", help=title, description=__doc__)
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("--config", required=True, metavar="TOML", help="the config of the running server")
    add("file", metavar="FILE", help="WAV, FLAC, MP3, OGG, …")
    add("--language", help="such as en, English or en-US; default: detected per utterance")
    add("--languages", type=codes, metavar="CODE,CODE,…", help="detect only these languages")
    add("--phrases", type=codes, metavar="PHRASE,PHRASE,…", help="names to recognize")
    add("--prompt", help="text before the audio: names, spelling, style")
    pace = "seconds of audio per second; 0: as fast as the server reads; default: %(default)g"
    add("--pace", type=float, default=1.0, metavar="X", help=pace)


def _run(args: argparse.Namespace) -> int:
    """Stream the file, print each final word and return the exit status.

    Raises:
        EarshotError: the file or an argument is wrong, or the server is not reachable.
    """
    server = server_url(load_config(args.config), "ws")
    names = ("language", "languages", "phrases", "prompt")
    transcription = {name: value for name in names if (value := getattr(args, name)) is not None}
    audio = read_bytes(args.file)
    return asyncio.run(_stream(server, audio, transcription, args.pace))


async def _stream(server: str, audio: bytes, transcription: dict[str, Any], pace: float) -> int:
    # Other commands do not load these.
    from serve.cli.live_client import transcribe_live  # noqa: PLC0415
    from serve.gateway.live.events import MAX_SESSION_S  # noqa: PLC0415
    from serve.speech.audio import decode  # noqa: PLC0415
    from serve.speech.meter import AudioLimits  # noqa: PLC0415

    failed = 0
    blocks = decode(audio, AudioLimits(MAX_SESSION_S))
    async for arrival in transcribe_live(server, blocks, transcription, pace=pace, key=api_key()):
        event = arrival.event
        kind = event["type"].rpartition(".")[2]
        if kind == "delta":
            print(event["delta"], end="", flush=True)
        elif kind == "completed":
            print(flush=True)
        elif kind == "failed":
            failed += 1
            print(f"error: {event['error']['message']}", file=sys.stderr)
    return 1 if failed else 0
