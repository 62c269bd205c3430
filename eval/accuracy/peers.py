"""The peers as systems under test: transformers and faster-whisper on the same checkpoint.

What only one of them needs is imported where it is opened, in a process of its own.
"""

import copy
import inspect
import io
import json
import threading
from collections.abc import Mapping
from typing import Any

from eval.accuracy.data import Prediction, TimedText
from eval.accuracy.load import System
from eval.accuracy.prepare import (
    OPENAI_VOCABULARIES,
    checkpoint_folder,
    converted_folder,
    knows_languages,
    vocabulary_size,
)
from eval.config import Config
from eval.record import versions
from serve.contract.errors import AudioError, UnavailableError


def _from_segments(language: str | None, segments: list[TimedText]) -> Prediction:
    text = " ".join(segment.text.strip() for segment in segments if segment.text.strip())
    return Prediction(text, language, tuple(segments))


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

    def transcribe(self, audio: bytes, language: str | None = None) -> Prediction:
        """Decode, cut, generate window by window."""
        from serve.speech import audio as audio_files  # noqa: PLC0415 - as above
        from serve.speech.cutting import cut  # noqa: PLC0415 - as above
        from serve.speech.meter import Limits  # noqa: PLC0415 - as above

        blocks = audio_files.decode(audio, Limits(self._config.transcriber.max_audio_s))
        segments: list[TimedText] = []
        given = language
        for window in cut(blocks):
            with self._lock:
                code, pieces = self._window(window.samples, given)
            language = language or code
            segments += [
                TimedText(window.start_s + p.start_s, window.start_s + p.end_s, p.text)
                for p in pieces
            ]
        return _from_segments(language, segments)

    def _window(self, samples: Any, language: str | None) -> tuple[str | None, list[TimedText]]:
        """Return language and timed text of one window; samples are float32 (n,), 16 kHz mono."""
        inputs = self._processor(samples, sampling_rate=16_000, return_tensors="pt")
        features = inputs.input_features.to(self._config.runtime.device)
        tokenizer = self._processor.tokenizer
        options, code = dict(self._options), language
        if self._model.generation_config.is_multilingual:
            if code is None:
                token = self._model.detect_language(features)[0].item()
                code = tokenizer.decode(token).strip("<|>")
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
    """faster-whisper on the same checkpoint, converted, with its own defaults but for `options`.

    Args:
        config: says which checkpoint, on which device, with how many threads.
        compute_type: of CTranslate2.
        options: of `transcribe`.
        batched: by its BatchedInferencePipeline instead of one window after the other.

    Raises:
        UnavailableError: the library takes a checkpoint that knows languages for English-only.
    """

    def __init__(
        self,
        config: Config,
        compute_type: str,
        options: Mapping[str, Any],
        *,
        batched: bool = False,
    ) -> None:
        from faster_whisper import BatchedInferencePipeline, WhisperModel  # noqa: PLC0415 - optional

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
        if knows_languages(folder) and not self.is_multilingual:
            raise UnavailableError(
                f"CTranslate2 takes {folder} for an English-only model, though its checkpoint "
                f"{config.build.checkpoint} knows languages, so faster-whisper would be told none; "
                "delete that folder to convert again, and see `mark_multilingual` in "
                "eval/accuracy/prepare.py"
            )
        self._options = dict(options)
        pipeline = BatchedInferencePipeline(self._model) if batched else self._model
        self._transcribe = pipeline.transcribe
        defaults = inspect.signature(self._transcribe).parameters
        known = [name for name in _PEER_OPTIONS if name in defaults]
        settings = {name: defaults[name].default for name in known} | self._options
        self.settings = {
            "class": type(pipeline).__name__,
            "compute type": compute_type,
            "device": config.runtime.device,
            "threads": str(config.eval.threads),
            "num_workers": "1",
            **{name: str(value) for name, value in settings.items()},
            **versions("faster-whisper", "ctranslate2"),
        }

    @property
    def is_multilingual(self) -> bool:
        """Return whether the library sees a model that knows languages, and tells it one."""
        return bool(self._model.model.is_multilingual)

    def transcribe(self, audio: bytes, language: str | None = None, **options: Any) -> Prediction:
        """Transcribe once, with `options` of its own; the library decodes the file itself."""
        from av.error import FFmpegError  # noqa: PLC0415 - comes with faster-whisper

        try:
            # A copy, because the library adds to the list of suppressed tokens.
            options = copy.deepcopy(self._options) | options
            pieces, info = self._transcribe(io.BytesIO(audio), language=language, **options)
        except FFmpegError as error:
            raise AudioError(f"faster-whisper cannot decode the audio: {error}") from error
        segments = [TimedText(piece.start, piece.end, piece.text, piece.seek) for piece in pieces]
        return _from_segments(info.language, segments)


_PEER_OPTIONS = (
    "beam_size",
    "best_of",
    "patience",
    "length_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "temperature",
    "compression_ratio_threshold",
    "log_prob_threshold",
    "no_speech_threshold",
    "condition_on_previous_text",
    "without_timestamps",
    "suppress_tokens",
    "max_new_tokens",
    "multilingual",
    "vad_filter",
    "batch_size",
)
"""Options of faster-whisper that decide its figures."""


def fair_options(config: Config) -> dict[str, Any]:
    """Return the options that are fair to a checkpoint which is not OpenAI's.

    Its own list of suppressed tokens is OpenAI's, so it gets the checkpoint's, which a conversion
    keeps in config.json; and small checkpoints that are not OpenAI's stop early after text of
    earlier windows. A published one is told nothing but its own list.
    """
    folder = converted_folder(config)
    suppressed = json.loads((folder / "config.json").read_text(encoding="utf-8"))["suppress_ids"]
    fair: dict[str, Any] = {"suppress_tokens": list(suppressed or [])}
    if vocabulary_size(folder) not in OPENAI_VOCABULARIES:
        fair["condition_on_previous_text"] = False
    return fair
