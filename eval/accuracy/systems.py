"""The table of systems under test: how each is opened, and what it needs before.

Every system's process imports this, so what is heavy is imported where it is needed.

Every system gets a file's bytes and no reference; the language is told to all of them or to none.
All are given the same number of CPU threads and fall back through Whisper's temperatures. A name
says what is other than configured, or than a peer's own defaults: `-greedy` has one beam.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.accuracy.load import System
from eval.accuracy.ours import EarshotInProcess, EarshotTriton, greedy
from eval.accuracy.peers import FasterWhisper, TransformersFp32, fair_options
from eval.accuracy.prepare import (
    checkpoint_key,
    engine_of,
    prepare_converted,
    prepare_engine,
)
from eval.config import Config, changed
from eval.record import missing_packages, versions
from serve.contract.codec import to_json
from serve.contract.config import Precision
from serve.contract.errors import ConfigError, UnavailableError
from serve.contract.files import read_bytes


@dataclasses.dataclass(frozen=True)
class Spec:
    """The way to open a system, and what it needs."""

    open: Callable[[], System]
    packages: tuple[str, ...]  # by import name
    engine: Precision | None = None  # to be built before it starts; None = none
    converted: bool = False  # whether the checkpoint has to be converted before it starts


Options = Mapping[str, Any]


def in_process(config: Config, precision: Precision, **options: Any) -> Spec:
    """Specify our engine in this process; `options` are of every request."""
    return Spec(
        lambda: EarshotInProcess(config, precision, **options), ("torch",), engine=precision
    )


def faster_whisper(
    config: Config, compute_type: str, options: Callable[[], Options], *, batched: bool = False
) -> Spec:
    """Specify faster-whisper; its options are made once the checkpoint is converted."""
    return Spec(
        lambda: FasterWhisper(config, compute_type, options(), batched=batched),
        ("faster_whisper", "ctranslate2", "av"),
        converted=True,
    )


def specs(config: Config) -> dict[str, Spec]:
    """Return every system by name."""

    def fair(**options: Any) -> Callable[[], Options]:
        return lambda: fair_options(config) | options

    def computed(cross_kv: str, encoder_precision: str) -> Spec:
        runtime = {"cross_kv": cross_kv, "encoder_precision": encoder_precision}
        return in_process(changed(config, "runtime", **runtime), "int8")

    one_row = {"beam_size": 1, "best_of": 1}
    return {
        "earshot-triton": Spec(
            lambda: EarshotTriton(config),
            ("pytriton", "tritonclient"),
            engine=config.build.precision,
        ),
        "earshot-int8": in_process(config, "int8"),
        "earshot-int8-greedy": in_process(greedy(config), "int8"),
        "earshot-int8-full-kv": computed("full", "full"),
        "earshot-int8-kv8": computed("int8", "full"),
        "earshot-int8-kv8-fp8": computed("int8", "fp8"),  # Hopper alone has FP8
        "earshot-fp16": in_process(config, "fp16"),
        "earshot-fp16-greedy": in_process(greedy(config), "fp16"),
        "faster-whisper-float32": faster_whisper(config, "float32", fair()),
        "faster-whisper-float32-greedy": faster_whisper(config, "float32", fair(**one_row)),
        "faster-whisper-float16": faster_whisper(config, "float16", fair()),  # GPUs alone have it
        "faster-whisper-int8": faster_whisper(config, "int8", fair()),
        "faster-whisper-int8-greedy": faster_whisper(config, "int8", fair(**one_row)),
        "faster-whisper-library-defaults": faster_whisper(config, "default", dict),
        "transformers-fp32": Spec(lambda: TransformersFp32(config), ("transformers", "torch")),
    }


def check(names: tuple[str, ...], known: Mapping[str, Spec], mentioned: Iterable[str] = ()) -> None:
    """Refuse, before anything runs, what of a table of systems cannot run.

    Args:
        names: of the systems that are to run.
        known: the table.
        mentioned: names elsewhere in the config, which have to be known.

    Raises:
        ConfigError: no system, one named twice, or an unknown one.
        UnavailableError: a package that a system needs is not installed.
    """
    _check_known(mentioned, known)
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"expected different names of systems, got {', '.join(names) or 'none'}")
    _check_known(names, known)
    for name in names:
        for package in missing_packages(known[name].packages):
            raise UnavailableError(
                f"{name} needs the package {package}, which is not installed; "
                "install requirements.txt, or leave the system out with --without"
            )


def _check_known(names: Iterable[str], known: Mapping[str, Spec]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown system {name!r}; known: {', '.join(known)}")


def prepare(needed: Sequence[Spec], config: Config, config_path: str) -> None:
    """Make what systems need and what is not there yet; fresh engines are left alone.

    Raises:
        EarshotError: something could not be made; the message names it.
    """
    for precision in sorted({spec.engine for spec in needed if spec.engine}):
        prepare_engine(config, config_path, precision)
    if any(spec.converted for spec in needed):
        prepare_converted(config)


def key_of(name: str, config: Config) -> str:
    """Hash what decides what a system says: its settings, weights, packages and code.

    What the system needs has to be there. Our code is all of serve; a peer's is how we call it.

    Raises:
        EarshotError: the checkpoint is not to be had.
        FileError: a file cannot be read.
    """
    from serve.contract.engine import MANIFEST_FILE  # noqa: PLC0415 - loads torch, which is not a peer's

    spec, of = specs(config)[name], config.eval
    facts = [name, of.threads, of.concurrency, of.tell_language, config.runtime.device]
    if spec.engine:
        manifest = Path(engine_of(config, spec.engine)) / MANIFEST_FILE
        facts += [config.runtime, config.transcriber, versions("torch"), _hash([manifest])]
        facts.append(_hash(sorted(Path("serve").rglob("*.py"))))
    else:
        facts += [versions(*_PEER_DISTRIBUTIONS), checkpoint_key(config)]
        facts.append(_hash(Path(__file__).parent / code for code in _PEER_CODE))
    return hashlib.sha256(to_json(facts).encode()).hexdigest()[:16]


_PEER_DISTRIBUTIONS = ("faster-whisper", "ctranslate2", "transformers", "torch")
_PEER_CODE = ("peers.py", "prepare.py")


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(read_bytes(path))
    return digest.hexdigest()


def open_system(name: str, config: Config) -> System:
    """Open a system; it is ready when this returns."""
    return specs(config)[name].open()
