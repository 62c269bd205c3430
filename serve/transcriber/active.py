"""Measure the phases of a request for its trace.

Describe a request's window after its samples are freed.

Hold the state of one accepted request: its pending windows, and its text so far.

Plain state without threads or a runtime; `serve.transcriber.loop` drives it.

Windows arrive one by one as the audio is decoded. In parallel mode a request's windows are decoded
at the same time. In sequential mode a window's prompt is the text before it, so each waits for the
last one; see `serve.transcriber.prompts`. If the language must be detected, the first window goes
alone, and the others follow with its language. If that window is silent or its language is
uncertain, the next window goes alone as well. With one language per window, no window waits.
"""

import collections
import dataclasses
import functools
import math
import string
import time
from collections.abc import Callable, Iterable

from serve.contract.config import TranscriberConfig
from serve.contract.engine import TokenizerFacts
from serve.contract.fields import ShortEncoder
from serve.contract.messages import (
    Alignment,
    OnEvent,
    Phase,
    Priority,
    Segment,
    Timings,
    Transcript,
)
from serve.runtime.protocol import DecodingOptions, Scores
from serve.speakers.words import lettered
from serve.speech.features import HOP_LENGTH, N_FRAMES, SAMPLE_RATE, WINDOW_S
from serve.speech.judging import (
    LOOP_START,
    AttemptDecision,
    best_attempt,
    compression_ratio,
    decide,
    loop_tokens,
    with_confidence,
    without_hallucinations,
)
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import (
    Attempt,
    AudioWindow,
    DecodedWindow,
    WindowTimeline,
    find_uncovered,
    join_text,
    split_segments,
    spoken,
    stitch,
    uncovered_s,
    written,
)
from serve.speech.words import (
    FRAMES_PER_S,
    WindowWords,
    assign_words,
    time_words,
    truncate_alignment,
)
from serve.transcriber.decoding_plan import DecodingPlan
from serve.transcriber.dispatch import Rank, rank_of
from serve.transcriber.languages import Languages, note_scores
from serve.transcriber.prompts import Prompt, Prompts


class Phases:
    """A recorder of the times at which work was done for a request. Thread-safe.

    Each phase is reported once, from its first start to its last end. The trace of an hour of audio
    therefore has as many spans as that of a clip.
    """

    def __init__(self) -> None:
        # Name, start and end in monotonic seconds, windows; appending needs no lock.
        self._recorded: list[tuple[str, float, float, int]] = []

    def note(self, name: str, began_s: float, windows: int = 1) -> None:
        """Record a piece of work that has just ended.

        Args:
            name: the phase's name.
            began_s: monotonic time at which the work began.
            windows: the number of windows processed; 0 for a part of one.
        """
        self._recorded.append((name, began_s, time.monotonic(), windows))

    def note_scores(self, scores: Scores) -> None:
        """Record the encoder's and the decoder's work for a window that has just ended."""
        now_s = time.monotonic()
        encode_s, decode_s = scores.encode_s, scores.decode_s
        encode_at, decode_at = scores.began_s or (now_s - decode_s - encode_s, now_s - decode_s)
        self._recorded.append(("encode", encode_at, encode_at + encode_s, 1))
        self._recorded.append(("steps", decode_at, decode_at + decode_s, 1))

    def seconds(self, name: str) -> float:
        """Sum the seconds of work in a phase."""
        return sum(end_s - begin_s for noted, begin_s, end_s, _ in self._recorded if noted == name)

    def told(self, accepted_s: float) -> tuple[Phase, ...]:
        """Return all phases and waits in wall-clock time, in order of start.

        Args:
            accepted_s: monotonic time at which the request was accepted.
        """
        recorded, offset_s = list(self._recorded), time.time() - time.monotonic()
        phases = []
        for name in dict.fromkeys(name for name, *_ in recorded):
            parts = [part for part in recorded if part[0] == name]
            begin_s = offset_s + min(begin_s for _, begin_s, _, _ in parts)
            end_s = offset_s + max(end_s for _, _, end_s, _ in parts)
            windows = sum(windows for *_, windows in parts)
            phases.append(Phase(name, begin_s, end_s, self.seconds(name), windows))
        for name, begin_s, end_s in _waits(recorded, accepted_s):
            phases.append(Phase(name, offset_s + begin_s, offset_s + end_s, end_s - begin_s, 1))
        return tuple(sorted(phases, key=lambda phase: phase.begin))


