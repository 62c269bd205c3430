"""What is made of a field's declaration."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from serve.contract.options import Option, option, options_of


@dataclasses.dataclass(frozen=True)
class Limits:
    size: Annotated[int, Field(ge=2)] = option(4, "so many", help="as many as that")


@dataclasses.dataclass(frozen=True)
class Asked:
    audio: bytes
    mode: Literal["a", "b"] | None = option(None, "how", max_bytes=8)
    times: Sequence[float] = option((), "when", metavar="S,S")
    guess: tuple[int, ...] = option((), "what")
    again: bool = option(True, "whether")
    size: int | None = None
    rest: int = 0


def test_an_option_is_what_its_field_declares_here_or_in_the_config():
    assert list(options_of(Asked, Limits).values()) == [
        Option("mode", str, "how", choices=("a", "b"), help="how", max_bytes=8),
        Option("times", float, "when", many=True, default=(), help="when", metavar="S,S"),
        Option("guess", int, "what", many=True, default=(), help="what"),
        Option("again", bool, "whether", default=True, help="whether"),
        Option("size", int, "so many", help="as many as that"),
    ]
    assert "size" not in options_of(Asked)
    assert (Asked(b"").again, Limits().size) == (True, 4)
