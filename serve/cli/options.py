"""Options that several commands share: the config, request options, subtitle options."""

import argparse
import base64
import functools
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from serve.cli.outputs import print_table
from serve.contract.codec import nearest
from serve.contract.config import OPTIONS, Config
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.files import read_bytes, read_text
from serve.contract.messages import Request
from serve.contract.options import SWITCH_CHOICES, Option, parse
from serve.speech.cues import CUE_OPTIONS, CueOptions, check_bounds
from serve.speech.formats import SUBTITLES

# Wildcard addresses, and the address that a client on this machine uses instead.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add --config, and --engine, which overrides the config's engine."""
    parser.add_argument("--config", required=True, metavar="TOML", help="engine, addresses, limits")
    parser.add_argument("--engine", metavar="FOLDER", help="instead of `engine` in the config")


def server_address(config: Config, port: int) -> str:
    """Return host:port of the configured server, as seen from this machine."""
    return f"{_WILDCARDS.get(config.server.host, config.server.host)}:{port}"


def server_url(config: Config, scheme: str) -> str:
    """Return the server's URL, as seen from this machine; with TLS, `scheme` gets an s."""
    secure = "s" if config.server.tls_certificate else ""
    return f"{scheme}{secure}://{server_address(config, config.server.http_port)}"


def api_key(file: Path | None = None) -> str | None:
    """Return the API key in a file, or that of the environment, or None.

    Raises:
        FileError: the file cannot be read.
        ConfigError: the key cannot be sent in an HTTP header.
    """
    key = os.environ.get("EARSHOT_API_KEY") if file is None else read_text(file).strip()
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{file or 'EARSHOT_API_KEY'} has characters that are not printable ASCII; expected a "
            "key that `python -m serve keys new` printed"
        )
    return key


_UNSETTABLE = (
    *("sample_rate", "try_word_timestamps", "voice", "unfinished", "draft"),
    *("known_speaker_names", "known_speaker_references"),  # of --known-speaker
)
_SETTABLE = {name: option for name, option in OPTIONS.items() if name not in _UNSETTABLE}
# The options with a flag of their own.
_FLAGS = {
    "language": "such as en, English or en-US; default: detected",
    "task": "transcribe (default), or translate: into English",
    "prompt": "text before the audio: names, spelling, style",
    "phrases": "names to recognize; Karenina^2 weighs twice",
    "word_timestamps": "add the times of words, in json",
    "diarize": "label speakers by their voices",
    "num_speakers": "with --diarize: the number of speakers",
    "vad": "decode only speech; auto: if longer than 30 s",
    "beam_size": "1 to 8 hypotheses; 1 is greedy",
    "temperature": "0 to 1; default: 0, higher if that fails",
    "channels": "split: one speaker per channel; or mix",
}
_METAVARS = {str: "TEXT", int: "N", float: "X"}


class _Set(argparse.Action):
    """Set an option of a table, the action's `const`, from NAME=VALUE."""

    def __call__(
        self, parser: object, args: object, text: Any, option_string: str | None = None
    ) -> None:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{option_string} {shown(text)}; expected NAME=VALUE")
        if name not in self.const:
            hint = nearest(name, list(self.const))
            raise ConfigError(f"{option_string} {text}: unknown option {shown(name)}{hint}")
        setattr(args, name, _parse(self.const[name], value))


class _PrintOptions(argparse.Action):
    """Print the table of options and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("--option NAME=VALUE sets one of these:\n")
        print_table([(name, option.meaning) for name, option in _SETTABLE.items()])
        print("\n--cue NAME=VALUE, for --format srt and vtt:\n")
        print_table([(name, option.meaning) for name, option in CUE_OPTIONS.items()])
        parser.exit()


def _parse(option: Option, text: str) -> Any:
    try:
        return parse(option, text)
    except OptionError as error:
        raise ConfigError(str(error)) from error


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a request: the common ones as flags, the others as --option NAME=VALUE."""
    group = parser.add_argument_group("request options")
    for name, meaning in _FLAGS.items():
        option, flag = OPTIONS[name], f"--{name.replace('_', '-')}"
        arguments: dict[str, Any] = {"type": functools.partial(_parse, option)}
        arguments["metavar"] = _METAVARS.get(option.kind)
        if option.many:
            arguments["metavar"] += ",…"
        if option.kind is bool:
            arguments = {"action": "store_true"}
        elif option.choices == SWITCH_CHOICES:
            arguments |= {"nargs": "?", "const": "on", "metavar": "|".join(SWITCH_CHOICES)}
        group.add_argument(flag, default=option.default, help=meaning, **arguments)
    add = group.add_argument
    add("--no-vad", dest="vad", action="store_const", const="off", help="same as --vad=off")
    clip = "with --diarize: 2 to 10 s of a voice; may be repeated"
    add("--known-speaker", type=_voice, action="append", default=[], metavar="NAME=FILE", help=clip)
    _add_table(group, "--option", _SETTABLE, "any other option; may be repeated")
    names = "list the NAMEs of --option and --cue"
    add("--help-options", action=_PrintOptions, nargs=0, help=names)


def add_cue_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve.speech.cues.CueOptions`."""
    _add_table(parser, "--cue", CUE_OPTIONS, "layout of srt and vtt, such as max_line_width=30")


def _add_table(
    group: argparse._ActionsContainer, flag: str, table: Mapping[str, Option], meaning: str
) -> None:
    group.add_argument(
        flag, dest=argparse.SUPPRESS, action=_Set, const=table, metavar="NAME=VALUE", help=meaning
    )


def read_cue_options(args: argparse.Namespace, formats: Collection[str]) -> CueOptions:
    """Read the options of subtitles, and set the word timestamps that they need in `args`.

    Args:
        args: the arguments of `add_cue_options` and `add_options`.
        formats: the formats to write.

    Raises:
        ConfigError: an option is wrong, or no format uses it.
    """
    options = {name: getattr(args, name) for name in CUE_OPTIONS if hasattr(args, name)}
    subtitles = any(format in SUBTITLES for format in formats)
    for name, value in options.items():
        if not subtitles:
            raise ConfigError(
                f"--cue {name} needs --format srt or vtt, found {', '.join(formats)}; for word "
                "times in json use --word-timestamps"
            )
        try:
            check_bounds(name, value)
        except OptionError as error:
            raise ConfigError(f"--cue {name} = {error}") from error
    cues = CueOptions(**options)
    args.word_timestamps = args.word_timestamps or cues.needs_words
    # The words of a translation do not follow the order of speech.
    args.try_word_timestamps = subtitles and args.task == "transcribe"
    return cues


def codes(text: str) -> tuple[str, ...]:
    """Split a text at its commas."""
    return tuple(part.strip() for part in text.split(","))


def _voice(text: str) -> tuple[str, str]:
    """Return the speaker's name, and the file as a data URL."""
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"{shown(text)}; expected NAME=FILE, such as Ann=ann.wav")
    data = base64.b64encode(read_bytes(file)).decode()
    return name, f"data:application/octet-stream;base64,{data}"


def request_of(audio: bytes, args: argparse.Namespace) -> Request:
    """Make the request of the arguments; options are fields of the same name."""
    options = {name: value for name, value in vars(args).items() if name in OPTIONS}
    if args.known_speaker:
        names, references = zip(*args.known_speaker, strict=True)
        options |= {"known_speaker_names": names, "known_speaker_references": references}
    return Request(audio, **options)
