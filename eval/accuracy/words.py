"""Times of words beside faster-whisper's and beside the true ones, and what they cost.

Both transcribe the same clips greedily from the same checkpoint: our engine on the CPU, and
faster-whisper on the conversion of `prepare`. Where both say the same words, their times are
compared; and of sentences that espeak-ng speaks, where both say what it spoke, with its own times.
"""

import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from build.clips import Clip, load_clips
from eval.accuracy.espeak import Espeak
from eval.accuracy.ours import greedy
from eval.accuracy.peers import fair_options
from eval.accuracy.prepare import converted_folder, prepare_converted, prepare_engine
from eval.accuracy.score import in_common
from eval.config import Config
from eval.corpora.find import find_clips
from eval.measurement import Check, Result, Run
from serve.contract.devices import usable_cores
from serve.contract.messages import Request, Samples
from serve.speech.audio import from_samples
from serve.speech.features import WINDOW_S
from serve.speech.meter import Limits
from serve.transcriber.loop import Transcriber
from serve.transcriber.open import open_transcriber

FRAME_S = 0.02
LEAST_WITHIN = 0.95  # of words that both say: begin and end within a frame of faster-whisper's
MOST_MEDIAN_S = 0.060  # of the distance from the truth
LEAST_THROUGHPUT = 0.90  # with words, of that without
AT_A_TIME = 8
ROUNDS = 3
THROUGHPUT_CLIPS = 16
VOICES = {"en": ("en-us", "en-us+f2", "en-us+m3"), "es": ("es", "es+f2", "es+m3")}
LIMITS = Limits(30.0)  # of a sentence
_MARKS = " .,;:!?¡¿\"'()…-"


@dataclasses.dataclass(frozen=True)
class Timed:
    """A word that somebody timed."""

    word: str  # without marks, in lower case
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Found:
    """All figures."""

    compared: int  # words that both say, of clips that are one window for both
    within: float  # share of these within a frame at both ends
    longer: int  # the same of longer clips, in which their windows begin elsewhere than ours
    longer_within: float
    truths: int  # words whose true time is known, and that both heard
    ours_s: float | None  # median distance of their beginnings from the truth; None: not measured
    theirs_s: float | None
    throughput: float  # with words / without

    def __str__(self) -> str:
        """Write the report."""
        lines = [
            f"{self.compared} words that faster-whisper says too: {self.within:.1%} begin and end "
            f"within {FRAME_S * 1e3:.0f} ms of its (wanted: {LEAST_WITHIN:.0%}); of "
            f"{self.longer} in longer clips, whose windows begin elsewhere, "
            f"{self.longer_within:.1%}",
            self._truth(),
            f"throughput with words, {AT_A_TIME} at a time: {self.throughput:.1%} of that without "
            f"(wanted: {LEAST_THROUGHPUT:.0%})",
        ]
        return "\n".join(lines)

    def _truth(self) -> str:
        if self.ours_s is None or self.theirs_s is None:
            return "words of known times: not measured, for no sentence was asked for"
        return (
            f"{self.truths} words of known times: median error {self.ours_s * 1e3:.0f} ms "
            f"(wanted: {MOST_MEDIAN_S * 1e3:.0f}), faster-whisper's {self.theirs_s * 1e3:.0f} ms"
        )

    @property
    def checks(self) -> tuple[Check, ...]:
        """Check what is wanted."""
        near = None
        if self.ours_s is not None and self.theirs_s is not None:
            near = self.ours_s <= MOST_MEDIAN_S and self.ours_s <= self.theirs_s + 1e-9
        within, kept = f"{self.within:.1%}", f"{self.throughput:.1%}"
        return (
            Check("words lie where faster-whisper's do", self.within >= LEAST_WITHIN, within),
            Check("words lie where they were spoken", near, self._truth()),
            Check("their times cost little throughput", self.throughput >= LEAST_THROUGHPUT, kept),
        )


