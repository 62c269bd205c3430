"""The systems under test: small adapters with one interface, and what each of them needs.

Every system gets a file's bytes and nothing else: no reference, no language. All are given the
same number of CPU threads and decode greedily with Whisper's temperature fallback. Packages that
only one system needs are imported where it is opened, in a process of its own.
"""

import contextlib
import copy
import dataclasses
import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.accuracy.data import Prediction, TimedText
from eval.accuracy.prepare import (
    checkpoint_folder,
    converted_folder,
    engine_of,
    prepare_converted,
    prepare_engine,
)
from eval.config import Config
from eval.machine import missing_packages, versions
from serve.config import Precision
from serve.errors import AudioError, ConfigError, UnavailableError
from serve.messages import Request, Transcript


class System:
    """One thing that turns audio into text."""

    settings: dict[str, str]  # everything that decides its figures, versions included

    def transcribe(self, audio: bytes) -> Prediction:
        """The text of an audio file's bytes; called from several threads at once.

        Raises:
            EarshotError: this one call failed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free everything, child processes included; nothing, where nothing runs between calls."""


def _from_transcript(transcript: Transcript) -> Prediction:
    segments = tuple(TimedText(s.start, s.end, s.text) for s in transcript.segments)
    return Prediction(transcript.text, transcript.language, segments)


def _from_segments(language: str | None, segments: list[TimedText]) -> Prediction:
    text = " ".join(segment.text.strip() for segment in segments if segment.text.strip())
    return Prediction(text, language, tuple(segments))


def _runtime_settings(config: Config, path: str) -> dict[str, str]:
    runtime = config.runtime
    return {
        "engine": path,
        "device": runtime.device,
        "slots": str(runtime.slots),
        "encoder batch": str(runtime.encoder_batch),
        "threads": str(runtime.threads),
        "temperatures": ", ".join(f"{t:g}" for t in config.transcriber.temperatures),
    }


class EarshotTriton(System):
    """The configured engine behind Triton Inference Server, whole answers by gRPC.

    Takes whatever ports are free, so that it can run beside a server on the configured ones.
    """

    def __init__(self, config: Config) -> None:
        from serve.triton.client import Client  # noqa: PLC0415 - needs tritonclient
        from serve.triton.server import (  # noqa: PLC0415 - needs pytriton
            on_free_ports,
            running_server,
        )

        server = on_free_ports(config.server)
        running = running_server(dataclasses.replace(config, server=server))
        with contextlib.ExitStack() as stack:
            self.server = stack.enter_context(running)
            client = Client(self.server.grpc, config.transcriber.request_timeout_s)
            self._client = stack.enter_context(client)
            self._stack = stack.pop_all()
        self.settings = {
            "transport": "KServe v2 infer by gRPC, file bytes in, whole answer out",
            **_runtime_settings(config, config.engine),
            **versions("nvidia-pytriton", "tritonclient", "torch"),
        }

    def transcribe(self, audio: bytes) -> Prediction:
        """One infer call."""
        return _from_transcript(self._client.transcribe(audio=audio))

    def close(self) -> None:
        """Stop the server."""
        self._stack.close()


class EarshotInProcess(System):
    """A transcriber in this process."""

    def __init__(self, config: Config, precision: Precision) -> None:
        from serve.engine import open_engine  # noqa: PLC0415 - loads torch
        from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

        path = engine_of(config, precision)
        found = open_engine(path).manifest.precision
        if found != precision:
            raise ConfigError(f"the engine {path} is {found}, expected {precision}")
        self._transcriber = open_transcriber(config, path)
        self.settings = {
            "transport": "in process",
            "precision": precision,
            **_runtime_settings(config, path),
            **versions("torch"),
        }

    def transcribe(self, audio: bytes) -> Prediction:
        """One request."""
        return _from_transcript(self._transcriber.transcribe(Request(audio=audio)))

    def close(self) -> None:
        """End the transcriber's thread."""
        self._transcriber.close()


