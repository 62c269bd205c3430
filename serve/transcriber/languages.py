"""Languages of a request's windows: that of all, or each its own; and the script of Chinese."""

import collections
from collections.abc import Mapping, Sequence

from serve.contract.messages import Segment
from serve.speech import chinese

_CHINESE = "zh"  # Cantonese, yue, stays as it was decoded
_MOST_UNSURE = 3  # windows that go one after another because none tells the language


class Languages:
    """The languages of one request.

    Args:
        named: code; None where it must be found.
        each: whether each window has its own, which is found in it.
        script: that Chinese is written in; None: the one of most of the first text that tells.
    """

    def __init__(self, named: str | None, each: bool, script: chinese.Script | None = None) -> None:
        self._each = each
        self._script = script
        self._named = named
        self._prob: float | None = None
        self._detected: dict[int, tuple[str, float | None]] = {}  # code and probability, by window
        self._silent: set[int] = set()  # of these windows

    def note(self, index: int, code: str, prob: float | None, silence: bool = False) -> None:
        """Take note of a window's language; that of silence counts where there is nothing else."""
        self._detected[index] = code, prob
        if silence:
            self._silent.add(index)
        if not self._each:
            spoken = [language for i, language in self._detected.items() if i not in self._silent]
            self._named, self._prob = _likeliest(spoken or list(self._detected.values()))

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
        code = self._detected[index][0] if index in self._detected else self._named
        assert code is not None, "nobody has named or found the language"
        return code

    def own(self, index: int) -> str | None:
        """Return the code of a window's own language; None where all have the same."""
        return self.of(index) if self._each else None

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

        Where each window has its own it is the one that most was said in, of equals the first, and
        the probability the mean of its windows.

        Args:
            spoken_s: seconds of text in each window, in order.
        """
        if not self._each or not spoken_s:
            return self._named, self._prob
        seconds: dict[str, float] = collections.defaultdict(float)
        for index, window_s in spoken_s.items():
            seconds[self.of(index)] += window_s
        most = max(seconds, key=lambda code: seconds[code])
        probs = [p for code, p in self._detected.values() if code == most and p is not None]
        return most, sum(probs) / len(probs) if probs else None


def _likeliest(detected: Sequence[tuple[str, float | None]]) -> tuple[str, float | None]:
    """Return the code with the largest sum of probabilities, the first of equals; and its best."""
    chances: dict[str, float] = collections.defaultdict(float)
    for code, prob in detected:
        chances[code] += 1.0 if prob is None else prob
    most = max(chances, key=lambda code: chances[code])
    known = [prob for code, prob in detected if code == most and prob is not None]
    return most, max(known, default=None)
