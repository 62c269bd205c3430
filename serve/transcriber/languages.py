"""Track the languages of a request's windows, and the script of Chinese text.

Either each window has its own language, or one language is detected for all. In the latter case a
window that is clearly in another language is decoded in that language.
"""

import collections
from collections.abc import Mapping, Sequence

from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.messages import Segment
from serve.runtime.protocol import Scores
from serve.speech import languages
from serve.speech.tokenizer import Tokenizer

_CHINESE = "zh"  # the script of Cantonese (yue) is not changed
_MAX_UNSURE = 3  # after this many uncertain windows, the likeliest language is used for all
_CLEAR = 0.9  # minimum probability of a language that is reported but was not decoded in
_SAME_PLACE_S = 1.0  # warnings join windows with a smaller gap between them


class Languages:
    """The languages of one request.

    Args:
        start: the ids of a prompt from start-of-transcript on; DETECT_LANGUAGE stands for a
            language to detect.
        named: the language's code; None if it must be detected.
        each: whether each window has its own, detected language.
        script: the script of Chinese text; None: the prevailing script of the first window that
            shows one.
    """

    def __init__(
        self,
        start: tuple[int, ...],
        named: str | None,
        each: bool,
        script: languages.Script | None = None,
    ) -> None:
        self.of_all = named
        """The code of the language of all windows; None if it is not known."""
        self._start, self._each, self._script = start, each, script
        self._by_client = named is not None
        self._prob: float | None = None
        self._token_of_all: int | None = None  # once the detected language is certain
        self._tokens: dict[int, int] = {}  # tokens of windows with their own language
        self._detected: dict[int, tuple[str, float | None]] = {}  # code and probability, by window
        self._silent: set[int] = set()  # silent windows among them
        # Windows in another language than that of all, by window:
        self._own: dict[int, tuple[str, float | None]] = {}  # decoded in it: code and probability
        self._clear: dict[int, str] = {}  # not decoded in it: code

    @property
    def detecting(self) -> bool:
        """Whether the next window must detect the language of all windows."""
        return DETECT_LANGUAGE in self._start and not self._each and self._token_of_all is None

    @property
    def several(self) -> bool:
        """Whether some windows were decoded in another language than that of all."""
        return any(code != self.of_all for code, _ in self._own.values())

    def start(self, index: int) -> tuple[int, ...]:
        """Return the ids of a window's prompt from start-of-transcript on."""
        token = self._tokens.get(index, self._token_of_all)
        if token is None:
            return self._start
        return tuple(token if id == DETECT_LANGUAGE else id for id in self._start)

    def note_scores(
        self, index: int, scores: Scores, tokenizer: Tokenizer, certainty: float, *, silence: bool
    ) -> None:
        """Record the language that a job detected in its window.

        Args:
            index: the window's index.
            scores: the job's scores.
            tokenizer: maps tokens to language codes.
            certainty: the minimum probability of a language that is certain for all windows.
            silence: whether the window is silent; then it counts only if all windows are silent.
        """
        token, clear = scores.language, scores.heard
        if DETECT_LANGUAGE not in self.start(index):
            if not silence and token is not None:
                self._own[index] = tokenizer.language_code(token), scores.language_prob
                self._tokens[index] = token
            elif not silence and clear is not None and clear[1] >= _CLEAR:
                self._clear[index] = tokenizer.language_code(clear[0])
            return
        assert token is not None, "the runtime returned no language; expected one"
        self._detected[index] = tokenizer.language_code(token), scores.language_prob
        if silence:
            self._silent.add(index)
        else:
            self._tokens[index] = token
        if self._each:
            return
        spoken = [found for i, found in self._detected.items() if i not in self._silent]
        self.of_all, self._prob = _likeliest(spoken or list(self._detected.values()))
        certain = self._prob is None or self._prob >= certainty or len(spoken) >= _MAX_UNSURE
        if not silence and certain:
            self._tokens.clear()
            self._token_of_all = tokenizer.facts.languages[self.of_all]

    def set_remainder(self, index: int, whole: int) -> None:
        """Give the remainder of a window the window's language, unless each window has its own."""
        if whole in self._own:
            self._own[index] = self._own[whole]
        if whole in self._tokens and not self._each:
            self._tokens[index] = self._tokens[whole]

    def of(self, index: int) -> str:
        """Return the language code of a decoded window."""
        found = self._own.get(index) or self._detected.get(index)
        code = found[0] if found else self.of_all
        assert code is not None, "the language was neither named nor detected"
        return code

    def own(self, index: int) -> str | None:
        """Return the code of a window's own language; None if it is that of all."""
        if self._each:
            return self.of(index)
        code, _ = self._own.get(index, (None, None))
        return None if code == self.of_all else code

    def in_script(self, index: int, segments: list[Segment]) -> list[Segment]:
        """Convert a window's segments to the answer's script if they are Chinese.

        Call this in the order of the windows, because the first one may decide the script.
        """
        if self.of(index) != _CHINESE:
            return segments
        if self._script is None:
            self._script = languages.script_in("".join(segment.text for segment in segments))
        if self._script is None:
            return segments
        return [languages.rewrite(segment, self._script) for segment in segments]

    def of_recording(self, spoken_s: Mapping[int, float]) -> tuple[str | None, float | None]:
        """Return the recording's language and its probability; None if they are not known.

        If windows have their own languages, return the language with the most seconds of text, the
        first one among equals, and its mean probability over the windows that detected it.

        Args:
            spoken_s: seconds of text in each window, in order.
        """
        if not (self._each or self.several) or not spoken_s:
            return self.of_all, self._prob
        seconds: dict[str, float] = collections.defaultdict(float)
        for index, window_s in spoken_s.items():
            seconds[self.of(index)] += window_s
        longest = max(seconds, key=seconds.__getitem__)
        found = (self._detected | self._own).values()
        probs = [prob for code, prob in found if code == longest and prob is not None]
        return longest, sum(probs) / len(probs) if probs else None

    def warnings(self, times: Mapping[int, tuple[float, float]]) -> list[str]:
        """Return warnings about windows in another language, and the options that help.

        Args:
            times: start and end in seconds of each window with text, in order of time.
        """
        if self._each:
            return []
        own = [(times[i], code) for i in times if (code := self.own(i))]
        clear = [
            (times[i], self._clear[i])
            for i in times
            if i in self._clear and not languages.are_close(self._clear[i], self.of(i))
        ]
        language, texts = self.of_all, list[str]()
        if own:
            texts.append(
                f"language {language} was detected, but {_places(own)}; these parts have the text "
                "of their own language. Send multilingual = true to detect the language of every "
                f"window, or language = {language} for one language"
            )
        if clear:
            reason, advice = f"language {language} was detected", "multilingual = true"
            if self._by_client:  # the two options exclude each other
                reason, advice = f"language = {language}", f"{advice} instead of language"
            texts.append(
                f"{reason}, but {_places(clear)}; these parts were decoded as {language}. Send "
                f"{advice} to detect the language of every window"
            )
        return texts


def _places(found: Sequence[tuple[tuple[float, float], str]]) -> str:
    """Describe where languages are spoken; adjacent windows are joined."""
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
    """Return the code with the largest sum of probabilities, and its maximum probability.

    The first code wins among equals.
    """
    chances: dict[str, float] = collections.defaultdict(float)
    for code, prob in detected:
        chances[code] += 1.0 if prob is None else prob
    likeliest = max(chances, key=chances.__getitem__)
    known = [prob for code, prob in detected if code == likeliest and prob is not None]
    return likeliest, max(known, default=None)
