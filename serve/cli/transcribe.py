"""`python -m serve transcribe`: writes down what audio files say."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from serve.cli.inputs import Recording, find_recordings
from serve.cli.options import (
    add_config,
    add_cue_options,
    add_options,
    api_key,
    read_cue_options,
    request_of,
    server_address,
)
from serve.cli.outputs import targets_of, write
from serve.contract.config import Config, load_config
from serve.contract.errors import EarshotError, FileError
from serve.contract.messages import Request, Transcript
from serve.speech.formats import Format, render
from serve.speech.raw import with_header

Transcribe = Callable[[Request], Transcript]


def add_parser(commands: Any) -> None:
    """The command, among those of `python -m serve`."""
    parser = commands.add_parser(
        "transcribe",
        help="write down what audio files say",
        description="Transcribe files through the server that the config names if it runs, "
        "else in this process. A file that fails is reported, and the others go on; the exit "
        "status is then 1.",
    )
    parser.set_defaults(run=_run)
    add_config(parser)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="WAV, FLAC, MP3, OGG, …; a folder, which is searched; a pattern; - for standard input",
    )
    parser.add_argument("--format", choices=get_args(Format), default="text", help="default: text")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write a file for each there, in folders as theirs are: talk.srt for talk.mp3",
    )
    parser.add_argument(
        "--in-process", action="store_true", help="do not look for a server; implied by --engine"
    )
    parser.add_argument(
        "--audio-type",
        metavar="TYPE",
        help="the files are raw samples, such as 'audio/L16; rate=16000; channels=1'",
    )
    add_cue_options(parser)
    add_options(parser)


def _run(args: argparse.Namespace) -> int:
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
        answers = [
            pool.submit(_transcribe_one, transcribe, recording, args) for recording in recordings
        ]
        bar = stack.enter_context(  # disable=None: only where it is a terminal
            tqdm(total=len(answers), unit="file", leave=False, disable=None, file=sys.stderr)
        )
        for recording, target, answer in zip(recordings, targets, answers, strict=True):
            name = recording.name
            try:
                transcript = answer.result()
                text = render(transcript, name, args.format, cues)
                for warning in transcript.warnings:
                    tqdm.write(f"warning: {name}: {warning}", file=sys.stderr)
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
        from serve.wire.client import Client  # noqa: PLC0415 - tritonclient, only if asked for

        address = server_address(config, config.server.grpc_port)
        with Client(address, key=api_key()) as client:
            if client.ready():
                print(f"through the server at {address}", file=sys.stderr)
                yield lambda request: client.start(request).result()
                return
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

    engine = args.engine or config.engine
    print(f"in this process, with the engine {engine}", file=sys.stderr)
    with open_transcriber(config, engine) as transcriber:
        yield transcriber.transcribe


def _transcribe_one(
    transcribe: Transcribe, recording: Recording, args: argparse.Namespace
) -> Transcript:
    audio = recording.read()
    if args.audio_type is not None:
        audio = with_header(audio, args.audio_type)
    return transcribe(request_of(audio, args))
