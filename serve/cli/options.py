"""Options that several commands have: the config, what a request may ask for, subtitles."""

import argparse
import dataclasses
import os
from collections.abc import Collection
from typing import get_args

from serve.contract.config import Config
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.messages import Mode, Request, Task
from serve.speech.cues import CueOptions, check_bounds
from serve.speech.formats import SUBTITLES

# Hosts that mean every interface, and where a client on this machine reaches them.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def add_config(parser: argparse.ArgumentParser) -> None:
    """Let a command have a config, and an engine in place of the one that it names."""
    parser.add_argument("--config", required=True, metavar="TOML", help="engine, addresses, limits")
    parser.add_argument("--engine", metavar="FOLDER", help="instead of `engine` in the config")


def server_address(config: Config, port: int) -> str:
    """Where the configured server is reached from here, as host:port."""
    return f"{_WILDCARDS.get(config.server.host, config.server.host)}:{port}"


def server_url(config: Config, scheme: str) -> str:
    """Where its HTTP is reached from here: `scheme`, which gets an s where it has TLS, and host."""
    secure = "s" if config.server.tls_certificate else ""
    return f"{scheme}{secure}://{server_address(config, config.server.http_port)}"


def api_key() -> str | None:
    """What a client shows to a server that wants a key."""
    return os.environ.get("EARSHOT_API_KEY")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a command have them; their defaults are those of `serve.contract.messages.Request`."""
    group = parser.add_argument_group("request options")
    group.add_argument(
        "--language", help="such as en, English or en-US; default, and auto: detected"
    )
    group.add_argument(
        "--languages",
        type=codes,
        default=Request.languages,
        metavar="CODE,CODE,…",
        help="detect it among these; default: as in the config",
    )
    group.add_argument(
        "--multilingual", action="store_true", help="detect it for each window of at most 30 s"
    )
    group.add_argument(
        "--task", choices=get_args(Task), default=Request.task, help=f"default: {Request.task}"
    )
    group.add_argument(
        "--prompt", default=Request.prompt, help="text before the audio: names, spelling, style"
    )
    group.add_argument(
        "--hotwords", default=Request.hotwords, help="names and terms that may be said anywhere"
    )
    group.add_argument(
        "--prefix",
        default=Request.prefix,
        help="words that the audio begins with; the answer goes on from them",
    )
    group.add_argument(
        "--mode",
        choices=get_args(Mode),
        help="sequential: each window knows the text before it; default: as in the config",
    )
    group.add_argument(
        "--partial",
        action=argparse.BooleanOptionalAction,
        help="transcribe what is there of a file that was cut short; default: as in the config",
    )
    group.add_argument(
        "--no-timestamps",
        dest="timestamps",
        action="store_false",
        help="one segment per window of at most 30 s",
    )
    group.add_argument(
        "--word-timestamps", action="store_true", help="when each word was said, in json"
    )
    group.add_argument(
        "--token-logprobs", action="store_true", help="log-probabilities of tokens, in json"
    )
    group.add_argument(
        "--hallucination-silence-threshold",
        type=float,
        metavar="SECONDS",
        help="leave out odd segments between longer silences; 0 is off; default: as in the config",
    )
    group.add_argument(
        "--clip-timestamps",
        type=_seconds,
        default=Request.clip_timestamps,
        metavar="START,END,…",
        help="decode only these stretches, in seconds; the last may go on to the end: 0,10,20",
    )
    group.add_argument(
        "--vad",
        action=argparse.BooleanOptionalAction,
        help="decode only speech; default: as in the config",
    )
    group.add_argument(
        "--temperature", type=float, help="0 to 1; default: 0, higher where that fails"
    )
    group.add_argument(
        "--short-encoder", action="store_true", help="encode the audio, not silence up to 30 s"
    )
    group.add_argument("--max-tokens", type=int, help="per window; default: as in the config")
    speech = parser.add_argument_group("speech options", "Defaults are those of the config.")
    speech.add_argument(
        "--vad-threshold", type=float, help="0 to 1: a likelier frame of 32 ms begins speech"
    )
    speech.add_argument("--vad-min-speech-s", type=float, help="what is no longer is no speech")
    speech.add_argument("--vad-min-silence-s", type=float, help="so much silence ends speech")
    speech.add_argument("--vad-pad-s", type=float, help="stays on either side of speech")
    search = parser.add_argument_group("search options", "Defaults are those of the config.")
    search.add_argument(
        "--beam-size", type=int, help="1 to 8 hypotheses, at temperature 0; 1 is greedy"
    )
    search.add_argument(
        "--patience", type=float, help="search on until there are beam size x patience hypotheses"
    )
    search.add_argument(
        "--length-penalty", type=float, help="they rank by log-probability / length ** penalty"
    )
    search.add_argument("--best-of", type=int, help="1 to 8 samples, at temperatures above 0")
    search.add_argument(
        "--repetition-penalty", type=float, help="above 1: tokens that were said become less likely"
    )
    search.add_argument(
        "--no-repeat-ngram-size", type=int, help="never say so many tokens twice in a row; 0 is off"
    )


def add_cue_options(parser: argparse.ArgumentParser) -> None:
    """Let a command have those of `serve.speech.cues.CueOptions`."""
    group = parser.add_argument_group("subtitles", "For --format srt and vtt.")
    group.add_argument(
        "--max-line-width",
        type=int,
        metavar="N",
        help="characters a line, of which East Asian ones count twice; "
        f"default: {CueOptions.max_line_width}",
    )
    group.add_argument(
        "--max-line-count",
        type=int,
        metavar="N",
        help=f"lines a cue; default: {CueOptions.max_line_count}",
    )
    group.add_argument(
        "--max-words-per-line", type=int, metavar="N", help="words a cue; 1: word by word"
    )
    group.add_argument(
        "--highlight-words",
        action="store_const",
        const=True,
        help="underline each word while it is said",
    )


def read_cue_options(args: argparse.Namespace, formats: Collection[str]) -> CueOptions:
    """How subtitles are split; the request that `request_of` makes will ask for what they need.

    Args:
        args: of `add_cue_options` and `add_options`.
        formats: those that are to be written.

    Raises:
        ConfigError: an option is wrong, or nothing is written that has it.
    """
    names = [field.name for field in dataclasses.fields(CueOptions)]
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    subtitles = any(format in SUBTITLES for format in formats)
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
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


def request_of(audio: bytes, args: argparse.Namespace) -> Request:
    """The request that the options ask for: each is a field by its name."""
    names = {field.name for field in dataclasses.fields(Request)}
    return Request(audio, **{name: value for name, value in vars(args).items() if name in names})
