"""Transcribe a folder, a manifest or an object store, with engines on a machine or a Ray cluster.

If the command is interrupted, run it again: it transcribes only the files that are missing.
OUTPUT/failed.jsonl lists the files that failed, with reasons; the exit status is then 1.
"""

import argparse
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tqdm import tqdm

from serve.cli.options import add_config, add_cue_options, add_options, read_cue_options, request_of
from serve.cli.progress import Progress
from serve.contract.config import Config, load_config
from serve.contract.errors import ConfigError
from serve.contract.exits import terminated_as_interrupted
from serve.contract.messages import Request
from serve.speech.formats import Format

if TYPE_CHECKING:
    from serve.bulk.sharding import BulkOutput, Shard

SHARD_FILES = 100  # the default
SHARDS = ("jsonl", "parquet")
TEXTS = tuple(format for format in get_args(Format) if format != "json")

_NEEDED = ("fsspec", "pyarrow", "ray")  # not in every image


def add_parser(commands: Any) -> None:
    title = "transcribe many files, on one machine or a Ray cluster"
    usage = "%(prog)s --config TOML --input PATH --output FOLDER [options]"
    parser = commands.add_parser("bulk", usage=usage, help=title, description=__doc__)
    parser.set_defaults(run=_run)
    add_config(parser)
    add = parser.add_argument
    source = "folder, s3://…, or JSONL with a `file` in each line, relative to the JSONL file"
    add("--input", required=True, metavar="PATH", help=source)
    add("--output", required=True, metavar="FOLDER", help="a path or s3://…")
    formats = f"shard format: {', '.join(SHARDS)}; also a file per recording: {', '.join(TEXTS)}"
    add("--format", default="jsonl", metavar="FORMAT,…", help=f"{formats}; default: %(default)s")
    size = "files in a shard, the unit that is saved or repeated; default: %(default)s"
    add("--shard-files", type=int, default=SHARD_FILES, metavar="N", help=size)
    add("--address", metavar="HOST:PORT", help="address of a Ray cluster; default: this machine")
    cpus = "CPU cores for each engine; default: runtime.threads, else at most 4; on a GPU 1"
    add("--cpus", type=int, metavar="N", help=cpus)
    add_cue_options(parser)
    add_options(parser)


@terminated_as_interrupted()
def _run(args: argparse.Namespace) -> int:
    """Transcribe the missing shards and return the exit status.

    Raises:
        EarshotError: the input, the output or an option is wrong, or shards are left.
        KeyboardInterrupt: Ctrl-C or SIGTERM; complete shards are kept.
    """
    config = load_config(args.config)
    _check(args)
    from serve.bulk import sharding, store  # noqa: PLC0415 - other commands load neither

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
    missing = [shard for shard in shards if shard.number not in done]
    skipped = f"; skipping {others} files that are not audio" if others else ""
    _print(f"{len(files)} files in {len(shards)} shards, {len(done)} of them done{skipped}")
    if missing:
        config = dataclasses.replace(config, engine=engine)
        _transcribe(missing, config, request, output, args)
    failed = output.gather_failed()
    if failed:
        _print(f"{failed} of {len(files)} files failed; see {output.folder}/failed.jsonl")
    return 1 if failed else 0


def _check(args: argparse.Namespace) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serve bulk needs packages that are not installed: {', '.join(missing)}; install "
            "requirements.txt, or use the native image"
        )
    for name, value in (("--shard-files", args.shard_files), ("--cpus", args.cpus)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}; expected at least 1")


def _formats(text: str) -> tuple[Any, Any]:
    """Return the shard format, and the formats of the per-recording files."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in SHARDS + TEXTS]
    shards = [name for name in names if name in SHARDS]
    if unknown or len(shards) > 1:
        raise ConfigError(
            f"--format {text}; expected {' or '.join(SHARDS)}, and any of {', '.join(TEXTS)}, "
            "separated by commas"
        )
    return (shards or ["jsonl"])[0], tuple(name for name in names if name in TEXTS)


def _transcribe(
    shards: "list[Shard]",
    config: Config,
    request: Request,
    output: "BulkOutput",
    args: argparse.Namespace,
) -> None:
    """Transcribe some shards and show the progress."""
    from serve.bulk import cluster  # noqa: PLC0415 - loads Ray and torch

    with (
        cluster.connected(args.address),
        Progress(sum(len(shard.files) for shard in shards)) as progress,
    ):
        engines = cluster.engines_of(config, args.cpus)
        _print(
            f"opening {engines.count} engines {config.engine} with {engines.num_cpus} cores each; "
            f"files are counted when their shard of {args.shard_files} is complete"
        )
        try:
            for report in cluster.transcribe(shards, engines, request, output):
                progress.add(report.files, report.audio_s)
                if report.undone:
                    _print(f"shard {report.number:06d} is not done: {report.undone}")
        except KeyboardInterrupt:
            _print(
                f"{progress}; complete shards are kept, the same command continues with the rest"
            )
            raise
        _print(str(progress))


def _print(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
