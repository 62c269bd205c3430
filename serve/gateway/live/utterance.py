"""One utterance of a stream: its audio, what of it has become text, and what to decode next.

Plain state without a clock or a server. All positions are samples of 16 kHz in the whole stream.
"""

import dataclasses

import numpy as np

from serve.contract.messages import Request, Samples, SpeechOptions, Timings, Transcript, Word
from serve.contract.server_config import LiveConfig
from serve.gateway.live.agreement import Agreement
from serve.speech.chinese import Script, script_in, script_of
from serve.speech.languages import language_code
from serve.speech.rate import SAMPLE_RATE

MOST_S = 28.0  # of audio at a time: a window has 30 s
SURE_S = 1.3  # of audio behind a word, with which one hypothesis is enough
PROMPT_CHARS = 200  # of the text whose audio is gone

NOTHING = Transcript("", None, None, 0.0, (), Timings(0.0, 0.0, 0.0, 0.0))
"""The transcript of silence, whatever a network writes of it."""

_BEFORE = 0.8  # of the audio that is held may be from before an utterance
_FREED = 0.25  # of the audio that is held, by a cut at least
_UNSURE_S = 2.0  # at the end of audio that must be cut, what may not be whole


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """A part of an utterance that is to be decoded."""

    samples: Samples  # (n,), 16 kHz
    voice: tuple[float, ...]  # start, end, start, … of speech in it, in seconds
    begin: int
    end: int
    prompt: str
    language: str | None
    languages: tuple[str, ...]  # that it may have where `language` is None; (): as configured
    phrases: tuple[str, ...]
    draft: tuple[int, ...]

    def request(self, config: LiveConfig) -> Request:
        """Make a request of it, at temperature 0: others would hold up all streams."""
        return Request(
            self.samples,
            SAMPLE_RATE,
            language=self.language,
            languages=self.languages,
            prompt=self.prompt,
            phrases=self.phrases,
            word_timestamps=True,
            vad=False,
            voice=self.voice,
            temperature=0.0,
            beam_size=config.beam_size or None,
            short_encoder=config.asks_short_encoder,
            unfinished=True,
            draft=self.draft,
        )


@dataclasses.dataclass(frozen=True)
class FinalText:
    """Text that became final, and when it was said."""

    text: str
    words: tuple[Word, ...]  # their times count from the stream's start, in seconds


