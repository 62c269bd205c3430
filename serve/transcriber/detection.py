"""Plan the language detection of a request."""

import dataclasses
from collections.abc import Sequence

from serve.contract.config import TranscriberConfig
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.messages import Request
from serve.runtime.protocol import Capabilities, Detection
from serve.speech.languages import CLOSE_LANGUAGES
from serve.speech.tokenizer import Tokenizer

# A window is decoded in further languages, up to TRIES, until the probabilities of the languages
# tried add up to CERTAINTY. The most likely text is kept.
CERTAINTY, TRIES = 0.85, 2
# If one language was detected for all windows, a later window with at least this probability of
# another language is decoded in that language, too. The more likely text is kept.
SWITCH = 0.5


def detection_of(
    request: Request, tokenizer: Tokenizer, capabilities: Capabilities, config: TranscriberConfig
) -> Detection:
    """Return how to detect the language of a request that names none.

    Raises:
        OptionError: the candidate languages are unknown or contradict another option, or the
            request asks for one language per window and the runtime cannot detect languages.
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
    if request.multilingual:  # each window's prompt names its own language
        return detection
    known = tokenizer.facts.languages
    close = tuple(
        frozenset(known[code] for code in codes if code in known) for codes in CLOSE_LANGUAGES
    )
    return dataclasses.replace(detection, switch=SWITCH, close=close)


def check_languages(
    config: TranscriberConfig, tokenizer: Tokenizer, capabilities: Capabilities
) -> None:
    """Check the configured languages.

    Raises:
        ConfigError: the engine or the runtime cannot use them.
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
    """Return why language detection cannot be limited to some languages; None if it can."""
    if not languages:
        return None
    if not tokenizer.facts.multilingual:
        return (
            f"languages = {shown(list(languages))}, but this engine is English-only; leave it out"
        )
    if not capabilities.languages:
        return (
            f"languages = {shown(list(languages))}, but the runtime {capabilities.runtime} cannot "
            "limit its language detection; leave it out"
        )
    return None
