"""The systems that transcribe the recordings; `eval.long` lists them."""

from contextlib import AbstractContextManager
from typing import Any

from eval.accuracy.systems import Spec, check, fair_options, faster_whisper, in_process, prepare
from eval.accuracy.worker import TranscriptionSystem
from eval.config import EvaluationProduct
from eval.long import OURS, THEIRS, THEIRS_BATCHED
from eval.record import Run

_COMPUTE_TYPE = "float32"  # the default of faster-whisper for a converted checkpoint


def specs(config: EvaluationProduct) -> dict[str, Spec]:
    """Return the specification of each system by name."""

    def peer_spec(options: dict[str, Any], *, batched: bool = False) -> Spec:
        def decoding_options() -> dict[str, Any]:
            return {"suppress_tokens": fair_options(config)["suppress_tokens"], **options}

        return faster_whisper(config, _COMPUTE_TYPE, decoding_options, batched=batched)

    precision = config.build.precision
    return {
        **{name: in_process(config, precision, **options) for name, options in OURS.items()},
        **{name: peer_spec(options) for name, options in THEIRS.items()},
        **{name: peer_spec(options, batched=True) for name, options in THEIRS_BATCHED.items()},
    }


def prepare_names(names: tuple[str, ...], run: Run) -> None:
    """Refuse systems that cannot run, and build engines and conversions that the others need."""
    known = specs(run.config)
    check(names, known)
    prepare([known[name] for name in names], run.config, run.config_path)


def open_system(
    name: str, config: EvaluationProduct
) -> AbstractContextManager[TranscriptionSystem]:
    """Open a system; it is ready in the `with` block."""
    return specs(config)[name].open()
