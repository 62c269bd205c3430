"""Check the phrases to boost, and build their trie over tokens.

Build the prompt of each window: the token ids with which decoding starts.

    [<|startofprev|> hotwords, text before it] <|startoftranscript|> [language task] …
    … [<|notimestamps|>] [[<|0.00|>] prefix]

In parallel mode the text before each window is the client's `prompt`. In sequential mode it is
that prompt plus the text of all windows so far, as in OpenAI's `whisper/transcribe.py`. After a
window that failed to decode, the text is reset, because a failed text makes the model repeat
itself. Only the first window has a prefix.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import get_args

from serve.contract.config import TranscriberConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.messages import Mode, Request
from serve.contract.phrases import BOOST, MAX_PHRASES, Trie, build_trie
from serve.runtime.protocol import Capabilities
from serve.speech.tokenizer import Tokenizer

MAX_CHARS = 100  # per phrase
MAX_BYTES = 2**16  # UTF-8 bytes of all phrases, checked before tokenizing
MAX_WEIGHT = 4.0
_TOKENIZED_AT_ONCE = 50
_LISTS = 64  # cached tries; clients send the same list with every request


def phrases_of(request: Request, config: TranscriberConfig) -> tuple[str, ...]:
    """Return the phrases of a request, or else the configured ones.

    Raises:
        OptionError: there are too many phrases, or one is invalid.
    """
    wanted = request.phrases
    if not isinstance(wanted, tuple | list) or not all(
        isinstance(phrase, str) for phrase in wanted
    ):
        raise OptionError(f"phrases = {shown(wanted)}; expected a list of texts")
    return _checked(tuple(wanted)) if wanted else config.phrases


def _checked(phrases: tuple[str, ...]) -> tuple[str, ...]:
    if len(phrases) > MAX_PHRASES:
        raise OptionError(f"phrases has {len(phrases)} entries; expected at most {MAX_PHRASES}")
    for phrase in phrases:
        weighted(phrase)
    size = sum(len(phrase.encode()) for phrase in phrases)
    if size > MAX_BYTES:
        raise OptionError(f"phrases has {size} bytes; expected at most {MAX_BYTES}: send fewer")
    return phrases


def check_phrases(
    config: TranscriberConfig, tokenizer: Tokenizer, capabilities: Capabilities
) -> None:
    """Check the configured phrases.

    Raises:
        ConfigError: a phrase is invalid, or the runtime cannot boost phrases.
    """
    if refusal := refusal_of_phrases(config.phrases, capabilities):
        raise ConfigError(f"transcriber.{refusal}")
    try:
        trie_of(_checked(config.phrases), tokenizer)
    except OptionError as error:
        raise ConfigError(f"transcriber.{error}") from error


def refusal_of_phrases(phrases: Sequence[str], capabilities: Capabilities) -> str | None:
    """Return why a runtime cannot boost the phrases; None if it can."""
    if phrases and not capabilities.phrases:
        return f"phrases is given, but the runtime {capabilities.runtime} cannot boost phrases"
    return None


def weighted(phrase: str) -> tuple[str, float]:
    """Split a phrase such as "Karenina^2" into its text and its weight, which is 1 by default.

    Raises:
        OptionError: the text is empty or too long, or the weight is out of bounds.
    """
    text, mark, number = phrase.rpartition("^")
    text = " ".join((text if mark else number).split())
    if not text or len(text) > MAX_CHARS:
        raise OptionError(f"phrases has {shown(phrase)}; expected 1 to {MAX_CHARS} characters")
    if not mark:
        return text, 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= MAX_WEIGHT:
        raise OptionError(
            f"phrases has {shown(phrase)}; expected a weight above 0 and at most {MAX_WEIGHT:g} "
            "after ^"
        )
    return text, weight


@functools.lru_cache(maxsize=_LISTS)
def trie_of(phrases: tuple[str, ...], tokenizer: Tokenizer) -> Trie | None:
    """Build the trie of phrases, each as written and capitalised; None if there are no phrases.

    Raises:
        OptionError: a phrase is invalid or holds special tokens, or all have too many tokens.
    """
    if not phrases:
        return None
    try:
        return build_trie(_sequences(phrases, tokenizer))
    except ValueError as error:
        raise OptionError(f"{error}; send fewer or shorter phrases") from error


def _sequences(
    phrases: Sequence[str], tokenizer: Tokenizer
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield each form of each phrase as tokens, with its boost in nats.

    Phrases are tokenized in small batches, so that a list that is too large fails early.
    """
    for begin in range(0, len(phrases), _TOKENIZED_AT_ONCE):
        texts, boosts = list[str](), list[float]()
        for phrase in phrases[begin : begin + _TOKENIZED_AT_ONCE]:
            text, weight = weighted(phrase)
            forms = dict.fromkeys((text, text[0].upper() + text[1:]))
            texts += forms
            boosts += [weight * BOOST] * len(forms)
        for ways, boost in zip(tokenizer.phrases_ids("phrases", texts), boosts, strict=True):
            yield from ((ids, boost) for ids in ways)


_LOST_TEMPERATURE = 0.5  # as in whisper/transcribe.py: text sampled above it resets the prompt


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The token ids with which a window's decoding starts."""

    ids: tuple[int, ...]
    prefix: int = 0  # the number of last ids that are the beginning of the window's text


