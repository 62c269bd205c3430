"""Transcribe a folder, a manifest or an object store on all engines of a machine or a Ray cluster.

After a kill, Ctrl-C or SIGTERM the same command transcribes what is missing. A file that cannot be
transcribed stands in OUTPUT/failed.jsonl with the reason; the exit status is then 1.
"""

import argparse
import dataclasses
import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from serve.cli.options import add_config, add_cue_options, add_options, read_cue_options, request_of
from serve.contract.config import Config, load_config
from serve.contract.errors import ConfigError
from serve.contract.exits import terminated_as_interrupted
from serve.contract.messages import Request
from serve.speech.formats import Format

if TYPE_CHECKING:
    from serve.bulk.sharding import BulkOutput, Shard
    from serve.bulk.worker import ShardReport

SHARD_FILES = 100  # if nobody says otherwise
SHARDS = ("jsonl", "parquet")
TEXTS = tuple(format for format in get_args(Format) if format != "json")

_NEEDED = ("fsspec", "pyarrow", "ray")  # not in every image
_LINE_EVERY_S = 30.0  # where the output is no terminal


def add_parser(commands: Any) -> None:
    """The command, among those of `python -m serve`."""
    title = "transcribe many files, on one machine or a Ray cluster"
    usage = "%(prog)s --config TOML --input PATH --output FOLDER [options]"
    parser = commands.add_parser("bulk", usage=usage, help=title, description=__doc__)
    parser.set_defaults(run=_run)
    add_config(parser)
    add = parser.add_argument
    add(
        "--input",
        required=True,
        metavar="PATH",
        help="folder or s3://…, or JSONL with `file` in each line, relative to it",
    )
    add("--output", required=True, metavar="FOLDER", help="a path or s3://…")
    add(
        "--format",
        default="jsonl",
        metavar="FORMAT,…",
        help=f"of shards: {', '.join(SHARDS)}; "
        f"of a file for each besides: {', '.join(TEXTS)}; default: %(default)s",
    )
    add(
        "--shard-files",
        type=int,
        default=SHARD_FILES,
        metavar="N",
        help="files that are done as a whole or not at all; default: %(default)s",
    )
    add("--address", metavar="HOST:PORT", help="a Ray cluster's; without: this machine alone")
    add(
        "--cpus",
        type=int,
        metavar="N",
        help="cores of an engine; default: runtime.threads, else 4 or what there are; on GPUs 1",
    )
    add_cue_options(parser)
    add_options(parser)


def _run(args: argparse.Namespace) -> int:
    """Transcribe what is not done yet and return the exit status; SIGTERM ends it as Ctrl-C.

    Raises:
        EarshotError: the input, the output or an option is wrong, or shards are left.
        KeyboardInterrupt: Ctrl-C or SIGTERM; whole shards are kept.
    """
    with terminated_as_interrupted():
        return _run_shards(args)


def _run_shards(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    _check(args)
    # Other commands do without these and what they load.
    from serve.bulk import sharding, store  # noqa: PLC0415

    engine = str(Path(args.engine or config.engine).absolute())
    shard_format, texts = _formats(args.format)
    cues = read_cue_options(args, texts)
    request = request_of(b"", args)
    output = sharding.BulkOutput(store.full(args.output), shard_format, texts, cues)
    source = store.full(args.input)
    files, others = sharding.find_files(source)
    places = sharding.places_below(files, source) if texts else ()
    shards = sharding.shards_of(files, args.shard_files, places)
    sharding.keep_or_compare(
        output,
        {
            "input": sharding.digest_of(files),
            "files": len(files),
            "shard_files": args.shard_files,
            "format": ",".join((shard_format, *texts)),
            **({"cues": dataclasses.asdict(cues)} if texts else {}),
            "engine": engine,
            "options": {**dataclasses.asdict(request), "audio": None},
            "transcriber": dataclasses.asdict(config.transcriber),
        },
    )
    done = output.done()
    left = [shard for shard in shards if shard.number not in done]
    passed = f"; {others} files of other kinds are passed over" if others else ""
    _tell(f"{len(files)} files in {len(shards)} shards, of which {len(done)} are done{passed}\n")
    if left:
        config = dataclasses.replace(config, engine=engine)
        _do(left, config, request, output, args)
    failed = output.gather_failed()
    if failed:
        _tell(f"{failed} of {len(files)} files failed: {output.folder}/failed.jsonl\n")
    return 1 if failed else 0


def _check(args: argparse.Namespace) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serve bulk needs packages that are missing here: {', '.join(missing)}; expected "
            "those of requirements.txt, which the native image has"
        )
    for name, value in (("--shard-files", args.shard_files), ("--cpus", args.cpus)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}; expected at least 1")


