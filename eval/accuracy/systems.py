"""The systems under test: Earshot and faster-whisper, and the table of them.

Every system's process imports this, so heavy modules are imported where they are needed. Every
system gets a file's bytes and no reference; the language is told to all of them or to none. All get
the same number of CPU threads and fall back through Whisper's temperatures. A name says the
difference to the configuration, or to a peer's own defaults: `-greedy` has one beam.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from build import hub
from eval.accuracy.predictions import Prediction, TimedText
from eval.accuracy.worker import OpenedSystem, TranscriptionSystem
from eval.config import EvaluationProduct, changed
from eval.processes import run_tool
from eval.record import made_once, missing_packages, read_json, versions, write_json
from serve.contract.codec import to_json
from serve.contract.config import Precision
from serve.contract.errors import AudioError, ConfigError, UnavailableError
from serve.contract.files import read_bytes
from serve.contract.manifest import MANIFEST_FILE
from serve.contract.messages import Request, Transcript

CACHE = Path(".cache") / "ctranslate2"
"""Converted checkpoints, by a hash of what made them; relative to the project's root."""

PREPARE_TIMEOUT_S = 3600.0
CONVERTED_VERSION = "4"  # a part of the cache's key; to be raised when the conversion changes
OPENAI_ENGLISH = 51_864
"""Tokens of OpenAI's English-only vocabulary, which names languages all the same."""
OPENAI_VOCABULARIES = (OPENAI_ENGLISH, 51_865, 51_866)  # multilingual; large-v3 and turbo
"""Sizes of the vocabularies of published checkpoints; no other checkpoint has one of these."""
_CONVERT = "from ctranslate2.converters.transformers import main; main()"
_SPARE_TOKEN = "<|startoflm|>"


def _from_transcript(transcript: Transcript) -> Prediction:
    """Convert a transcript. Segments of one window are those in a row with the same scores."""
    windows = itertools.groupby(
        transcript.segments, lambda s: (s.avg_logprob, s.no_speech_prob, s.compression_ratio)
    )
    segments = tuple(
        TimedText(s.start, s.end, s.text, number)
        for number, (_, group) in enumerate(windows)
        for s in group
    )
    return Prediction(transcript.text, transcript.language, segments)


def greedy(config: EvaluationProduct) -> EvaluationProduct:
    """Return the config with a beam of 1 at every temperature."""
    return changed(config, "transcriber", beam_size=1)


@contextlib.contextmanager
def earshot_triton(config: EvaluationProduct) -> Iterator[TranscriptionSystem]:
    """Run the configured engine behind Triton Inference Server; whole answers come by gRPC.

    It listens on free ports, so that it can run beside a server on the configured ones.

    Raises:
        EarshotError: the server does not start, or failed meanwhile, even if it was started again.
    """
    from eval.server import running  # noqa: PLC0415 - needs the server's packages

    with running(config) as server, over_triton(config, server.grpc) as system:
        yield system
        server.require_unbroken()


def _settings(config: EvaluationProduct, **own: str) -> dict[str, Any]:
    return {**own, **vars(config.runtime), **vars(config.transcriber)}


@contextlib.contextmanager
def over_triton(config: EvaluationProduct, address: str) -> Iterator[TranscriptionSystem]:
    """Transcribe by a server at host:port that has this config."""
    from serve.wire.client import TritonClient  # noqa: PLC0415 - needs tritonclient

    transport = "KServe v2 infer by gRPC, file bytes in, whole answer out"
    settings = _settings(config, transport=transport, engine=config.engine)
    settings |= versions("nvidia-pytriton", "tritonclient", "torch")
    with TritonClient(address, config.transcriber.request_timeout_s) as client:

        def transcribe(audio: bytes, language: str | None) -> Prediction:
            return _from_transcript(client.transcribe(audio=audio, language=language))

        yield TranscriptionSystem(settings, transcribe)


@contextlib.contextmanager
def earshot_in_process(
    config: EvaluationProduct, precision: Precision, **options: Any
) -> Iterator[TranscriptionSystem]:
    """Open a transcriber in this process; every call has these `options` of `Request`."""
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

    path = engine_of(config, precision)
    settings = _settings(config, transport="in process", engine=path, precision=precision)
    settings |= options | versions("torch")
    with open_transcriber(config, path) as transcriber:

        def transcribe(audio: bytes, language: str | None) -> Prediction:
            request = Request(audio, language=language, **options)
            return _from_transcript(transcriber.transcribe(request))

        yield TranscriptionSystem(settings, transcribe)


