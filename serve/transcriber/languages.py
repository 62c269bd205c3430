"""Languages of a request's windows: that of all, or each its own; and the script of Chinese.

Where one is found for all, a window that is clearly in another language has that for its own.
"""

import collections
from collections.abc import Mapping, Sequence

from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.messages import Segment
from serve.runtime.protocol import Scores
from serve.speech import chinese
from serve.speech.languages import are_close
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.prompts import Prompts

_CHINESE = "zh"  # Cantonese, yue, stays as it was decoded
_MOST_UNSURE = 3  # windows that go one after another because none tells the language
_CLEAR = 0.9  # the least probability of a language that is told without its text
_SAME_PLACE_S = 1.0  # windows with less between them are told as one place


class Languages:
    """The languages of one request.

    Args:
        named: code; None where it must be found.
        each: whether each window has its own language, which is found in it.
        script: that Chinese is written in; None: the one of most of the first text that tells.
    """

    def __init__(self, named: str | None, each: bool, script: chinese.Script | None = None) -> None:
        self.each = each
        """Whether each window has its own language."""
        self._by_client = named is not None
        self._script = script
        self._named = named
        self._prob: float | None = None
        self._detected: dict[int, tuple[str, float | None]] = {}  # code and probability, by window
        self._silent: set[int] = set()  # of these windows
        # Code and probability, by window, where the prompt named another language:
        self._own: dict[int, tuple[str, float | None]] = {}  # in which it was decoded all the same
        self._heard: dict[int, str] = {}  # which it sounds like, and was not decoded in

    def note(self, index: int, code: str, prob: float | None, silence: bool = False) -> None:
        """Take note of a window's language; that of silence counts where there is nothing else."""
        self._detected[index] = code, prob
        if silence:
            self._silent.add(index)
        if not self.each:
            spoken = [language for i, language in self._detected.items() if i not in self._silent]
            self._named, self._prob = _likeliest(spoken or list(self._detected.values()))

    def note_own(self, index: int, code: str, prob: float | None) -> None:
        """Take note of a window that was decoded in its own language in place of that of all."""
        self._own[index] = code, prob

    def note_heard(self, index: int, code: str) -> None:
        """Take note of the language that a window clearly is in."""
        self._heard[index] = code

    def set_rest(self, index: int, whole: int) -> None:
        """Let what is left of a window be in its language."""
        if whole in self._own:
            self._own[index] = self._own[whole]

    @property
    def several(self) -> bool:
        """Tell whether windows were decoded in their own languages beside the one of all."""
        return any(code != self._named for code, _ in self._own.values())

    @property
    def of_all(self) -> str | None:
        """The code of windows that have none of their own; None where it is not known."""
        return self._named

    def decided(self, certainty: float) -> str | None:
        """Return the code of all windows' language; None while too little is known to tell.

        Args:
            certainty: the least probability of a language that is sure.
        """
        spoken = len(self._detected) - len(self._silent)
        sure = spoken > 0 and (self._prob is None or self._prob >= certainty)
        return self._named if sure or spoken >= _MOST_UNSURE else None

    def of(self, index: int) -> str:
        """Return the code of a window that was decoded."""
        found = self._own.get(index) or self._detected.get(index)
        code = found[0] if found else self._named
        assert code is not None, "nobody has named or found the language"
        return code

    def own(self, index: int) -> str | None:
        """Return the code of a window's own language; None where it is that of all."""
        if self.each:
            return self.of(index)
        code, _ = self._own.get(index, (None, None))
        return None if code == self._named else code

    def in_script(self, index: int, segments: list[Segment]) -> list[Segment]:
        """Return a window's segments, in the answer's script if they are Chinese.

        Windows come in the order of their segments, so that the first ones decide.
        """
        if self.of(index) != _CHINESE:
            return segments
        if self._script is None:
            self._script = chinese.script_in("".join(segment.text for segment in segments))
        if self._script is None:
            return segments
        return [chinese.rewrite(segment, self._script) for segment in segments]

    def of_most(self, spoken_s: Mapping[int, float]) -> tuple[str | None, float | None]:
        """Return the whole's language, and its probability; None where none was named or found.

        Where windows have their own it is the one that most was said in, of equals the first, and
        the probability the mean of the windows in which it was looked for.

        Args:
            spoken_s: seconds of text in each window, in order.
        """
        if not (self.each or self.several) or not spoken_s:
            return self._named, self._prob
        seconds: dict[str, float] = collections.defaultdict(float)
        for index, window_s in spoken_s.items():
            seconds[self.of(index)] += window_s
        most = max(seconds, key=lambda code: seconds[code])
        found = (self._detected | self._own).values()
        probs = [p for code, p in found if code == most and p is not None]
        return most, sum(probs) / len(probs) if probs else None

    def warnings(self, times: Mapping[int, tuple[float, float]]) -> list[str]:
        """Say which windows are in another language than all, and what to send.

        Args:
            times: begin and end, in seconds, of each window that has text, in order of time.
        """
        if self.each:
            return []
        own = [(times[i], code) for i in times if (code := self.own(i))]
        heard = [
            (times[i], self._heard[i])
            for i in times
            if i in self._heard and not are_close(self._heard[i], self.of(i))
        ]
        found, texts = self._named, list[str]()
        if own:
            texts.append(
                f"language {found} was detected, but {_places(own)}; these parts have the text of "
                "their own language. Send multilingual = true to detect the language of every "
                f"window, or language = {found} for one language"
            )
        if heard and self._by_client:
            texts.append(
                f"language = {found}, but {_places(heard)}; send multilingual = true to detect the "
                "language of every window, or leave language out"
            )
        elif heard:
            texts.append(
                f"language {found} was detected, but {_places(heard)}; these parts were decoded as "
                f"{found}. Send multilingual = true to detect the language of every window"
            )
        return texts


