"""Translate the names of a request's options to command-line flags, also in messages.

The code that checks a request names fields as HTTP clients send them: `partial = true`. Commands
show the same errors and warnings with flags: `--option partial=true`.
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
"""Options with a flag of the same name; `--option` and `--cue` set the others."""
OTHER_FLAGS = {
    "known_speaker_names": "--known-speaker",
    "known_speaker_references": "--known-speaker",
}
"""Options with a flag of another name."""
WITHOUT_FLAG = ("sample_rate", "try_word_timestamps", "voice", "unfinished", "draft")
"""Options that the command line cannot set."""

_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|[^\s;,]+"""
# A field's name, alone or with its value. `transcriber.max_tokens` is a config key and no match.
_FIELD = re.compile(rf"(?<![\w.\-'\"/])`?([a-z]\w*)`?(?: = ({_VALUE}))?(?![\w\-])")
_SUBJECT = re.compile(r" (?:has|holds|is|came) ")


def message_in_flags(error: EarshotError, options: Mapping[str, Option] = OPTIONS) -> str:
    """Return an error's message for the command line; see `in_flags`."""
    return in_flags(str(error), options) if isinstance(error, RequestError) else str(error)


def in_flags(text: str, options: Mapping[str, Option] = OPTIONS) -> str:
    """Replace the names of options in a message by their flags.

    A name is replaced only if it cannot be an English word: with a value, in backquotes, with an
    underscore, as the message's subject, or after "came with".

    Args:
        text: the message, such as "ask with partial = true".
        options: the options to replace.
    """

    def replaced(match: re.Match[str]) -> str:
        name, value = match.groups()
        subject = match.start() == 0 and _SUBJECT.match(text, match.end())
        is_marked = value or "_" in name or "`" in match[0] or subject
        has_flag = name in OTHER_FLAGS or (name in options and name not in WITHOUT_FLAG)
        if not has_flag or not (is_marked or text.endswith("came with ", 0, match.start())):
            return match[0]
        return flag_of(name, value)

    return _FIELD.sub(replaced, text)


def flag_of(name: str, value: str | None = None) -> str:
    """Return the flag that sets an option, with its value if there is one."""
    if value is not None and value.startswith("["):
        value = value.strip("[]").replace("'", "").replace(", ", ",")
    if name in OTHER_FLAGS or name in FLAGS:
        flag = OTHER_FLAGS.get(name, f"--{name.replace('_', '-')}")
        if value in ("true", "false"):
            return flag if value == "true" else f"no {flag}"
        return flag if value is None else f"{flag} {value}"
    setter = f"{'--option' if name in OPTIONS else '--cue'} {name}"
    return setter if value is None else f"{setter}={value}"
