"""One utterance of a stream: its audio, its text so far, and the window to decode next.

It is plain state, without a clock or a server. All positions are samples of 16 kHz from the
stream's beginning.
"""

import collections
import dataclasses

import numpy as np

from serve.contract.messages import Request, Samples, SpeechOptions, Timings, Transcript, Word
from serve.contract.server_config import LiveConfig
from serve.gateway.live.agreement import LocalAgreement
from serve.speech.languages import Script, language_code, script_in, script_of
from serve.speech.rate import SAMPLE_RATE

MAX_S = 28.0  # of audio in one decoding: a window has 30 s
SURE_S = 1.3  # of audio behind a word after which one hypothesis makes it final
PROMPT_CHARS = 200  # of the final text of audio that is cut off

NOTHING = Transcript("", None, None, 0.0, (), Timings(0.0, 0.0, 0.0, 0.0))
"""The transcript of silence, which is not decoded."""

_NONE = np.zeros(0, np.float32)
_BEFORE = 0.8  # most of the audio that is held may be from the utterance before
_FREED = 0.25  # of the audio that is held a cut frees at least
_UNSURE_S = 2.0  # that stay at the end of audio which must be cut: a word may be incomplete


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateWindow:
    """A part of an utterance to be decoded."""

    audio: tuple[Samples, ...]  # pieces of float32 (n,), n > 0, 16 kHz
    voice: tuple[float, ...]  # start, end, start, … of speech in it, in seconds
    begin: int
    end: int
    prompt: str
    language: str | None
    languages: tuple[str, ...]  # to choose from if `language` is None; (): as configured
    phrases: tuple[str, ...]
    draft: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        """Seconds of audio."""
        return (self.end - self.begin) / SAMPLE_RATE

    def request(self, config: LiveConfig, samples: Samples = _NONE) -> Request:
        """Make a request, at temperature 0: temperature fallback would delay all streams.

        Args:
            config: the keys of [live].
            samples: `audio` in one piece; empty: it is sent beside the request.
        """
        return Request(
            samples,
            SAMPLE_RATE,
            language=self.language,
            languages=self.languages,
            prompt=self.prompt,
            phrases=self.phrases,
            word_timestamps=True,
            vad=False,
            voice=self.voice,
            temperature=0.0,
            beam_size=1,  # greedy decoding takes the text before as a draft
            short_encoder=config.asks_short_encoder,
            unfinished=True,
            draft=self.draft,
        )


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
    language: str | None  # the language's code; None: it is detected
    prompt: str  # the text before it
    languages: tuple[str, ...] = ()  # codes to choose from in detection; (): as configured
    phrases: tuple[str, ...] = ()  # phrases to boost; (): as configured
    sure_s: float = SURE_S  # audio behind a word after which one hypothesis makes it final

    def __post_init__(self) -> None:
        self.end = self.start
        self.spoken_until = self.start
        """The end of the latest speech."""
        self.decoded_until = self.start
        """The end of the audio that the latest hypothesis is of."""
        self.ended = False
        self.text = ""
        """The final text."""
        self._spoken = 0  # samples of speech
        self._voice: list[tuple[int, int]] = []  # speech in the audio that is held
        self._script: Script | None = None  # of Chinese text that is final
        self._gone = ""  # the final text of audio that is cut off
        self._audio = collections.deque[Samples]()  # pieces from `_begin` on; none is empty
        self._frames: list[Samples] = []  # behind those
        self._begin = self.start
        self._draft: tuple[int, ...] = ()
        self._agreement = LocalAgreement()

    @property
    def duration_s(self) -> float:
        """Seconds of audio."""
        return (self.end - self.start) / SAMPLE_RATE

    @property
    def silent(self) -> bool:
        """Return whether it has no speech, or too short a moment of it."""
        return self._spoken / SAMPLE_RATE <= SpeechOptions.vad_min_speech_s

    @property
    def changed(self) -> int:
        """The number of words that a later hypothesis did not have; none was final."""
        return self._agreement.changed

    @property
    def guess(self) -> str:
        """The text of the latest hypothesis behind the final text."""
        return self._agreement.guess

    @property
    def unheard_s(self) -> float:
        """Seconds of audio behind the latest hypothesis."""
        return (self.end - self.decoded_until) / SAMPLE_RATE

    @property
    def decoded(self) -> bool:
        """Tell whether the latest hypothesis is of all speech."""
        return self.decoded_until > self.spoken_until or self.decoded_until == self.end > self.start

    def follow(self, before: "LiveUtterance", hold_s: float) -> None:
        """Decode it together with the end of the utterance before, which gives context.

        The silence between the two is left out. Without a named language it is decoded alone, since
        it may be in another language.

        Args:
            before: the utterance before, which is not used any more.
            hold_s: seconds of audio to hold at most.
        """
        if self.language is None or before.language != self.language:
            return
        if before._held_s > _BEFORE * hold_s and (cut_s := before._cut_at()) is not None:
            before._cut(cut_s)
        if before._held_s > _BEFORE * hold_s:
            return
        end_s = before.duration_s
        self._agreement = LocalAgreement(
            [
                dataclasses.replace(word, start=word.start - end_s, end=word.end - end_s)
                for word in before._agreement.words
            ]
        )
        self._begin -= before.end - before._begin
        self._audio.extendleft(reversed(before._pieces()))
        later = self.start - before.end
        self._voice[:0] = [(first + later, last + later) for first, last in before._voice]
        self._gone, self._draft = before._gone, before._draft
        self._script = before._script

    def add(self, samples: Samples, speech: bool) -> None:
        """Add the next audio."""
        if len(samples):
            self._frames.append(samples)
        begin, self.end = self.end, self.end + len(samples)
        if speech:
            joins = self._voice and self._voice[-1][1] == begin
            self._voice.append((self._voice.pop()[0] if joins else begin, self.end))
            self.spoken_until = self.end
            self._spoken += len(samples)

    def window(self) -> UpdateWindow:
        """Return the window to decode now."""
        prompt = f"{self.prompt} {self._gone}".strip()
        languages = () if self.language else self.languages
        where = tuple(self._pieces()), self._voice_s(), self._begin, self.end
        language = f"zh-{self._script}" if self._script else self.language
        return UpdateWindow(*where, prompt, language, languages, self.phrases, self._draft)

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
        words = [
            dataclasses.replace(word, start=word.start + offset_s, end=word.end + offset_s)
            for segment in transcript.segments
            for word in segment.words or ()
        ]
        before = len(self._agreement.words)
        heard_s = (window.end - self.start) / SAMPLE_RATE
        text = self._agreement.update(words) + self._agreement.settle(heard_s - self.sure_s)
        if text and self.language is None:
            self.language = transcript.language
        self._keep_script(text)
        final = self._final_text(text, before)
        if self._held_s > hold_s and (cut_s := self._cut_at()) is not None:
            self._cut(cut_s)
        if self._held_s > MAX_S:
            self._cut(heard_s - _UNSURE_S)
        return final

    def _keep_script(self, text: str) -> None:
        """Keep the script of the first final text for all text that follows."""
        language = self.language
        if text and language is not None and not self._script and not script_of(language):
            self._script = script_in(text) if language_code(language) == "zh" else None

    def finish(self) -> FinalText:
        """Make the rest of the latest hypothesis final."""
        before = len(self._agreement.words)
        return self._final_text(self._agreement.finish(), before)

    def _final_text(self, text: str, before: int) -> FinalText:
        if not self.text:
            text = text.lstrip()
        self.text += text
        start_s = self.start / SAMPLE_RATE
        words = self._agreement.words[before:]
        return FinalText(
            text,
            tuple(
                dataclasses.replace(word, start=word.start + start_s, end=word.end + start_s)
                for word in words
            ),
        )

    def _pieces(self) -> collections.deque[Samples]:
        """Return the audio in pieces; the frames since the last call are joined to one."""
        if self._frames:
            self._audio.append(np.concatenate(self._frames))
            self._frames = []
        return self._audio

    def _voice_s(self) -> tuple[float, ...]:
        return tuple((at - self._begin) / SAMPLE_RATE for part in self._voice for at in part)

    @property
    def _held_s(self) -> float:
        return (self.end - self._begin) / SAMPLE_RATE

    def _cut_at(self) -> float | None:
        """Return the second at which a cut frees enough of the audio; None: there is none."""
        begin_s = (self._begin - self.start) / SAMPLE_RATE
        return self._agreement.cut(begin_s + _FREED * self._held_s)

    def _cut(self, at_s: float) -> None:
        """Forget the audio before a second of the utterance; its final text becomes the prompt."""
        at = max(self._begin, min(self.start + round(at_s * SAMPLE_RATE), self.end))
        self._gone = (self._gone + self._agreement.drop(at_s))[-PROMPT_CHARS:]
        surplus, pieces = at - self._begin, self._pieces()
        while surplus > 0:
            first = pieces.popleft()
            if surplus < len(first):
                pieces.appendleft(first[surplus:])
            surplus -= len(first)
        self._voice = [(max(first, at), last) for first, last in self._voice if last > at]
        if at > self._begin:
            self._begin, self._draft = at, ()