class Utterance:
    """From where speech begins to where it ends, or to where a client says that it does.

    Args:
        item_id: what clients call it.
        start: its first sample.
        language: code; None: to be detected.
        prompt: text that precedes it.
        languages: codes, one of which is to be detected; (): as configured.
        phrases: to come out right; (): as configured.
        sure_s: seconds of audio behind a word with which one hypothesis makes it final.
    """

    def __init__(
        self,
        item_id: str,
        start: int,
        language: str | None,
        prompt: str,
        languages: tuple[str, ...] = (),
        phrases: tuple[str, ...] = (),
        sure_s: float = SURE_S,
    ) -> None:
        self.item_id = item_id
        self.start = self.end = start
        self.spoken_until = start
        """The sample at which speech was heard last."""
        self.decoded_until = start
        """The sample at which the latest hypothesis ends."""
        self.ended = False
        self.text = ""
        """All that is final."""
        self._spoken = 0  # samples
        self._voice: list[tuple[int, int]] = []  # where somebody speaks, in what is held
        self._language = language
        self._script: Script | None = None  # of Chinese text that is final
        self._languages = languages
        self._phrases = phrases
        self._sure_s = sure_s
        self._prompt = prompt
        self._gone = ""  # final text whose audio is cut off
        self._audio: list[Samples] = []  # from `_begin` on
        self._begin = start
        self._draft: tuple[int, ...] = ()
        self._agreement = Agreement()

    @property
    def duration_s(self) -> float:
        """Seconds of audio."""
        return (self.end - self.start) / SAMPLE_RATE

    @property
    def silent(self) -> bool:
        """Tell whether nobody has spoken in it, but for a moment that is too short for speech."""
        return self._spoken / SAMPLE_RATE <= SpeechOptions.vad_min_speech_s

    @property
    def changed(self) -> int:
        """Words of hypotheses that did not stay; none of them was final."""
        return self._agreement.changed

    @property
    def guess(self) -> str:
        """The text of the latest hypothesis behind what is final."""
        return self._agreement.guess

    @property
    def unheard_s(self) -> float:
        """Seconds of audio behind the latest hypothesis."""
        return (self.end - self.decoded_until) / SAMPLE_RATE

    @property
    def decoded(self) -> bool:
        """Tell whether the latest hypothesis is of all that was spoken."""
        return self.decoded_until > self.spoken_until or self.decoded_until == self.end > self.start

    def follow(self, before: "Utterance", hold_s: float) -> None:
        """Hear it with the end of what was said before: one sentence alone is easily misheard.

        The quiet between the two is left out. Where nobody said what language it has, it is heard
        alone: it may have another one.

        Args:
            before: is not used any more.
            hold_s: of audio should be held.
        """
        if self._language is None or before._language != self._language:
            return
        if before._held_s > _BEFORE * hold_s and (cut_s := before._cut_at()) is not None:
            before._cut(cut_s)
        if before._held_s > _BEFORE * hold_s:
            return
        end_s = before.duration_s
        self._agreement = Agreement(
            [
                dataclasses.replace(word, start=word.start - end_s, end=word.end - end_s)
                for word in before._agreement.words
            ]
        )
        self._begin -= before.end - before._begin
        self._audio[:0] = before._audio
        later = self.start - before.end
        self._voice[:0] = [(first + later, last + later) for first, last in before._voice]
        self._gone, self._draft = before._gone, before._draft
        self._script = before._script

    def add(self, samples: Samples, speech: bool) -> None:
        """Add audio with which it goes on."""
        self._audio.append(samples)
        begin, self.end = self.end, self.end + len(samples)
        if speech:
            joins = self._voice and self._voice[-1][1] == begin
            self._voice.append((self._voice.pop()[0] if joins else begin, self.end))
            self.spoken_until = self.end
            self._spoken += len(samples)

    def window(self) -> Window:
        """Cut out what to decode now."""
        samples = np.concatenate(self._audio) if self._audio else np.zeros(0, np.float32)
        self._audio = [samples]
        prompt = f"{self._prompt} {self._gone}".strip()
        languages = () if self._language else self._languages
        where = samples, self._voice_s(), self._begin, self.end
        language = f"zh-{self._script}" if self._script else self._language
        return Window(*where, prompt, language, languages, self._phrases, self._draft)

    def take(self, window: Window, transcript: Transcript, hold_s: float) -> FinalText:
        """Take the text of a window, and return what becomes final by it.

        Args:
            window: from `window`.
            transcript: its text.
            hold_s: audio of more than that loses what has become text.
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
        text = self._agreement.update(words) + self._agreement.settle(heard_s - self._sure_s)
        if text and self._language is None:
            self._language = transcript.language
        self._keep_script(text)
        final = self._final_text(text, before)
        if self._held_s > hold_s and (cut_s := self._cut_at()) is not None:
            self._cut(cut_s)
        if self._held_s > MOST_S:
            self._cut(heard_s - _UNSURE_S)
        return final

    def _keep_script(self, text: str) -> None:
        """Let all that follows have the script of text that became final."""
        language = self._language
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

    def _voice_s(self) -> tuple[float, ...]:
        return tuple((at - self._begin) / SAMPLE_RATE for part in self._voice for at in part)

    @property
    def _held_s(self) -> float:
        return (self.end - self._begin) / SAMPLE_RATE

    def _cut_at(self) -> float | None:
        """Find the second at which a cut frees enough of what is held; None: there is none."""
        begin_s = (self._begin - self.start) / SAMPLE_RATE
        return self._agreement.cut(begin_s + _FREED * self._held_s)

    def _cut(self, at_s: float) -> None:
        """Forget the audio before a time of the utterance, and what was final by then."""
        at = max(self._begin, min(self.start + round(at_s * SAMPLE_RATE), self.end))
        self._gone = (self._gone + self._agreement.drop(at_s))[-PROMPT_CHARS:]
        self._audio = [np.concatenate(self._audio)[at - self._begin :].copy()]
        self._voice = [(max(first, at), last) for first, last in self._voice if last > at]
        if at > self._begin:
            self._begin, self._draft = at, ()