def _formats(text: str) -> tuple[Any, Any]:
    """The format of shards, and those of which each recording gets a file."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in SHARDS + TEXTS]
    shards = [name for name in names if name in SHARDS]
    if unknown or len(shards) > 1:
        raise ConfigError(
            f"--format {text}; expected {' or '.join(SHARDS)}, and any of {', '.join(TEXTS)}, with "
            "commas between them"
        )
    return (shards or ["jsonl"])[0], tuple(name for name in names if name in TEXTS)


def _do(
    shards: "list[Shard]",
    config: Config,
    request: Request,
    output: "BulkOutput",
    args: argparse.Namespace,
) -> None:
    """Do some shards and show how far it is."""
    from serve.bulk import cluster  # noqa: PLC0415 - loads Ray and torch

    progress = BulkProgress(sum(len(shard.files) for shard in shards))
    with cluster.connected(args.address):
        engines = cluster.engines_of(config, args.cpus)
        _tell(
            f"{engines.count} engines {config.engine}, of {engines.num_cpus} cores each, open now; "
            f"files count by shards of {args.shard_files}\n"
        )
        if not engines.room:
            _tell("other work has the whole cluster; waiting for its end\n")
        try:
            for report in cluster.transcribe(shards, engines, request, output):
                progress.add(report)
        except KeyboardInterrupt:
            progress.end()
            _tell("ending; whole shards are kept, and the same command does the others\n")
            raise
    progress.end()


class BulkProgress:
    """Shows how far a run is, on a terminal all the time and elsewhere every half minute.

    Args:
        files: so many are to be done.
    """

    def __init__(self, files: int) -> None:
        self._files = files
        self._done, self._failed, self._again, self._audio_s = 0, 0, 0, 0.0
        self._start_s = time.monotonic()
        self._first_s = float("inf")  # when the first engine began
        self._shown_s = self._start_s
        self._terminal = sys.stderr.isatty()

    def add(self, report: "ShardReport") -> None:
        """Count a shard that is done, or has to be done again."""
        now = time.monotonic()
        if report.undone:
            self._again += 1
        else:
            self._first_s = min(self._first_s, now - report.seconds)
        self._done += report.files
        self._failed += report.failed
        self._audio_s += report.audio_s
        if self._terminal:
            _tell(f"\r{self._line(now)}\x1b[K")
        elif now - self._shown_s >= _LINE_EVERY_S:
            _tell(f"{self._line(now)}\n")
            self._shown_s = now

    def end(self) -> None:
        """Show what it came to."""
        now = time.monotonic()
        begin = "\r\x1b[K" if self._terminal else ""
        _tell(
            f"{begin}{self._line(now)}, {now - self._start_s:.1f} s in all, "
            f"{self._first_s - self._start_s:.1f} of them before the first engine began\n"
        )

    def _line(self, now_s: float) -> str:
        worked_s = max(now_s - self._first_s, 1e-3)
        left_s = (self._files - self._done) * worked_s / max(self._done, 1)
        hours, minutes = divmod(round(left_s / 60), 60)
        again = f"{self._again} shards tried again, " if self._again else ""
        return (
            f"{self._done} of {self._files} files, {self._failed} set aside, {again}"
            f"{self._audio_s / 3600:.2f} h of audio in {worked_s:.1f} s, "
            f"{self._audio_s / worked_s:.1f} RTFx, {hours}:{minutes:02d} h left"
        )


def _tell(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
