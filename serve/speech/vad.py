"""Detect speech in streamed audio with Silero VAD 6.2.3.

The rules that turn the model's probabilities into speech intervals are those of silero-vad and of
faster-whisper's `get_speech_timestamps`. Speech begins at a frame above the threshold. It ends when
frames stay below a lower threshold for the minimum silence. Short intervals are dropped, and the
rest is padded. There is no maximum speech length, because `serve.speech.cutting` cuts long speech
at its quietest place.
"""

import dataclasses
import functools
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serve.contract.errors import EarshotError
from serve.contract.messages import Samples, SpeechOptions
from serve.speech.rate import SAMPLE_RATE

FRAME = 512  # samples per probability: 32 ms
MODEL = Path(__file__).parent / "silero" / "silero_vad_16k.onnx"

_CONTEXT = 64  # samples of context before a frame
_STATE = (1, 1, 128)
_MAX_FRAMES = 512  # maximum frames per call of the model: 16 s
_HYSTERESIS = 0.15  # the threshold for the end of speech is lower by this much
_MIN_END_THRESHOLD = 0.01  # minimum threshold for the end of speech

Probabilities = npt.NDArray[np.float32]


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
        for i in range(0, len(inputs), _MAX_FRAMES):
            inputs_by_name = {"input": inputs[i : i + _MAX_FRAMES], "h": self._h, "c": self._c}
            batch, self._h, self._c = self._session.run(None, inputs_by_name)
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
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # it would keep the memory of the longest block
    providers = ["CPUExecutionProvider"]
    try:
        return onnxruntime.InferenceSession(model.read_bytes(), options, providers=providers)
    except Exception as error:  # the library raises no narrower type
        raise EarshotError(f"cannot load {model}: {error}; install Earshot again") from error


class VadState:
    """The speech state of a recording, updated frame by frame.

    Args:
        options: the VAD thresholds.
    """

    def __init__(self, options: SpeechOptions) -> None:
        self.speaking = False
        self.since = 0
        """While speaking: the sample at which speech began."""
        self.quiet_since: int | None = None
        """While speaking: the sample at which speech may have ended."""
        self._threshold = options.vad_threshold
        self._end_threshold = max(self._threshold - _HYSTERESIS, _MIN_END_THRESHOLD)
        self._min_silence = round(options.vad_min_silence_s * SAMPLE_RATE)

    def runs(self, probabilities: Probabilities) -> Iterator[tuple[int, int]]:
        """Yield first and last frame of each run of frames that `step` treats alike.

        Steps for the first and the last frame of a run leave the same state as steps for all its
        frames. A window of 30 s has 938 frames and some ten runs.
        """
        exact = probabilities.astype(np.float64)
        level = (exact >= self._threshold) * 1 + (exact >= self._end_threshold)
        changes = np.flatnonzero(np.diff(level)).tolist()
        return zip([0, *(i + 1 for i in changes)], [*changes, len(level) - 1], strict=True)

    def step(self, probability: float, position: int) -> None:
        """Update the state with the probability of the frame that begins at this sample."""
        if probability >= self._threshold:
            self.since = self.since if self.speaking else position
            self.speaking, self.quiet_since = True, None
        elif self.speaking and probability < self._end_threshold:
            if self.quiet_since is None:
                self.quiet_since = position
            if position - self.quiet_since >= self._min_silence:
                self.speaking, self.quiet_since = False, None


