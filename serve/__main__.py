"""Serve engines: `python -m serve COMMAND`, each with --help.

python -m serve triton --config configs/demo.toml
python -m serve gateway --config before-others.toml
python -m serve transcribe --config configs/demo.toml --format srt talk.mp3
python -m serve bulk --config configs/demo.toml --input recordings --output transcripts
python -m serve live --config configs/demo.toml talk.mp3
python -m serve wyoming --config configs/demo.toml
python -m serve tensors
python -m serve keys new --name alice --file keys.toml
"""

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import get_args

from tqdm import tqdm

from serve import key_commands, live
from serve.bulk import command as bulk
from serve.config import Config, load_config
from serve.errors import ConfigError, EarshotError, FileError
from serve.inputs import Recording, find_recordings
from serve.messages import Request, Transcript
from serve.options import add_cue_options, add_options, read_cue_options, request_of
from serve.outputs import targets_of, write
from serve.speech.formats import Format, render
from serve.speech.raw import with_header
from serve.supervisor.run import running_server
from serve.triton import wire
from serve.wyoming import command as wyoming

_WATCH_INTERVAL_S = 0.5
_KEY = "EARSHOT_API_KEY"  # what `transcribe` shows to a server that wants a key
# Hosts that mean every interface, and where a client on this machine reaches them.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}

Transcribe = Callable[[Request], Transcript]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except EarshotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    # Whoever reads the output has closed it, as `head` does: nothing more may be written.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serve", description="Transcribe with Earshot engines."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    triton = commands.add_parser(
        "triton",
        help="run Triton Inference Server in the foreground",
        description="Run Triton Inference Server and the gateway before it until Ctrl-C or "
        "SIGTERM, which let them finish what they have accepted; a second Ctrl-C stops them at "
        "once. What fails is started again. The exit status is 1 where a request was accepted and "
        "not answered.",
    )
    triton.set_defaults(run=_triton)
    _add_config(triton)
    _add_open(triton)
    triton.add_argument(
        "--log",
        type=Path,
        help="keep the server's log in this file; of several engines in FILE.0, FILE.1",
    )

    gateway = commands.add_parser(
        "gateway",
        help="run a gateway before other Earshots in the foreground",
        description="Run a gateway before the servers that [[upstreams]] of the config names, with "
        "no engine of its own, until Ctrl-C or SIGTERM; a second Ctrl-C stops it at once. The exit "
        "status is 1 where a request was accepted and not answered.",
    )
    gateway.set_defaults(run=_gateway)
    gateway.add_argument("--config", required=True, metavar="TOML", help="addresses, limits")
    _add_open(gateway)

    transcribe = commands.add_parser(
        "transcribe",
        help="write down what audio files say",
        description="Transcribe files through the server that the config names if it runs, "
        "else in this process. A file that fails is reported, and the others go on; the exit "
        "status is then 1.",
    )
    transcribe.set_defaults(run=_transcribe)
    _add_config(transcribe)
    transcribe.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="WAV, FLAC, MP3, OGG, …; a folder, which is searched; a pattern; - for standard input",
    )
    transcribe.add_argument(
        "--format", choices=get_args(Format), default="text", help="default: text"
    )
    transcribe.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write a file for each there, in folders as theirs are: talk.srt for talk.mp3",
    )
    transcribe.add_argument(
        "--in-process", action="store_true", help="do not look for a server; implied by --engine"
    )
    transcribe.add_argument(
        "--audio-type",
        metavar="TYPE",
        help="the files are raw samples, such as 'audio/L16; rate=16000; channels=1'",
    )
    add_cue_options(transcribe)
    add_options(transcribe)

    many = commands.add_parser("bulk", help=bulk.TITLE, description=bulk.__doc__)
    many.set_defaults(run=_bulk)
    _add_config(many)
    bulk.add_arguments(many)

    stream = commands.add_parser("live", help=live.TITLE, description=live.__doc__)
    stream.set_defaults(run=_live)
    live.add_arguments(stream)

    bridge = commands.add_parser("wyoming", help=wyoming.TITLE, description=wyoming.__doc__)
    bridge.set_defaults(run=_wyoming)
    wyoming.add_arguments(bridge)

    tensors = commands.add_parser(
        "tensors",
        help="list the inputs and outputs of the Triton models",
        description="List the inputs and outputs of the Triton models, as KServe v2 has them.",
    )
    tensors.set_defaults(run=_tensors)
    key_commands.add_parser(commands)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="TOML", help="engine, addresses, limits")
    parser.add_argument("--engine", metavar="FOLDER", help="instead of `engine` in the config")


def _add_open(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--open", action="store_true", help="let everybody in; as server.open = true in the config"
    )


# ---------------------------------------------------------------- triton