def note_scores(
    languages: Languages,
    prompts: Prompts,
    index: int,
    scores: Scores,
    tokenizer: Tokenizer,
    certainty: float,
    *,
    silence: bool,
) -> None:
    """Take note of the language that a job found in its window.

    Args:
        languages, prompts: of the request; both are changed.
        index: of the window.
        scores: of the job.
        tokenizer: for the codes of languages.
        certainty: the least probability of a language that is sure for all windows.
        silence: whether the window is silent.
    """
    token, heard = scores.language, scores.heard
    if DETECT_LANGUAGE not in prompts.of(index).ids:
        if not silence and token is not None:
            languages.note_own(index, tokenizer.language_code(token), scores.language_prob)
            prompts.set_language(index, token)
        elif not silence and heard is not None and heard[1] >= _CLEAR:
            languages.note_heard(index, tokenizer.language_code(heard[0]))
        return
    assert token is not None, "the runtime was asked for the language and named none"
    languages.note(index, tokenizer.language_code(token), scores.language_prob, silence)
    if silence:
        return
    prompts.set_language(index, token)
    if not languages.each and (decided := languages.decided(certainty)):
        prompts.set_language_of_all(tokenizer.facts.languages[decided])


def _places(found: Sequence[tuple[tuple[float, float], str]]) -> str:
    """Say where languages are spoken; windows that follow each other are told as one."""
    joined = list[tuple[str, float, float]]()
    for (begin_s, end_s), code in found:
        if joined and joined[-1][0] == code and begin_s - joined[-1][2] < _SAME_PLACE_S:
            begin_s = joined.pop()[1]
        joined.append((code, begin_s, end_s))
    by_code: dict[str, list[str]] = collections.defaultdict(list)
    for code, begin_s, end_s in joined:
        by_code[code].append(f"{begin_s:.1f} to {end_s:.1f} s")
    return ", ".join(f"{code} is spoken at {', '.join(at)}" for code, at in by_code.items())


def _likeliest(detected: Sequence[tuple[str, float | None]]) -> tuple[str, float | None]:
    """Return the code with the largest sum of probabilities, the first of equals; and its best."""
    chances: dict[str, float] = collections.defaultdict(float)
    for code, prob in detected:
        chances[code] += 1.0 if prob is None else prob
    most = max(chances, key=lambda code: chances[code])
    known = [prob for code, prob in detected if code == most and prob is not None]
    return most, max(known, default=None)
