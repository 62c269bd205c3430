"""Options that several commands have: the config, what a request may ask for, subtitles."""

import argparse
import base64
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from serve.cli.outputs import print_table
from serve.contract.codec import nearest
from serve.contract.config import OPTIONS, Config
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.files import read_bytes
from serve.contract.flags import FLAGS, OTHERWISE, WITHOUT, in_flags, spelled
from serve.contract.messages import Request
from serve.contract.options import SWITCH, Option, parse
from serve.speech.cues import CUE_OPTIONS, CueOptions, check_bounds
from serve.speech.formats import SUBTITLES

# Hosts that mean every interface, and where a client on this machine reaches them.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def add_config(parser: argparse.ArgumentParser) -> None:
    """Let a command have a config, and an engine in place of the one that it names."""
    parser.add_argument("--config", required=True, metavar="TOML", help="engine, addresses, limits")
    parser.add_argument("--engine", metavar="FOLDER", help="instead of `engine` in the config")


def server_address(config: Config, port: int) -> str:
    """Return where the configured server is reached from here, as host:port."""
    return f"{_WILDCARDS.get(config.server.host, config.server.host)}:{port}"


def server_url(config: Config, scheme: str) -> str:
    """Return the URL of its HTTP from here; `scheme` gets an s where it has TLS."""
    secure = "s" if config.server.tls_certificate else ""
    return f"{scheme}{secure}://{server_address(config, config.server.http_port)}"


def api_key() -> str | None:
    """Return the API key that a client shows to a server that wants one; None: there is none.

    Raises:
        ConfigError: no header can hold it.
    """
    key = os.environ.get("EARSHOT_API_KEY")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "EARSHOT_API_KEY holds other characters than printable ASCII; expected a key as "
            "`python -m serve keys new` prints it"
        )
    return key


_TABLE = {name: one for name, one in OPTIONS.items() if name not in {*OTHERWISE, *WITHOUT}}
_HELP = {
    "language": "such as en, English or en-US; default: detected",
    "task": "transcribe (default), or translate: into English",
    "prompt": "text before the audio: names, spelling, style",
    "phrases": "names to come out right; Karenina^2 weighs twice",
    "word_timestamps": "when each word was said, in json",
    "diarize": "tell speakers apart by their voices",
    "num_speakers": "with --diarize: how many there are",
    "vad": "decode speech alone; auto: in more than 30 s",
    "beam_size": "1 to 8 hypotheses; 1 is greedy",
    "temperature": "0 to 1; default: 0, higher where that fails",
    "channels": "split: each channel is a speaker's own; or mix",
}
_METAVARS = {str: "TEXT", int: "N", float: "X"}


class _Set(argparse.Action):
    """Sets an option of a table, its `const`, from NAME=VALUE."""

    def __call__(
        self, parser: object, args: object, text: Any, option_string: str | None = None
    ) -> None:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{option_string} {shown(text)}; expected NAME=VALUE")
        if name not in self.const:
            near = nearest(name, list(self.const))
            raise ConfigError(f"{option_string} {text}: unknown option {shown(name)}{near}")
        setattr(args, name, _parse(self.const[name], value))


class _TellOptions(argparse.Action):
    """Prints the table of options, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("--option NAME=VALUE sets one of these:\n")
        print_table([(name, _described(option)) for name, option in _TABLE.items()])
        print("\n--cue NAME=VALUE, for --format srt and vtt:\n")
        print_table([(name, _described(option)) for name, option in CUE_OPTIONS.items()])
        parser.exit()


def _described(option: Option) -> str:
    """Return an option's meaning; other options have their own names in it, not their tensors'."""
    names = "|".join(name.upper() for name in OPTIONS)
    return re.sub(rf"\b({names})\b", lambda match: match[0].lower(), option.meaning)


def _parse(option: Option, text: str) -> Any:
    try:
        return parse(option, text)
    except OptionError as error:
        raise ConfigError(in_flags(str(error), {option.name: option})) from error


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a command have a request's options: some as flags, all as `--option NAME=VALUE`."""
    group = parser.add_argument_group("request options")
    for name in FLAGS:
        option = OPTIONS[name]
        how: dict[str, Any] = {"type": functools.partial(_parse, option)}
        how["metavar"] = _METAVARS.get(option.kind)
        if option.many:
            how["metavar"] += ",…"
        if option.kind is bool:
            how = {"action": "store_true"}
        elif option.choices == SWITCH:
            how |= {"nargs": "?", "const": "on", "metavar": "|".join(SWITCH)}
        group.add_argument(spelled(name), default=option.default, help=_HELP[name], **how)
    group.add_argument(
        "--no-vad", dest="vad", action="store_const", const="off", help="same as --vad=off"
    )
    group.add_argument(
        "--known-speaker",
        dest="known_speakers",
        type=_known_speaker,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="with --diarize, several times: 2 to 10 s of a voice",
    )
    _add_table(group, "--option", _TABLE, "any other option, several times")
    group.add_argument(
        "--help-options", action=_TellOptions, nargs=0, help="list the NAMEs of --option and --cue"
    )