class _StopSignals:
    """SIGINT and SIGTERM: the first after `armed` asks for a drain, any other interrupts."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.armed = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.armed or self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()


def _triton(args: argparse.Namespace) -> int:
    config = _served(args)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)  # what the supervisor says
    stop = _StopSignals()
    engine = args.engine or config.engine
    print(f"starting Triton Inference Server with the engine {engine} …", file=sys.stderr)
    # Those of requests are for whoever looks at this process, where no file is named.
    requests_to = os.dup(2) if args.log is None else None
    with running_server(config, args.engine, args.log, requests_to) as server:
        stop.armed = True
        print(
            f"ready: HTTP {server.http}, gRPC {server.grpc}, "
            f"metrics http://{server.metrics}/metrics",
            flush=True,
        )
        while not stop.asked.wait(_WATCH_INTERVAL_S):
            reason = server.failure()
            if reason is not None:
                raise EarshotError(reason)
        print("stopping when all requests are answered; Ctrl-C stops at once", file=sys.stderr)
    print("stopped", file=sys.stderr)
    return 0


def _gateway(args: argparse.Namespace) -> int:
    from serve.gateway.run import serve_alone  # noqa: PLC0415 - only if asked for

    if serve_alone(_served(args)) != 0:
        raise EarshotError("not every request that was accepted has been answered")
    return 0


def _served(args: argparse.Namespace) -> Config:
    config = load_config(args.config)
    if args.open:
        return dataclasses.replace(config, server=dataclasses.replace(config.server, open=True))
    return config


def _tensors(args: argparse.Namespace) -> int:
    print(wire.describe(), end="")
    return 0


def _live(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    scheme = "wss" if config.server.tls_certificate else "ws"
    server = f"{scheme}://{_address(config, config.server.http_port)}"
    return live.run(server, args, os.environ.get(_KEY), _say, _complain)


def _wyoming(args: argparse.Namespace) -> int:
    config = load_config(args.config) if args.config else None
    url = args.server
    if url is None and config is not None:
        scheme = "https" if config.server.tls_certificate else "http"
        url = f"{scheme}://{_address(config, config.server.http_port)}"
    if url is None:
        raise ConfigError("no server is named; say --config TOML, or --server URL")
    return wyoming.run(config, url, args, os.environ.get(_KEY, ""), _say)


def _bulk(args: argparse.Namespace) -> int:
    return bulk.run(load_config(args.config), args, _complain)


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _complain(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- transcribe


def _transcribe(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    cues = read_cue_options(args, [args.format])
    recordings, others = find_recordings(args.files)
    targets = targets_of(recordings, args.output, args.format)
    if others:
        print(f"{others} files of other kinds are passed over", file=sys.stderr)
    failed = 0
    with contextlib.ExitStack() as stack:
        transcribe = stack.enter_context(_backend(config, args))
        pool = ThreadPoolExecutor(config.runtime.slots)
        # Does not wait: after Ctrl-C it is the backend's end that ends the calls.
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        answers = [pool.submit(_transcribe_one, transcribe, one, args) for one in recordings]
        bar = stack.enter_context(  # disable=None: only where it is a terminal
            tqdm(total=len(answers), unit="file", leave=False, disable=None, file=sys.stderr)
        )
        for recording, target, answer in zip(recordings, targets, answers, strict=True):
            name = recording.name
            try:
                transcript = answer.result()
                text = render(transcript, name, args.format, cues)
                if transcript.warning:
                    tqdm.write(f"warning: {name}: {transcript.warning}", file=sys.stderr)
                write(text, name, target, titled=len(answers) > 1 and args.format != "json")
            except EarshotError as error:
                failed += 1
                subject = "" if isinstance(error, FileError) else f"{name}: "  # it names the file
                tqdm.write(f"error: {subject}{error}", file=sys.stderr)
            bar.update()
    if failed:
        print(f"{failed} of {len(recordings)} files failed", file=sys.stderr)
    return 1 if failed else 0


@contextlib.contextmanager
def _backend(config: Config, args: argparse.Namespace) -> Iterator[Transcribe]:
    """The running server if there is one, else a transcriber of this process's own."""
    if not (args.in_process or args.engine):
        from serve.triton.client import Client  # noqa: PLC0415 - tritonclient, only if asked for

        address = _address(config, config.server.grpc_port)
        with Client(address, key=os.environ.get(_KEY)) as client:
            if client.ready():
                print(f"through the server at {address}", file=sys.stderr)
                yield lambda request: client.start(request).result()
                return
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

    engine = args.engine or config.engine
    print(f"in this process, with the engine {engine}", file=sys.stderr)
    with open_transcriber(config, engine) as transcriber:
        yield transcriber.transcribe


def _address(config: Config, port: int) -> str:
    """Where the configured server is reached from here."""
    return f"{_WILDCARDS.get(config.server.host, config.server.host)}:{port}"


def _transcribe_one(
    transcribe: Transcribe, recording: Recording, args: argparse.Namespace
) -> Transcript:
    audio = recording.read()
    if args.audio_type is not None:
        audio = with_header(audio, args.audio_type)
    return transcribe(request_of(audio, args))


if __name__ == "__main__":
    sys.exit(main())
