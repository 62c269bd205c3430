"""Earshot as a system under test: through Triton Inference Server, and in this process.

What only one of them needs is imported where it is opened, in a process of its own.
"""

import contextlib
import itertools
from typing import Any

from eval.accuracy.data import Prediction, TimedText
from eval.accuracy.load import System
from eval.accuracy.prepare import engine_of
from eval.config import Config, changed
from eval.record import versions
from serve.contract.config import SEARCH_OPTIONS, Precision
from serve.contract.errors import ConfigError
from serve.contract.messages import Request, Transcript


def _from_transcript(transcript: Transcript) -> Prediction:
    """Convert a transcript; segments of a window have its scores, by which they are known."""
    scores = [(s.avg_logprob, s.no_speech_prob, s.compression_ratio) for s in transcript.segments]
    changed = [score != before for before, score in itertools.pairwise(scores)]
    windows = itertools.accumulate(changed, initial=0)
    segments = tuple(
        TimedText(s.start, s.end, s.text, window)
        for s, window in zip(transcript.segments, windows, strict=False)
    )
    return Prediction(transcript.text, transcript.language, segments)


def _runtime_settings(config: Config, path: str) -> dict[str, str]:
    runtime = config.runtime
    return {
        "engine": path,
        "device": runtime.device,
        "slots": str(runtime.slots),
        "rows": str(runtime.rows),
        "encoder batch": str(runtime.encoder_batch),
        "threads": str(runtime.threads),
        "cross KV": runtime.cross_kv,
        "encoder precision": runtime.encoder_precision,
        **{name: str(getattr(config.transcriber, name)) for name in _SEARCH},
    }


_SEARCH = (
    *SEARCH_OPTIONS,
    "temperatures",
    "mode",
    "previous_tokens",
    "previous_timestamps",
    "vad",
)


def greedy(config: Config) -> Config:
    """Return the config with one row a window at every temperature."""
    return changed(config, "transcriber", beam_size=1, best_of=1)


class EarshotTriton(System):
    """The configured engine behind Triton Inference Server, whole answers by gRPC.

    It listens on free ports, so that it can run beside a server on the configured ones.
    """

    def __init__(self, config: Config) -> None:
        from eval.server import running  # noqa: PLC0415 - needs the server's packages
        from serve.wire.client import Client  # noqa: PLC0415 - needs tritonclient

        with contextlib.ExitStack() as stack:
            self.server = stack.enter_context(running(config))
            client = Client(self.server.grpc, config.transcriber.request_timeout_s)
            self._client = stack.enter_context(client)
            self._stack = stack.pop_all()
        self.settings = {
            "transport": "KServe v2 infer by gRPC, file bytes in, whole answer out",
            **_runtime_settings(config, config.engine),
            **versions("nvidia-pytriton", "tritonclient", "torch"),
        }

    def transcribe(self, audio: bytes, language: str | None = None) -> Prediction:
        """Make one infer call."""
        answer = self._client.transcribe(audio=audio, language=language)
        return _from_transcript(answer)

    def close(self) -> None:
        """Stop the server.

        Raises:
            EarshotError: it failed meanwhile, even if it was started again.
        """
        with self._stack:
            self.server.require_unbroken()


class EarshotInProcess(System):
    """A transcriber in this process; `options` are those of `Request` that every call asks for."""

    def __init__(self, config: Config, precision: Precision, **options: Any) -> None:
        from serve.contract.engine import open_engine  # noqa: PLC0415 - loads torch
        from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

        path = engine_of(config, precision)
        built = open_engine(path).manifest.precision
        if built != precision:
            raise ConfigError(f"the engine {path} is {built}, expected {precision}")
        self._options = options
        self._transcriber = open_transcriber(config, path)
        self.settings = {
            "transport": "in process",
            "precision": precision,
            **_runtime_settings(config, path),
            **{name: str(value) for name, value in options.items()},
            **versions("torch"),
        }

    def transcribe(self, audio: bytes, language: str | None = None, **options: Any) -> Prediction:
        """Make one request, which asks for `options` besides those of every call."""
        request = Request(audio, language=language, **self._options | options)
        return _from_transcript(self._transcriber.transcribe(request))

    def close(self) -> None:
        """End the transcriber's thread."""
        self._transcriber.close()
