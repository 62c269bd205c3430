"""Declare the options that users may set; tensors, flags and forms are generated from them.

Options are fields of `Request`, `SearchOptions` and `SpeechOptions` in `serve.contract.messages`,
and of `serve.speech.cues.CueOptions`.
"""

import contextlib
import dataclasses
import math
import numbers
import re
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from serve.contract.errors import OptionError, shown

T = TypeVar("T")

Switch = Literal["auto", "on", "off"]
SWITCH_CHOICES = typing.get_args(Switch)
"""The choices of an option that may also be true or false."""
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_SWITCHED: dict[str, Switch] = {
    **{"auto": "auto", "on": "on", "true": "on", "1": "on"},
    **{"off": "off", "false": "off", "0": "off"},
}


@dataclasses.dataclass(frozen=True)
class Option:
    """The declaration of an option."""

    name: str
    kind: type  # bool, int, float or str: the type of the value, or of each item if `many`
    meaning: str
    many: bool = False
    choices: tuple[str, ...] = ()  # (): any value
    default: Any = None  # None: as configured, or nothing
    max_bytes: int | None = None  # the largest tensor; None: as large as a request may be


def option(default: T, meaning: str, *, max_bytes: int | None = None) -> T:
    """Declare a field of a dataclass as an option; see `Option`."""
    metadata = {"meaning": meaning, "max_bytes": max_bytes}
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


def as_switch(name: str, value: object) -> Switch:
    """Convert a client's text or boolean to a choice of `SWITCH_CHOICES`.

    Raises:
        OptionError: the value is not one of them.
    """
    choice = _SWITCHED.get(str(value).lower()) if isinstance(value, bool | str) else None
    if choice is None:
        raise OptionError(f"{name} = {shown(value)}; expected auto, on, off, true or false")
    return choice


def parse(option: Option, text: str) -> Any:
    """Read an option's value from a form or a command line.

    Args:
        option: the option; if it is `many`, the items are separated by commas.
        text: the client's text.

    Raises:
        OptionError: the text is not a value of the option.
    """
    if option.many:
        item = dataclasses.replace(option, many=False)
        return tuple(parse(item, part.strip()) for part in text.split(","))
    if option.choices == SWITCH_CHOICES:
        return as_switch(option.name, text)
    parse_value, _, expected = _KINDS[option.kind]
    if option.choices:
        expected = f"one of {', '.join(option.choices)}"
    with contextlib.suppress(ValueError, KeyError):
        value = parse_value(text)
        if not option.choices or value in option.choices:
            return value
    raise OptionError(f"{option.name} = {shown(text)}; expected {expected}")


def checked(option: Option, value: object) -> Any:
    """Return an option's value, or a list of its items, after a check of the types.

    Raises:
        OptionError: the value has another type, which NumPy would convert silently, or it is an
            integer that INT32 cannot hold.
    """
    if option.many:
        if not isinstance(value, tuple | list):
            raise OptionError(f"{option.name} = {shown(value)}; expected a list")
        item = dataclasses.replace(option, many=False)
        return [checked(item, item_value) for item_value in value]
    if option.choices == SWITCH_CHOICES:
        return as_switch(option.name, value)
    _, kind, expected = _KINDS[option.kind]
    has_type = isinstance(value, kind) and isinstance(value, bool) == (option.kind is bool)
    if has_type and isinstance(value, int) and abs(value) >= _INT32_LIMIT:
        has_type, expected = False, f"{expected} below {_INT32_LIMIT}"
    if not has_type:
        raise OptionError(f"{option.name} = {shown(value)}; expected {expected}")
    return value


def _parse_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _parse_integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError
    return int(text)


_INT32_LIMIT = 2**31  # the first integer that INT32 cannot hold
# For each kind of option: the function that reads a text, the type of its values, its name.
_KINDS: dict[type, tuple[Callable[[str], Any], type, str]] = {
    str: (str, str, "text"),
    float: (_parse_number, numbers.Real, "a number"),
    int: (_parse_integer, numbers.Integral, "a whole number"),
    bool: (lambda text: _BOOLEANS[text.lower()], bool, "true or false"),
}


def options_of(kind: Any, *declaring: Any) -> dict[str, Option]:
    """Return the options of a dataclass by name, in the order of the fields.

    Args:
        kind: the dataclass with the fields.
        declaring: dataclasses that declare fields of the same names as options.
    """
    hints = typing.get_type_hints(kind)
    declared = {field.name: field for other in declaring for field in dataclasses.fields(other)}
    options = {}
    for field in dataclasses.fields(kind):
        if metadata := field.metadata or declared.get(field.name, field).metadata:
            type_facts = _type_facts(hints[field.name])
            options[field.name] = Option(
                field.name, default=field.default, **type_facts, **metadata
            )
    return options


def _type_facts(hint: Any) -> dict[str, Any]:
    """Convert a field's type to arguments of `Option`."""
    inner = typing.get_args(hint)
    if type(None) in inner:
        return _type_facts(inner[0])
    if typing.get_origin(hint) is Literal:
        return {"kind": str, "choices": inner}
    return {"kind": inner[0], "many": True} if inner else {"kind": hint}
