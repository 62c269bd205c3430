"""Build engines: `python -m build engine|inspect|verify`; each has --help.

python -m build engine --config configs/demo.toml
python -m build inspect engines/demo
python -m build verify engines/demo --checkpoint build/demo/checkpoint
"""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, get_args

from tqdm import tqdm

from build import writer
from build.checkpoint import Checkpoint, open_checkpoint
from build.config import BuildConfig, Config, load_config
from build.summary import summary
from build.trtllm import engines as trtllm_build
from build.trtllm import llm_api as trtllm_api
from serve.config import Precision, RuntimeConfig
from serve.engine import Engine, manifest_to_json, open_engine
from serve.errors import ConfigError, EarshotError, EngineError

if TYPE_CHECKING:
    from build.verify import Recording


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except EarshotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was changed", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # unwinds, so that unfinished folders are removed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m build", description="Turn Whisper checkpoints into Earshot engines."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    engine = commands.add_parser("engine", help="build an engine from a checkpoint, and verify it")
    engine.set_defaults(run=_engine)
    _add_config(engine, "settings to build with; flags below override it")
    engine.add_argument("--checkpoint", help="Hugging Face folder or hub id, or OpenAI .pt file")
    engine.add_argument("--engine", help="folder to write; an engine there is replaced")
    engine.add_argument(
        "--precision", choices=get_args(Precision), help="int8 weights, or fp16 as they are"
    )
    engine.add_argument(
        "--tokenizer", help="folder or hub id with tokenizer.json and generation_config.json"
    )
    engine.add_argument(
        "--if-stale", action="store_true", help="do nothing if the engine is up to date"
    )
    engine.add_argument(
        "--no-verify", action="store_true", help="do not compare with the checkpoint at the end"
    )
    engine.add_argument(
        "--dry-run",
        action="store_true",
        help="with runtime tensorrt_llm: print the exact commands and build nothing",
    )
    _add_audio(engine)

    inspect = commands.add_parser("inspect", help="print what an engine says about itself")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("engine", metavar="ENGINE", help="engine folder")
    inspect.add_argument("--json", action="store_true", help="print the manifest as it is")

    verify = commands.add_parser(
        "verify", help="compare an engine's logits and greedy tokens with its checkpoint's"
    )
    verify.set_defaults(run=_verify)
    verify.add_argument("engine", metavar="ENGINE", help="engine folder")
    verify.add_argument("--checkpoint", help="what it was built from; default: as it says itself")
    verify.add_argument(
        "--tokenizer", default="", help="folder or hub id with tokenizer.json, for a .pt"
    )
    _add_config(verify, "settings: [runtime] to compare with, clips of build.verify_clips")
    _add_audio(verify)
    return parser