def _waits(
    noted: list[tuple[str, float, float, int]], accepted_s: float
) -> list[tuple[str, float, float]]:
    """Compute the wait for a decoder thread, and the first window's wait for a slot."""
    decoded = [part for part in noted if part[0] == "decode"]
    ready_s = [end_s for _, _, end_s, windows in decoded if windows]
    encoded_s = [begin_s for name, begin_s, _, _ in noted if name == "encode"]
    waits = []
    if decoded:
        begin_s = min(begin_s for _, begin_s, _, _ in decoded)
        waits.append(("queue.decoder", accepted_s, max(accepted_s, begin_s)))
    if ready_s and encoded_s:
        waits.append(("queue.slot", min(ready_s), max(min(ready_s), min(encoded_s))))
    return waits


_SILENCE_S = 1.0  # minimum silence that the encoder sees behind the audio
# With short_encoder = "auto", a window of at least `_SHORTEST_S` is padded to the smallest length
# that holds it. Measured with base: shorter windows give more errors than padding to 30 s.
_SHORTEST_S = 3.0
_SEEN_S = (10, 15, 20)
WINDOW_LENGTHS = tuple(seconds * SAMPLE_RATE for seconds in (*_SEEN_S, WINDOW_S))
"""Lengths in samples to which windows are padded, unless short_encoder is "on"."""


@dataclasses.dataclass(frozen=True)
class WindowInfo:
    """A window's description without its samples."""

    timeline: WindowTimeline
    duration_s: float
    voice: tuple[tuple[float, float], ...] | None  # see `AudioWindow`
    voice_s: float | None
    number: int  # index among the windows cut from the audio; a remainder has its window's
    remainder_depth: int  # 0: cut from the audio; n: the remainder of a window with n - 1
    channel: int  # see `AudioWindow`
    narrow: bool  # see `AudioWindow`

    @classmethod
    def of(cls, window: AudioWindow, number: int, remainder_depth: int = 0) -> "WindowInfo":
        times = window.timeline, window.duration_s
        speech = window.voice, window.voice_s
        return cls(*times, *speech, number, remainder_depth, window.channel, window.narrow)

    @property
    def word_frames(self) -> int:
        """The number of whole encoder frames in which words are timed, as OpenAI counts them."""
        # The epsilon corrects quotients that round to just below a whole number.
        return max(1, math.floor(self.duration_s * FRAMES_PER_S + 1e-6))

    def encoder_frames(self, short: ShortEncoder) -> int:
        """Count the log-mel frames of this window that the encoder sees."""
        rest = self.remainder_depth and short == "auto"
        return N_FRAMES if rest else encoder_frames(self.duration_s, short)


