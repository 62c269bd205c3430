"""Hold the state of one accepted request: its pending windows, and its text so far.

Plain state without threads or a runtime; `serve.transcriber.loop` drives it.

Windows arrive one by one as the audio is decoded. In parallel mode a request's windows are decoded
at the same time. In sequential mode a window's prompt is the text before it, so each window waits
for the window before it; see `serve.transcriber.prompts`. If the language must be detected, the
first window is decoded alone, and the others use its language. If that window is silent or its
language is uncertain, the next window is decoded alone as well. With one language per window, no
window waits.
"""

import collections
import dataclasses
import functools
import math
import string
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from serve.contract.config import TranscriberConfig
from serve.contract.fields import ShortEncoder
from serve.contract.messages import OnEvent, Phase, Priority, Segment, Timings, Transcript
from serve.runtime.protocol import Job, JobEvent, Scores
from serve.speakers.diarize import SpeakerTurn
from serve.speakers.words import letter_speakers, split
from serve.speech import judging, windows, words
from serve.speech.features import HOP_LENGTH, N_FRAMES, SAMPLE_RATE, WINDOW_S
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.decoding_plan import DecodingPlan
from serve.transcriber.languages import Languages

_SILENCE_S = 1.0  # minimum silence that the encoder sees behind the audio
# With short_encoder = "auto", a window of at least `_SHORTEST_S` is padded to the smallest length
# that holds it. Measured with base: shorter windows give more errors than padding to 30 s.
_SHORTEST_S = 3.0
_PADDED_S = (10, 15, 20)
WINDOW_LENGTHS = tuple(seconds * SAMPLE_RATE for seconds in (*_PADDED_S, WINDOW_S))
"""Lengths in samples to which windows are padded, unless short_encoder is "on"."""

_MAX_REMAINDERS = 4  # maximum number of remainders decoded after one window
_SEEDS_PER_WINDOW = 1000
_LOST_TEMPERATURE = 0.5  # as in whisper/transcribe.py: text sampled above it resets the prompt


class Phases:
    """A recorder of the times at which work was done for a request. Thread-safe.

    Each phase is reported once, from its first start to its last end. The trace of an hour of audio
    therefore has as many spans as that of a clip.
    """

    def __init__(self) -> None:
        # Name, start and end in monotonic seconds, windows; appending needs no lock.
        self._recorded: list[tuple[str, float, float, int]] = []

    def record(self, name: str, began_s: float, windows: int = 1) -> None:
        """Record a piece of work that has just ended.

        Args:
            name: the phase's name.
            began_s: monotonic time at which the work began.
            windows: the number of windows processed; 0 for a part of one.
        """
        self._recorded.append((name, began_s, time.monotonic(), windows))

    def record_scores(self, scores: Scores) -> None:
        """Record the encoder's and the decoder's work for a window that has just ended."""
        now_s = time.monotonic()
        encode_s, decode_s = scores.encode_s, scores.decode_s
        encode_at, decode_at = scores.began_s or (now_s - decode_s - encode_s, now_s - decode_s)
        self._recorded.append(("encode", encode_at, encode_at + encode_s, 1))
        self._recorded.append(("steps", decode_at, decode_at + decode_s, 1))

    def seconds(self, name: str) -> float:
        """Sum the seconds of work in a phase."""
        return sum(end_s - begin_s for phase, begin_s, end_s, _ in self._recorded if phase == name)

    def summary(self, accepted_s: float) -> tuple[Phase, ...]:
        """Return all phases in wall-clock time, in order of start.

        Two of them are waits: for a decoder thread, and of the first window for a slot.

        Args:
            accepted_s: monotonic time at which the request was accepted.
        """
        recorded, offset_s = list(self._recorded), time.time() - time.monotonic()
        phases, begins = list[Phase](), dict[str, float]()
        for name in dict.fromkeys(name for name, *_ in recorded):
            entries = [entry for entry in recorded if entry[0] == name]
            _, starts, ends, windows = zip(*entries, strict=True)
            begins[name] = min(starts)
            phases.append(Phase(name, min(starts), max(ends), self.seconds(name), sum(windows)))
        ready_s = [end_s for name, _, end_s, windows in recorded if name == "decode" and windows]
        if "decode" in begins:
            begin_s = max(accepted_s, begins["decode"])
            phases.append(Phase("queue.decoder", accepted_s, begin_s, begin_s - accepted_s, 1))
        if ready_s and "encode" in begins:
            first_s, begin_s = min(ready_s), max(min(ready_s), begins["encode"])
            phases.append(Phase("queue.slot", first_s, begin_s, begin_s - first_s, 1))
        shifted = (
            dataclasses.replace(phase, begin=offset_s + phase.begin, end=offset_s + phase.end)
            for phase in phases
        )
        return tuple(sorted(shifted, key=lambda phase: phase.begin))


