"""Track the languages of a request's windows, and the script of Chinese text.

Either each window has its own language, or all windows have one common language. In the latter case
a window that is clearly in another language is decoded in that language.
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
_MIN_REPORTED_PROB = 0.9  # a warning names a likelier language that was not decoded in
_MAX_GAP_S = 1.0  # warnings join windows with a smaller gap between them


class Languages:
    """The languages of one request.

    Args:
        start: the ids of a prompt from start-of-transcript on; DETECT_LANGUAGE stands for a
            language to detect.
        requested_code: the language's code; None if it must be detected.
        per_window: whether each window has its own, detected language.
        script: the script of Chinese text; None: the prevailing script of the first window that
            shows one.
    """

    def __init__(
        self,
        start: tuple[int, ...],
        requested_code: str | None,
        per_window: bool,
        script: languages.Script | None = None,
    ) -> None:
        self.common_code = requested_code
        """The code of the common language of all windows; None if it is not known."""
        self._start, self._per_window, self._script = start, per_window, script
        self._by_client = requested_code is not None
        self._prob: float | None = None
        self._common_id: int | None = None  # once the detected language is certain
        self._tokens: dict[int, int] = {}  # tokens of windows with their own language
        self._detected: dict[int, tuple[str, float | None]] = {}  # code and probability, by window
        self._silent: set[int] = set()  # the silent windows in `_detected`
        # Windows in another language than the common one, by index:
        # Code and probability, if the window was decoded in that language.
        self._other_decoded: dict[int, tuple[str, float | None]] = {}
        self._other_not_decoded: dict[int, str] = {}  # code, if it was not

    @property
    def detecting(self) -> bool:
        """Whether the next window must detect the language of all windows."""
        return DETECT_LANGUAGE in self._start and not self._per_window and self._common_id is None

    @property
    def is_mixed(self) -> bool:
        """Whether some windows were decoded in another language than the common one."""
        return any(code != self.common_code for code, _ in self._other_decoded.values())

    def start(self, index: int) -> tuple[int, ...]:
        """Return the ids of a window's prompt from start-of-transcript on."""
        token = self._tokens.get(index, self._common_id)
        if token is None:
            return self._start
        return tuple(token if id == DETECT_LANGUAGE else id for id in self._start)

    def record_scores(
        self, index: int, scores: Scores, tokenizer: Tokenizer, certainty: float, *, silence: bool
    ) -> None:
        """Record the language that a job detected in its window.

        Args:
            index: the window's index.
            scores: the job's scores.
            tokenizer: maps tokens to language codes.
            certainty: the minimum probability of a language that is certain for all windows.
            silence: whether the window is silent; it then counts only if all windows are silent.
        """
        token, top_language = scores.language, scores.top_language
        if DETECT_LANGUAGE not in self.start(index):
            if not silence and token is not None:
                self._other_decoded[index] = tokenizer.language_code(token), scores.language_prob
                self._tokens[index] = token
            elif not silence and top_language is not None and top_language[1] >= _MIN_REPORTED_PROB:
                self._other_not_decoded[index] = tokenizer.language_code(top_language[0])
            return
        assert token is not None, "the runtime returned no language; expected one"
        self._detected[index] = tokenizer.language_code(token), scores.language_prob
        if silence:
            self._silent.add(index)
        else:
            self._tokens[index] = token
        if self._per_window:
            return
        not_silent = [detected for i, detected in self._detected.items() if i not in self._silent]
        self.common_code, self._prob = _likeliest(not_silent or list(self._detected.values()))
        certain = self._prob is None or self._prob >= certainty or len(not_silent) >= _MAX_UNSURE
        if not silence and certain:
            self._tokens.clear()
            self._common_id = tokenizer.facts.languages[self.common_code]

    def set_remainder(self, index: int, window: int) -> None:
        """Give the remainder of a window the window's language, unless each window has its own."""
        if window in self._other_decoded:
            self._other_decoded[index] = self._other_decoded[window]
        if window in self._tokens and not self._per_window:
            self._tokens[index] = self._tokens[window]

    def of(self, index: int) -> str:
        """Return the language code of a decoded window."""
        detected = self._other_decoded.get(index) or self._detected.get(index)
        code = detected[0] if detected else self.common_code
        assert code is not None, "the language was neither named nor detected"
        return code

    def own_code(self, index: int) -> str | None:
        """Return the code of a window's language if it differs from the common language."""
        if self._per_window:
            return self.of(index)
        code, _ = self._other_decoded.get(index, (None, None))
        return None if code == self.common_code else code

    def convert_script(self, index: int, segments: list[Segment]) -> list[Segment]:
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
        if not (self._per_window or self.is_mixed) or not spoken_s:
            return self.common_code, self._prob
        seconds: dict[str, float] = collections.defaultdict(float)
        for index, window_s in spoken_s.items():
            seconds[self.of(index)] += window_s
        longest = max(seconds, key=seconds.__getitem__)
        detected = (self._detected | self._other_decoded).values()
        probs = [prob for code, prob in detected if code == longest and prob is not None]
        return longest, sum(probs) / len(probs) if probs else None

    def warnings(self, times: Mapping[int, tuple[float, float]]) -> list[str]:
        """Return warnings about windows in another language, and the options that help.

        Args:
            times: start and end in seconds of each window with text, in order of time.
        """
        if self._per_window:
            return []
        decoded_in = [(times[i], code) for i in times if (code := self.own_code(i))]
        not_decoded_in = [
            (times[i], self._other_not_decoded[i])
            for i in times
            if i in self._other_not_decoded
            and not languages.are_close(self._other_not_decoded[i], self.of(i))
        ]
        language, texts = self.common_code, list[str]()
        if decoded_in:
            texts.append(
                f"language {language} was detected, but {_describe_intervals(decoded_in)}; these "
                "parts were transcribed in that language. Send multilingual = true to detect the "
                f"language of every window, or language = {language} for one language"
            )
        if not_decoded_in:
            reason, advice = f"language {language} was detected", "multilingual = true"
            if self._by_client:  # the two options exclude each other
                reason, advice = f"language = {language}", f"{advice} instead of language"
            texts.append(
                f"{reason}, but {_describe_intervals(not_decoded_in)}; these parts were decoded as "
                f"{language}. Send {advice} to detect the language of every window"
            )
        return texts


def _describe_intervals(windows: Sequence[tuple[tuple[float, float], str]]) -> str:
    """Describe where languages are spoken; adjacent windows are joined."""
    joined = list[tuple[str, float, float]]()
    for (begin_s, end_s), code in windows:
        if joined and joined[-1][0] == code and begin_s - joined[-1][2] < _MAX_GAP_S:
            begin_s = joined.pop()[1]
        joined.append((code, begin_s, end_s))
    by_code: dict[str, list[str]] = collections.defaultdict(list)
    for code, begin_s, end_s in joined:
        by_code[code].append(f"{begin_s:.1f} to {end_s:.1f} s")
    return ", ".join(f"{code} is spoken at {', '.join(times)}" for code, times in by_code.items())


def _likeliest(detected: Sequence[tuple[str, float | None]]) -> tuple[str, float | None]:
    """Return the code with the largest sum of probabilities, and its maximum probability.

    The first code wins among equals.
    """
    sums: dict[str, float] = collections.defaultdict(float)
    for code, prob in detected:
        sums[code] += 1.0 if prob is None else prob
    likeliest = max(sums, key=sums.__getitem__)
    probabilities = [prob for code, prob in detected if code == likeliest and prob is not None]
    return likeliest, max(probabilities, default=None)
