"""Messages name flags where the code that checks a request names fields."""

import pytest

from serve.cli.main import parser
from serve.contract.config import OPTIONS
from serve.contract.errors import ConfigError, OptionError
from serve.contract.flags import OTHER_FLAGS, WITHOUT_FLAG, in_flags, message_in_flags


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("ask with partial = true", "ask with --option partial=true"),
        ("ask for short_encoder = false", "ask for --option short_encoder=false"),
        ("ask for diarize = false", "ask for no --diarize"),
        ("timestamps = true, but it cannot", "--option timestamps=true, but it cannot"),
        ("the request: beam_size = 99; expected", "the request: --beam-size 99; expected"),
        ("languages = ['de', 'xx'] with", "--option languages=de,xx with"),
        ("known_speaker_names has 2 and", "--known-speaker has 2 and"),
        ("phrases is given, but", "--phrases is given, but"),
        # No fields: a key of a config, a word, an option without a flag, a file.
        ("transcriber.max_tokens = 3", "transcriber.max_tokens = 3"),
        ("the language 'xx' is unknown", "the language 'xx' is unknown"),
        ("'task = x.wav'", "'task = x.wav'"),
    ],
)
def test_fields_become_flags(message, shown):
    assert in_flags(message) == shown


def test_what_a_request_did_not_cause_stays_as_it_is():
    assert message_in_flags(OptionError("mode = 3")) == "--option mode=3"
    assert message_in_flags(ConfigError("some.toml: mode = 3")) == "some.toml: mode = 3"


def test_every_option_is_set_by_what_messages_name():
    for name, option in OPTIONS.items():
        if name in OTHER_FLAGS or name in WITHOUT_FLAG:
            continue
        value = "1" if option.kind in (int, float) else (option.choices or ("true",))[0]
        words = in_flags(f"`{name}`").split()
        if words[0] == "--option":
            words[1] += f"={value}"
        elif option.kind is not bool:
            words.append(value)
        args = parser().parse_args(["transcribe", "--config", "x", "y", *words])
        assert getattr(args, name) not in (None, ()), name