# ---------------------------------------------------------------- peers


@contextlib.contextmanager
def open_faster_whisper(
    config: EvaluationProduct, compute_type: str, *, batched: bool = False, **options: Any
) -> Iterator[TranscriptionSystem]:
    """Open faster-whisper on the same checkpoint, converted.

    Args:
        config: names the checkpoint, the device and the number of threads.
        compute_type: CTranslate2's compute type.
        batched: whether the library decodes windows in batches.
        options: options of `transcribe`, in place of those of `fair_options`.
    """
    from av.error import FFmpegError  # noqa: PLC0415 - comes with faster-whisper
    from faster_whisper import BatchedInferencePipeline, WhisperModel  # noqa: PLC0415 - optional

    device, _, index = config.runtime.device.partition(":")
    model: Any = WhisperModel(
        str(converted_folder(config)),
        device=device,
        device_index=int(index or 0),
        compute_type=compute_type,
        cpu_threads=config.eval.threads,
        num_workers=1,
    )
    pipeline = BatchedInferencePipeline(model) if batched else model
    decoding = fair_options(config) | options
    settings = {
        "class": type(pipeline).__name__,
        "compute type": compute_type,
        "device": config.runtime.device,
        "threads": config.eval.threads,
        **decoding,
        **versions("faster-whisper", "ctranslate2"),
    }

    def transcribe(audio: bytes, language: str | None) -> Prediction:
        """Transcribe once; the library decodes the file itself."""
        try:
            # A copy, because the library adds to the list of suppressed tokens.
            own = copy.deepcopy(decoding)
            pieces, info = pipeline.transcribe(io.BytesIO(audio), language=language, **own)
        except FFmpegError as error:
            raise AudioError(f"faster-whisper cannot decode the audio: {error}") from error
        segments = [TimedText(piece.start, piece.end, piece.text, piece.seek) for piece in pieces]
        text = " ".join(segment.text.strip() for segment in segments if segment.text.strip())
        return Prediction(text, info.language, tuple(segments))

    yield TranscriptionSystem(settings, transcribe)


def fair_options(config: EvaluationProduct) -> dict[str, Any]:
    """Return the options that are fair to a checkpoint which is not OpenAI's.

    The library's list of suppressed tokens is OpenAI's, so it gets the checkpoint's, which a
    conversion keeps in config.json; and small checkpoints that are not OpenAI's stop early after
    text of earlier windows.
    """
    folder = converted_folder(config)
    suppressed = json.loads((folder / "config.json").read_text(encoding="utf-8"))["suppress_ids"]
    fair: dict[str, Any] = {"suppress_tokens": list(suppressed or [])}
    if len(vocabulary(folder)) not in OPENAI_VOCABULARIES:
        fair["condition_on_previous_text"] = False
    return fair


# ---------------------------------------------------------------- what systems need


def engine_of(config: EvaluationProduct, precision: Precision) -> str:
    """Return the folder of the engine of that precision: the configured one, or its sibling."""
    if precision == config.build.precision:
        return config.engine
    return f"{config.engine.rstrip('/')}-{precision}"


def prepare_engine(config: EvaluationProduct, config_path: str, precision: Precision) -> None:
    """Build the engine of that precision where it is missing or older than its checkpoint.

    Raises:
        EarshotError: the build failed; it has said why.
        MissingCheckpointError: because the checkpoint cannot be had.
    """
    command = [sys.executable, "-m", "build", "engine", "--if-stale", "--config", config_path]
    command += ["--precision", precision, "--engine", engine_of(config, precision)]
    run_tool(command, f"building the {precision} engine", PREPARE_TIMEOUT_S)


def checkpoint_folder(config: EvaluationProduct) -> Path:
    """Find the Hugging Face checkpoint's folder; a hub id is fetched into the hub's cache.

    Raises:
        UnavailableError: the checkpoint is an OpenAI file, which only Earshot reads.
        CheckpointError: the hub does not give it.
    """
    name = config.build.checkpoint
    if name.endswith(".pt"):
        raise UnavailableError(
            f"faster-whisper needs a Hugging Face checkpoint, got {name}; leave it out with "
            "--without"
        )
    return hub.checkpoint_folder(name).path


