"""The one declaration of a field that users may set: tensors, flags, forms are made of it.

The fields are those of `serve.contract.messages.Request`, some of which
`serve.contract.config` declares, and those of `serve.speech.cues.CueOptions`.
"""

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from serve.contract.errors import OptionError, shown

T = TypeVar("T")

Switch = Literal["auto", "on", "off"]
SWITCH = typing.get_args(Switch)
"""The choices of an option that may also be true or false."""
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_SWITCHED: dict[str, Switch] = {
    **{"auto": "auto", "on": "on", "true": "on", "1": "on"},
    **{"off": "off", "false": "off", "0": "off"},
}


@dataclasses.dataclass(frozen=True)
class Option:
    """A field as those see it who let users set it."""

    name: str
    kind: type  # bool, int, float or str: of its value, or of each of `many`
    meaning: str
    many: bool = False
    choices: tuple[str, ...] = ()  # (): any value
    default: Any = None  # None: as configured, or nothing
    max_bytes: int | None = None  # of its tensor; None: as many as a request may have


def option(default: T, meaning: str, *, max_bytes: int | None = None) -> T:
    """Declare a dataclass's field as an option; see `Option`."""
    metadata = {"meaning": meaning, "max_bytes": max_bytes}
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


def as_switch(name: str, value: object) -> Switch:
    """Return the choice of `SWITCH` that a client's text or boolean names.

    Raises:
        OptionError: it names none.
    """
    chosen = _SWITCHED.get(str(value).lower()) if isinstance(value, bool | str) else None
    if chosen is None:
        raise OptionError(f"{name} = {shown(value)}; expected auto, on, off, true or false")
    return chosen


def parse(option: Option, text: str) -> Any:
    """Read an option's value from a form or a command line.

    Args:
        option: names the type; of `many`, a tuple is read, with commas between its items.
        text: as the client wrote it.

    Raises:
        OptionError: the text is no such value.
    """
    if option.many:
        item = dataclasses.replace(option, many=False)
        return tuple(parse(item, part.strip()) for part in text.split(","))
    if option.choices == SWITCH:
        return as_switch(option.name, text)
    read, expected = _READERS[option.kind]
    if option.choices:
        expected = f"one of {', '.join(option.choices)}"
    with contextlib.suppress(ValueError, KeyError):
        value = read(text)
        if not option.choices or value in option.choices:
            return value
    raise OptionError(f"{option.name} = {shown(text)}; expected {expected}")


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError
    return int(text)


_READERS: dict[type, tuple[Callable[[str], Any], str]] = {
    str: (str, "text"),
    float: (_number, "a number"),
    int: (_whole, "a whole number"),
    bool: (lambda text: _BOOLEANS[text.lower()], "true or false"),
}


def options_of(kind: Any, *others: Any) -> dict[str, Option]:
    """Collect a dataclass's options by their names, in their order.

    Args:
        kind: has a field of each.
        others: dataclasses that declare the options of their fields where `kind` does not.
    """
    hints = typing.get_type_hints(kind)
    declared = {field.name: field for other in others for field in dataclasses.fields(other)}
    options = {}
    for field in dataclasses.fields(kind):
        if metadata := field.metadata or declared.get(field.name, field).metadata:
            form = _form(hints[field.name])
            options[field.name] = Option(field.name, default=field.default, **form, **metadata)
    return options


def _form(hint: Any) -> dict[str, Any]:
    """Read a field's type, as arguments of `Option`."""
    inner = typing.get_args(hint)
    if type(None) in inner:
        return _form(inner[0])
    if typing.get_origin(hint) is Literal:
        return {"kind": str, "choices": inner}
    return {"kind": inner[0], "many": True} if inner else {"kind": hint}