def encoder_frames(duration_s: float, short: ShortEncoder) -> int:
    """Return the number of log-mel frames to which a window of `duration_s` seconds is padded."""
    if short == "off" or (short == "auto" and duration_s < _SHORTEST_S):
        return N_FRAMES
    seconds = math.ceil(duration_s + _SILENCE_S)
    if short == "auto":
        seconds = next((padded for padded in _PADDED_S if padded >= seconds), WINDOW_S)
    return min(N_FRAMES, seconds * SAMPLE_RATE // HOP_LENGTH)


@dataclasses.dataclass(eq=False)
class _Window:
    """A window of a request, and the result of decoding it so far."""

    audio: windows.AudioWindow  # has samples until they are submitted or, with VAD, decoded
    duration_s: float
    number: int  # index among the windows cut from the audio; remainders have their window's number
    remainder_depth: int = 0  # 0: cut from the audio; n: the remainder of a window of depth n - 1
    needs_full_size: bool = False  # decode again with a full-size encoder
    failed: list[windows.Attempt] = dataclasses.field(default_factory=list)
    decoded: windows.DecodedWindow | None = None
    times_pending: bool = False  # decoded, word timing pending
    timed: words.WindowWords | None = None

    def free_samples(self) -> None:
        self.audio = dataclasses.replace(self.audio, samples=self.audio.samples[:0].copy())


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
    held: Callable[[], None] | None = None  # called once the window's speech is known
    warnings: list[str] = dataclasses.field(default_factory=list)  # about its audio
    phases: Phases = dataclasses.field(default_factory=Phases)  # other threads record phases, too
    # A window's index is its order of arrival; remainders of windows arrive last.
    _windows: list[_Window] = dataclasses.field(default_factory=list)
    _order: list[int] = dataclasses.field(default_factory=list)  # indices in order of time
    _waiting: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    _all_arrived: bool = False
    _decoded: int = 0  # number of windows decoded
    _stitched: int = 0  # the first windows of `_order`, which are done and in `_segments`
    _segments: list[Segment] = dataclasses.field(default_factory=list)
    _spoken_until_s: float = 0.0  # end of the last word so far in the current channel
    _turns: Sequence[SpeakerTurn] | None = None  # None until diarization is done

    def __post_init__(self) -> None:
        self.set_plan(self.plan)

    def set_plan(self, plan: DecodingPlan) -> None:
        """Replace the plan by a more complete one; call this before the first window arrives."""
        self.plan = plan
        self._text_before = plan.texts.before  # prompt ids of the text before the next window
        per_window = plan.request.multilingual
        self._languages = Languages(plan.start, plan.language, per_window, plan.script)

    def warn(self, text: str) -> None:
        """Add a warning about the audio unless it is known; call this before `transcript`."""
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def ready(self) -> bool:
        """Whether a window can be submitted now."""
        if not self._waiting:
            return False
        if self.plan.request.mode == "sequential":
            return self.submitted == self._stitched
        return not self._languages.detecting or self.submitted == self._decoded

    @property
    def is_short(self) -> bool:
        """Whether the request consists of one window, which is not submitted yet."""
        return self.submitted == 0 and self._all_arrived and len(self._waiting) == 1

    @property
    def next_samples(self) -> int:
        """The number of samples of the next window; one must be waiting."""
        return len(self._windows[self._waiting[0]].audio.samples)

    @property
    def complete(self) -> bool:
        """Whether all windows are decoded and stitched, and diarization, if wanted, is done."""
        all_stitched = self._all_arrived and self._stitched == len(self._windows)
        return all_stitched and (self._turns is not None or self.plan.speakers is None)

    @property
    def voice_pending(self) -> bool:
        """Whether speech in the only window is still searched for."""
        return bool(self._windows) and self._windows[0].audio.voice_pending

    def set_voice(self, audio: windows.AudioWindow) -> None:
        """Replace the only window by one with its speech."""
        self._windows[0].audio = audio
        if self.submitted and not audio.voice:
            self._windows[0].free_samples()

    def add_window(self, window: windows.AudioWindow) -> None:
        """Add the next window of decoded audio."""
        assert not self._all_arrived, f"request {self.id} has had its last window"
        if len(window.samples):  # empty if the window has no speech
            index = len(self._windows)
            number = self._windows[self._order[-1]].number + 1 if index else 0
            self._waiting.append(index)
            self._order.append(index)
            self._windows.append(_Window(window, window.duration_s, number))
        self._all_arrived = window.last
        if not window.channel:  # all channels have the same duration
            self.duration_s += window.duration_s + window.left_out_s

    def next_window(self) -> tuple[int, windows.AudioWindow]:
        """Remove the next window to submit; return its index and the window.

        `ready` must be true.
        """
        assert self.ready, f"request {self.id} has no window to submit"
        self.submitted += 1
        index = self._waiting.popleft()
        window = self._windows[index]
        audio = window.audio
        if index and audio.channel != self._windows[index - 1].audio.channel:
            self._text_before = self.plan.texts.before
        if not (audio.voice or audio.voice_pending):
            window.free_samples()
        return index, audio

    def mark_started(self, at_s: float | None = None) -> None:
        """Record the monotonic time at which the runtime began the first window; None: now."""
        if self.started_s is None:
            self.started_s = time.monotonic() if at_s is None else at_s

    def encoder_frames(self, index: int) -> int:
        """Return the number of log-mel frames to which a window is padded."""
        window, short = self._windows[index], self.plan.short_encoder
        if window.needs_full_size or (window.remainder_depth and short == "auto"):
            return N_FRAMES
        return encoder_frames(window.duration_s, short)

    def job(
        self,
        id: int,
        index: int,
        features: torch.Tensor,
        temperature: float,
        urgent: bool,
        draft: tuple[int, ...],
        stop_loops: bool,
    ) -> Job:
        """Return a window's job: beam search at temperature 0, `best_of` samples above.

        The seed depends only on the window's number and the temperature. The same request therefore
        gets the same answer, independent of the requests beside it.
        """
        window, plan = self._windows[index], self.plan
        prefix = plan.texts.prefix if index == 0 else ()
        seed = window.number * _SEEDS_PER_WINDOW + round(temperature * (_SEEDS_PER_WINDOW - 1))
        options = dataclasses.replace(plan.options, temperature=temperature, seed=seed)
        if temperature > 0:
            options = dataclasses.replace(options, beam_size=1)
        else:
            options = dataclasses.replace(options, best_of=1)
        max_repeated = 0
        if stop_loops and plan.request.unfinished:
            max_repeated = judging.LOOP_START
        elif stop_loops:
            max_repeated = judging.loop_tokens(
                options.max_tokens, window.duration_s, plan.repetitive
            )
        # Whole encoder frames, as OpenAI counts them. The epsilon corrects quotients that round to
        # just below a whole number.
        word_frames = max(1, math.floor(window.duration_s * words.FRAMES_PER_S + 1e-6))
        return Job(
            id=id,
            features=features,
            prompt=plan.texts.prompt(self._languages.start(index), self._text_before, prefix),
            options=options,
            frames=self.encoder_frames(index),
            prefix=len(prefix),
            draft=draft,
            align_frames=word_frames if plan.words else 0,
            loop_tokens=max_repeated,
            urgent=urgent,
            detection=plan.detection,
        )

    def judge_attempt(
        self,
        index: int,
        temperature: float,
        tokens: tuple[int, ...],
        event: JobEvent,
        tokenizer: Tokenizer,
        config: TranscriberConfig,
    ) -> float | None:
        """Judge a job's result, and keep it unless the window must be decoded again.

        If every temperature failed, the best attempt is kept.

        Args:
            index: the window's index.
            temperature: the job's temperature.
            tokens: all tokens of the job.
            event: the job's last event, with scores.
            tokenizer: the engine's tokenizer.
            config: the thresholds.

        Returns:
            The temperature of the retry; None if the window is done.
        """
        window, scores, looped = self._windows[index], event.scores, event.finished == "loop"
        assert scores is not None
        self.phases.record_scores(scores)
        if looped and self.plan.request.unfinished:
            tokens, looped = tokens[: -judging.LOOP_START], False
        pieces = tuple(windows.split_segments(tokens, tokenizer.facts, window.duration_s))
        # One looping sentence hardly changes the ratio of 30 s of text: check each segment.
        texts = map(tokenizer.decode, {tokens, *(piece.tokens for piece in pieces)})
        attempt = windows.Attempt(
            tokens=tokens,
            pieces=pieces,
            avg_logprob=scores.avg_logprob,
            no_speech_prob=scores.no_speech_prob,
            temperature=temperature,
            compression_ratio=max(map(judging.compression_ratio, texts)),
            looped=looped,
            alignment=event.alignment,
        )
        # In narrow-band noise, higher temperatures only produce more hallucinations.
        fixed_temperature = self.plan.request.temperature is not None or window.audio.narrow
        decision = judging.decide(attempt, config, fixed_temperature, window.audio.voice_s)
        if self.plan.short_encoder == "auto" and self.encoder_frames(index) != N_FRAMES:
            misses_speech = window.audio.voice and windows.find_uncovered(window.audio, pieces)[1]
            if misses_speech or decision.outcome != "accept":
                window.needs_full_size = True
                return temperature
        certainty, silence = self.plan.detection.certainty, decision.outcome == "silence"
        self._languages.record_scores(index, scores, tokenizer, certainty, silence=silence)
        if decision.outcome == "retry":
            if decision.temperature != temperature:
                window.failed.append(attempt)
            return decision.temperature
        if decision.outcome == "give up":
            attempt = judging.best_attempt([*window.failed, attempt], config)
        window.failed.clear()
        self._store_result(index, attempt, decision.outcome)
        return None

    def _store_result(self, index: int, attempt: windows.Attempt, outcome: str) -> None:
        """Keep a window's last attempt, and queue windows for speech that it does not cover."""
        window = self._windows[index]
        pieces = () if outcome == "silence" else attempt.pieces
        n_kept, remainders = len(pieces), list[windows.AudioWindow]()
        if window.audio.voice:
            if window.remainder_depth < _MAX_REMAINDERS:
                n_kept, remainders = windows.find_uncovered(window.audio, pieces)
            if not remainders:
                self.untold_s += windows.uncovered_s(window.audio, pieces)
        position = self._order.index(index) + 1
        for audio in reversed(remainders):
            remainder_index = len(self._windows)
            depth = window.remainder_depth + 1
            self._windows.append(_Window(audio, audio.duration_s, window.number, depth))
            self._order.insert(position, remainder_index)
            self._languages.set_remainder(remainder_index, index)
            self._waiting.appendleft(remainder_index)
        self._decoded += 1
        window.decoded = windows.DecodedWindow(
            timeline=window.audio.timeline,
            duration_s=window.duration_s - sum(audio.duration_s for audio in remainders),
            attempt=attempt,
            pieces=pieces[:n_kept],
            language=self._languages.own_code(index),
            given_up=outcome == "give up",
        )
        window.free_samples()

    def untimed_words(
        self, index: int, tokenizer: Tokenizer
    ) -> Callable[[], words.WindowWords] | None:
        """Return a function that times the words of a decoded window; None if none are wanted.

        Any thread may call the function. Pass its result to `set_words`. Until then the window's
        segments and all later ones are not final.
        """
        window = self._windows[index]
        decoded = window.decoded
        assert decoded is not None
        alignment = decoded.attempt.alignment
        window.decoded = dataclasses.replace(  # free the alignment, which is large
            decoded, attempt=dataclasses.replace(decoded.attempt, alignment=None)
        )
        if not self.plan.words or not decoded.pieces:
            return None
        assert alignment is not None, "the runtime returned no alignment; expected one"
        window.times_pending = True
        text = [piece.tokens for piece in decoded.pieces]
        frames = max(1, round(decoded.duration_s * words.FRAMES_PER_S))
        alignment = words.truncate_alignment(alignment, sum(map(len, text)), frames)
        translated = tokenizer.facts.translate in self.plan.start
        language = "en" if translated else self._languages.of(index)
        logprobs, voice = self.plan.request.token_logprobs, window.audio.voice or ()
        return functools.partial(
            words.time_words, alignment, text, tokenizer.decode, language, logprobs, voice
        )

    def set_words(self, index: int, timed: words.WindowWords) -> None:
        """Set the timed words of a window."""
        self._windows[index].times_pending, self._windows[index].timed = False, timed

    def set_turns(self, turns: Sequence[SpeakerTurn]) -> None:
        """Set the speaker turns of the whole recording."""
        self._turns = turns

    def stitch_ready(self, tokenizer: Tokenizer) -> list[Segment]:
        """Return the new segments of done windows; no unfinished window precedes them."""
        segments: list[Segment] = []
        for index in self._order[self._stitched :]:
            window = self._windows[index]
            if window.decoded is None or window.times_pending:
                break
            channel = window.audio.channel
            if self._stitched:
                previous = self._windows[self._order[self._stitched - 1]]
                if channel != previous.audio.channel:
                    self._spoken_until_s = 0.0
            stitched = self._stitch(index, window.decoded, window.timed, tokenizer)
            window.timed = None
            if self.plan.channels:
                speaker = string.ascii_uppercase[channel]
                stitched = [dataclasses.replace(segment, speaker=speaker) for segment in stitched]
            segments += stitched
            self._stitched += 1
        self._segments += segments
        # Segments with speakers become final only at the end.
        return [] if self.plan.returns_speakers else segments

    def _stitch(
        self,
        index: int,
        window: windows.DecodedWindow,
        timed: words.WindowWords | None,
        tokenizer: Tokenizer,
    ) -> list[Segment]:
        """Return a window's segments with times of the whole audio."""
        plan, segments = self.plan, windows.stitch(window, tokenizer.decode)
        if timed is not None:
            start_s = window.timeline.start_s
            segments = words.assign_words(segments, timed, start_s, self._spoken_until_s)
            segments = judging.with_confidence(
                segments, plan.confidence, plan.request.low_confidence
            )
        segments = window.timeline.restore(self._languages.convert_script(index, segments))
        if (silence_s := plan.request.hallucination_silence_threshold) > 0:
            segments = judging.without_hallucinations(
                segments, window, self._spoken_until_s, silence_s
            )
        for segment in segments:
            if segment.words:
                self._spoken_until_s = segment.words[-1].end
        if plan.words and not plan.returns_words and not plan.speakers:
            segments = _without_words(segments)
        segments = windows.spoken(segments)
        if plan.request.mode == "sequential" and window.pieces:
            # Compare by identity: a sentence may occur twice with equal tokens.
            spoken_pieces = [
                piece for piece in window.pieces if any(piece.tokens is s.tokens for s in segments)
            ]
            timestamps = plan.options.timestamps and plan.texts.timestamps
            tokens = windows.written(spoken_pieces, tokenizer.facts, timestamps)
            # A failed text makes the model repeat itself.
            failed = window.given_up or window.attempt.temperature > _LOST_TEMPERATURE
            self._text_before = () if failed else (*self._text_before, *tokens)[-plan.texts.limit :]
        return segments

    def transcript(self, tokenizer: Tokenizer) -> Transcript:
        """Return the request's transcript; `complete` must be true.

        Segments are in order of time. With diarization, each has one speaker.
        """
        assert self.complete
        plan, segments = self.plan, self._segments
        if self._turns is not None and plan.speakers is not None:
            by_speaker = list(split(segments, self._turns, tokenizer.decode))
            segments = letter_speakers(by_speaker, [name for name, _ in plan.speakers.known])
            segments = segments if plan.returns_words else _without_words(segments)
        if plan.channels:
            segments = sorted(segments, key=lambda segment: segment.start)
        decoded = [window.decoded for window in self._windows if window.decoded is not None]
        spoken_s = {
            index: sum(piece.end_s - piece.start_s for piece in window.pieces)
            for index, window in enumerate(decoded)
        }
        language, language_prob = self._languages.of_recording(spoken_s)
        # Only audio without speech has no window, and thus no language.
        assert language is not None or not self._windows
        if self._languages.is_mixed:
            code = self._languages.common_code
            segments = [dataclasses.replace(s, language=s.language or code) for s in segments]
        times = dict[int, tuple[float, float]]()
        for index in self._order:
            if decoded[index].pieces:
                window = self._windows[index]
                timeline = window.audio.timeline
                times[index] = timeline.start(0.0), timeline.end(window.duration_s)
        for text in self._languages.warnings(times):
            self.warn(text)
        now_s = time.monotonic()
        return Transcript(
            text=windows.join_text(segments),
            language=language,
            language_prob=language_prob,
            duration=self.duration_s,
            segments=tuple(segments),
            timings=Timings(
                queue_s=(now_s if self.started_s is None else self.started_s) - self.accepted_s,
                encode_s=self.phases.seconds("encode"),
                decode_s=self.phases.seconds("steps"),
                total_s=now_s - self.accepted_s,
            ),
            tokens=decoded[0].attempt.tokens if decoded else (),
            warnings=tuple(self.warnings),
            phases=self.phases.summary(self.accepted_s),
        )


def _without_words(segments: Iterable[Segment]) -> list[Segment]:
    return [dataclasses.replace(segment, words=None) for segment in segments]
