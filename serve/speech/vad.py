"""Detect speech in streamed audio with Silero VAD 6.2.3.

The rules that turn the model's probabilities into speech intervals are those of silero-vad and of
faster-whisper's `get_speech_timestamps`. Speech begins at a frame above the threshold. It ends when
frames stay below a lower threshold for the minimum silence. Short intervals are dropped, and the
rest is padded. There is no maximum speech length, because `serve.speech.cutting` cuts long speech
at its quietest place.
"""

import dataclasses
import functools
import hashlib
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serve.contract.errors import EarshotError
from serve.contract.messages import Samples, SpeechOptions
from serve.speech.rate import SAMPLE_RATE

FRAME = 512  # samples per probability: 32 ms
MODEL = Path(__file__).parent / "silero" / "silero_vad_16k.onnx"
MODEL_SHA256 = "8cbe49ba1cb4e2f6f5ed7570458db32d1babd135905787f8cbf0d7d24ee3957d"

_CONTEXT = 64  # samples of context before a frame
_STATE = (1, 1, 128)
_MOST_FRAMES = 512  # maximum frames per call of the model: 16 s
_HYSTERESIS = 0.15  # the threshold for the end of speech is lower by this much
_MIN_END_THRESHOLD = 0.01  # minimum threshold for the end of speech

