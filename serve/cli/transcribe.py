"""Transcribe files through the config's server if it runs, else in this process.

If a file fails, it is reported, the others continue, and the exit status is 1. With --output, the
same command continues after an interruption.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from serve.cli.backend import Transcribe, open_backend
from serve.cli.inputs import InputFile, find_recordings, readable
from serve.cli.options import add_config, add_cue_options, add_options, read_cue_options, request_of
from serve.cli.outputs import targets_of, write
from serve.cli.progress import Progress
from serve.contract.config import Config, load_config
from serve.contract.errors import ConfigError, EarshotError, FileError
from serve.contract.exits import terminated_as_interrupted
from serve.contract.messages import Transcript
from serve.speech.cues import CueOptions
from serve.speech.formats import Format, render
from serve.speech.raw import with_header


def add_parser(commands: Any) -> None:
    title, usage = "transcribe audio files", "%(prog)s --config TOML [options] FILE ..."
    parser = commands.add_parser("transcribe", usage=usage, help=title, description=__doc__)
    parser.set_defaults(run=_run)
    add_config(parser)
    add, formats = parser.add_argument, get_args(Format)
    add("files", nargs="+", metavar="FILE", help="audio, a folder, or - for standard input")
    known = ", ".join(formats)
    add("--format", choices=formats, default="text", metavar="FORMAT", help=known)
    output = "write a file for each, such as talk.srt for talk.mp3, unless it exists"
    add("--output", type=Path, metavar="FOLDER", help=output)
    add("--again", action="store_true", help="with --output: also transcribe files that have one")
    add("--in-process", action="store_true", help="do not look for a server; implied by --engine")
    raw = "type of raw samples: 'audio/L16; rate=16000; channels=1'"
    add("--audio-type", metavar="TYPE", help=raw)
    add_cue_options(parser)
    add_options(parser)


@terminated_as_interrupted()
def _run(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    cues = read_cue_options(args, [args.format])
    if args.again and args.output is None:
        raise ConfigError("--again needs --output FOLDER, the folder of the earlier transcripts")
    recordings, others = find_recordings(args.files)
    targets = targets_of(recordings, args.output, args.format)
    if others:
        print(f"skipping {others} files that are not audio", file=sys.stderr)
    tasks = [
        (recording, target)
        for recording, target in zip(recordings, targets, strict=True)
        if args.again or target is None or not target.exists()
    ]
    skipped = len(recordings) - len(tasks)
    if skipped:
        print(
            f"skipping {skipped} of {len(recordings)} files that have a transcript in "
            f"{args.output}; --again transcribes them again",
            file=sys.stderr,
        )
    failed = _transcribe_all(args, config, cues, tasks, len(recordings)) if tasks else 0
    return 1 if failed else 0


def _transcribe_all(
    args: argparse.Namespace,
    config: Config,
    cues: CueOptions,
    tasks: Sequence[tuple[InputFile, Path | None]],
    count: int,
) -> int:
    """Transcribe recordings, print the totals, and return the number of failures.

    Args:
        args: the command's arguments.
        config: the server's address, and the engine.
        cues: the layout of subtitles.
        tasks: each recording, and the file for the transcript; None is standard output.
        count: the number of recordings that the command names.

    Raises:
        EarshotError: there is no server, and the engine cannot be opened.
    """
    done, failed, audio_s = 0, 0, 0.0
    titled = count > 1 and args.format != "json"
    with open_backend(config, args) as transcribe:
        pool, began_s = ThreadPoolExecutor(config.runtime.slots), time.monotonic()
        try:
            with Progress(len(tasks)) as progress:
                futures = {
                    pool.submit(_transcribe_one, args, transcribe, task[0], progress): task
                    for task in tasks
                }
                # Standard output keeps the order of the recordings.
                for future in futures if args.output is None else as_completed(futures):
                    recording, target = futures[future]
                    name = readable(recording.name)
                    try:
                        transcript = future.result()
                        for warning in transcript.warnings:
                            tqdm.write(f"warning: {name}: {warning}", file=sys.stderr)
                        text = render(transcript, name, args.format, cues)
                        write(text, name, target, titled)
                        done += 1
                        audio_s += transcript.duration
                    except EarshotError as error:
                        failed += 1
                        # The message of a FileError has the file's name.
                        prefix = "" if isinstance(error, FileError) else f"{name}: "
                        tqdm.write(f"error: {prefix}{error}", file=sys.stderr)
        finally:
            # Do not wait: after Ctrl-C, closing the backend ends the calls.
            pool.shutdown(wait=False, cancel_futures=True)
            seconds = time.monotonic() - began_s
            print(
                f"{done} of {count} files transcribed, {count - len(tasks)} skipped, "
                f"{failed} failed; {audio_s:.1f} s of audio in {seconds:.1f} s, "
                f"{audio_s / max(seconds, 1e-3):.1f} RTFx",
                file=sys.stderr,
            )
    return failed


def _transcribe_one(
    args: argparse.Namespace, transcribe: Transcribe, recording: InputFile, progress: Progress
) -> Transcript:
    shown_s = 0.0

    def advance(until_s: float) -> None:
        nonlocal shown_s
        progress.add(0, max(0.0, until_s - shown_s))
        shown_s = max(shown_s, until_s)

    try:
        audio = recording.read()
        if args.audio_type is not None:
            audio = with_header(audio, args.audio_type)
        transcript = transcribe(request_of(audio, args), advance)
        advance(transcript.duration)
        return transcript
    finally:
        progress.add(1, 0.0)
