"""LocalAgreement: words of an open utterance become final once two decodings in a row agree.

LocalAgreement-2 is by Liu et al. 2020 (arXiv 2005.11185), and whisper_streaming uses it (Macháček
et al. 2023, arXiv 2307.14743). The open utterance is decoded again and again. Words that follow the
final ones become final if two hypotheses in a row have them. Final text never changes.

Four things differ from whisper_streaming:

- The place in a hypothesis where the final words end is found by text and times together, not by
  times and then by repeated n-grams.
- Words are compared without case and punctuation, which change with every word that follows. So
  the mark behind the last final word waits until the next word is final.
- The last word of a hypothesis waits: it may be the beginning of a longer one.
- A word does not wait for ever: one hypothesis makes it final once enough audio is behind it.
"""

import dataclasses
import itertools
import unicodedata
from collections.abc import Sequence

from serve.contract.messages import Word
from serve.speech.text import sentence_ends

_RECENT = 8  # final words that are looked for in a hypothesis
_EDITS_PER_S = 1.0  # differing words that weigh as much as a second between the times


class LocalAgreement:
    """The final words of one utterance, and the hypothesis behind them.

    All times are seconds from the utterance's start.

    Args:
        final: final words of the utterance before, which is decoded again with this one.
    """

    def __init__(self, final: Sequence[Word] = ()) -> None:
        self.words = list(final)
        """The final words. The last one's mark may be missing; see `_mark`."""
        self.pending: tuple[Word, ...] = ()
        """The words of the latest hypothesis behind the final ones."""
        self.changed = 0
        """The number of words that the next hypothesis did not have in their place."""
        self._mark = ""  # behind the last final word, by the latest hypothesis
        self._began = False  # a word of this utterance is final

    @property
    def guess(self) -> str:
        """The text of the pending words."""
        return self._mark + "".join(word.word for word in self.pending)

    def update(self, words: Sequence[Word]) -> str:
        """Take another hypothesis; return the text that becomes final by it."""
        fresh = self._behind_final(words)
        pairs = itertools.takewhile(lambda pair: _alike(*pair), zip(fresh, self.pending))  # noqa: B905
        agreed = sum(1 for _ in pairs)
        self.changed += len(self.pending) - agreed
        return self._commit(fresh, min(agreed, len(fresh) - 1) if fresh else 0)

    def finish(self) -> str:
        """Make the rest of the latest hypothesis final; return its text."""
        text = self._commit(self.pending, len(self.pending)) + self._mark
        self._close()
        return text

    def settle(self, until_s: float) -> str:
        """Make the pending words final that end before a time; return their text."""
        count = sum(word.end <= until_s for word in self.pending)
        return self._commit(self.pending, count)

    def cut(self, after_s: float) -> float | None:
        """Return the time of a pause where the audio of final words may be cut off; None: none.

        It is the end of the last sentence in the final words, or the longest pause between two of
        them. The last final word stays: its mark is still open.

        Args:
            after_s: the earliest time; a cut that frees little soon needs another, and each costs
                a draft.
        """
        ends = [i for i in range(len(self.words) - 1) if self.words[i].end > after_s]
        if not ends:
            return None
        ends_sentence = sentence_ends([word.word for word in self.words])
        sentences = [i for i in ends if ends_sentence[i]]
        pauses_s = [after.start - word.end for word, after in itertools.pairwise(self.words)]
        last = sentences[-1] if sentences else max(ends, key=pauses_s.__getitem__)
        return (self.words[last].end + self.words[last + 1].start) / 2

    def drop(self, until_s: float) -> str:
        """Remove the final words before a time at which the audio is cut; return their text."""
        count = sum(word.end <= until_s for word in self.words)
        dropped, self.words = self.words[:count], self.words[count:]
        return "".join(word.word for word in dropped)

    def _commit(self, fresh: Sequence[Word], count: int) -> str:
        """Make the first words of a hypothesis final, and the others pending; return the text."""
        self.pending = tuple(fresh[count:])
        if not count:
            return ""
        core, mark = _split(fresh[count - 1].word)
        last = dataclasses.replace(fresh[count - 1], word=core)
        text = self._mark + "".join(word.word for word in fresh[: count - 1]) + core
        self._close()
        self.words += [*fresh[: count - 1], last]
        self._mark, self._began = mark, True
        return text

    def _close(self) -> None:
        """Make the mark behind the last final word final."""
        if self.words:
            last = self.words[-1]
            self.words[-1] = dataclasses.replace(last, word=last.word + self._mark)
        self._mark = ""

    def _behind_final(self, words: Sequence[Word]) -> Sequence[Word]:
        """Return the words of a hypothesis that follow the final ones."""
        if not self.words:
            return words
        parts = [(part, index) for index, word in enumerate(words) for part in _parts(word)]
        recent = [part for word in self.words[-_RECENT:] for part in _parts(word)][-_RECENT:]
        edits = _edits([_plain(part) for part in recent], [_plain(part) for part, _ in parts])
        until_s = recent[-1].end

        def unlikelihood(count: int) -> float:
            ends_s = parts[count - 1][0].end if count else until_s
            return edits[count] + _EDITS_PER_S * abs(ends_s - until_s)

        count = min(range(len(parts) + 1), key=unlikelihood)
        if self._began and count and _alike(parts[count - 1][0], recent[-1]):
            self._mark = _split(parts[count - 1][0].word)[1]
        return _joined(words, parts[count:])


def _parts(word: Word) -> list[Word]:
    """Split a word before each mark inside it: hypotheses have "co founder" or "co-founder"."""
    text = word.word
    marks = [_is_mark(character) for character in text]
    cuts = [i for i in range(1, len(text) - 1) if marks[i - 1 : i + 2] == [False, True, False]]
    character_s = (word.end - word.start) / max(len(text), 1)
    return [
        dataclasses.replace(
            word,
            word=text[begin:end],
            start=word.start + begin * character_s,
            end=word.start + end * character_s if end < len(text) else word.end,
        )
        for begin, end in itertools.pairwise([0, *cuts, len(text)])
    ]


def _joined(words: Sequence[Word], parts: Sequence[tuple[Word, int]]) -> Sequence[Word]:
    """Join the last parts of words to words again.

    Args:
        words: all words.
        parts: the last parts, each with its word's index.
    """
    if not parts:
        return ()
    part, index = parts[0]
    text = "".join(part.word for part, word_index in parts if word_index == index)
    word = dataclasses.replace(words[index], word=text, start=part.start)
    return [word, *words[index + 1 :]]


def _edits(final: Sequence[str], words: Sequence[str]) -> list[int]:
    """Count the words in which `final` and the words before each place in `words` differ.

    It is Levenshtein's distance to the nearest run of words that ends there, wherever it begins.
    """
    row = [0] * (len(words) + 1)
    for word in final:
        above, row = row, [row[0] + 1]
        for i, candidate in enumerate(words):
            row.append(min(above[i] + (word != candidate), above[i + 1] + 1, row[i] + 1))
    return row


def _alike(word: Word, candidate: Word) -> bool:
    return _plain(word) == _plain(candidate)


def _plain(word: Word) -> str:
    """Return a word without case, spaces and marks; a word of marks alone stays as it is."""
    text = unicodedata.normalize("NFKC", word.word).casefold()
    return "".join(character for character in text if not _is_mark(character)) or text.strip()


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] in "PZ"


def _split(text: str) -> tuple[str, str]:
    """Split a word from the marks behind it."""
    end = len(text)
    while end and _is_mark(text[end - 1]):
        end -= 1
    return (text[:end], text[end:]) if end else (text, "")