class TransformersFp32(System):
    """transformers' `generate` in float32 on the windows that Earshot cuts, one at a time."""

    def __init__(self, config: Config) -> None:
        import torch  # noqa: PLC0415 - heavy
        import transformers  # noqa: PLC0415 - heavy

        self._config = config
        self._lock = threading.Lock()  # generate keeps state in the model; calls take turns
        torch.set_num_threads(config.eval.threads)
        folder = str(checkpoint_folder(config))
        self._processor = transformers.WhisperProcessor.from_pretrained(folder)
        whisper: Any = transformers.WhisperForConditionalGeneration
        model = whisper.from_pretrained(folder, dtype=torch.float32)
        self._model = model.to(config.runtime.device).eval()
        transcriber = config.transcriber
        self._options = {
            "return_timestamps": True,
            "num_beams": 1,
            "do_sample": False,
            "max_new_tokens": transcriber.max_tokens,
            "temperature": transcriber.temperatures,
            "compression_ratio_threshold": transcriber.compression_ratio_threshold,
            "logprob_threshold": transcriber.logprob_threshold,
            "no_speech_threshold": transcriber.no_speech_threshold,
        }
        self.settings = {
            "dtype": "float32",
            "device": config.runtime.device,
            "threads": str(config.eval.threads),
            "calls": "one window at a time, callers take turns; generate seeks within a window",
            **{name: str(value) for name, value in self._options.items()},
            **versions("transformers", "torch"),
        }

    def transcribe(self, audio: bytes) -> Prediction:
        """Decode, cut, generate window by window."""
        from serve.speech import audio as audio_files  # noqa: PLC0415 - as above
        from serve.speech import windows  # noqa: PLC0415 - as above

        samples = audio_files.decode(audio, self._config.transcriber.max_audio_s)
        segments: list[TimedText] = []
        language = None
        for window in windows.cut(samples):
            with self._lock:
                code, pieces = self._window(window.samples)
            language = language or code
            segments += [
                TimedText(window.start_s + p.start_s, window.start_s + p.end_s, p.text)
                for p in pieces
            ]
        return _from_segments(language, segments)

    def _window(self, samples: Any) -> tuple[str | None, list[TimedText]]:
        """Language and timed text of one window; samples are float32 (n,), 16 kHz mono."""
        inputs = self._processor(samples, sampling_rate=16_000, return_tensors="pt")
        features = inputs.input_features.to(self._config.runtime.device)
        tokenizer = self._processor.tokenizer
        options, code = dict(self._options), None
        if self._model.generation_config.is_multilingual:
            found = self._model.detect_language(features)[0].item()
            code = tokenizer.decode(found).strip("<|>")
            options |= {"task": "transcribe", "language": code}
        out = self._model.generate(features, return_segments=True, **options)
        pieces = [
            TimedText(
                float(piece["start"]),
                float(piece["end"]),
                tokenizer.decode(piece["tokens"], skip_special_tokens=True),
            )
            for piece in out["segments"][0]
        ]
        return code, pieces