def _add_config(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--config", metavar="TOML", help=f"{meaning}; default: build/config.py's")


def _add_audio(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--audio",
        nargs="+",
        default=[],
        metavar="FILE",
        help="compare on these; default: clips of the config's build.verify_clips, or, where "
        "there is none, a synthetic signal",
    )
    parser.add_argument(
        "--device", default="cpu", help="where to compare: cpu (default), cuda or cuda:N"
    )


def _engine(args: argparse.Namespace) -> None:
    config = _overridden(load_config(args.config) if args.config else Config(), args)
    build, target = config.build, Path(config.engine)
    checkpoint = open_checkpoint(build.checkpoint, build.tokenizer)
    for note in checkpoint.notes:
        print(f"note: {note}")
    if build.runtime == "tensorrt_llm":
        _compile(checkpoint, config, target, args)
        return
    if args.dry_run:
        raise ConfigError(f"--dry-run shows commands; build.runtime = {build.runtime!r} runs none")
    if build.runtime == "tensorrt_llm_api":
        _keep(checkpoint, build, target, args)
        return
    if args.if_stale and writer.up_to_date(
        target, checkpoint, build.precision, verified=not args.no_verify
    ):
        print(f"{target} is up to date")
        return
    recordings = [] if args.no_verify else _recordings(args, config)
    with writer.staged(target) as folder:
        names = tqdm(
            writer.tensor_names(checkpoint), desc=f"Building {target}", unit=" tensors", leave=False
        )
        writer.fill(folder, checkpoint, build.precision, names)
        if recordings:
            _verify_engine(open_engine(folder), checkpoint, recordings, _runtime(args, config))
    print(summary(open_engine(target)))


def _overridden(config: Config, args: argparse.Namespace) -> Config:
    """The config with the flags that were given."""
    names = ("checkpoint", "precision", "tokenizer")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    build = dataclasses.replace(config.build, **given)
    return dataclasses.replace(config, engine=args.engine or config.engine, build=build)


def _compile(
    checkpoint: Checkpoint, config: Config, target: Path, args: argparse.Namespace
) -> None:
    """Build for TensorRT-LLM, which verifies on its own GPU, not here."""
    precision = config.build.precision
    if args.dry_run:
        print(trtllm_build.dry_run(checkpoint.dims, config))
        return
    if args.if_stale and trtllm_build.up_to_date(target, checkpoint, config, precision):
        print(f"{target} is up to date")
        return
    built = trtllm_build.build_engine(checkpoint, config, precision, target, tqdm.write)
    print(summary(built))


def _keep(
    checkpoint: Checkpoint, build: BuildConfig, target: Path, args: argparse.Namespace
) -> None:
    """Build for TensorRT-LLM's LLM API, which runs the checkpoint as it is."""
    if args.if_stale and trtllm_api.up_to_date(target, checkpoint, build):
        print(f"{target} is up to date")
        return
    print(summary(trtllm_api.build_engine(checkpoint, build, target, tqdm.write)))


def _recordings(args: argparse.Namespace, config: Config) -> list["Recording"]:
    from build import verify  # noqa: PLC0415 - transformers takes seconds to load

    manifest = Path(config.build.verify_clips)
    if args.audio:
        return verify.read_recordings(args.audio)
    if args.config and manifest.is_file():
        return verify.recordings_of(manifest)
    return verify.synthetic_recordings()


def _runtime(args: argparse.Namespace, config: Config) -> RuntimeConfig:
    """How the config serves, on the device where engine and checkpoint are compared."""
    graphs = config.runtime.cuda_graph and args.device != "cpu"
    return dataclasses.replace(config.runtime, device=args.device, cuda_graph=graphs)


def _verify_engine(
    engine: Engine, checkpoint: Checkpoint, recordings: list["Recording"], runtime: RuntimeConfig
) -> None:
    """Compare, and note the deviation in the engine's manifest."""
    from build import verify  # noqa: PLC0415 - as above

    print(f"Verifying on {', '.join(recording.name for recording in recordings)}", file=sys.stderr)
    deviation = verify.verify(engine, checkpoint, recordings, runtime)
    measured = dataclasses.asdict(deviation)
    writer.write_manifest(engine.path, dataclasses.replace(engine.manifest, verification=measured))


def _verify(args: argparse.Namespace) -> None:
    config = load_config(args.config) if args.config else Config()
    engine = open_engine(args.engine)
    if engine.manifest.runtime != "native":
        raise EngineError(
            f"{engine.path} is a {engine.manifest.runtime} engine, whose weights only its own "
            "library reads; `python -m eval trtllm-check` compares it with transformers"
        )
    checkpoint = open_checkpoint(args.checkpoint or engine.manifest.source.id, args.tokenizer)
    _verify_engine(engine, checkpoint, _recordings(args, config), _runtime(args, config))
    print(summary(open_engine(args.engine)))


def _inspect(args: argparse.Namespace) -> None:
    engine = open_engine(args.engine)
    if args.json:
        print(manifest_to_json(engine.manifest), end="")
    else:
        print(summary(engine))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
