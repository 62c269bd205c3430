"""Voice activity by Silero VAD 6.2.3, as audio arrives.

The rules that turn the model's probabilities into stretches of speech are those of faster-whisper's
`get_speech_timestamps`, which are silero-vad's: speech begins at a frame that is likely enough,
and ends where frames have been clearly less likely for a while; what is too short is none; then it
is padded. One of its options has no part here: stretches need no longest length, since
`serve.speech.cutting` cuts what is too long for a window in its quietest place.
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

FRAME = 512  # samples that get one probability: 32 ms
MODEL = Path(__file__).parent / "silero" / "silero_vad_16k_sequence.onnx"
MODEL_SHA256 = "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85"

_CONTEXT = 64  # samples before a frame that the model sees with it
_STATE = (1, 1, 128)
_MOST_FRAMES = 512  # in one go: 16 s
_HYSTERESIS = 0.15  # speech ends below a threshold that is so much lower
_LOWEST_END = 0.01  # but not below this one

Probabilities = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Options:
    """Bounds of what counts as speech: `SpeechOptions`, in samples instead of seconds."""

    threshold: float = SpeechOptions.vad_threshold
    min_silence: int = round(SpeechOptions.vad_min_silence_s * SAMPLE_RATE)
    pad: int = round(SpeechOptions.vad_pad_s * SAMPLE_RATE)
    min_speech: int = round(SpeechOptions.vad_min_speech_s * SAMPLE_RATE)

    @classmethod
    def of(cls, options: SpeechOptions) -> "Options":
        """Convert seconds to samples."""
        return cls(
            options.vad_threshold,
            round(options.vad_min_silence_s * SAMPLE_RATE),
            round(options.vad_pad_s * SAMPLE_RATE),
            round(options.vad_min_speech_s * SAMPLE_RATE),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Speech:
    """Audio that is worth decoding."""

    start: int  # its first sample in the whole audio
    samples: Samples  # (n,), n > 0


class Detector:
    """The probabilities of speech of one recording, frame by frame.

    Raises:
        EarshotError: the package onnxruntime is missing, or the model's file is not the right one.
    """

    def __init__(self, model: Path = MODEL) -> None:
        self._session = _session(model)
        self._h = np.zeros(_STATE, np.float32)
        self._c = np.zeros(_STATE, np.float32)
        self._context = np.zeros(_CONTEXT, np.float32)

    def probabilities(self, samples: Samples) -> Probabilities:
        """Return the probability of each frame that follows those before.

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
    """Open the model, once; any number of threads may run it."""
    # NOTE: without it the library reports to its maker what it is used for. A server of other
    # people's voices speaks to nobody.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime  # noqa: PLC0415 - takes 50 MB, and only who listens needs it
    except ImportError as error:
        raise EarshotError(
            "voice activity needs the package onnxruntime; install requirements.txt, or ask for "
            "vad = false"
        ) from error
    data = model.read_bytes()
    if model == MODEL and hashlib.sha256(data).hexdigest() != MODEL_SHA256:
        raise EarshotError(f"{model} is damaged; expected the file with SHA-256 {MODEL_SHA256}")
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # it would keep what a long block once needed
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class Voice:
    """The state of speaking or not, from one frame's probability to the next.

    Args:
        options: what counts as speech.
    """

    def __init__(self, options: Options) -> None:
        self.speaking = False
        self.since = 0
        """While speaking: the sample at which that began."""
        self.quiet_since: int | None = None
        """While speaking: the sample at which that may have ended."""
        self._options = options
        self._end_threshold = max(options.threshold - _HYSTERESIS, _LOWEST_END)

    def step(self, probability: float, at: int) -> None:
        """Take note of the frame that begins at a sample."""
        if probability >= self._options.threshold:
            self.since = self.since if self.speaking else at
            self.speaking, self.quiet_since = True, None
        elif self.speaking and probability < self._end_threshold:
            if self.quiet_since is None:
                self.quiet_since = at
            if at - self.quiet_since >= self._options.min_silence:
                self.speaking, self.quiet_since = False, None


