"""Print an engine's manifest for people."""

import math

from build.builders import BUILDERS
from serve.contract.engine import Dims, Draft, Engine, LayerError, Manifest, tensor_kinds

WORST_SHOWN = 5
_GOOD = 0.95  # minimum greedy agreement of an FP16 engine
_USUAL = 0.85  # usual greedy agreement of INT8 engines on clear speech
_FP16 = "fp16_greedy_agreement"


def summary(engine: Engine) -> str:
    """Return lines on an engine's contents, its size, and its agreement with its checkpoint."""
    manifest = engine.manifest
    rows = [
        ("source", f"{manifest.source.id} (SHA-256 {manifest.source.sha256[:16]}…)"),
        (
            "runtime",
            f"{manifest.runtime}, {_precision(manifest)}, format {manifest.format_version}",
        ),
        ("network", _network(manifest)),
        *_draft(manifest),
        ("languages", _languages(manifest)),
        ("size", _size(manifest)),
        ("built with", ", ".join(f"{k} {v}" for k, v in manifest.versions.items())),
        *_calibration(manifest),
        *_confidence(manifest),
        ("verified", _verified(manifest)),
        *_verdict(manifest),
        *_fp8(manifest),
    ]
    rows += [(f"option {key}", str(value)) for key, value in manifest.runtime_options.items()]
    rows += _errors(manifest.quantization)
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"Engine {engine.path}", *(f"  {n:{width}}  {text}" for n, text in rows)])


def _precision(manifest: Manifest) -> str:
    return {"int8": "INT8 weights per output channel", "fp16": "FP16 weights"}[manifest.precision]


def _network(manifest: Manifest) -> str:
    dims = manifest.dims
    return (
        f"{_parameters(dims) / 1e6:,.1f} M parameters; {dims.n_audio_layer} encoder and "
        f"{dims.n_text_layer} decoder layers, width {dims.n_audio_state}, "
        f"{dims.n_audio_head} heads; {dims.n_mels} mel bins; vocabulary {dims.n_vocab:,}"
    )


def _parameters(dims: Dims, draft: Draft | None = None) -> int:
    return sum(math.prod(shape) for _, shape, _ in tensor_kinds(dims, draft))


def _draft(manifest: Manifest) -> list[tuple[str, str]]:
    """Return a line on the draft decoder, if there is one."""
    draft = manifest.draft
    if draft is None:
        return []
    more = _parameters(manifest.dims, draft) - _parameters(manifest.dims)
    layers = f"{draft.n_text_layer} decoder layer{'s' * (draft.n_text_layer > 1)}"
    source = f"{draft.source.id} (SHA-256 {draft.source.sha256[:16]}…)"
    return [("draft", f"{more / 1e6:,.1f} M parameters more; {layers}, from {source}")]


def _calibration(manifest: Manifest) -> list[tuple[str, str]]:
    """Return a line on the calibration clips, if there are any."""
    calibration = manifest.calibration
    if calibration is None:
        return []
    return [("calibrated", f"on {calibration.clips} clips (SHA-256 {calibration.sha256[:16]}…)")]


def _confidence(manifest: Manifest) -> list[tuple[str, str]]:
    """Return a line on the confidence of words, if the engine has it."""
    fit = manifest.confidence
    if fit is None:
        return []
    words = f"{fit.words:,} words of {fit.clips} clips ({', '.join(fit.languages)})"
    return [("confidence", f"{fit.fit}, fitted to {words}, transcribed by {fit.source}")]


def _languages(manifest: Manifest) -> str:
    languages = manifest.tokenizer.languages
    return f"{len(languages)}, with translation to English" if languages else "English only"


def _size(manifest: Manifest) -> str:
    size = sum(facts.bytes for facts in manifest.files.values())
    before = manifest.checkpoint_bytes
    return (
        f"{before / 1e6:,.1f} MB checkpoint -> {size / 1e6:,.1f} MB engine "
        f"({size / before:.0%}), tokenizer included"
    )


def _verified(manifest: Manifest) -> str:
    verification = manifest.verification
    if verification is None:
        return f"not yet; run `{BUILDERS[manifest.runtime].compared_by}`"
    measured = dict(verification)
    measured.pop(_FP16, None)  # `_verdict` shows it
    shares = ("logits_relative", "token_agreement", "greedy_agreement")
    parts = [f"{k.replace('_', ' ')} {measured.pop(k):.2%}" for k in shares if k in measured]
    parts += [f"{key.replace('_', ' ')} {value:.4g}" for key, value in measured.items()]
    return ", ".join(parts)


def _verdict(manifest: Manifest) -> list[tuple[str, str]]:
    """Return a verdict on the greedy agreement, in comparison with FP16 weights."""
    verification = manifest.verification
    if verification is None or _FP16 not in verification:  # an engine of an earlier version
        return []
    ours, fp16 = verification["greedy_agreement"], verification[_FP16]
    if manifest.precision == "fp16":
        text = f"{ours:.0%} of the decoded text equals the checkpoint's"
    else:
        text = f"{ours:.0%} of the decoded text equals the checkpoint's, {fp16:.0%} in FP16"
    if ours >= _GOOD:
        return [("", f"good: {text}")]
    verdict = "usual for INT8" if ours >= _USUAL else "less than usual for INT8"
    return [
        ("", f"{verdict}: {text}; a different token also changes later ones,"),
        ("", "often without an error: `python -m eval run` counts the errors of both"),
    ]


def _fp8(manifest: Manifest) -> list[tuple[str, str]]:
    """Return a line on whether the encoder may compute in FP8, if it was verified."""
    proof = manifest.fp8
    if proof is None:
        return []
    taken = "used on GPUs that have FP8" if proof.holds else "not used"
    shares = (
        f"{proof.agreement:.2%} of the tokens unchanged, INT8 weights {proof.int8_agreement:.2%}"
    )
    return [("FP8 encoder", f"{taken}: {shares} ({proof.windows} windows, {proof.device})")]


def _errors(quantization: dict[str, LayerError]) -> list[tuple[str, str]]:
    """Return the mean quantisation error, and the matrices with the largest errors."""
    if not quantization:
        return []
    worst = sorted(quantization.items(), key=lambda item: -item[1].relative)
    mean = sum(error.relative for error in quantization.values()) / len(quantization)
    rows = [("INT8 error", f"{mean:.3%} relative on average of {len(worst)} matrices; worst:")]
    rows += [
        ("", f"{error.relative:.3%}  max {error.max_abs:.2e}  {name}")
        for name, error in worst[:WORST_SHOWN]
    ]
    return rows
