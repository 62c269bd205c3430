"""Types of a config's keys: numbers with bounds, texts with a format."""

import ipaddress
import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from serve.contract.codec import text_that
from serve.contract.options import Switch, as_switch


def _is_device(text: str) -> bool:
    if not re.fullmatch(r"cpu(,cpu)*|cuda(:([0-9]{1,3}(,[0-9]{1,3})*|\*))?", text):
        return False
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return len(set(numbers)) == len(numbers)


def _switched(value: object) -> object:
    """Convert a boolean to its choice; pydantic checks other values."""
    return as_switch("vad", value) if isinstance(value, bool) else value


Count = Annotated[int, Field(gt=0, le=1_000_000_000)]
CountOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
_MAX_S = 10_000_000  # four months; the functions that wait cannot take an infinite timeout
Seconds = Annotated[Finite, Field(gt=0, le=_MAX_S)]
SecondsOrNone = Annotated[Finite, Field(ge=0, le=_MAX_S)]
Share = Annotated[Finite, Field(gt=0, le=1)]
Fraction = Annotated[Finite, Field(gt=0, lt=1)]
Temperature = Annotated[Finite, Field(ge=0, le=1)]
Temperatures = Annotated[tuple[Temperature, ...], Field(min_length=1)]
Port = Annotated[int, Field(gt=0, lt=65536)]
MAX_BEAMS = 8
ShortEncoder = Switch
VoiceActivity = Annotated[Switch, BeforeValidator(_switched)]
Beams = Annotated[int, Field(ge=1, le=MAX_BEAMS)]
Factor = Annotated[Finite, Field(ge=0.1, le=10)]
Power = Annotated[Finite, Field(ge=0, le=10)]
Moment = Annotated[Finite, Field(ge=0, le=10)]  # s
Name = Annotated[
    str, text_that(lambda text: text.strip() and text.isprintable(), "text of printable characters")
]
NameOrNone = Annotated[str, text_that(str.isprintable, "text of printable characters")]
Address = Annotated[str, text_that(ipaddress.IPv4Address, "an IPv4 address such as 127.0.0.1")]
Origin = Annotated[
    str,
    text_that(
        re.compile(r"https?://[^/\s?#@]+|null").fullmatch, "an origin such as https://example.org"
    ),
]
Host = Annotated[
    str,
    text_that(
        re.compile(r"[A-Za-z0-9._-]+").fullmatch,
        "a host name without a port, such as asr.example.org",
    ),
]
Device = Annotated[
    str,
    text_that(
        _is_device,
        '"cpu", "cuda" or "cuda:N"; or several without duplicates: "cuda:0,1", "cuda:*", "cpu,cpu"',
    ),
]
