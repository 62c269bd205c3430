"""Plan the language detection of a request.

Track the languages of a request's windows, and the script of Chinese text.

Either each window has its own language, or one language is detected for all. In the latter case a
window that is clearly in another language is decoded in that language.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from serve.contract.config import TranscriberConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.messages import Request, Segment
from serve.runtime.protocol import Capabilities, Detection, Scores
from serve.speech import languages
from serve.speech.languages import CLOSE_LANGUAGES, are_close
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.prompts import Prompts

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


_CHINESE = "zh"  # the script of Cantonese (yue) is not changed
_MOST_UNSURE = 3  # after this many uncertain windows, the likeliest language is used for all
_CLEAR = 0.9  # minimum probability of a language that is reported but was not decoded in
_SAME_PLACE_S = 1.0  # warnings join windows with a smaller gap between them


class Languages:
    """The languages of one request.

    Args:
        named: the language's code; None if it must be detected.
        each: whether each window has its own, detected language.
        script: the script of Chinese text; None: the prevailing script of the first window that
            shows one.
    """

    def __init__(
        self, named: str | None, each: bool, script: languages.Script | None = None
    ) -> None:
        self.each = each
        """Whether each window has its own language."""
        self._by_client = named is not None
        self._script = script
        self._named = named
        self._prob: float | None = None
        self._detected: dict[int, tuple[str, float | None]] = {}  # code and probability, by window
        self._silent: set[int] = set()  # silent windows among them
        # Windows in another language than that of all, by window:
        self._own: dict[int, tuple[str, float | None]] = {}  # decoded in it: code and probability
        self._heard: dict[int, str] = {}  # not decoded in it: code

    def note(self, index: int, code: str, prob: float | None, silence: bool = False) -> None:
        """Record a window's language; a silent window's counts only if all are silent."""
        self._detected[index] = code, prob
        if silence:
            self._silent.add(index)
        if not self.each:
            spoken = [language for i, language in self._detected.items() if i not in self._silent]
            self._named, self._prob = _likeliest(spoken or list(self._detected.values()))

    def note_own(self, index: int, code: str, prob: float | None) -> None:
        """Record a window that was decoded in its own language instead of that of all."""
        self._own[index] = code, prob

    def note_heard(self, index: int, code: str) -> None:
        """Record the language that a window clearly has, but was not decoded in."""
        self._heard[index] = code

    def set_rest(self, index: int, whole: int) -> None:
        """Give the remainder of a window the window's language."""
        if whole in self._own:
            self._own[index] = self._own[whole]

    @property
    def several(self) -> bool:
        """Whether some windows were decoded in another language than that of all."""
        return any(code != self._named for code, _ in self._own.values())

    @property
    def of_all(self) -> str | None:
        """The code of the language of all windows; None if it is not known."""
        return self._named

    def decided(self, certainty: float) -> str | None:
        """Return the code of all windows' language; None while it is uncertain.

        Args:
            certainty: the minimum probability of a certain language.
        """
        spoken = len(self._detected) - len(self._silent)
        sure = spoken > 0 and (self._prob is None or self._prob >= certainty)
        return self._named if sure or spoken >= _MOST_UNSURE else None

    def of(self, index: int) -> str:
        """Return the language code of a decoded window."""
        found = self._own.get(index) or self._detected.get(index)
        code = found[0] if found else self._named
        assert code is not None, "the language was neither named nor detected"
        return code

    def own(self, index: int) -> str | None:
        """Return the code of a window's own language; None if it is that of all."""
        if self.each:
            return self.of(index)
        code, _ = self._own.get(index, (None, None))
        return None if code == self._named else code

    def in_script(self, index: int, segments: list[Segment]) -> list[Segment]:
        """Convert a window's segments to the answer's script if they are Chinese.

        Call this in the order of the windows, because the first one may decide the script.
        """
        if self.of(index) != _CHINESE:
            return segments
        if self._script is None:
            self._script = languages.script_in("".join(segment.text for segment in segments))
        if self._script is None:
            return segments
        return [languages.rewrite(segment, self._script) for segment in segments]

    def of_most(self, spoken_s: Mapping[int, float]) -> tuple[str | None, float | None]:
        """Return the recording's language and its probability; None if they are not known.

        If windows have their own languages, return the language with the most seconds of text, the
        first one among equals, and its mean probability over the windows that detected it.

        Args:
            spoken_s: seconds of text in each window, in order.
        """
        if not (self.each or self.several) or not spoken_s:
            return self._named, self._prob
        seconds: dict[str, float] = collections.defaultdict(float)
        for index, window_s in spoken_s.items():
            seconds[self.of(index)] += window_s
        most = max(seconds, key=lambda code: seconds[code])
        found = (self._detected | self._own).values()
        probs = [p for code, p in found if code == most and p is not None]
        return most, sum(probs) / len(probs) if probs else None

    def warnings(self, times: Mapping[int, tuple[float, float]]) -> list[str]:
        """Return warnings about windows in another language, and the options that help.

        Args:
            times: start and end in seconds of each window with text, in order of time.
        """
        if self.each:
            return []
        own = [(times[i], code) for i in times if (code := self.own(i))]
        heard = [
            (times[i], self._heard[i])
            for i in times
            if i in self._heard and not are_close(self._heard[i], self.of(i))
        ]
        found, texts = self._named, list[str]()
        if own:
            texts.append(
                f"language {found} was detected, but {_places(own)}; these parts have the text of "
                "their own language. Send multilingual = true to detect the language of every "
                f"window, or language = {found} for one language"
            )
        if heard and self._by_client:
            texts.append(
                f"language = {found}, but {_places(heard)}; send multilingual = true to detect the "
                "language of every window, or leave language out"
            )
        elif heard:
            texts.append(
                f"language {found} was detected, but {_places(heard)}; these parts were decoded as "
                f"{found}. Send multilingual = true to detect the language of every window"
            )
        return texts