def checkpoint_key(config: EvaluationProduct) -> str:
    """Hash the checkpoint's weights and JSON files; raises as `checkpoint_folder`."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint_folder(config).iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json"):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def converted_folder(config: EvaluationProduct) -> Path:
    """Return where the CTranslate2 form of the present checkpoint lies or will lie.

    A checkpoint in this form is used as it is. For any other, the name depends on its content, on
    the release of CTranslate2 and on `CONVERTED_VERSION`.
    """
    folder = checkpoint_folder(config)
    if (folder / "model.bin").is_file():
        return folder
    made_by = (CONVERTED_VERSION, importlib.metadata.version("ctranslate2"), checkpoint_key(config))
    return CACHE / hashlib.sha256(" ".join(made_by).encode()).hexdigest()[:24]


def prepare_converted(config: EvaluationProduct) -> None:
    """Convert the checkpoint to CTranslate2 in float32, unless that was done before.

    Raises:
        EarshotError: the conversion failed; it has said why.
        UnavailableError: CTranslate2 would take the checkpoint for English-only.
    """

    def convert(partial: Path) -> None:
        command = [sys.executable, "-c", _CONVERT, "--model", str(checkpoint_folder(config))]
        command += ["--output_dir", str(partial), "--quantization", "float32", "--force"]
        command += ["--copy_files", "tokenizer.json", "preprocessor_config.json"]
        run_tool(command, "converting the checkpoint for faster-whisper", PREPARE_TIMEOUT_S)
        mark_multilingual(partial)

    made_once(converted_folder(config), convert)


def mark_multilingual(folder: Path) -> None:
    """Let CTranslate2 see that a converted checkpoint knows languages.

    Since 4.7.0 it takes for English-only what has no empty token, which OpenAI's multilingual
    vocabularies have and others need not. Such a model would get no language token. The name of
    `<|startoflm|>`, which no reader of Whisper uses, becomes the empty one.

    Raises:
        UnavailableError: the vocabulary has no such token to spare.
    """
    tokens = vocabulary(folder)
    knows_languages = "<|transcribe|>" in tokens and len(tokens) != OPENAI_ENGLISH
    if not knows_languages or "" in tokens:
        return
    if _SPARE_TOKEN not in tokens:
        raise UnavailableError(
            "CTranslate2 would take the checkpoint for English-only: its vocabulary has neither an "
            f"empty token nor {_SPARE_TOKEN} to make one of; leave faster-whisper out with "
            "--without"
        )
    tokens[tokens.index(_SPARE_TOKEN)] = ""
    write_json(folder / "vocabulary.json", tokens)


def vocabulary(folder: Path) -> list[str]:
    """Read the tokens of a converted checkpoint."""
    path = folder / "vocabulary.json"
    if not path.is_file():  # of earlier releases, a token a line
        return (folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
    return read_json(path, list[str], "a vocabulary")


# ---------------------------------------------------------------- systems


LONG_OURS: dict[str, dict[str, Any]] = {  # options of a request, for `long`
    "earshot-parallel": {},
    "earshot-no-vad": {"vad": False},
    "earshot-sequential": {"mode": "sequential"},
    "earshot-no-timestamps": {"timestamps": False},
    "earshot-multilingual": {"multilingual": True},
}

_CONTEXT: dict[str, Any] = {"condition_on_previous_text": True}
_NO_CONTEXT: dict[str, Any] = {"condition_on_previous_text": False}
_VAD: dict[str, Any] = {"vad_filter": True}
_BATCHED: dict[str, Any] = {"batched": True}
LONG_THEIRS: dict[str, dict[str, Any]] = {  # options of `open_faster_whisper`
    "faster-whisper-default": _CONTEXT,
    "faster-whisper-vad": _CONTEXT | _VAD,
    "faster-whisper-no-context": _NO_CONTEXT,
    "faster-whisper-no-context-vad": _NO_CONTEXT | _VAD,
    "faster-whisper-multilingual": _NO_CONTEXT | _VAD | {"multilingual": True},
    "faster-whisper-batched": _BATCHED,
    "faster-whisper-batched-times": _BATCHED | {"without_timestamps": False},
    "faster-whisper-batched-multilingual": _BATCHED | {"multilingual": True},
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """The way to open a system, and what it needs."""

    open: Callable[[], OpenedSystem]
    packages: tuple[str, ...]  # by import name
    engine: Precision | None  # ours, built before it starts; None: it reads the checkpoint


def in_process(config: EvaluationProduct, precision: Precision, **options: Any) -> Spec:
    """Specify our engine in this process; `options` are of every request."""
    opened = functools.partial(earshot_in_process, config, precision, **options)
    return Spec(opened, ("torch",), precision)


def faster_whisper(config: EvaluationProduct, compute_type: str, **options: Any) -> Spec:
    """Specify faster-whisper; the options are those of `open_faster_whisper`."""
    opened = functools.partial(open_faster_whisper, config, compute_type, **options)
    return Spec(opened, ("faster_whisper", "ctranslate2", "av"), None)


def specs(config: EvaluationProduct) -> dict[str, Spec]:
    """Return every system of `run` and `long` by name."""
    library = _CONTEXT | {"suppress_tokens": [-1]}  # the defaults of release 1.2.1
    one_row, configured = {"beam_size": 1, "best_of": 1}, config.build.precision
    triton = functools.partial(earshot_triton, config)
    return {
        "earshot-triton": Spec(triton, ("pytriton", "tritonclient"), configured),
        "earshot-int8": in_process(config, "int8"),
        "earshot-int8-greedy": in_process(greedy(config), "int8"),
        "earshot-fp16": in_process(config, "fp16"),
        "earshot-fp16-greedy": in_process(greedy(config), "fp16"),
        "faster-whisper-float32": faster_whisper(config, "float32"),
        "faster-whisper-float32-greedy": faster_whisper(config, "float32", **one_row),
        "faster-whisper-float16": faster_whisper(config, "float16"),  # GPUs alone have it
        "faster-whisper-int8": faster_whisper(config, "int8"),
        "faster-whisper-int8-greedy": faster_whisper(config, "int8", **one_row),
        "faster-whisper-library-defaults": faster_whisper(config, "default", **library),
        **{name: in_process(config, configured, **own) for name, own in LONG_OURS.items()},
        **{name: faster_whisper(config, "float32", **own) for name, own in LONG_THEIRS.items()},
    }


def check(names: tuple[str, ...], config: EvaluationProduct, mentioned: Iterable[str] = ()) -> None:
    """Refuse, before anything runs, systems that cannot run.

    Args:
        names: the systems to run.
        config: the config of the systems.
        mentioned: names elsewhere in the config, which have to be known.

    Raises:
        ConfigError: no system, one named twice, or an unknown one.
        UnavailableError: a package that a system needs is not installed.
    """
    known = specs(config)
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"expected different names of systems, got {', '.join(names) or 'none'}")
    for name in (*mentioned, *names):
        if name not in known:
            raise ConfigError(f"unknown system {name!r}; known: {', '.join(known)}")
    for name in names:
        for package in missing_packages(known[name].packages):
            raise UnavailableError(
                f"{name} needs the package {package}, which is not installed; "
                "install requirements.txt, or leave the system out with --without"
            )


def prepare(names: Iterable[str], config: EvaluationProduct, config_path: str) -> None:
    """Make the engines and the conversion that systems need, unless they are up to date.

    Raises:
        EarshotError: something could not be made; the message names it.
    """
    known = specs(config)
    needed = [known[name] for name in names]
    for precision in sorted({spec.engine for spec in needed if spec.engine}):
        prepare_engine(config, config_path, precision)
    if any(spec.engine is None for spec in needed):
        prepare_converted(config)


def key_of(name: str, config: EvaluationProduct) -> str:
    """Hash everything that decides a system's answers: its settings, weights, packages and code.

    Call it after `prepare`. Our code is all of serve; a peer's is the code that calls it.

    Raises:
        EarshotError: the checkpoint is not to be had.
        FileError: a file cannot be read.
    """
    spec, settings = specs(config)[name], config.eval
    facts = [name, settings.threads, settings.concurrency, settings.tell_language]
    facts += [config.runtime.device]
    if spec.engine:
        facts += [config.runtime, config.transcriber, versions("torch")]
        files = [Path(engine_of(config, spec.engine)) / MANIFEST_FILE]
        files += sorted(Path("serve").rglob("*.py"))
    else:
        facts += [versions("faster-whisper", "ctranslate2"), checkpoint_key(config)]
        files = [Path(__file__)]
    digest = hashlib.sha256(to_json(facts).encode())
    for path in files:
        digest.update(read_bytes(path))
    return digest.hexdigest()[:16]


def open_system(name: str, config: EvaluationProduct) -> OpenedSystem:
    """Open a system."""
    return specs(config)[name].open()
