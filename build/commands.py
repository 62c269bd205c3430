"""The commands of `python -m build`; `__main__` has their arguments."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

from build import builders
from build.builders import BUILDERS
from build.checkpoint import Checkpoint, open_checkpoint
from build.config import BuildProduct, load_config
from build.draft import with_draft
from build.recordings import VerificationAudio, read_recording, recordings_of
from build.summary import summary
from build.writer import write_manifest
from serve.contract.engine import Engine, open_engine
from serve.contract.errors import ConfigError, EngineError
from serve.contract.manifest import TokenizerFacts, manifest_to_json
from serve.native.kernels.choose import runs_fp8

# If runtime.encoder_precision = "auto" and the device supports FP8, FP8 is verified on this
# manifest's clips, without those of the half "report".
FP8_CLIPS = "tests/data/human/manifest.jsonl"


def _engine(args: argparse.Namespace) -> None:
    if not args.config and not args.engine:
        raise ConfigError(
            "no engine folder; expected --engine FOLDER (make build-engine: ENGINE=FOLDER), or "
            "--config with a file that names one"
        )
    config = _overridden(load_config(args.config) if args.config else BuildProduct(), args)
    builder = BUILDERS[config.build.runtime]
    builders.check(config, {"--audio": args.audio, "--device": args.device})
    checkpoint = open_checkpoint(config.build.checkpoint, config.build.tokenizer)
    if config.build.draft:
        checkpoint = with_draft(checkpoint, config.build.draft)
    for note in checkpoint.notes:
        print(f"note: {note}")
    verified = builder.native and not args.no_verify
    if args.if_stale and builders.up_to_date(checkpoint, config, verified):
        print(f"{config.engine} is up to date")
        return
    verify = _verifier(checkpoint, config, args) if verified else None
    print(summary(builders.build_engine(checkpoint, config, tqdm.write, verify)))


def _overridden(config: BuildProduct, args: argparse.Namespace) -> BuildProduct:
    """Return the config with the given flags applied."""
    names = ("checkpoint", "precision", "tokenizer", "draft", "confidence", "calibrate", "device")
    overrides = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if overrides.get("checkpoint", config.build.checkpoint) != config.build.checkpoint:
        for name in ("draft", "confidence"):  # these belong to the config's checkpoint
            overrides.setdefault(name, "")
    build = dataclasses.replace(config.build, **overrides)
    return dataclasses.replace(config, engine=args.engine or config.engine, build=build)


def _verifier(
    checkpoint: Checkpoint, config: BuildProduct, args: argparse.Namespace
) -> Callable[[Engine], None]:
    """Return a function that compares an engine with its checkpoint, and stores the result."""
    from build import verify  # noqa: PLC0415 - transformers takes seconds to load

    if args.audio:
        recordings = [read_recording(path) for path in args.audio]
    else:
        recordings = recordings_of(config.build.verify_clips, checkpoint.facts)
    device = args.device or config.build.device
    # The config's runtime, on the device of the comparison.
    graphs = config.runtime.cuda_graph and device != "cpu"
    runtime = dataclasses.replace(config.runtime, device=device, cuda_graph=graphs)

    def compare(engine: Engine) -> None:
        names = ", ".join(recording.name for recording in recordings)
        print(f"Verifying on {names}", file=sys.stderr)
        deviation = verify.verify(engine, checkpoint, recordings, runtime)
        measured = dataclasses.asdict(deviation)
        manifest = dataclasses.replace(engine.manifest, verification=measured)
        checks_fp8 = runtime.encoder_precision == "auto"
        if checks_fp8 and runs_fp8(runtime.kernels, torch.device(device)):
            proof = verify.prove_fp8(engine, checkpoint, FP8_CLIPS, runtime)
            manifest = dataclasses.replace(manifest, fp8=proof)
        if not manifest.tokenizer.alignment_heads:
            manifest = dataclasses.replace(manifest, tokenizer=_with_heads(engine, recordings))
        write_manifest(engine.path, manifest)

    return compare


def _with_heads(engine: Engine, recordings: Sequence[VerificationAudio]) -> TokenizerFacts:
    """Measure alignment heads, which the checkpoint does not name; return facts with them."""
    from build.alignment_heads import measure_heads  # noqa: PLC0415 - as above

    heads = measure_heads(engine, recordings)
    result = f"measured, as [layer, head]: {[list(head) for head in heads]}"
    if not heads:
        result = "the recordings have no speech to measure them on; name others with --audio"
    print(f"The checkpoint has no alignment heads for word timestamps; {result}", file=sys.stderr)
    return dataclasses.replace(engine.manifest.tokenizer, alignment_heads=heads)


def _verify(args: argparse.Namespace) -> None:
    config = load_config(args.config) if args.config else BuildProduct()
    engine = open_engine(args.engine)
    builder = BUILDERS[engine.manifest.runtime]
    if not builder.native:
        raise EngineError(
            f"{engine.path} is a {engine.manifest.runtime} engine, and only its own library reads "
            f"its weights; compare it with `{builder.compare_command}`"
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


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "engine": _engine,
    "inspect": _inspect,
    "verify": _verify,
}