def note_scores(
    languages: Languages,
    prompts: Prompts,
    index: int,
    scores: Scores,
    tokenizer: Tokenizer,
    certainty: float,
    *,
    silence: bool,
) -> None:
    """Record the language that a job detected in its window.

    Args:
        languages, prompts: the request's; both are changed.
        index: the window's index.
        scores: the job's scores.
        tokenizer: maps tokens to language codes.
        certainty: the minimum probability of a language that is certain for all windows.
        silence: whether the window is silent.
    """
    token, heard = scores.language, scores.heard
    if DETECT_LANGUAGE not in prompts.of(index).ids:
        if not silence and token is not None:
            languages.note_own(index, tokenizer.language_code(token), scores.language_prob)
            prompts.set_language(index, token)
        elif not silence and heard is not None and heard[1] >= _CLEAR:
            languages.note_heard(index, tokenizer.language_code(heard[0]))
        return
    assert token is not None, "the runtime returned no language; expected one"
    languages.note(index, tokenizer.language_code(token), scores.language_prob, silence)
    if silence:
        return
    prompts.set_language(index, token)
    if not languages.each and (decided := languages.decided(certainty)):
        prompts.set_language_of_all(tokenizer.facts.languages[decided])


def _places(found: Sequence[tuple[tuple[float, float], str]]) -> str:
    """Describe where languages are spoken; adjacent windows are joined."""
    joined = list[tuple[str, float, float]]()
    for (begin_s, end_s), code in found:
        if joined and joined[-1][0] == code and begin_s - joined[-1][2] < _SAME_PLACE_S:
            begin_s = joined.pop()[1]
        joined.append((code, begin_s, end_s))
    by_code: dict[str, list[str]] = collections.defaultdict(list)
    for code, begin_s, end_s in joined:
        by_code[code].append(f"{begin_s:.1f} to {end_s:.1f} s")
    return ", ".join(f"{code} is spoken at {', '.join(at)}" for code, at in by_code.items())


def _likeliest(detected: Sequence[tuple[str, float | None]]) -> tuple[str, float | None]:
    """Return the code with the largest sum of probabilities, and its maximum probability.

    The first code wins among equals.
    """
    chances: dict[str, float] = collections.defaultdict(float)
    for code, prob in detected:
        chances[code] += 1.0 if prob is None else prob
    most = max(chances, key=lambda code: chances[code])
    known = [prob for code, prob in detected if code == most and prob is not None]
    return most, max(known, default=None)
