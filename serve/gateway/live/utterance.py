"""One utterance of a stream: its audio, its text so far, and the window to decode next.

It is plain state, without a clock or a server. All positions are samples of 16 kHz from the
stream's beginning.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from serve.contract.messages import Request, Samples, SpeechOptions, Timings, Transcript, Word
from serve.gateway.live.agreement import LocalAgreement
from serve.gateway.live.settings import Transcription
from serve.speech.languages import Script, language_code, named_language, script_in, script_of
from serve.speech.rate import SAMPLE_RATE

MAX_S = 28.0  # audio in one decoding: a window has 30 s
SURE_S = 1.3  # audio behind a word after which one hypothesis makes it final
PROMPT_CHARS = 200  # final text of audio that is cut off

NOTHING = Transcript("", None, None, 0.0, (), Timings(0.0, 0.0, 0.0, 0.0))
"""The transcript of silence, which is not decoded."""

_MAX_PREVIOUS_SHARE = 0.8  # maximum share of the held audio from the utterance before
_MIN_FREED_SHARE = 0.25  # minimum share of the held audio that a cut frees
_UNSURE_S = 2.0  # that stay at the end of audio which must be cut: a word may be incomplete


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateWindow:
    """A part of an utterance to be decoded."""

    audio: tuple[Samples, ...]  # pieces of float32 (n,), n > 0, 16 kHz
    begin: int
    end: int
    options: Request  # all but the audio

    @property
    def duration_s(self) -> float:
        """Seconds of audio."""
        return (self.end - self.begin) / SAMPLE_RATE


@dataclasses.dataclass(frozen=True)
class FinalText:
    """Text that became final, with its words."""

    text: str
    words: tuple[Word, ...]  # times in seconds from the stream's beginning


@dataclasses.dataclass(eq=False)
class LiveUtterance:
    """An utterance: the audio from the beginning of speech to its end, or to a client's commit."""

    item_id: str  # the item's id in events
    start: int  # the first sample
    settings: Transcription
    short_encoder: bool | None = None  # see `LiveConfig.asks_short_encoder`

    def __post_init__(self) -> None:
        self.language = named_language(self.settings.language)
        """The language's code; None: it is not detected yet."""
        self.end = self.start
        self.spoken_until = self.start
        """The end of the latest speech."""
        self.decoded_until = self.start
        """The end of the audio that the latest hypothesis covers."""
        self.ended = False
        self.text = ""
        """The final text."""
        self._spoken = 0  # samples of speech
        self._speech_ranges: list[tuple[int, int]] = []  # speech in the audio that is held
        self._chinese_script: Script | None = None  # of Chinese text that is final
        self._cut_text = ""  # the final text of audio that is cut off
        self._audio = collections.deque[Samples]()  # pieces from `_audio_begin` on; none is empty
        self._frames: list[Samples] = []  # after `_audio`, not joined into a piece yet
        self._audio_begin = self.start
        self._draft: tuple[int, ...] = ()
        self.agreement = LocalAgreement()

    @property
    def duration_s(self) -> float:
        """Seconds of audio."""
        return (self.end - self.start) / SAMPLE_RATE

    @property
    def silent(self) -> bool:
        """Return whether it has no speech, or too short a moment of it."""
        return self._spoken / SAMPLE_RATE <= SpeechOptions.vad_min_speech_s

    @property
    def undecoded_s(self) -> float:
        """Seconds of audio behind the latest hypothesis."""
        return (self.end - self.decoded_until) / SAMPLE_RATE

    @property
    def decoded(self) -> bool:
        """Tell whether the latest hypothesis is of all speech."""
        return self.decoded_until > self.spoken_until or self.decoded_until == self.end > self.start

    def prepend(self, previous: "LiveUtterance", hold_s: float) -> None:
        """Prepend the end of the previous utterance's audio, which gives context to the decoder.

        The silence between the two utterances is left out. Nothing is prepended if the
        languages differ, this one's language is unknown, or the previous audio is too long.

        Args:
            previous: the previous utterance; do not use it afterwards.
            hold_s: the maximum audio to hold, in seconds.
        """
        if self.language is None or previous.language != self.language:
            return
        max_s = _MAX_PREVIOUS_SHARE * hold_s
        previous._shorten(max_s)
        if previous._audio_s > max_s:
            return
        self.agreement = LocalAgreement(_shifted(previous.agreement.words, -previous.duration_s))
        self._audio_begin -= previous.end - previous._audio_begin
        self._audio.extendleft(reversed(previous._pieces()))
        gap = self.start - previous.end
        self._speech_ranges[:0] = [
            (begin + gap, end + gap) for begin, end in previous._speech_ranges
        ]
        self._cut_text, self._draft = previous._cut_text, previous._draft
        self._chinese_script = previous._chinese_script

    def add(self, samples: Samples, speech: bool) -> None:
        """Add the next audio."""
        if len(samples):
            self._frames.append(samples)
        begin, self.end = self.end, self.end + len(samples)
        if speech:
            joins = self._speech_ranges and self._speech_ranges[-1][1] == begin
            self._speech_ranges.append((self._speech_ranges.pop()[0] if joins else begin, self.end))
            self.spoken_until = self.end
            self._spoken += len(samples)

    def window(self) -> UpdateWindow:
        """Return the window to decode now."""
        settings, bounds = self.settings, itertools.chain.from_iterable(self._speech_ranges)
        options = Request(
            np.zeros(0, np.float32),
            SAMPLE_RATE,
            language=f"zh-{self._chinese_script}" if self._chinese_script else self.language,
            languages=() if self.language else tuple(settings.languages or ()),
            prompt=f"{settings.prompt or ''} {self._cut_text}".strip(),
            phrases=settings.boosted,
            word_timestamps=True,
            vad=False,
            voice=tuple((sample - self._audio_begin) / SAMPLE_RATE for sample in bounds),
            temperature=0.0,  # temperature fallback would delay all streams
            beam_size=1,  # greedy decoding takes the text before as a draft
            unfinished=True,
            short_encoder=self.short_encoder,
            draft=self._draft,
        )
        return UpdateWindow(tuple(self._pieces()), self._audio_begin, self.end, options)

    def take(self, window: UpdateWindow, transcript: Transcript, hold_s: float) -> FinalText:
        """Take a window's transcript; return the text that becomes final by it.

        Args:
            window: the latest window.
            transcript: its transcript.
            hold_s: seconds of audio above which final text is cut off.
        """
        self.decoded_until = window.end
        self._draft = transcript.tokens
        offset_s = (window.begin - self.start) / SAMPLE_RATE
        words = [word for segment in transcript.segments for word in segment.words or ()]
        count = len(self.agreement.words)
        end_s = (window.end - self.start) / SAMPLE_RATE
        text = self.agreement.update(_shifted(words, offset_s))
        text += self.agreement.settle(end_s - SURE_S * self.settings.delay_factor)
        if text and self.language is None:
            self.language = transcript.language
        language = self.language or ""
        names_no_script = language_code(language) == "zh" and not script_of(language)
        if text and names_no_script and not self._chinese_script:
            self._chinese_script = script_in(text)  # all text that follows has the same
        final = self._final_text(text, count)
        self._shorten(hold_s)
        if self._audio_s > MAX_S:
            self._cut(end_s - _UNSURE_S)
        return final

    def finish(self) -> FinalText:
        """Make the rest of the latest hypothesis final."""
        count = len(self.agreement.words)
        return self._final_text(self.agreement.finish(), count)

    def _final_text(self, text: str, count: int) -> FinalText:
        """Return text that became final, with the final words from an index on."""
        if not self.text:
            text = text.lstrip()
        self.text += text
        words = self.agreement.words[count:]
        return FinalText(text, tuple(_shifted(words, self.start / SAMPLE_RATE)))

    def _pieces(self) -> collections.deque[Samples]:
        """Return the audio in pieces; the frames since the last call are joined to one."""
        if self._frames:
            self._audio.append(np.concatenate(self._frames))
            self._frames = []
        return self._audio

    @property
    def _audio_s(self) -> float:
        return (self.end - self._audio_begin) / SAMPLE_RATE

    def _shorten(self, max_s: float) -> None:
        """Cut off final text if more than these seconds are held and a cut frees enough of them."""
        begin_s = (self._audio_begin - self.start) / SAMPLE_RATE
        if self._audio_s > max_s:
            cut_s = self.agreement.cut(begin_s + _MIN_FREED_SHARE * self._audio_s)
            if cut_s is not None:
                self._cut(cut_s)

    def _cut(self, cut_s: float) -> None:
        """Forget the audio before a second of the utterance; its final text becomes the prompt."""
        begin = max(self._audio_begin, min(self.start + round(cut_s * SAMPLE_RATE), self.end))
        self._cut_text = (self._cut_text + self.agreement.drop(cut_s))[-PROMPT_CHARS:]
        surplus, pieces = begin - self._audio_begin, self._pieces()
        while surplus > 0:
            piece = pieces.popleft()
            if surplus < len(piece):
                pieces.appendleft(piece[surplus:])
            surplus -= len(piece)
        self._speech_ranges = [
            (max(start, begin), end) for start, end in self._speech_ranges if end > begin
        ]
        if begin > self._audio_begin:
            self._audio_begin, self._draft = begin, ()


def _shifted(words: Iterable[Word], offset_s: float) -> list[Word]:
    """Return words whose times are later by an offset."""
    return [
        dataclasses.replace(word, start=word.start + offset_s, end=word.end + offset_s)
        for word in words
    ]
