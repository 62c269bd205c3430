"""Languages that a request does not name: how many there are, and which may be."""

import dataclasses
from collections.abc import Sequence

from serve.contract.config import TranscriberConfig
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.messages import Request
from serve.runtime.protocol import Capabilities, Detection
from serve.speech.languages import CLOSE_LANGUAGES
from serve.speech.tokenizer import Tokenizer

# While the languages that were tried are together less likely than this, a window is decoded in the
# next one, too, and the likeliest text is taken; in so many languages at most.
CERTAINTY, TRIES = 0.85, 2
# Where one language is found for all windows, a later window that is at least so likely in another
# language is decoded in that, too; the likelier text is taken.
SWITCH = 0.5


def detection_of(
    request: Request, tokenizer: Tokenizer, capabilities: Capabilities, config: TranscriberConfig
) -> Detection:
    """Return how the language of a request is found, if it names none.

    Raises:
        OptionError: the languages that it may have are unknown, or contradict another option;
            or each window is to have its own, and cannot.
    """
    _check_multilingual(request, tokenizer, capabilities)
    wanted = request.languages
    if not isinstance(wanted, tuple | list) or not all(isinstance(code, str) for code in wanted):
        raise OptionError(f"languages = {shown(wanted)}; expected a list of codes such as 'en'")
    if wanted and request.language is not None:
        raise OptionError(
            f"languages = {shown(list(wanted))} with language = {shown(request.language)}; "
            "expected one of them"
        )
    if refusal := _refusal(wanted, tokenizer, capabilities):
        raise OptionError(refusal)
    if request.language is not None:
        return Detection()
    languages = tokenizer.language_ids(wanted or config.languages)
    detection = Detection(languages, CERTAINTY, TRIES)
    if request.multilingual:  # a window's prompt then names its own
        return detection
    known = tokenizer.facts.languages
    close = tuple(
        frozenset(known[code] for code in codes if code in known) for codes in CLOSE_LANGUAGES
    )
    return dataclasses.replace(detection, switch=SWITCH, close=close)


def check_languages(
    config: TranscriberConfig, tokenizer: Tokenizer, capabilities: Capabilities
) -> None:
    """Refuse configured languages that cannot be.

    Raises:
        ConfigError: names the key, and what to do.
    """
    if refusal := _refusal(config.languages, tokenizer, capabilities):
        raise ConfigError(f"transcriber.{refusal}")
    try:
        tokenizer.language_ids(config.languages)
    except OptionError as error:
        raise ConfigError(f"transcriber.languages: {error}") from error


def _check_multilingual(request: Request, tokenizer: Tokenizer, capabilities: Capabilities) -> None:
    wanted = request.multilingual
    if wanted and request.language is not None:
        raise OptionError(
            f"multilingual = true with language = {shown(request.language)}; expected one of them"
        )
    if wanted and not tokenizer.facts.multilingual:
        raise OptionError("multilingual = true, but this engine is English-only; leave it out")
    if wanted and not capabilities.detect_language:
        raise OptionError(
            f"multilingual = true, but the runtime {capabilities.runtime} cannot detect "
            "languages; name one"
        )


def _refusal(
    languages: Sequence[str], tokenizer: Tokenizer, capabilities: Capabilities
) -> str | None:
    """Say why nothing can choose among some languages; None: something can."""
    if not languages:
        return None
    if not tokenizer.facts.multilingual:
        return (
            f"languages = {shown(list(languages))}, but this engine is English-only; leave it out"
        )
    if not capabilities.languages:
        return (
            f"languages = {shown(list(languages))}, but the runtime {capabilities.runtime} cannot "
            "choose among some languages; leave it out"
        )
    return None
