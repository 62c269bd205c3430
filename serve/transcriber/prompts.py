"""Tokenize a request's texts, and build the windows' prompts.

A prompt holds the token ids with which decoding starts:

    [<|startofprev|> hotwords, text before it] <|startoftranscript|> [language task] …
    … [<|notimestamps|>] [[<|0.00|>] prefix]

In parallel mode the text before each window is the client's `prompt`. In sequential mode it is
that prompt plus the text of all windows so far, as in OpenAI's `whisper/transcribe.py`. Only the
first window has a prefix. Phrases to boost become a trie over tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from serve.contract.config import TranscriberConfig
from serve.contract.errors import OptionError, shown
from serve.contract.messages import Request
from serve.contract.phrases import BOOST, MAX_PHRASES, Trie, build_trie
from serve.speech.tokenizer import Tokenizer

MAX_CHARS = 100  # per phrase
MAX_BYTES = 2**16  # UTF-8 bytes of all phrases, checked before tokenizing
MAX_WEIGHT = 4.0
_TOKENIZED_AT_ONCE = 50
_CACHED_TRIES = 64  # clients send the same list with every request


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
    ) -> tuple[int, ...]:
        """Build a window's prompt.

        Args:
            start: the ids from start-of-transcript on.
            before: the text before the window; its last ids are kept as far as they fit.
            prefix: the beginning of the window's text.
        """
        room = min(self.previous_limit, self.limit - len(prefix)) - len(self.hotwords)
        text = (*self.hotwords, *before[max(0, len(before) - room) :])
        mark = (self.mark,) if text else ()
        return (*mark, *text, *start, *prefix)


def texts_of(request: Request, tokenizer: Tokenizer, config: TranscriberConfig) -> PromptTexts:
    """Tokenize a request's hotwords, previous text, prefix and phrases.

    Raises:
        OptionError: a text or a phrase holds special tokens or is too long.
    """
    limit = tokenizer.text_limit
    previous_limit = min(config.previous_tokens, limit)
    hotwords = tokenizer.text_ids("hotwords", request.hotwords, previous_limit)
    first_timestamp = (tokenizer.facts.timestamp_begin,) if request.timestamps else ()
    prefix_limit = limit - len(hotwords) - len(first_timestamp)
    prefix = tokenizer.text_ids("prefix", request.prefix, prefix_limit)
    return PromptTexts(
        mark=tokenizer.facts.sot_prev,
        limit=limit,
        previous_limit=previous_limit,
        timestamps=config.previous_timestamps,
        hotwords=hotwords,
        before=tokenizer.previous_text(request.prompt),
        prefix=(*first_timestamp, *prefix) if prefix else (),
        phrases=trie_of(phrases_of(request, config), tokenizer),
    )


def phrases_of(request: Request, config: TranscriberConfig) -> tuple[str, ...]:
    """Return the phrases of a request, or else the configured ones.

    Raises:
        OptionError: see `checked_phrases`.
    """
    return checked_phrases(tuple(request.phrases)) if request.phrases else config.phrases


def checked_phrases(phrases: tuple[str, ...]) -> tuple[str, ...]:
    """Return the phrases unchanged.

    Raises:
        OptionError: there are too many phrases, or one is invalid.
    """
    if len(phrases) > MAX_PHRASES:
        raise OptionError(f"phrases has {len(phrases)} entries; expected at most {MAX_PHRASES}")
    for phrase in phrases:
        split_weight(phrase)
    size = sum(len(phrase.encode()) for phrase in phrases)
    if size > MAX_BYTES:
        raise OptionError(f"phrases has {size} bytes; expected at most {MAX_BYTES}: send fewer")
    return phrases


def split_weight(phrase: str) -> tuple[str, float]:
    """Split a phrase such as "Karenina^2" into its text and its weight, which is 1 by default.

    Raises:
        OptionError: the text is empty or too long, or the weight is out of bounds.
    """
    text, mark, number = phrase.rpartition("^")
    text = " ".join((text if mark else number).split())
    if not text or len(text) > MAX_CHARS:
        raise OptionError(f"phrases has {shown(phrase)}; expected 1 to {MAX_CHARS} characters")
    try:
        weight = float(number) if mark else 1.0
    except ValueError:
        weight = math.nan
    if not 0 < weight <= MAX_WEIGHT:
        raise OptionError(
            f"phrases has {shown(phrase)}; expected a weight above 0 and at most {MAX_WEIGHT:g} "
            "after ^"
        )
    return text, weight


@functools.lru_cache(maxsize=_CACHED_TRIES)
def trie_of(phrases: tuple[str, ...], tokenizer: Tokenizer) -> Trie | None:
    """Build the trie of phrases, both as written and capitalised; None if there are no phrases.

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
    """Yield every token sequence of each phrase, with its boost in nats.

    Phrases are tokenized in small batches, so that a list that is too large fails early.
    """
    for begin in range(0, len(phrases), _TOKENIZED_AT_ONCE):
        forms, boosts = list[str](), list[float]()
        for text, weight in map(split_weight, phrases[begin : begin + _TOKENIZED_AT_ONCE]):
            texts = dict.fromkeys((text, text[0].upper() + text[1:]))
            forms += texts
            boosts += [weight * BOOST] * len(texts)
        for variants, boost in zip(tokenizer.phrases_ids("phrases", forms), boosts, strict=True):
            yield from ((ids, boost) for ids in variants)