class SpeechFilter:
    """A filter that returns the speech of one recording with padding, as early as possible.

    The filter buffers audio until it is certain to be speech, speech that is too short, or silence.

    Args:
        options: the VAD thresholds.
        model: the VAD model with the recording's state.
    """

    def __init__(self, options: SpeechOptions, model: VadModel) -> None:
        self._pad = round(options.vad_pad_s * SAMPLE_RATE)
        self._min_speech = round(options.vad_min_speech_s * SAMPLE_RATE)
        self._model = model
        self._state = VadState(options)
        self._buffer = np.zeros(0, np.float32)  # the latest audio
        self._buffer_start = 0  # its first sample's index in the recording
        self._n_scored = 0  # samples with a probability; a whole number of frames
        self._unpadded_speech: deque[tuple[int, int]] = deque()  # speech so far, without padding
        self._speech: list[tuple[int, int]] = []  # disjoint padded intervals of speech
        self._n_returned = 0  # audio before this sample was returned

    @property
    def margin_s(self) -> float:
        """Seconds of padding on either side of speech."""
        return self._pad / SAMPLE_RATE

    @property
    def received(self) -> int:
        """The number of samples of the recording so far."""
        return self._buffer_start + len(self._buffer)

    def spoken(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the speech found between two samples, as pairs of first and last sample + 1.

        Speech that ends before `start` is dropped from memory.
        """
        while self._unpadded_speech and self._unpadded_speech[0][1] <= start:
            self._unpadded_speech.popleft()
        return [(max(a, start), min(b, end)) for a, b in self._unpadded_speech if a < end]

    def push(self, block: Samples) -> list[SpeechAudio]:
        """Add a block, and return the speech that is certain now, in order."""
        self._buffer = np.concatenate([self._buffer, block])
        if frames := (self.received - self._n_scored) // FRAME:
            begin = self._n_scored - self._buffer_start
            self._detect(self._buffer[begin : begin + frames * FRAME])
        return self._take_speech()

    def finish(self) -> list[SpeechAudio]:
        """Return the remaining speech at the end of the recording."""
        unjudged = self._buffer[self._n_scored - self._buffer_start :]
        if len(unjudged):
            self._detect(np.pad(unjudged, (0, FRAME - len(unjudged))))
        if self._state.speaking:
            self._add_current_speech(self.received)
        return self._take_speech()

    def _detect(self, samples: Samples) -> None:
        probabilities, begin = self._model.probabilities(samples), self._n_scored
        for first, last in self._state.runs(probabilities):
            for frame in (first, last):
                self._state.step(float(probabilities[frame]), begin + frame * FRAME)
            self._n_scored = begin + (last + 1) * FRAME
            if self._state.speaking and self._state.quiet_since is None:
                self._add_current_speech(self._n_scored)

    def _add_current_speech(self, end: int) -> None:
        """Add the current speech up to sample `end` if it is long enough."""
        if end - self._state.since > self._min_speech:
            self._add_speech(self._state.since, end)

    @property
    def _undecided(self) -> int:
        """The first sample for which speech or silence is still uncertain."""
        state, end = self._state, self._n_scored
        if state.speaking:
            end = self._n_scored if state.quiet_since is None else state.quiet_since
            if end - state.since <= self._min_speech:
                return state.since
        return end

    def _add_speech(self, start: int, end: int) -> None:
        """Add an interval of speech with its padding."""
        # The last interval may have grown.
        if self._unpadded_speech and self._unpadded_speech[-1][0] == start:
            self._unpadded_speech.pop()
        self._unpadded_speech.append((start, end))
        start, end = max(0, start - self._pad), end + self._pad
        if self._speech and start <= self._speech[-1][1]:
            start, end = self._speech[-1][0], max(end, self._speech.pop()[1])
        self._speech.append((start, end))

    def _take_speech(self) -> list[SpeechAudio]:
        """Return the padded speech that has arrived and was not returned before."""
        speech = []
        for start, end in self._speech:
            start, end = max(start, self._n_returned), min(end, self.received)
            if start < end:
                buffer_start = self._buffer_start
                samples = self._buffer[start - buffer_start : end - buffer_start].copy()
                speech.append(SpeechAudio(start, samples))
                self._n_returned = end
        del self._speech[:-1]  # the last one may grow
        # Speech may begin at the first undecided sample: keep the audio that would pad it.
        keep_from = self._undecided - self._pad
        keep_from = max(self._buffer_start, min(keep_from, self._n_scored, self.received))
        self._buffer = self._buffer[keep_from - self._buffer_start :].copy()
        self._buffer_start = keep_from
        return speech