Probabilities = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class VadOptions:
    """The VAD thresholds of `SpeechOptions`, in samples instead of seconds."""

    threshold: float = SpeechOptions.vad_threshold
    min_silence: int = round(SpeechOptions.vad_min_silence_s * SAMPLE_RATE)
    pad: int = round(SpeechOptions.vad_pad_s * SAMPLE_RATE)
    min_speech: int = round(SpeechOptions.vad_min_speech_s * SAMPLE_RATE)

    @classmethod
    def of(cls, options: SpeechOptions) -> "VadOptions":
        """Convert seconds to samples."""
        return cls(
            options.vad_threshold,
            round(options.vad_min_silence_s * SAMPLE_RATE),
            round(options.vad_pad_s * SAMPLE_RATE),
            round(options.vad_min_speech_s * SAMPLE_RATE),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class SpeechAudio:
    """An interval of audio with speech."""

    start: int  # the first sample's index in the recording
    samples: Samples  # (n,), n > 0


class VadModel:
    """The VAD model with its state for one recording.

    Raises:
        EarshotError: the package onnxruntime is missing, or the model file is damaged.
    """

    def __init__(self, model: Path = MODEL) -> None:
        self._session = _session(model)
        self._h = np.zeros(_STATE, np.float32)
        self._c = np.zeros(_STATE, np.float32)
        self._context = np.zeros(_CONTEXT, np.float32)

    def probabilities(self, samples: Samples) -> Probabilities:
        """Return the speech probability of each of the recording's next frames.

        Args:
            samples: float32 (n * FRAME,), 16 kHz mono.

        Returns:
            float32 (n,).
        """
        frames = samples.reshape(-1, FRAME)
        contexts = np.concatenate([self._context[None], frames[:-1, -_CONTEXT:]])
        inputs = np.concatenate([contexts, frames], axis=1)
        self._context = frames[-1, -_CONTEXT:].copy()
        batches = []
        for i in range(0, len(inputs), _MOST_FRAMES):
            feed = {"input": inputs[i : i + _MOST_FRAMES], "h": self._h, "c": self._c}
            batch, self._h, self._c = self._session.run(None, feed)
            batches.append(batch.reshape(-1))
        return np.concatenate(batches)


@functools.cache
def _session(model: Path) -> Any:
    """Load the model once; its session is thread-safe."""
    # NOTE: without it the library sends usage data to its vendor. This server processes people's
    # voices and must send no data.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime  # noqa: PLC0415 - 50 MB, needed only for VAD
    except ImportError as error:
        raise EarshotError(
            "VAD needs the package onnxruntime; install requirements.txt, or send vad = false"
        ) from error
    data = model.read_bytes()
    if model == MODEL and hashlib.sha256(data).hexdigest() != MODEL_SHA256:
        raise EarshotError(f"{model} is damaged; expected the file with SHA-256 {MODEL_SHA256}")
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # it would keep the memory of the longest block
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class VadState:
    """The speech state of a recording, updated frame by frame.

    Args:
        options: the VAD thresholds.
    """

    def __init__(self, options: VadOptions) -> None:
        self.speaking = False
        self.since = 0
        """While speaking: the sample at which speech began."""
        self.quiet_since: int | None = None
        """While speaking: the sample at which speech may have ended."""
        self._options = options
        self._end_threshold = max(options.threshold - _HYSTERESIS, _MIN_END_THRESHOLD)

    def step(self, probability: float, position: int) -> None:
        """Update the state with the probability of the frame that begins at this sample."""
        if probability >= self._options.threshold:
            self.since = self.since if self.speaking else position
            self.speaking, self.quiet_since = True, None
        elif self.speaking and probability < self._end_threshold:
            if self.quiet_since is None:
                self.quiet_since = position
            if position - self.quiet_since >= self._options.min_silence:
                self.speaking, self.quiet_since = False, None


class SpeechFilter:
    """A filter that returns the speech of one recording with padding, as early as possible.

    It holds back the padding, and audio that may still become silence or too short for speech.

    Args:
        options: the VAD thresholds.
        detector: the recording's detector.
    """

    def __init__(self, options: VadOptions, detector: VadModel) -> None:
        self._options = options
        self._detector = detector
        self._voice = VadState(options)
        self._held = np.zeros(0, np.float32)  # the latest audio
        self._held_start = 0  # index of its first sample in the recording
        self._n_judged = 0  # samples with a probability; a whole number of frames
        self._spoken: deque[tuple[int, int]] = deque()  # speech so far, without padding
        self._kept: list[tuple[int, int]] = []  # disjoint padded intervals of speech
        self._n_returned = 0  # audio before this sample was returned

    @property
    def margin_s(self) -> float:
        """Seconds of padding on either side of speech."""
        return self._options.pad / SAMPLE_RATE

    @property
    def received(self) -> int:
        """The number of samples of the recording so far."""
        return self._held_start + len(self._held)

    def spoken(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the known speech between two samples, as pairs of first and last sample + 1.

        Speech that ends before `start` is dropped from memory.
        """
        while self._spoken and self._spoken[0][1] <= start:
            self._spoken.popleft()
        return [(max(a, start), min(b, end)) for a, b in self._spoken if a < end]

    def push(self, block: Samples) -> list[SpeechAudio]:
        """Add a block, and return the speech that is certain now, in order."""
        self._held = np.concatenate([self._held, block])
        if frames := (self.received - self._n_judged) // FRAME:
            begin = self._n_judged - self._held_start
            self._judge(self._held[begin : begin + frames * FRAME])
        return self._take_kept()

    def finish(self) -> list[SpeechAudio]:
        """Return the remaining speech at the end of the recording."""
        unjudged = self._held[self._n_judged - self._held_start :]
        if len(unjudged):
            self._judge(np.pad(unjudged, (0, FRAME - len(unjudged))))
        if self._voice.speaking:
            self._keep_speech(self.received)
        return self._take_kept()

    def _judge(self, samples: Samples) -> None:
        for probability in self._detector.probabilities(samples):
            self._voice.step(float(probability), self._n_judged)
            self._n_judged += FRAME
            if self._voice.speaking and self._voice.quiet_since is None:
                self._keep_speech(self._n_judged)

    def _keep_speech(self, end: int) -> None:
        """Keep the current speech up to sample `end` if it is long enough."""
        if end - self._voice.since > self._options.min_speech:
            self._keep(self._voice.since, end)

    @property
    def _undecided(self) -> int:
        """The first sample for which speech or silence is still uncertain."""
        voice, end = self._voice, self._n_judged
        if voice.speaking:
            end = self._n_judged if voice.quiet_since is None else voice.quiet_since
            if end - voice.since <= self._options.min_speech:
                return voice.since
        return end

    def _keep(self, start: int, end: int) -> None:
        """Keep an interval with its padding."""
        if self._spoken and self._spoken[-1][0] == start:  # the last interval has grown
            self._spoken.pop()
        self._spoken.append((start, end))
        start, end = max(0, start - self._options.pad), end + self._options.pad
        if self._kept and start <= self._kept[-1][1]:
            start, end = self._kept[-1][0], max(end, self._kept.pop()[1])
        self._kept.append((start, end))

    def _take_kept(self) -> list[SpeechAudio]:
        """Return the kept audio that has arrived and was not returned before."""
        speech = []
        for start, end in self._kept:
            start, end = max(start, self._n_returned), min(end, self.received)
            if start < end:
                held_start = self._held_start
                speech.append(
                    SpeechAudio(start, self._held[start - held_start : end - held_start].copy())
                )
                self._n_returned = end
        del self._kept[:-1]  # the last one may grow
        # Keep the padding of speech that may begin at the first uncertain sample.
        keep_from = self._undecided - self._options.pad
        keep_from = max(self._held_start, min(keep_from, self._n_judged, self.received))
        self._held = self._held[keep_from - self._held_start :].copy()
        self._held_start = keep_from
        return speech
