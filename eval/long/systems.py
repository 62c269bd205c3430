"""How the systems that long recordings are given to are opened; `eval.long.plan` lists them."""

from typing import Any

from eval.accuracy.load import System
from eval.accuracy.ours import EarshotInProcess
from eval.accuracy.peers import FasterWhisper, fair_options
from eval.accuracy.systems import PEER_PACKAGES, Spec, check, prepare
from eval.config import Config
from eval.long.plan import OURS, THEIRS, THEIRS_BATCHED
from eval.measurement import Run

_COMPUTE_TYPE = "float32"  # which the library keeps of a converted checkpoint if told nothing


def specs(config: Config) -> dict[str, Spec]:
    """Return every system by name."""

    def ours(options: dict[str, Any]) -> Spec:
        precision = config.build.precision
        return Spec(
            lambda: EarshotInProcess(config, precision, **options), ("torch",), engine=precision
        )

    def theirs(options: dict[str, Any], *, batched: bool = False) -> Spec:
        def open_one() -> System:
            suppressed = fair_options(config)["suppress_tokens"]
            all_options = {"suppress_tokens": suppressed, **options}
            return FasterWhisper(config, _COMPUTE_TYPE, all_options, batched=batched)

        return Spec(open_one, PEER_PACKAGES, converted=True)

    return {
        **{name: ours(options) for name, options in OURS.items()},
        **{name: theirs(options) for name, options in THEIRS.items()},
        **{name: theirs(options, batched=True) for name, options in THEIRS_BATCHED.items()},
    }


def prepare_names(names: tuple[str, ...], run: Run) -> None:
    """Refuse what cannot run, and make what the others need; errors as of both."""
    known = specs(run.config)
    check(names, known)
    prepare([known[name] for name in names], run.config, run.config_path)


def open_system(name: str, config: Config) -> System:
    """Open a system; it is ready when this returns."""
    return specs(config)[name].open()
