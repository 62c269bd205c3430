"""`python -m serve transcribe`: transcribe audio files."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from serve.cli.backend import Transcribe, open_backend
from serve.cli.inputs import STDIN, InputFile, find_recordings, readable
from serve.cli.options import add_config, add_cue_options, add_options, read_cue_options, request_of
from serve.cli.outputs import targets_of, write
from serve.cli.progress import Progress
from serve.contract.config import Config, load_config
from serve.contract.errors import ConfigError, EarshotError, FileError
from serve.contract.exits import terminated_as_interrupted
from serve.contract.flags import in_flags, message_in_flags
from serve.contract.messages import Transcript
from serve.speech.cues import CueOptions
from serve.speech.formats import Format, render
from serve.speech.raw import with_header


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "transcribe",
        usage="%(prog)s --config TOML [options] FILE ...",
        help="transcribe audio files",
        description="Transcribe files through the config's server if it runs, else in this "
        "process. If a file fails, it is reported, the others continue, and the exit status is "
        "1. With --output, the same command continues after an interruption.",
    )
    parser.set_defaults(run=_run)
    add_config(parser)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="audio, a folder, a pattern, or - for standard input",
    )
    formats = get_args(Format)
    parser.add_argument(
        *("--format",), choices=formats, default="text", metavar="FORMAT", help=", ".join(formats)
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write a file for each, such as talk.srt for talk.mp3, unless it exists",
    )
    parser.add_argument(
        "--again", action="store_true", help="with --output: also transcribe files that have one"
    )
    parser.add_argument(
        "--in-process", action="store_true", help="do not look for a server; implied by --engine"
    )
    parser.add_argument(
        "--audio-type",
        metavar="TYPE",
        help="type of raw samples: 'audio/L16; rate=16000; channels=1'",
    )
    add_cue_options(parser)
    add_options(parser)


def _run(args: argparse.Namespace) -> int:
    with terminated_as_interrupted():
        return _transcribe(args)


def _transcribe(args: argparse.Namespace) -> int:
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
    run = _Run(args, cues, tasks, len(recordings))
    if run.skipped:
        print(
            f"skipping {run.skipped} of {len(recordings)} files that have a transcript in "
            f"{args.output}; --again transcribes them again",
            file=sys.stderr,
        )
    if tasks:
        run.transcribe_all(config)
    return 1 if run.failed else 0


class _Run:
    """The recordings to transcribe, and the number of those done and failed.

    Args:
        args: the command's arguments.
        cues: the layout of subtitles.
        tasks: each recording with the file of its transcript; None is standard output.
        count: the number of recordings that the command names.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        cues: CueOptions,
        tasks: Sequence[tuple[InputFile, Path | None]],
        count: int,
    ) -> None:
        self._args, self._cues, self._tasks, self._count = args, cues, tasks, count
        self.skipped, self.failed, self._done = count - len(tasks), 0, 0
        raw = args.audio_type is not None  # raw samples have no header
        names = [recording.name for recording, _ in tasks]
        self._progress = Progress(["" if raw or name == STDIN else name for name in names])

    def transcribe_all(self, config: Config) -> None:
        """Transcribe all recordings and print the totals.

        Raises:
            EarshotError: there is no server, and the engine cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            transcribe = stack.enter_context(open_backend(config, self._args))
            stack.callback(self._print_totals)
            pool = ThreadPoolExecutor(config.runtime.slots)
            # Do not wait: after Ctrl-C, closing the backend ends the calls.
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            stack.enter_context(self._progress)
            numbers = {
                pool.submit(self._transcribe_one, transcribe, number): number
                for number in range(len(self._tasks))
            }
            # Standard output keeps the order of the recordings.
            for future in numbers if self._args.output is None else as_completed(numbers):
                number = numbers[future]
                name = readable(self._tasks[number][0].name)
                try:
                    transcript = future.result()
                    self._write(name, self._tasks[number][1], transcript)
                    self._done += 1
                    self._progress.done(number, transcript.duration)
                except EarshotError as error:
                    self.failed += 1
                    self._progress.failed(number)
                    # The message of a FileError has the file's name.
                    prefix = "" if isinstance(error, FileError) else f"{name}: "
                    tqdm.write(f"error: {prefix}{message_in_flags(error)}", file=sys.stderr)

    def _transcribe_one(self, transcribe: Transcribe, number: int) -> Transcript:
        audio = self._tasks[number][0].read()
        if self._args.audio_type is not None:
            audio = with_header(audio, self._args.audio_type)
        request = request_of(audio, self._args)
        return transcribe(request, lambda until_s: self._progress.advance(number, until_s))

    def _write(self, name: str, target: Path | None, transcript: Transcript) -> None:
        warnings = tuple(map(in_flags, transcript.warnings))
        for warning in warnings:
            tqdm.write(f"warning: {name}: {warning}", file=sys.stderr)
        transcript = dataclasses.replace(transcript, warnings=warnings)
        text = render(transcript, name, self._args.format, self._cues)
        write(text, name, target, titled=self._count > 1 and self._args.format != "json")

    def _print_totals(self) -> None:
        audio_s, seconds = self._progress.audio_s, self._progress.seconds
        print(
            f"{self._done} of {self._count} files transcribed, {self.skipped} skipped, "
            f"{self.failed} failed; {audio_s:.1f} s of audio in {seconds:.1f} s, "
            f"{audio_s / max(seconds, 1e-3):.1f} RTFx",
            file=sys.stderr,
        )
