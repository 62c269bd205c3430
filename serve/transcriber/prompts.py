"""Prompts: the ids that the decoding of each window of a request begins with.

    [<|startofprev|> hotwords, text before it] <|startoftranscript|> [language task] …
    … [<|notimestamps|>] [[<|0.00|>] prefix]

Where windows are decoded at the same time, the text before each is what the client sent as
`prompt`. Where they follow each other, it is that and all that was said since, as in OpenAI's
`whisper/transcribe.py`; after a window in which decoding failed it begins anew, for a model that
has lost its way repeats itself. Only the first window has a prefix.
"""

import dataclasses
from typing import get_args

from serve.contract.config import TranscriberConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import OptionError, shown
from serve.contract.messages import Mode, Request
from serve.contract.phrases import Trie
from serve.runtime.protocol import Capabilities
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.phrases import phrases_of, trie_of

_LOST_TEMPERATURE = 0.5  # OpenAI's: what was found above it is no text to go on from


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The ids that a window's decoding begins with."""

    ids: tuple[int, ...]
    prefix: int = 0  # so many of the last ones are what the window begins to say


@dataclasses.dataclass(frozen=True)
class Texts:
    """Ids of the texts that come with a request's audio, and how many of them a prompt may hold.

    Hotwords and prefix are never cut: together they have at most `limit`.
    """

    mark: int = 0  # <|startofprev|>
    limit: int = 0  # of text in all
    previous_limit: int = 0  # of what stands before start-of-transcript
    timestamps: bool = True  # what was said keeps them there
    hotwords: tuple[int, ...] = ()  # at most `previous_limit`; before every window
    before: tuple[int, ...] = ()  # what precedes the audio
    prefix: tuple[int, ...] = ()  # what the audio begins with, <|0.00|> first where times are asked
    phrases: Trie | None = None  # that are boosted in every window

    def prompt(
        self, start: tuple[int, ...], before: tuple[int, ...], prefix: tuple[int, ...] = ()
    ) -> Prompt:
        """Make a window's prompt.

        Args:
            start: from start-of-transcript on.
            before: the text before the window, of which the last is taken that there is room for.
            prefix: what the window begins to say.
        """
        room = min(self.previous_limit, self.limit - len(prefix)) - len(self.hotwords)
        text = (*self.hotwords, *before[max(0, len(before) - room) :])
        mark = (self.mark,) if text else ()
        return Prompt((*mark, *text, *start, *prefix), len(prefix))


NO_TEXTS = Texts()
"""Nor room for any."""


class Prompts:
    """The prompts of one request's windows.

    Args:
        start: from start-of-transcript on; holds DETECT_LANGUAGE where the language must be found.
        texts: the client's.
        multilingual: whether each window has its own language.
    """

    def __init__(self, start: tuple[int, ...], texts: Texts, multilingual: bool = False) -> None:
        self._start = start
        self._multilingual = multilingual
        self._language_of_all: int | None = None  # token, where it was detected
        self._languages: dict[int, int] = {}  # tokens of windows that have their own
        self._texts = texts
        self._before = texts.before  # the next window

    @property
    def detecting(self) -> bool:
        """Tell whether the language of all windows must be found in the next one."""
        found = self._multilingual or self._language_of_all is not None
        return DETECT_LANGUAGE in self._start and not found

    def of(self, index: int) -> Prompt:
        """Return the prompt of a window that may be submitted now, or of another attempt at it."""
        prefix = self._texts.prefix if index == 0 else ()
        token = self._languages.get(index, self._language_of_all)
        start = self._start if token is None else _named(self._start, token)
        return self._texts.prompt(start, self._before, prefix)

    def set_language(self, index: int, token: int) -> None:
        """Note which language was found in a window: further attempts at it are in that."""
        self._languages[index] = token

    def set_language_of_all(self, token: int) -> None:
        """Let all windows from now on be in one language."""
        self._languages.clear()
        self._language_of_all = token

    def set_rest(self, index: int, whole: int) -> None:
        """Let what is left of a window be in its language, unless another may begin there."""
        if whole in self._languages and not self._multilingual:
            self._languages[index] = self._languages[whole]

    def restart(self) -> None:
        """Let the next window begin as the first one did: it is of another channel."""
        self._before = self._texts.before

    def add(self, tokens: tuple[int, ...], temperature: float, failed: bool) -> None:
        """Let the next window begin after what was said in one more; silence says nothing.

        Args:
            tokens: its text as a prompt may hold it.
            temperature: at which they were.
            failed: no attempt was good enough, and this is the best of them.
        """
        lost = failed or temperature > _LOST_TEMPERATURE
        self._before = () if lost else (*self._before, *tokens)[-self._texts.limit :]


def _named(start: tuple[int, ...], token: int) -> tuple[int, ...]:
    return tuple(token if id == DETECT_LANGUAGE else id for id in start)


def texts_of(request: Request, tokenizer: Tokenizer, config: TranscriberConfig) -> Texts:
    """Return the ids of a request's texts.

    Raises:
        OptionError: a text holds special tokens or is too long, or phrases are.
    """
    texts = no_texts(tokenizer, config)
    hotwords = tokenizer.text_ids("hotwords", request.hotwords, texts.previous_limit)
    stamp = (tokenizer.facts.timestamp_begin,) if request.timestamps else ()
    room = texts.limit - len(hotwords) - len(stamp)
    prefix = tokenizer.text_ids("prefix", request.prefix, room)
    return dataclasses.replace(
        texts,
        hotwords=hotwords,
        before=tokenizer.previous_text(request.prompt),
        prefix=(*stamp, *prefix) if prefix else (),
        phrases=trie_of(phrases_of(request, config), tokenizer),
    )


def no_texts(tokenizer: Tokenizer, config: TranscriberConfig) -> Texts:
    """Return the texts of a request that has none, with the room that there is."""
    limit = tokenizer.text_limit
    return Texts(
        mark=tokenizer.facts.sot_prev,
        limit=limit,
        previous_limit=min(config.previous_tokens, limit),
        timestamps=config.previous_timestamps,
    )


def mode_of(request: Request) -> Mode:
    """Return the mode in which a request's windows are decoded.

    Raises:
        OptionError: it asks for a mode that there is not.
    """
    wanted = request.mode
    if wanted not in get_args(Mode):
        expected = " or ".join(get_args(Mode))
        raise OptionError(f"mode = {shown(wanted)}; expected {expected}")
    return wanted


def refusal_of_text(request: Request, mode: Mode, capabilities: Capabilities) -> str | None:
    """Say which option needs text in prompts that may not be there; None: none."""
    for name in ("prompt", "hotwords", "prefix"):
        text = getattr(request, name)
        if not isinstance(text, str):
            return f"{name} = {shown(text)}; expected text"
        if text.strip() and not capabilities.previous_text:
            return f"{name} is given, but {without_text(capabilities)}; leave it out"
    if mode == "sequential" and not capabilities.previous_text:
        return f"mode = sequential, but {without_text(capabilities)}; ask for mode = parallel"
    return None


def without_text(capabilities: Capabilities) -> str:
    """Say that a runtime takes no text in prompts."""
    return f"the runtime {capabilities.runtime} cannot begin with text"
