"""Build engines: `python -m build engine|inspect|verify`; each has --help.

python -m build engine --config configs/demo.toml
python -m build inspect engines/demo
python -m build verify engines/demo --checkpoint build/demo/checkpoint
"""

import argparse
import dataclasses
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, get_args

from tqdm import tqdm

from build import builders
from build.builders import EngineBuilder
from build.checkpoint import Checkpoint, open_checkpoint
from build.config import Config, load_config
from build.draft import with_draft
from build.summary import summary
from build.writer import write_manifest
from serve.config import Precision
from serve.engine import Engine, TokenizerFacts, manifest_to_json, open_engine
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
        "--draft",
        help="checkpoint on the same encoder, whose decoder guesses and is verified; with another "
        "--checkpoint than the config's, its draft is left out",
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
        help="where the build runs commands of others: print them and build nothing",
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
    parser.add_argument("--device", help="where to compare: cpu (default), cuda or cuda:N")


def _engine(args: argparse.Namespace) -> None:
    config = _overridden(load_config(args.config) if args.config else Config(), args)
    builder = builders.builder_of(config)
    _refuse_flags(builder, config, args)
    builders.check(config)
    checkpoint = open_checkpoint(config.build.checkpoint, config.build.tokenizer)
    if config.build.draft:
        checkpoint = with_draft(checkpoint, config.build.draft)
    for note in checkpoint.notes:
        print(f"note: {note}")
    if args.dry_run:
        _show(builder.commands(checkpoint.dims, config), config)
        return
    verified = builder.VERIFIES and not args.no_verify
    if args.if_stale and builders.up_to_date(checkpoint, config, verified):
        print(f"{config.engine} is up to date")
        return
    verify = _verifier(checkpoint, config, args) if verified else None
    print(summary(builders.build_engine(checkpoint, config, tqdm.write, verify)))


def _refuse_flags(builder: EngineBuilder, config: Config, args: argparse.Namespace) -> None:
    """Refuse the flags that the builder would pass over."""
    runtime = config.build.runtime
    for flag in ("audio", "device"):
        if getattr(args, flag) and not builder.VERIFIES:
            raise ConfigError(
                f"--{flag} is for comparing the engine with its checkpoint, which a build with "
                f"build.runtime = {runtime!r} does not; `{builder.COMPARED_BY}` does it"
            )


def _show(commands: Sequence[Sequence[str]], config: Config) -> None:
    if not commands:
        runtime = config.build.runtime
        raise ConfigError(f"--dry-run shows commands; build.runtime = {runtime!r} runs none")
    for command in commands:
        print(shlex.join(command))


def _overridden(config: Config, args: argparse.Namespace) -> Config:
    """The config with the flags that were given."""
    names = ("checkpoint", "precision", "tokenizer", "draft")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if given.get("checkpoint", config.build.checkpoint) != config.build.checkpoint:
        given.setdefault("draft", "")  # the config's draft is for the config's checkpoint
    build = dataclasses.replace(config.build, **given)
    return dataclasses.replace(config, engine=args.engine or config.engine, build=build)


def _recordings(args: argparse.Namespace, config: Config) -> list["Recording"]:
    from build import verify  # noqa: PLC0415 - transformers takes seconds to load

    manifest = Path(config.build.verify_clips)
    if args.audio:
        return verify.read_recordings(args.audio)
    if args.config and manifest.is_file():
        return verify.recordings_of(manifest)
    return verify.synthetic_recordings()


def _verifier(
    checkpoint: Checkpoint, config: Config, args: argparse.Namespace
) -> Callable[[Engine], None]:
    """What compares an engine with its checkpoint and notes the deviation in its manifest."""
    from build import verify  # noqa: PLC0415 - as above

    recordings = _recordings(args, config)
    device = args.device or "cpu"
    # As the config serves, on the device where engine and checkpoint are compared.
    graphs = config.runtime.cuda_graph and device != "cpu"
    runtime = dataclasses.replace(config.runtime, device=device, cuda_graph=graphs)

    def compare(engine: Engine) -> None:
        names = ", ".join(recording.name for recording in recordings)
        print(f"Verifying on {names}", file=sys.stderr)
        deviation = verify.verify(engine, checkpoint, recordings, runtime)
        measured = dataclasses.asdict(deviation)
        manifest = dataclasses.replace(engine.manifest, verification=measured)
        if not manifest.tokenizer.alignment_heads:
            manifest = dataclasses.replace(manifest, tokenizer=_with_heads(engine, recordings))
        write_manifest(engine.path, manifest)

    return compare


def _with_heads(engine: Engine, recordings: Sequence["Recording"]) -> TokenizerFacts:
    """The facts of an engine whose checkpoint names no alignment heads, with measured ones."""
    from build.heads import hear, measure_heads  # noqa: PLC0415 - as above

    print("The checkpoint names no alignment heads, by which words are timed", file=sys.stderr)
    heads = measure_heads(engine, hear(engine, recordings))
    if heads:
        print(f"measured, as [layer, head]: {[list(head) for head in heads]}", file=sys.stderr)
    else:
        print(
            "no speech was heard that they could be measured on; words cannot be timed; name "
            "recordings of speech with --audio",
            file=sys.stderr,
        )
    return dataclasses.replace(engine.manifest.tokenizer, alignment_heads=heads)


def _verify(args: argparse.Namespace) -> None:
    config = load_config(args.config) if args.config else Config()
    engine = open_engine(args.engine)
    builder = builders.builder_for(engine.manifest.runtime)
    if not builder.VERIFIES:
        raise EngineError(
            f"{engine.path} is a {engine.manifest.runtime} engine, whose weights only its own "
            f"library reads; `{builder.COMPARED_BY}` compares it with transformers"
        )
    checkpoint = open_checkpoint(args.checkpoint or engine.manifest.source.id, args.tokenizer)
    _verifier(checkpoint, config, args)(engine)
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
