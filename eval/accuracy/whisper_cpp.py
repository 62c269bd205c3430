"""whisper.cpp as a system under test, by its Python package, as its own command line runs it."""

import io
import threading
from typing import Any

from eval.accuracy.data import Prediction, TimedText
from eval.accuracy.load import System
from eval.accuracy.prepare import GgmlKind, ggml_file
from eval.config import Config
from eval.machine import versions
from serve.contract.errors import AudioError
from serve.contract.messages import Samples

BEAM_SEARCH = 1  # its default strategy on the command line: a beam of 5
BEST_OF = 5  # likewise, at temperatures above 0
_AUTO = "auto"  # the language is detected
SAMPLE_RATE = 16_000
_TICKS_A_SECOND = 100.0  # of the times of segments


class WhisperCpp(System):
    """whisper.cpp on the same checkpoint, with the defaults of its command line.

    These are a beam of 5, best of 5, falling back through temperatures, no text of earlier
    calls. It computes one transcription at a time with all its threads, so callers take turns.
    It reads WAV of 16 kHz alone; what libsndfile reads is brought to that for it.

    Args:
        config: says which checkpoint, with how many threads.
        kind: of the weights.
    """

    def __init__(self, config: Config, kind: GgmlKind) -> None:
        import _pywhispercpp  # noqa: PLC0415 - only its own evaluation needs it
        from pywhispercpp.model import Model  # noqa: PLC0415 - as above

        self._library: Any = _pywhispercpp
        self._lock = threading.Lock()
        self._model: Any = Model(
            str(ggml_file(config, kind)),
            params_sampling_strategy=BEAM_SEARCH,
            n_threads=config.eval.threads,
            print_progress=False,
            greedy={"best_of": BEST_OF},
        )
        params = self._model.get_params()
        self.settings = {
            "weights": kind,
            "threads": str(config.eval.threads),
            "calls": "callers take turns; audio is decoded by libsndfile and soxr",
            **{name: str(params[name]) for name in _OPTIONS},
            "built with": self._library.whisper_print_system_info().strip(" |"),
            **versions("pywhispercpp"),
        }

    def transcribe(self, audio: bytes, language: str | None = None) -> Prediction:
        """Decode, then one call of `whisper_full`."""
        samples = _samples(audio)
        with self._lock:
            pieces = self._model.transcribe(samples, language=language or _AUTO)
            code = self._library.whisper_lang_str(
                self._library.whisper_full_lang_id(self._model._ctx)
            )
        segments = tuple(
            TimedText(piece.t0 / _TICKS_A_SECOND, piece.t1 / _TICKS_A_SECOND, piece.text)
            for piece in pieces
        )
        text = " ".join(segment.text for segment in segments if segment.text)
        return Prediction(text, code, segments)


def _samples(audio: bytes) -> Samples:
    """Decode to float32 (n,), 16 kHz mono; not by `serve.speech`, which would bring torch in."""
    import soundfile  # noqa: PLC0415 - only where a system is opened
    import soxr  # noqa: PLC0415 - as above

    try:
        samples, rate = soundfile.read(io.BytesIO(audio), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise AudioError(f"libsndfile cannot decode the audio for whisper.cpp: {error}") from error
    resampled: Samples = soxr.resample(samples.mean(axis=1), rate, SAMPLE_RATE)
    return resampled


_OPTIONS = (
    "beam_search",
    "greedy",
    "temperature",
    "temperature_inc",
    "entropy_thold",
    "logprob_thold",
    "no_speech_thold",
    "no_context",
    "suppress_blank",
    "suppress_nst",
    "audio_ctx",
    "vad",
)
"""Options of whisper.cpp that decide its figures."""