class FasterWhisper(System):
    """faster-whisper on the same checkpoint, converted.

    What its own defaults take from OpenAI's checkpoints comes from this one: which tokens are
    suppressed. A limit of new tokens is not given, because it would end a window at half of it.
    """

    def __init__(self, config: Config, compute_type: str) -> None:
        from faster_whisper import WhisperModel  # noqa: PLC0415 - optional

        device, _, index = config.runtime.device.partition(":")
        folder = converted_folder(config)
        self._model: Any = WhisperModel(
            str(folder),
            device=device,
            device_index=int(index or 0),
            compute_type=compute_type,
            cpu_threads=config.eval.threads,
            num_workers=1,
        )
        transcriber = config.transcriber
        self._options = {
            "beam_size": 1,
            "best_of": 1,
            "temperature": list(transcriber.temperatures),
            "compression_ratio_threshold": transcriber.compression_ratio_threshold,
            "log_prob_threshold": transcriber.logprob_threshold,
            "no_speech_threshold": transcriber.no_speech_threshold,
            "condition_on_previous_text": False,
            "suppress_tokens": _suppressed_tokens(folder),
            "vad_filter": False,
        }
        self.settings = {
            "compute type": compute_type,
            "device": config.runtime.device,
            "threads": str(config.eval.threads),
            "num_workers": "1",
            **{name: str(value) for name, value in self._options.items()},
            **versions("faster-whisper", "ctranslate2"),
        }

    @property
    def is_multilingual(self) -> bool:
        """Whether the library sees a model that knows languages, and tells it one."""
        return bool(self._model.model.is_multilingual)

    def transcribe(self, audio: bytes) -> Prediction:
        """One sequential transcription; the library decodes the file itself."""
        from av.error import FFmpegError  # noqa: PLC0415 - comes with faster-whisper

        try:
            # A copy, because the library adds to the list of suppressed tokens.
            options = copy.deepcopy(self._options)
            pieces, info = self._model.transcribe(io.BytesIO(audio), **options)
        except FFmpegError as error:
            raise AudioError(f"faster-whisper cannot decode the audio: {error}") from error
        segments = [TimedText(piece.start, piece.end, piece.text) for piece in pieces]
        return _from_segments(info.language, segments)


def _suppressed_tokens(folder: Path) -> list[int]:
    """The checkpoint's own list, which a conversion keeps in config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return list(config["suppress_ids"] or [])


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a system is opened and what it needs."""

    open: Callable[[], System]
    packages: tuple[str, ...]  # by import name
    engine: Precision | None = None  # to be built before it starts; None = none
    converted: bool = False  # whether the checkpoint has to be converted before it starts


def specs(config: Config) -> dict[str, Spec]:
    """Every system by name."""

    def in_process(precision: Precision) -> Spec:
        return Spec(lambda: EarshotInProcess(config, precision), ("torch",), engine=precision)

    def faster_whisper(compute_type: str) -> Spec:
        packages = ("faster_whisper", "ctranslate2", "av")
        return Spec(lambda: FasterWhisper(config, compute_type), packages, converted=True)

    through_triton = Spec(
        lambda: EarshotTriton(config), ("pytriton", "tritonclient"), engine=config.build.precision
    )
    return {
        "earshot-triton": through_triton,
        "earshot-int8": in_process("int8"),
        "earshot-fp16": in_process("fp16"),
        "transformers-fp32": Spec(lambda: TransformersFp32(config), ("transformers", "torch")),
        "faster-whisper-int8": faster_whisper("int8"),
        "faster-whisper-float32": faster_whisper("float32"),
    }


def check(names: tuple[str, ...], config: Config) -> None:
    """Refuse, before anything runs, what cannot run.

    Raises:
        ConfigError: no system, an unknown one, or one named twice.
        UnavailableError: a package that a system needs is not installed.
    """
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"expected different names of systems, got {', '.join(names) or 'none'}")
    known = specs(config)
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown system {name!r}; known: {', '.join(known)}")
        for package in missing_packages(known[name].packages):
            raise UnavailableError(
                f"{name} needs the package {package}, which is not installed; "
                "install requirements.txt, or leave the system out with --systems"
            )


def prepare(names: tuple[str, ...], config: Config, config_path: str) -> None:
    """Make what the systems need and what is not there yet; fresh engines are left alone.

    Raises:
        EarshotError: something could not be made; the message names it.
    """
    needed = [specs(config)[name] for name in names]
    for precision in sorted({spec.engine for spec in needed if spec.engine}):
        prepare_engine(config, config_path, precision)
    if any(spec.converted for spec in needed):
        prepare_converted(config)


def open_system(name: str, config: Config) -> System:
    """Open a system; it is ready when this returns."""
    return specs(config)[name].open()
