"""How the command line spells a request's options, in messages as well.

The code that checks a request names fields, `partial = true`, as clients of HTTP send them. A
command shows its errors and warnings as its user writes them, `--option partial=true`.
"""

import re
from collections.abc import Mapping

from serve.contract.config import OPTIONS
from serve.contract.errors import EarshotError, RequestError
from serve.contract.options import Option

FLAGS = (
    *("language", "task", "prompt", "phrases", "word_timestamps", "diarize", "num_speakers"),
    *("vad", "beam_size", "temperature", "channels"),
)
"""Options that have a flag of their own; `--option` and `--cue` set the others."""
OTHERWISE = {
    "known_speaker_names": "--known-speaker",
    "known_speaker_references": "--known-speaker",
}
"""Flags of options that are set by a flag of another name."""
WITHOUT = ("sample_rate", "try_word_timestamps", "voice", "unfinished", "draft")
"""Options that the command line does not set."""

_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|[^\s;,]+"""
# A field's name, alone or with its value. The name in `transcriber.max_tokens` is a config's key.
_FIELD = re.compile(rf"(?<![\w.\-'\"/])`?([a-z]\w*)`?(?: = ({_VALUE}))?(?![\w\-])")
_SUBJECT = re.compile(r" (?:has|holds|is|came) ")


def told(error: EarshotError, options: Mapping[str, Option] = OPTIONS) -> str:
    """Return an error's message for the command line; see `in_flags`."""
    return in_flags(str(error), options) if isinstance(error, RequestError) else str(error)


def in_flags(text: str, options: Mapping[str, Option] = OPTIONS) -> str:
    """Replace the names of options in a message by what sets them.

    A name is replaced where it cannot be an English word: with a value, in backquotes, with an
    underscore, as the message's subject, and after "came with".

    Args:
        text: the message, such as "ask with partial = true".
        options: the options whose names are replaced.
    """

    def replaced(match: re.Match[str]) -> str:
        name, value = match.groups()
        subject = match.start() == 0 and _SUBJECT.match(text, match.end())
        named = value or "_" in name or "`" in match[0] or subject
        known = name in OTHERWISE or (name in options and name not in WITHOUT)
        if not known or not (named or text.endswith("came with ", 0, match.start())):
            return match[0]
        return spelled(name, value)

    return _FIELD.sub(replaced, text)


def spelled(name: str, value: str | None = None) -> str:
    """Return what sets an option on the command line, to a value if there is one."""
    if value is not None and value.startswith("["):
        value = value.strip("[]").replace("'", "").replace(", ", ",")
    if name in OTHERWISE or name in FLAGS:
        flag = OTHERWISE.get(name, f"--{name.replace('_', '-')}")
        if value in ("true", "false"):
            return flag if value == "true" else f"no {flag}"
        return flag if value is None else f"{flag} {value}"
    setter = f"{'--option' if name in OPTIONS else '--cue'} {name}"
    return setter if value is None else f"{setter}={value}"
