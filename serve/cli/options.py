"""Options that several commands have: the config, what a request may ask for, subtitles."""

import argparse
import base64
import os
from collections.abc import Collection
from typing import Any

from serve.contract.config import OPTIONS, SEARCH_OPTIONS, SPEECH_OPTIONS, Config
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.files import read_bytes
from serve.contract.flags import OTHERWISE, WITHOUT
from serve.contract.messages import Request
from serve.contract.options import SWITCH, Option, as_switch
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


_ACTIONS = {None: argparse.BooleanOptionalAction, False: "store_true", True: "store_false"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a command have a request's options, but for those of live text and of raw samples."""
    group = parser.add_argument_group("request options")
    configured = "Defaults are those of the config."
    groups = {
        **dict.fromkeys(SPEECH_OPTIONS, parser.add_argument_group("speech options", configured)),
        **dict.fromkeys(SEARCH_OPTIONS, parser.add_argument_group("search options", configured)),
    }
    for name, option in OPTIONS.items():
        if name not in OTHERWISE and name not in WITHOUT:
            _add_flag(groups.get(name, group), option, option.default)
    group.add_argument(
        "--known-speaker",
        dest="known_speakers",
        type=_known_speaker,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="with --diarize: a speaker's name, and a file of 2 to 10 s of that voice alone; may "
        "be given several times",
    )


def add_cue_options(parser: argparse.ArgumentParser) -> None:
    """Let a command have those of `serve.speech.cues.CueOptions`."""
    group = parser.add_argument_group("subtitles", "For --format srt and vtt.")
    for option in CUE_OPTIONS.values():
        _add_flag(group, option, None)


def _add_flag(group: argparse._ArgumentGroup, option: Option, default: object) -> None:
    """Add the flag that sets an option, or denies one that is true by itself."""
    how: dict[str, Any]
    if option.kind is bool:
        how = {"action": _ACTIONS[option.default]}
    elif option.choices == SWITCH:
        how = {"type": _switch, "nargs": "?", "const": "on", "metavar": "|".join(SWITCH)}
        off = f"--no-{option.name.replace('_', '-')}"
        group.add_argument(
            off,
            dest=option.name,
            action="store_const",
            const="off",
            help=f"same as {option.flag}=off",
        )
    else:
        parse = _LISTS[option.kind] if option.many else option.kind
        how = {"type": parse, "choices": option.choices or None, "metavar": option.metavar}
    group.add_argument(option.flag, dest=option.name, default=default, help=option.help, **how)


def read_cue_options(args: argparse.Namespace, formats: Collection[str]) -> CueOptions:
    """Read how subtitles are split; the request of `request_of` will ask for what they need.

    Args:
        args: of `add_cue_options` and `add_options`.
        formats: those that are to be written.

    Raises:
        ConfigError: an option is wrong, or nothing is written that has it.
    """
    options = {name: value for name in CUE_OPTIONS if (value := getattr(args, name)) is not None}
    subtitles = any(format in SUBTITLES for format in formats)
    for name, value in options.items():
        flag = CUE_OPTIONS[name].flag
        if not subtitles:
            raise ConfigError(
                f"{flag} is for --format srt and vtt, found {', '.join(formats)}; json holds the "
                "words with --word-timestamps"
            )
        try:
            check_bounds(name, value)
        except OptionError as error:
            raise ConfigError(f"{flag} {error}") from error
    cues = CueOptions(**options)
    args.word_timestamps = args.word_timestamps or cues.needs_words
    # A translation's words are not said in their order.
    args.try_word_timestamps = subtitles and args.task == "transcribe"
    return cues


def _switch(text: str) -> str:
    try:
        return as_switch("it", text)
    except OptionError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}; expected auto, on or off; before a file write --vad=on"
        ) from None


def codes(text: str) -> tuple[str, ...]:
    """Texts between commas."""
    return tuple(part.strip() for part in text.split(","))


def _seconds(text: str) -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}; expected seconds between commas, such as 0,10,20,30"
        ) from None


def _known_speaker(text: str) -> tuple[str, str]:
    """A name, and a file as a data URL."""
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"{shown(text)}; expected NAME=FILE, such as Ann=ann.wav")
    data = base64.b64encode(read_bytes(file)).decode()
    return name, f"data:application/octet-stream;base64,{data}"


_LISTS = {str: codes, float: _seconds}


def request_of(audio: bytes, args: argparse.Namespace) -> Request:
    """The request that the options ask for: each is a field by its name."""
    options = {name: value for name, value in vars(args).items() if name in OPTIONS}
    if args.known_speakers:
        names, references = zip(*args.known_speakers, strict=True)
        options |= {"known_speaker_names": names, "known_speaker_references": references}
    return Request(audio, **options)
