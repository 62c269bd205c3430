"""Which language a request's windows are in: that of all, or each its own."""

import collections
from collections.abc import Mapping, Sequence

_MOST_UNSURE = 3  # windows that go one after another because none tells the language


class Languages:
    """The languages of one request.

    Args:
        named: code; None where it must be found.
        each: whether each window has its own, which is found in it.
    """

    def __init__(self, named: str | None, each: bool) -> None:
        self._each = each
        self._named = named
        self._prob: float | None = None
        self._heard: dict[int, tuple[str, float | None]] = {}  # code and its probability, by window
        self._silent: set[int] = set()  # of these windows

    def note(self, index: int, code: str, prob: float | None, silence: bool = False) -> None:
        """Take note of what was heard in a window; silence counts where nothing else is heard."""
        self._heard[index] = code, prob
        if silence:
            self._silent.add(index)
        if not self._each:
            heard = [said for i, said in self._heard.items() if i not in self._silent]
            self._named, self._prob = _likeliest(heard or list(self._heard.values()))

    def decided(self, certainty: float) -> str | None:
        """Code of the language of all windows; None while too little was heard to tell.

        Args:
            certainty: the least probability of a language that is sure.
        """
        spoken = len(self._heard) - len(self._silent)
        sure = spoken > 0 and (self._prob is None or self._prob >= certainty)
        return self._named if sure or spoken >= _MOST_UNSURE else None

    def of(self, index: int) -> str:
        """Code of a window that was decoded."""
        code = self._heard[index][0] if index in self._heard else self._named
        assert code is not None, "nobody has named or found the language"
        return code

    def own(self, index: int) -> str | None:
        """Code of a window's own language; None where all have the same."""
        return self.of(index) if self._each else None

    def of_most(self, spoken_s: Mapping[int, float]) -> tuple[str | None, float | None]:
        """The whole's language, and its probability; None where none was named or found.

        Where each window has its own it is the one that most was said in, of equals the first, and
        the probability the mean of its windows.

        Args:
            spoken_s: seconds of text in each window, in order.
        """
        if not self._each or not spoken_s:
            return self._named, self._prob
        seconds: dict[str, float] = collections.defaultdict(float)
        for index, said_s in spoken_s.items():
            seconds[self.of(index)] += said_s
        most = max(seconds, key=lambda code: seconds[code])
        probs = [prob for code, prob in self._heard.values() if code == most and prob is not None]
        return most, sum(probs) / len(probs) if probs else None


def _likeliest(heard: Sequence[tuple[str, float | None]]) -> tuple[str, float | None]:
    """The code with the largest sum of probabilities, of equals the first, and its largest one."""
    chances: dict[str, float] = collections.defaultdict(float)
    for code, prob in heard:
        chances[code] += 1.0 if prob is None else prob
    most = max(chances, key=lambda code: chances[code])
    known = [prob for code, prob in heard if code == most and prob is not None]
    return most, max(known, default=None)