def encoder_frames(duration_s: float, short: ShortEncoder) -> int:
    """Count the log-mel frames that the encoder sees of a window of `duration_s` seconds."""
    if short == "off" or (short == "auto" and duration_s < _SHORTEST_S):
        return N_FRAMES
    seconds = math.ceil(duration_s + _SILENCE_S)
    if short == "auto":
        seconds = next((seen for seen in _SEEN_S if seen >= seconds), WINDOW_S)
    return min(N_FRAMES, seconds * SAMPLE_RATE // HOP_LENGTH)


_MAX_REMAINDERS = 4  # maximum number of remainders decoded after one window


_SEEDS_PER_WINDOW = 1000


def options_at(options: DecodingOptions, number: int, temperature: float) -> DecodingOptions:
    """Return a window's options at a temperature: beam search at 0, `best_of` samples above.

    The seed depends only on the window's number and the temperature. The same request therefore
    gets the same answer, independent of the requests beside it.
    """
    seed = number * _SEEDS_PER_WINDOW + round(temperature * (_SEEDS_PER_WINDOW - 1))
    options = dataclasses.replace(options, temperature=temperature, seed=seed)
    if temperature > 0:
        return dataclasses.replace(options, beam_size=1)
    return dataclasses.replace(options, best_of=1)


def attempt_of(
    tokens: tuple[int, ...],
    scores: Scores,
    tokenizer: Tokenizer,
    duration_s: float,
    temperature: float,
    alignment: Alignment | None,
    looped: bool,
) -> Attempt:
    """Build an attempt from the tokens sampled for a window of `duration_s` seconds."""
    pieces = split_segments(tokens, tokenizer.facts, duration_s)
    return Attempt(
        tokens=tokens,
        pieces=tuple(pieces),
        avg_logprob=scores.avg_logprob,
        no_speech_prob=scores.no_speech_prob,
        temperature=temperature,
        # One looping sentence hardly changes the ratio of 30 seconds of text: check each segment.
        compression_ratio=max(
            compression_ratio(tokenizer.decode(text))
            for text in (tokens, *(piece.tokens for piece in pieces))
        ),
        looped=looped,
        alignment=alignment,
    )


@dataclasses.dataclass(eq=False)  # compared by identity
class ActiveRequest:
    """The state of one accepted request; the request tracker sets the first six fields."""

    id: int  # unique in the transcriber
    plan: DecodingPlan  # how to decode its windows
    on_event: OnEvent  # called with its segments and its terminal event
    accepted_s: float  # monotonic time of acceptance
    deadline_s: float  # monotonic time of the deadline
    priority: Priority = "file"
    ended: bool = False  # the terminal event was sent
    started_s: float | None = None  # monotonic time at which its first window began
    duration_s: float = 0.0  # seconds of audio decoded so far
    untold_s: float = 0.0  # seconds of speech without text
    submitted: int = 0  # number of windows submitted
    warnings: list[str] = dataclasses.field(default_factory=list)  # about its audio
    phases: Phases = dataclasses.field(default_factory=Phases)  # other threads record theirs, too
    # A window's index is its order of arrival; remainders of windows arrive last.
    _segments: list[Segment] = dataclasses.field(default_factory=list)
    _waiting: collections.deque[tuple[int, AudioWindow]] = dataclasses.field(
        default_factory=collections.deque
    )
    _infos: list[WindowInfo] = dataclasses.field(default_factory=list)  # by window index
    _order: list[int] = dataclasses.field(default_factory=list)  # indices in order of time
    _windows: dict[int, AudioWindow] = dataclasses.field(
        default_factory=dict
    )  # in decoding, with VAD
    _all_came: bool = False
    _failed: dict[int, list[Attempt]] = dataclasses.field(default_factory=dict)
    _doubted: set[int] = dataclasses.field(default_factory=set)  # retried with a full-size encoder
    _decoded: dict[int, DecodedWindow] = dataclasses.field(default_factory=dict)
    _untimed: set[int] = dataclasses.field(default_factory=set)  # decoded, word timing pending
    _words: dict[int, WindowWords] = dataclasses.field(default_factory=dict)
    _stitched: int = 0  # the first windows of `_order`, which are done and in `_segments`
    _spoken_until_s: float = 0.0  # end of the last word so far in the current channel
    # Splits segments by speaker; None until diarization is done.
    _by_speaker: Callable[[list[Segment]], Iterable[Segment]] | None = None

    def __post_init__(self) -> None:
        self.set_plan(self.plan)

    def set_plan(self, plan: DecodingPlan) -> None:
        """Replace the plan by a more complete one; call this before the first window arrives."""
        self.plan = plan
        self._prompts = Prompts(plan.start, plan.texts, plan.multilingual)
        self._languages = Languages(plan.language, plan.multilingual, plan.script)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of a window's next job, a first attempt or a retry."""
        return self._prompts.of(index)

    def warn(self, text: str) -> None:
        """Add a warning about the audio unless it is known; call this before `transcript`."""
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def ready(self) -> bool:
        """Whether a window can be submitted now."""
        if not self._waiting:
            return False
        if self.plan.mode == "sequential":
            return self.submitted == self._stitched
        return not self._prompts.detecting or self.submitted == len(self._decoded)

    @property
    def is_short(self) -> bool:
        """Whether the request consists of one window, which is not submitted yet."""
        return self.submitted == 0 and self._all_came and len(self._waiting) == 1

    @property
    def rank(self) -> Rank:
        """The rank in the queue; requests of more than one window count as one window ahead."""
        had = 0 if self.is_short else 1 + self.submitted
        return rank_of(self.priority, had, len(self._waiting[0][1].samples))

    @property
    def complete(self) -> bool:
        """Whether all windows are decoded and stitched, and diarization, if wanted, is done."""
        whole = self._all_came and self._stitched == len(self._infos)
        return whole and (self._by_speaker is not None or self.plan.speakers is None)

    def add_window(self, window: AudioWindow) -> None:
        """Add the next window of decoded audio."""
        assert not self._all_came, f"request {self.id} has had its last window"
        if len(window.samples):  # empty if the window has no speech
            index = len(self._infos)
            self._waiting.append((index, window))
            self._order.append(index)
            number = self._infos[self._order[-2]].number + 1 if index else 0
            self._infos.append(WindowInfo.of(window, number))
        self._all_came = window.last
        if not window.channel:  # all channels have the same duration
            self.duration_s += window.duration_s + window.left_out_s

    def next_window(self) -> tuple[int, AudioWindow]:
        """Remove and return the next window to submit and its index; `ready` must be true."""
        assert self.ready, f"request {self.id} has no window to submit"
        self.submitted += 1
        index, window = self._waiting.popleft()
        if index and window.channel != self._infos[index - 1].channel:
            self._prompts.restart()
        if window.voice:
            self._windows[index] = window
        return index, window

    def mark_started(self, at_s: float | None = None) -> None:
        """Record the monotonic time at which the runtime began the first window; None: now."""
        if self.started_s is None:
            self.started_s = time.monotonic() if at_s is None else at_s

    def options(self, index: int, temperature: float) -> DecodingOptions:
        """Return a window's options at a temperature."""
        return options_at(self.plan.options, self._infos[index].number, temperature)

    def align_frames(self, index: int) -> int:
        """Return the number of encoder frames to align words in; 0 if no words are wanted."""
        return self._infos[index].word_frames if self.plan.words else 0

    def loop_tokens(self, index: int) -> int:
        """Return how many repeated tokens end a window; see `Job.loop_tokens`."""
        max_tokens, duration_s = self.plan.options.max_tokens, self._infos[index].duration_s
        if self.plan.unfinished:
            return LOOP_START
        return loop_tokens(max_tokens, duration_s, self.plan.repetitive)

    def encoder_frames(self, index: int) -> int:
        """Count the log-mel frames of a window that the encoder sees."""
        whole = index in self._doubted or self.plan.short_encoder == "off"
        return N_FRAMES if whole else self._infos[index].encoder_frames(self.plan.short_encoder)

    def judge_attempt(
        self,
        index: int,
        temperature: float,
        tokens: tuple[int, ...],
        scores: Scores,
        tokenizer: Tokenizer,
        config: TranscriberConfig,
        alignment: Alignment | None = None,
        looped: bool = False,
    ) -> float | None:
        """Judge a job's result, and keep it unless the window must be decoded again.

        If every temperature failed, the best attempt is kept.

        Returns:
            The temperature of the retry; None if the window is done.
        """
        self.phases.note_scores(scores)
        if looped and self.plan.unfinished:
            tokens, looped = tokens[:-LOOP_START], False
        info = self._infos[index]
        attempt = attempt_of(
            tokens, scores, tokenizer, info.duration_s, temperature, alignment, looped
        )
        # In narrow-band noise, higher temperatures only produce more hallucinations.
        fixed_temperature = self.plan.fixed_temperature or info.narrow
        verdict = decide(attempt, config, fixed_temperature, info.voice_s)
        if self._is_doubted(index, attempt, verdict):
            self._doubted.add(index)
            return temperature
        found, certainty = (index, scores, tokenizer), self.plan.detection.certainty
        silence = verdict.outcome == "silence"
        note_scores(self._languages, self._prompts, *found, certainty, silence=silence)
        if verdict.outcome == "retry":
            if verdict.temperature != temperature:
                self._failed.setdefault(index, []).append(attempt)
            return verdict.temperature
        failed = self._failed.pop(index, [])
        if verdict.outcome == "give up":
            attempt = best_attempt([*failed, attempt], config)
        self._keep(index, attempt, verdict.outcome)
        return None

    def _is_doubted(self, index: int, attempt: Attempt, verdict: AttemptDecision) -> bool:
        """Return whether to retry a window because the encoder saw a shortened one."""
        if self.plan.short_encoder != "auto" or self.encoder_frames(index) == N_FRAMES:
            return False
        window = self._windows.get(index)
        breaks_off = window is not None and bool(find_uncovered(window, attempt.pieces)[1])
        return breaks_off or verdict.outcome != "accept"

    def _keep(self, index: int, attempt: Attempt, outcome: str) -> None:
        """Keep a window's last attempt, and queue windows for speech that it does not cover."""
        window, info = self._windows.pop(index, None), self._infos[index]
        pieces = () if outcome == "silence" else attempt.pieces
        kept, remainders = len(pieces), list[AudioWindow]()
        if window is not None:  # VAD found speech in it
            if info.remainder_depth < _MAX_REMAINDERS:
                kept, remainders = find_uncovered(window, pieces)
            if not remainders:
                self.untold_s += uncovered_s(window, pieces)
        place = self._order.index(index) + 1
        for remainder in reversed(remainders):
            after = len(self._infos)
            self._infos.append(WindowInfo.of(remainder, info.number, info.remainder_depth + 1))
            self._order.insert(place, after)
            self._prompts.set_rest(after, index)
            self._languages.set_rest(after, index)
            self._waiting.appendleft((after, remainder))
        self._decoded[index] = DecodedWindow(
            timeline=info.timeline,
            duration_s=info.duration_s - sum(remainder.duration_s for remainder in remainders),
            attempt=attempt,
            pieces=pieces[:kept],
            language=self._languages.own(index),
            given_up=outcome == "give up",
        )

    def untimed_words(self, index: int, tokenizer: Tokenizer) -> Callable[[], WindowWords] | None:
        """Return a function that times the words of a decoded window; None if none are wanted.

        Any thread may call the function. Pass its result to `set_words`. Until then the window's
        segments and all later ones are not final.
        """
        window = self._decoded[index]
        alignment = window.attempt.alignment
        self._decoded[index] = dataclasses.replace(  # free the alignment, which is large
            window, attempt=dataclasses.replace(window.attempt, alignment=None)
        )
        if not self.plan.words or not window.pieces:
            return None
        assert alignment is not None, "the runtime returned no alignment; expected one"
        self._untimed.add(index)
        text = [piece.tokens for piece in window.pieces]
        frames = max(1, round(window.duration_s * FRAMES_PER_S))
        alignment = truncate_alignment(alignment, sum(map(len, text)), frames)
        translated = tokenizer.facts.translate in self.plan.start
        language = "en" if translated else self._languages.of(index)
        logprobs = self.plan.tells_logprobs
        voice = self._infos[index].voice or ()
        return functools.partial(
            time_words, alignment, text, tokenizer.decode, language, logprobs, voice
        )

    def set_words(self, index: int, words: WindowWords) -> None:
        """Set the timed words of a window."""
        self._untimed.remove(index)
        self._words[index] = words

    def set_speakers(self, by_speaker: Callable[[list[Segment]], Iterable[Segment]]) -> None:
        """Set the function that splits segments by speaker."""
        self._by_speaker = by_speaker

    def stitch_ready(self, tokenizer: Tokenizer) -> list[Segment]:
        """Return the new segments of done windows; no unfinished window precedes them."""
        segments: list[Segment] = []
        for index in self._order[self._stitched :]:
            window = self._decoded.get(index)
            if window is None or index in self._untimed:
                break
            channel, before = self._infos[index].channel, self._order[: self._stitched]
            if before and channel != self._infos[before[-1]].channel:
                self._spoken_until_s = 0.0
            stitched = stitch(window, tokenizer.decode)
            if (words := self._words.pop(index, None)) is not None:
                begin_s = window.timeline.start_s
                stitched = assign_words(stitched, words, begin_s, self._spoken_until_s)
                stitched = with_confidence(stitched, self.plan.confidence, self.plan.low_confidence)
            stitched = self._languages.in_script(index, stitched)
            stitched = spoken(self._settle(window, window.timeline.restore(stitched)))
            if self.plan.mode == "sequential" and window.pieces:
                self._go_on_from(window, stitched, tokenizer.facts)
            if self.plan.channels:
                speaker = string.ascii_uppercase[channel]
                stitched = [dataclasses.replace(segment, speaker=speaker) for segment in stitched]
            segments += stitched
            self._stitched += 1
        self._segments += segments
        # Segments with speakers become final only at the end.
        return [] if self.plan.tells_speakers else segments

    def _told_by_speaker(self) -> list[Segment]:
        """Return all segments in order of time; with diarization, each has one speaker."""
        segments = self._segments
        if self._by_speaker is not None and self.plan.speakers is not None:
            segments = lettered(list(self._by_speaker(segments)), self.plan.speakers.names)
            if not self.plan.tells_words:
                segments = [dataclasses.replace(segment, words=None) for segment in segments]
        if self.plan.channels:
            segments = sorted(segments, key=lambda segment: segment.start)
        return segments

    def _times_of_text(self) -> dict[int, tuple[float, float]]:
        """Return start and end of each window with text, in seconds of the whole audio."""
        infos = [(i, self._infos[i]) for i in self._order if self._decoded[i].pieces]
        return {i: (s.timeline.start(0.0), s.timeline.end(s.duration_s)) for i, s in infos}

    def _settle(self, window: DecodedWindow, segments: list[Segment]) -> list[Segment]:
        """Drop hallucinated segments, and words that the client did not ask for.

        Times are seconds of the whole audio.
        """
        if (threshold_s := self.plan.hallucination_silence_s) > 0:
            segments = without_hallucinations(segments, window, self._spoken_until_s, threshold_s)
        for words in (segment.words for segment in segments if segment.words):
            self._spoken_until_s = words[-1].end
        if self.plan.tells_words or self.plan.speakers or not self.plan.words:
            return segments
        return [dataclasses.replace(segment, words=None) for segment in segments]

    def _go_on_from(
        self, window: DecodedWindow, segments: list[Segment], facts: TokenizerFacts
    ) -> None:
        """Add the kept text of a window to the next window's prompt."""
        # Compare by identity: a sentence may occur twice with equal tokens.
        answered = [
            piece for piece in window.pieces if any(piece.tokens is s.tokens for s in segments)
        ]
        timestamps = self.plan.options.timestamps and self.plan.texts.timestamps
        tokens = written(answered, facts, timestamps)
        self._prompts.add(tokens, window.attempt.temperature, window.given_up)

    def transcript(self) -> Transcript:
        """Return the request's transcript; `complete` must be true."""
        assert self.complete
        spoken_s = {
            index: sum(piece.end_s - piece.start_s for piece in window.pieces)
            for index, window in sorted(self._decoded.items())
        }
        language, language_prob = self._languages.of_most(spoken_s)
        # Only audio without speech has no window, and thus no language.
        assert language is not None or not self._infos
        now = time.monotonic()
        timings = Timings(
            queue_s=(now if self.started_s is None else self.started_s) - self.accepted_s,
            encode_s=self.phases.seconds("encode"),
            decode_s=self.phases.seconds("steps"),
            total_s=now - self.accepted_s,
        )
        segments = self._told_by_speaker()
        if self._languages.several:
            all_ = self._languages.of_all
            segments = [dataclasses.replace(s, language=s.language or all_) for s in segments]
        for text in self._languages.warnings(self._times_of_text()):
            self.warn(text)
        return Transcript(
            text=join_text(segments),
            language=language,
            language_prob=language_prob,
            duration=self.duration_s,
            segments=tuple(segments),
            timings=timings,
            tokens=self._decoded[0].attempt.tokens if self._decoded else (),
            warnings=tuple(self.warnings),
            phases=self.phases.told(self.accepted_s),
        )
