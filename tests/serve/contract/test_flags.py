"""Messages name flags where the code that checks a request names fields."""

import pytest

from serve.cli.main import parser
from serve.contract.config import OPTIONS
from serve.contract.errors import ConfigError, OptionError
from serve.contract.flags import OTHERWISE, WITHOUT, in_flags, told


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("ask with partial = true", "ask with --partial"),
        ("ask with `partial`", "ask with --partial"),
        ("ask for short_encoder = false", "ask for --no-short-encoder"),
        ("ask for diarize = false", "ask for no --diarize"),
        ("timestamps = true, but it cannot", "no --no-timestamps, but it cannot"),
        ("the request: beam_size = 99; expected", "the request: --beam-size 99; expected"),
        ("languages = ['de', 'xx'] with", "--languages de,xx with"),
        ("known_speaker_names has 2 and", "--known-speaker has 2 and"),
        ("clip_timestamps has 3 to 2 s", "--clip-timestamps has 3 to 2 s"),
        ("phrases is given, but", "--phrases is given, but"),
        # No fields: a key of a config, a word, an option without a flag, a file.
        ("transcriber.max_tokens = 3", "transcriber.max_tokens = 3"),
        ("the language 'xx' is unknown", "the language 'xx' is unknown"),
        ("a mode has a prompt", "a mode has a prompt"),
        ("draft = (1,)", "draft = (1,)"),
        ("'task = x.wav'", "'task = x.wav'"),
    ],
)
def test_fields_become_flags(message, shown):
    assert in_flags(message) == shown


def test_what_a_request_did_not_cause_stays_as_it_is():
    assert told(OptionError("mode = 3")) == "--mode 3"
    assert told(ConfigError("some.toml: mode = 3")) == "some.toml: mode = 3"


def test_every_flag_is_one_of_the_command():
    flags = parser().parse_args(["transcribe", "--config", "x", "y"])
    for name, option in OPTIONS.items():
        if name not in OTHERWISE and name not in WITHOUT:
            assert name in flags and in_flags(f"`{name}`") == option.flag
