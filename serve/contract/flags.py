"""Flags of the command line in place of a request's fields, in messages as well.

The code that checks a request names fields, `partial = true`, as clients of HTTP send them. A
command shows its errors and warnings with flags, `--partial`.
"""

import re
from collections.abc import Mapping

from serve.contract.config import OPTIONS
from serve.contract.errors import EarshotError, RequestError
from serve.contract.options import Option

OTHERWISE = {
    "known_speaker_names": "--known-speaker",
    "known_speaker_references": "--known-speaker",
}
"""Flags of options that are set by a flag of another name."""
WITHOUT = ("sample_rate", "try_word_timestamps", "voice", "unfinished", "draft")
"""Options that have no flag."""

_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|[^\s;,]+"""
# A field's name, alone or with its value. The name in `transcriber.max_tokens` is a config's key.
_FIELD = re.compile(rf"(?<![\w.\-'\"/])`?([a-z]\w*)`?(?: = ({_VALUE}))?(?![\w\-])")
_SUBJECT = re.compile(r" (?:has|holds|is|came) ")


def told(error: EarshotError, options: Mapping[str, Option] = OPTIONS) -> str:
    """Return an error's message for the command line; see `in_flags`."""
    return in_flags(str(error), options) if isinstance(error, RequestError) else str(error)


def in_flags(text: str, options: Mapping[str, Option] = OPTIONS) -> str:
    """Replace the names of options in a message by their flags.

    A name is replaced where it cannot be an English word: with a value, in backquotes, with an
    underscore, as the message's subject, and after "came with".

    Args:
        text: the message, such as "ask with partial = true".
        options: the options whose names are replaced.
    """

    def replaced(match: re.Match[str]) -> str:
        name, value = match.groups()
        flag = _flag(name, options)
        subject = match.start() == 0 and _SUBJECT.match(text, match.end())
        named = value or "_" in name or "`" in match[0] or subject
        if flag is None or not (named or text.endswith("came with ", 0, match.start())):
            return match[0]
        return flag if value is None else _with_value(flag, value, options.get(name))

    return _FIELD.sub(replaced, text)


def _flag(name: str, options: Mapping[str, Option]) -> str | None:
    if name in OTHERWISE or name in WITHOUT or name not in options:
        return OTHERWISE.get(name)
    return options[name].flag


def _with_value(flag: str, value: str, option: Option | None) -> str:
    """Return a flag with its value, or the flag of a switch's position."""
    if option is None or option.kind is not bool or value not in ("true", "false"):
        bare = value.strip("[]").replace("'", "").replace(", ", ",")
        return f"{flag} {bare if value.startswith('[') else value}"
    if (value == "true") is not flag.startswith("--no-"):
        return flag
    return f"--no-{option.name}".replace("_", "-") if option.default is None else f"no {flag}"
