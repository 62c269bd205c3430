"""Check the phrases to boost, and build their trie over tokens."""

import functools
import math
from collections.abc import Iterator, Sequence

from serve.contract.config import TranscriberConfig
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.messages import Request
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