@dataclasses.dataclass(frozen=True)
class PromptTexts:
    """The token ids of a request's texts, and the maximum number of text ids in a prompt.

    Hotwords and prefix are never truncated: together they have at most `limit` ids.
    """

    mark: int = 0  # <|startofprev|>
    limit: int = 0  # maximum text ids in a prompt
    previous_limit: int = 0  # maximum text ids before start-of-transcript
    timestamps: bool = True  # keep timestamp tokens in the text of previous windows
    hotwords: tuple[int, ...] = ()  # at most `previous_limit`; before every window
    before: tuple[int, ...] = ()  # the text before the audio
    prefix: tuple[int, ...] = ()  # the beginning of the text, after <|0.00|> if times are asked
    phrases: Trie | None = None  # phrases to boost in every window

    def prompt(
        self, start: tuple[int, ...], before: tuple[int, ...], prefix: tuple[int, ...] = ()
    ) -> Prompt:
        """Build a window's prompt.

        Args:
            start: the ids from start-of-transcript on.
            before: the text before the window; its last ids are kept as far as they fit.
            prefix: the beginning of the window's text.
        """
        room = min(self.previous_limit, self.limit - len(prefix)) - len(self.hotwords)
        text = (*self.hotwords, *before[max(0, len(before) - room) :])
        mark = (self.mark,) if text else ()
        return Prompt((*mark, *text, *start, *prefix), len(prefix))


NO_TEXTS = PromptTexts()
"""No texts, and no room for any."""


class Prompts:
    """The prompts of one request's windows.

    Args:
        start: the ids from start-of-transcript on; DETECT_LANGUAGE stands for an unknown language.
        texts: the client's texts.
        multilingual: whether each window has its own language.
    """

    def __init__(
        self, start: tuple[int, ...], texts: PromptTexts, multilingual: bool = False
    ) -> None:
        self._start = start
        self._multilingual = multilingual
        self._language_of_all: int | None = None  # the detected language's token
        self._languages: dict[int, int] = {}  # tokens of windows with their own language
        self._texts = texts
        self._before = texts.before  # the text before the next window

    @property
    def detecting(self) -> bool:
        """Whether the next window must detect the language of all windows."""
        found = self._multilingual or self._language_of_all is not None
        return DETECT_LANGUAGE in self._start and not found

    def of(self, index: int) -> Prompt:
        """Return the prompt of a window's first attempt or retry."""
        prefix = self._texts.prefix if index == 0 else ()
        token = self._languages.get(index, self._language_of_all)
        start = self._start if token is None else _named(self._start, token)
        return self._texts.prompt(start, self._before, prefix)

    def set_language(self, index: int, token: int) -> None:
        """Set the language that was detected in a window, for its retries."""
        self._languages[index] = token

    def set_language_of_all(self, token: int) -> None:
        """Set the language of all further windows."""
        self._languages.clear()
        self._language_of_all = token

    def set_rest(self, index: int, whole: int) -> None:
        """Give the remainder of a window the window's language, unless `multilingual`."""
        if whole in self._languages and not self._multilingual:
            self._languages[index] = self._languages[whole]

    def restart(self) -> None:
        """Reset the text before the next window, which is the first one of a channel."""
        self._before = self._texts.before

    def add(self, tokens: tuple[int, ...], temperature: float, failed: bool) -> None:
        """Append a window's text to the text before the next one.

        Args:
            tokens: the window's text as prompt ids; empty for silence.
            temperature: the temperature at which the tokens were sampled.
            failed: whether all attempts failed, and this is the best one.
        """
        lost = failed or temperature > _LOST_TEMPERATURE
        self._before = () if lost else (*self._before, *tokens)[-self._texts.limit :]


def _named(start: tuple[int, ...], token: int) -> tuple[int, ...]:
    return tuple(token if id == DETECT_LANGUAGE else id for id in start)


def texts_of(request: Request, tokenizer: Tokenizer, config: TranscriberConfig) -> PromptTexts:
    """Tokenize a request's hotwords, previous text, prefix and phrases.

    Raises:
        OptionError: a text or a phrase holds special tokens or is too long.
    """
    texts = no_texts(tokenizer, config)
    hotwords = tokenizer.text_ids("hotwords", request.hotwords, texts.previous_limit)
    first_timestamp = (tokenizer.facts.timestamp_begin,) if request.timestamps else ()
    prefix_limit = texts.limit - len(hotwords) - len(first_timestamp)
    prefix = tokenizer.text_ids("prefix", request.prefix, prefix_limit)
    return dataclasses.replace(
        texts,
        hotwords=hotwords,
        before=tokenizer.previous_text(request.prompt),
        prefix=(*first_timestamp, *prefix) if prefix else (),
        phrases=trie_of(phrases_of(request, config), tokenizer),
    )


def no_texts(tokenizer: Tokenizer, config: TranscriberConfig) -> PromptTexts:
    """Return the texts of a request without texts, with the prompt's limits."""
    limit = tokenizer.text_limit
    return PromptTexts(
        mark=tokenizer.facts.sot_prev,
        limit=limit,
        previous_limit=min(config.previous_tokens, limit),
        timestamps=config.previous_timestamps,
    )


def mode_of(request: Request) -> Mode:
    """Return the mode in which a request's windows are decoded.

    Raises:
        OptionError: the mode is unknown.
    """
    wanted = request.mode
    if wanted not in get_args(Mode):
        expected = " or ".join(get_args(Mode))
        raise OptionError(f"mode = {shown(wanted)}; expected {expected}")
    return wanted


def refusal_of_text(request: Request, mode: Mode, capabilities: Capabilities) -> str | None:
    """Return why the texts or the mode of a request are invalid; None if they are valid."""
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
    """Return the message that a runtime accepts no text in prompts."""
    return f"the runtime {capabilities.runtime} accepts no text in prompts"
