"""Print an engine's manifest for people."""

import math
from collections.abc import Iterator

from build.builders import BUILDERS
from serve.contract.engine import Engine, tensor_kinds
from serve.contract.manifest import CheckpointSource, Dims, Draft, Manifest

_NUMBERS = ("logits_max_abs", "tokens", "windows")  # the other values are shares
_PRECISIONS = {"int8": "INT8 weights per output channel", "fp16": "FP16 weights"}


def summary(engine: Engine) -> str:
    """Return lines on an engine's contents, its size, and its agreement with its checkpoint."""
    manifest = engine.manifest
    rows = [*_contents(manifest), *_measurements(manifest)]
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"Engine {engine.path}", *(f"  {n:{width}}  {text}" for n, text in rows)])


def _contents(manifest: Manifest) -> Iterator[tuple[str, str]]:
    dims, draft, fit = manifest.dims, manifest.draft, manifest.confidence
    yield "source", _source(manifest.source)
    precision = _PRECISIONS[manifest.precision]
    yield "runtime", f"{manifest.runtime}, {precision}, format {manifest.format_version}"
    parameters = _parameters(dims)
    yield (
        "network",
        f"{parameters / 1e6:,.1f} M parameters; {dims.n_audio_layer} encoder and "
        f"{dims.n_text_layer} decoder layers, width {dims.n_audio_state}, "
        f"{dims.n_audio_head} heads; {dims.n_mels} mel bins; vocabulary {dims.n_vocab:,}",
    )
    if draft is not None:
        draft_parameters = _parameters(dims, draft) - parameters
        layers = f"{draft.n_text_layer} decoder layer{'s' * (draft.n_text_layer > 1)}"
        parameters_more = f"{draft_parameters / 1e6:,.1f} M parameters more"
        yield "draft", f"{parameters_more}; {layers}, from {_source(draft.source)}"
    languages = len(manifest.tokenizer.languages)
    yield "languages", f"{languages}, with translation to English" if languages else "English only"
    size_bytes = sum(facts.bytes for facts in manifest.files.values())
    checkpoint_bytes = manifest.checkpoint_bytes
    yield (
        "size",
        f"{checkpoint_bytes / 1e6:,.1f} MB checkpoint -> {size_bytes / 1e6:,.1f} MB engine "
        f"({size_bytes / checkpoint_bytes:.0%}), tokenizer included",
    )
    yield "built with", ", ".join(f"{k} {v}" for k, v in manifest.versions.items())
    if (clips := manifest.calibration) is not None:
        yield "calibrated", f"on {clips.clips} clips (SHA-256 {clips.sha256[:16]}…)"
    if fit is not None:
        words = f"{fit.words:,} words of {fit.clips} clips ({', '.join(fit.languages)})"
        yield "confidence", f"{fit.fit}, fitted to {words}, transcribed by {fit.source}"


def _source(source: CheckpointSource) -> str:
    return f"{source.id} (SHA-256 {source.sha256[:16]}…)"


def _parameters(dims: Dims, draft: Draft | None = None) -> int:
    return sum(math.prod(shape) for _, shape, _ in tensor_kinds(dims, draft))


def _measurements(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the deviation from the checkpoint, the FP8 check, and the largest rounding errors."""
    result = f"not yet; run `{BUILDERS[manifest.runtime].compare_command}`"
    if manifest.verification is not None:
        result = ", ".join(
            f"{name.replace('_', ' ')} {value:{'.4g' if name in _NUMBERS else '.2%'}}"
            for name, value in manifest.verification.items()
        )
    yield "verified", result
    if (proof := manifest.fp8) is not None:
        used = "used on GPUs that have FP8" if proof.holds else "not used"
        shares = f"{proof.agreement:.2%} of the tokens unchanged, INT8 weights "
        shares += f"{proof.int8_agreement:.2%} ({proof.windows} windows, {proof.device})"
        yield "FP8 encoder", f"{used}: {shares}"
    yield from ((f"option {key}", str(value)) for key, value in manifest.runtime_options.items())
    errors = manifest.quantization
    if errors:
        mean = sum(error.relative for error in errors.values()) / len(errors)
        worst = max(errors, key=lambda name: errors[name].relative)
        largest = f"{errors[worst].relative:.3%}, of {worst}"
        yield "INT8 error", f"{mean:.3%} on average of {len(errors)} matrices; at most {largest}"