class Listener:
    """Lets the speech of one recording through, with a margin around it, as soon as it is known.

    It holds back the margin, and what may yet turn out to be silence, or too short for speech.

    Args:
        options: what counts as speech.
        detector: of this recording.
    """

    def __init__(self, options: Options, detector: Detector) -> None:
        self._options = options
        self._detector = detector
        self._voice = Voice(options)
        self._held = np.zeros(0, np.float32)  # the latest audio
        self._held_from = 0  # its first sample in the whole audio
        self._judged = 0  # samples that have their probability; a whole number of frames
        self._spoken: deque[tuple[int, int]] = deque()  # speech so far, without its margin
        self._kept: list[tuple[int, int]] = []  # what is worth decoding, apart from each other
        self._given = 0  # of that, what is before was given out

    @property
    def margin_s(self) -> float:
        """Seconds of audio that stay on either side of speech."""
        return self._options.pad / SAMPLE_RATE

    @property
    def received(self) -> int:
        """Samples of the recording so far."""
        return self._held_from + len(self._held)

    def spoken(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the first sample, and the one after the last, of each stretch of speech between.

        As far as it is known; speech that ends before is forgotten.
        """
        while self._spoken and self._spoken[0][1] <= start:
            self._spoken.popleft()
        return [(max(a, start), min(b, end)) for a, b in self._spoken if a < end]

    def push(self, block: Samples) -> list[Speech]:
        """Take one more block, and return the speech that is known after it, in order."""
        self._held = np.concatenate([self._held, block])
        if frames := (self.received - self._judged) // FRAME:
            begin = self._judged - self._held_from
            self._judge(self._held[begin : begin + frames * FRAME])
        return self._give()

    def finish(self) -> list[Speech]:
        """Return the speech that is left at the recording's end."""
        rest = self._held[self._judged - self._held_from :]
        if len(rest):
            self._judge(np.pad(rest, (0, FRAME - len(rest))))
        if self._voice.speaking:
            self._keep_speech(self.received)
        return self._give()

    def _judge(self, samples: Samples) -> None:
        for probability in self._detector.probabilities(samples):
            self._voice.step(float(probability), self._judged)
            self._judged += FRAME
            if self._voice.speaking and self._voice.quiet_since is None:
                self._keep_speech(self._judged)

    def _keep_speech(self, end: int) -> None:
        """Keep the speech that goes on until there, if it is long enough for some."""
        if end - self._voice.since > self._options.min_speech:
            self._keep(self._voice.since, end)

    @property
    def _undecided(self) -> int:
        """The sample from which on it is not known what is speech."""
        voice, end = self._voice, self._judged
        if voice.speaking:
            end = self._judged if voice.quiet_since is None else voice.quiet_since
            if end - voice.since <= self._options.min_speech:
                return voice.since
        return end

    def _keep(self, start: int, end: int) -> None:
        """Keep what is between, and the margin around it."""
        if self._spoken and self._spoken[-1][0] == start:  # it goes on
            self._spoken.pop()
        self._spoken.append((start, end))
        start, end = max(0, start - self._options.pad), end + self._options.pad
        if self._kept and start <= self._kept[-1][1]:
            start, end = self._kept[-1][0], max(end, self._kept.pop()[1])
        self._kept.append((start, end))

    def _give(self) -> list[Speech]:
        """Return the audio that is kept and has arrived, and was not yet given out."""
        given = []
        for start, end in self._kept:
            start, end = max(start, self._given), min(end, self.received)
            if start < end:
                at = self._held_from
                given.append(Speech(start, self._held[start - at : end - at].copy()))
                self._given = end
        del self._kept[:-1]  # the last one may grow
        # Speech that begins later has a margin, which was not given out either.
        until = self._undecided - self._options.pad
        until = max(self._held_from, min(until, self._judged, self.received))
        self._held = self._held[until - self._held_from :].copy()
        self._held_from = until
        return given