def measure_words(run: Run, *, limit: int, spoken: str, sentences: int) -> Result:
    """Measure all three.

    Args:
        run: of a config whose engine, checkpoint and clips are used.
        limit: how many clips to draw.
        spoken: manifest whose texts are spoken.
        sentences: how many of them; 0 leaves the truth out, and needs no espeak-ng.

    Raises:
        EarshotError: the engine, the conversion, a clip or espeak-ng is not to be had.
    """
    espeak, config = Espeak() if sentences else None, run.config
    prepare_engine(config, run.config_path, config.build.precision)
    prepare_converted(config)
    config = greedy(config)
    of = config.eval
    drawn = find_clips(of.manifest, limit=limit, seed=of.seed, half=of.half).clips
    clips = [clip for clip in drawn if clip.text]
    theirs = _Theirs(config)
    with open_transcriber(config) as transcriber:
        run.show(f"{len(clips)} clips, beside faster-whisper")
        apart: dict[bool, list[float]] = {False: [], True: []}  # by whether a clip is longer
        for clip in tqdm(clips, unit="clip"):
            request = _request(clip)
            mine = _ours(transcriber, request)
            other = theirs.transcribe(str(clip.path), clip.language)
            pairs = [(mine[i], other[j]) for i, j in _same(mine, other)]
            apart[clip.duration_s > WINDOW_S] += [
                max(abs(a.start - b.start), abs(a.end - b.end)) for a, b in pairs
            ]
        errors: list[tuple[float, float]] = []
        if espeak:
            run.show(f"{sentences} sentences, beside the truth")
            errors = _errors(espeak, transcriber, theirs, load_clips(spoken), sentences)
        run.show("throughput with words and without")
        throughput = _throughput(transcriber, clips[:THROUGHPUT_CLIPS])
    figures = Found(
        compared=len(apart[False]),
        within=_within(apart[False]),
        longer=len(apart[True]),
        longer_within=_within(apart[True]),
        truths=len(errors),
        ours_s=statistics.median(ours for ours, _ in errors) if errors else None,
        theirs_s=statistics.median(others for _, others in errors) if errors else None,
        throughput=throughput,
    )
    return Result(figures, figures.checks, str(figures))


def _within(apart: Sequence[float]) -> float:
    return float(np.mean(np.array(apart) <= FRAME_S + 1e-6)) if apart else 0.0


def _request(clip: Clip, words: bool = True) -> Request:
    return Request(clip.path.read_bytes(), language=clip.language, word_timestamps=words)


def _ours(transcriber: Transcriber, request: Request) -> list[Timed]:
    answer = transcriber.transcribe(request)
    return [_timed(w.word, w.start, w.end) for s in answer.segments for w in s.words or ()]


def _timed(word: str, start: float, end: float) -> Timed:
    return Timed(word.strip(_MARKS).lower(), float(start), float(end))  # not NumPy's


def _same(a: Sequence[Timed], b: Sequence[Timed]) -> list[tuple[int, int]]:
    """Return indices of the words that two texts have in common, in order."""
    return in_common([word.word for word in a], [word.word for word in b])


class _Theirs:
    """faster-whisper in FP32 with words."""

    def __init__(self, config: Config) -> None:
        from faster_whisper import WhisperModel  # noqa: PLC0415 - only its own evaluation needs it

        self._options = {**fair_options(config), "beam_size": 1, "word_timestamps": True}
        self._model: Any = WhisperModel(
            str(converted_folder(config)),
            device="cpu",
            compute_type="float32",
            cpu_threads=config.runtime.threads or usable_cores(),
        )

    def transcribe(self, audio: str | Samples, language: str | None) -> list[Timed]:
        """Time the words of a file, or of samples at 16 kHz."""
        options = {name: list(v) if isinstance(v, list) else v for name, v in self._options.items()}
        segments, _ = self._model.transcribe(audio, language=language, **options)
        return [_timed(w.word, w.start, w.end) for segment in segments for w in segment.words]


def _errors(
    espeak: Espeak,
    transcriber: Transcriber,
    theirs: _Theirs,
    clips: Sequence[Clip],
    sentences: int,
) -> list[tuple[float, float]]:
    """Measure how far from the truth each word begins that all three have: (ours, theirs)."""
    errors = list[tuple[float, float]]()
    known = [clip for clip in clips if clip.language in VOICES]
    for number, clip in enumerate(known[:: max(1, len(known) // sentences)][:sentences]):
        assert clip.language is not None
        voices = VOICES[clip.language]
        speech = espeak.speak(clip.text, voices[number % len(voices)])
        truth = [_timed(word, begin, begin) for word, begin in speech.words]
        samples = np.concatenate(list(from_samples(speech.samples, speech.rate, LIMITS)))
        request = Request(samples, 16_000, language=clip.language, word_timestamps=True)
        mine, other = _ours(transcriber, request), theirs.transcribe(samples, clip.language)
        at = dict(_same(truth, other))
        errors += [
            (abs(mine[j].start - truth[i].start), abs(other[at[i]].start - truth[i].start))
            for i, j in _same(truth, mine)
            if i in at
        ]
    return errors


def _throughput(transcriber: Transcriber, clips: Sequence[Clip]) -> float:
    """Time without words / time with, both the least of some rounds that take turns."""
    took: dict[bool, list[float]] = {False: [], True: []}
    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        for words in [False, True] * ROUNDS:
            requests = [_request(clip, words) for clip in clips]
            began = time.perf_counter()
            list(pool.map(transcriber.transcribe, requests))
            took[words].append(time.perf_counter() - began)
    return min(took[False]) / min(took[True])
