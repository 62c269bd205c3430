"""What the decoding of each window of a request begins with.

    [<|startofprev|> hotwords, text before it] <|startoftranscript|> [language task] …

Where windows are decoded at the same time, the text before each is what the client sent as
`prompt`. Where they follow each other, it is that and all that was said since, as in OpenAI's
`whisper/transcribe.py`; after a window in which decoding failed it begins anew, for a model that
has lost its way repeats itself.
"""

import dataclasses

from serve.engine import DETECT_LANGUAGE
from serve.messages import Mode

_LOST_TEMPERATURE = 0.5  # OpenAI's: what was found above it is no text to go on from


@dataclasses.dataclass(frozen=True)
class Texts:
    """Ids of the texts that come with a request's audio, and how many of them a prompt may hold."""

    mark: int = 0  # <|startofprev|>
    limit: int = 0
    hotwords: tuple[int, ...] = ()  # at most `limit`; before every window
    before: tuple[int, ...] = ()  # what precedes the audio

    def prompt(
        self, start: tuple[int, ...], before: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """A window's prompt: `start`, and before it what the hotwords leave room for.

        Args:
            start: from start-of-transcript on.
            before: the text before the window; None: before the audio.
        """
        before = self.before if before is None else before
        text = (*self.hotwords, *_last(before, self.limit - len(self.hotwords)))
        return (self.mark, *text, *start) if text else start


NO_TEXTS = Texts()
"""Nor room for any."""


class Prompts:
    """The prompts of one request's windows.

    Args:
        start: from start-of-transcript on; holds DETECT_LANGUAGE where the language must be found.
        mode: whether windows are decoded at the same time.
        texts: the client's.
    """

    def __init__(self, start: tuple[int, ...], mode: Mode, texts: Texts) -> None:
        self._start = start
        self._mode = mode
        self._texts = texts
        self._before = texts.before  # the next window

    @property
    def detecting(self) -> bool:
        """Whether the next window's language must be found."""
        return DETECT_LANGUAGE in self._start

    @property
    def one_at_a_time(self) -> bool:
        """Whether a window's prompt is known only after the windows before it."""
        return self._mode == "sequential" or self.detecting

    @property
    def next(self) -> tuple[int, ...]:
        """The prompt of the next window, or of the same one again."""
        return self._texts.prompt(self._start, self._before)

    def set_language(self, token: int) -> None:
        """Note which language was found."""
        self._start = tuple(token if id == DETECT_LANGUAGE else id for id in self._start)

    def add(self, tokens: tuple[int, ...], temperature: float, failed: bool) -> None:
        """Take note of what a window says; silent ones say nothing.

        Args:
            tokens: its text as the next window's prompt may hold it.
            temperature: at which they were.
            failed: no attempt was good enough, and this is the best of them.
        """
        if self._mode == "parallel":
            return
        lost = failed or temperature > _LOST_TEMPERATURE
        self._before = () if lost else _last((*self._before, *tokens), self._texts.limit)


def _last(ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    return ids[max(0, len(ids) - count) :]