def add_cue_options(parser: argparse.ArgumentParser) -> None:
    """Let a command have those of `serve.speech.cues.CueOptions`."""
    _add_table(parser, "--cue", CUE_OPTIONS, "how srt and vtt are split, as max_line_width=30")


def _add_table(
    group: argparse._ActionsContainer, flag: str, table: Mapping[str, Option], meaning: str
) -> None:
    group.add_argument(
        flag,
        dest=argparse.SUPPRESS,
        action=_Set,
        const=table,
        metavar="NAME=VALUE",
        help=meaning,
    )


def unrecognized(arguments: Sequence[str], args: argparse.Namespace) -> str:
    """Say of arguments that a command does not know how they are spelled now, if they were flags.

    Args:
        arguments: the unknown ones.
        args: what the command knows.
    """
    table = CUE_OPTIONS | (_TABLE if hasattr(args, "known_speakers") else {})
    for argument in arguments:
        flag, _, value = argument.partition("=")
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        option = table.get(name)
        if flag.startswith("--") and option and name not in FLAGS:
            if option.kind is bool:
                value = "false" if flag.startswith("--no-") else "true"
            return f"{flag} is now {spelled(name, value or 'VALUE')}"
    return f"unrecognized arguments: {' '.join(arguments)}"


def read_cue_options(args: argparse.Namespace, formats: Collection[str]) -> CueOptions:
    """Read how subtitles are split; the request of `request_of` will ask for what they need.

    Args:
        args: of `add_cue_options` and `add_options`.
        formats: those that are to be written.

    Raises:
        ConfigError: an option is wrong, or nothing is written that has it.
    """
    options = {name: getattr(args, name) for name in CUE_OPTIONS if hasattr(args, name)}
    subtitles = any(format in SUBTITLES for format in formats)
    for name, value in options.items():
        if not subtitles:
            raise ConfigError(
                f"{spelled(name)} is for --format srt and vtt, found {', '.join(formats)}; json "
                "holds the words with --word-timestamps"
            )
        try:
            check_bounds(name, value)
        except OptionError as error:
            raise ConfigError(f"{spelled(name)} = {error}") from error
    cues = CueOptions(**options)
    args.word_timestamps = args.word_timestamps or cues.needs_words
    # A translation's words are not said in their order.
    args.try_word_timestamps = subtitles and args.task == "transcribe"
    return cues


def codes(text: str) -> tuple[str, ...]:
    """Texts between commas."""
    return tuple(part.strip() for part in text.split(","))


def _known_speaker(text: str) -> tuple[str, str]:
    """A name, and a file as a data URL."""
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"{shown(text)}; expected NAME=FILE, such as Ann=ann.wav")
    data = base64.b64encode(read_bytes(file)).decode()
    return name, f"data:application/octet-stream;base64,{data}"


def request_of(audio: bytes, args: argparse.Namespace) -> Request:
    """The request that the options ask for: each is a field by its name."""
    options = {name: value for name, value in vars(args).items() if name in OPTIONS}
    if args.known_speakers:
        names, references = zip(*args.known_speakers, strict=True)
        options |= {"known_speaker_names": names, "known_speaker_references": references}
    return Request(audio, **options)
