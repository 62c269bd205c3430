"""Text <-> frozen dataclasses: the one place where JSON and TOML are checked against types.

A field's annotation says all that is required of its value: `Annotated[int, Field(gt=0)]`, a
`Literal`, another dataclass. Reading is strict: an unknown key, a missing one or a value of another
type is an error that names the place, what was found and what was expected. Numbers with a point
may be written without; true and false are never numbers.
"""

import dataclasses
import difflib
import functools
import itertools
import json
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic
import pydantic_core
from pydantic_core import ErrorDetails

from serve.contract.errors import ConfigError, EarshotError, shown
from serve.contract.files import read_text

T = TypeVar("T")

_MAX_ERRORS = 1000  # beyond which it is not said where one is
_MAX_KEY_CHARS = 60  # of a key, where an error names it
_MAX_KEYS = 30
_UNKNOWN_KEY = "unexpected_keyword_argument"

# What is expected where pydantic reports an error of this kind; its context fills the braces.
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a table",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt:.10g}",
    "greater_than_equal": "at least {ge:.10g}",
    "int_type": "an integer",
    "less_than": "less than {lt:.10g}",
    "less_than_equal": "at most {le:.10g}",
    "literal_error": "{expected}",
    "string_type": "text",
    "too_long": "at most {max_length} of them",
    "too_short": "at least {min_length} of them",
    "tuple_type": "a list",
}


def from_json(
    kind: type[T],
    text: str | bytes,
    where: str,
    *,
    error: type[EarshotError] = ConfigError,
    advice: str = "",
    extra: Literal["forbid", "ignore"] = "forbid",
) -> T:
    """Read a value of `kind` from JSON.

    Args:
        kind: a dataclass, or a tuple or dict of them.
        text: UTF-8 where it is bytes.
        where: stands at the start of an error's message, such as the file's name.
        error: class of the error that is raised.
        advice: what to do about it; stands at the end of the message.
        extra: whether keys that are no field of their dataclass are refused or passed over.

    Raises:
        EarshotError: of class `error`; the text is not JSON, or not that of a `kind`.
    """
    try:
        value: T = _adapter(typing.cast(Any, kind)).validate_json(text, strict=True, extra=extra)
    except pydantic.ValidationError as problem:
        if problem.error_count() > _MAX_ERRORS:  # listing a million of them takes many seconds
            raise error(
                f"{where} has {problem.error_count()} errors; {advice or 'mend it'}"
            ) from None
        # An unknown key before a missing one: the latter may be the former, misspelt.
        errors = problem.errors(include_url=False)
        worst = min(errors, key=lambda details: details["type"] != _UNKNOWN_KEY)
        message = _sentence(kind, worst, where)
        raise error(f"{message}; {advice}" if advice else message) from problem
    return value


@dataclasses.dataclass(frozen=True)
class _Versioned:
    """The key that all versions of a format have."""

    format_version: int | None = None


def require_version(
    text: str | bytes,
    where: str,
    version: int,
    *,
    error: type[EarshotError] = ConfigError,
    advice: str,
) -> None:
    """Refuse JSON of another format version than `version`; arguments as in `from_json`.

    Raises:
        EarshotError: of class `error`; it states another version, none, or is not JSON.
    """
    versioned = from_json(_Versioned, text, where, error=error, advice=advice, extra="ignore")
    if versioned.format_version != version:
        raise error(
            f"{where} has format version {versioned.format_version}, this Earshot reads {version}; "
            f"{advice}"
        )


def parse_json(text: str | bytes) -> Any:
    """Read any JSON as plain values, whose texts UTF-8 can hold.

    Raises:
        ValueError: the text is not JSON, is nested more than 200 deep, or holds half a surrogate
            pair, such as "\\ud800".
    """
    return pydantic_core.from_json(text)


def text_that(check: Callable[[str], Any], expected: str) -> pydantic.AfterValidator:
    """Annotate text for which `check` gives something true; `expected` describes it."""

    def checked(text: str) -> str:
        if not check(text):
            raise pydantic_core.PydanticCustomError("text", "{expected}", {"expected": expected})
        return text

    return pydantic.AfterValidator(checked)


def to_json(value: Any, indent: int | None = None) -> str:
    """Write dataclasses, or plain values that hold some, as JSON; non-ASCII text as it is."""
    return pydantic_core.to_json(value, indent=indent).decode()


def read_toml(
    path: Path, advice: str = "expected a config, such as configs/demo.toml"
) -> dict[str, Any]:
    """Read the tables of a TOML file.

    Args:
        path: as it was named; it stands so in the error.
        advice: what to do if it cannot be read.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is not TOML.
    """
    try:
        return tomllib.loads(read_text(path, advice))
    except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def from_table(
    kind: type[T],
    table: Mapping[str, Any],
    where: str,
    *,
    error: type[EarshotError] = ConfigError,
    advice: str = "",
) -> T:
    """Read a dataclass from a table of TOML or JSON; arguments as in `from_json`.

    Raises:
        EarshotError: of class `error`; a key or a value is wrong.
    """
    # By way of JSON, whose lists may become tuples; TOML's dates alone have no JSON.
    text = json.dumps(table, default=lambda value: {"date or time": str(value)})
    return from_json(kind, text, where, error=error, advice=advice)


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _sentence(kind: Any, details: ErrorDetails, where: str) -> str:
    """Put one of pydantic's errors into our words."""
    problem, location, value = details["type"], details["loc"], details["input"]
    context = details.get("ctx", {})
    if problem == "json_invalid":
        return f"{where} is not JSON: {context['error']}"
    if problem == _UNKNOWN_KEY:
        *parents, key = location
        place = f"{where}: {_dotted(parents)}" if parents else where
        return f"{place}: unknown key {shown(key)}{nearest(str(key), _fields_at(kind, parents))}"
    if problem == "missing":
        has = f"; has {_listed(value) or 'no keys'}" if isinstance(value, dict) else ""
        return f"{where}: {_dotted(location)} is missing{has}"
    known = _EXPECTED.get(problem)
    expected = known.format(**context) if known else details["msg"]
    subject = f"{where}: {_dotted(location)} =" if location else f"{where} holds"
    return f"{subject} {shown(value)}; expected {expected}"


def _dotted(location: Sequence[int | str]) -> str:
    """Write a place as people do: runtime.slots, temperatures[0]."""
    steps = (
        f"[{step}]" if isinstance(step, int) else f".{step[:_MAX_KEY_CHARS]}" for step in location
    )
    return "".join(steps).removeprefix(".")


def _listed(keys: Iterable[str]) -> str:
    """List the first of a text's keys; they may be as many and as long as it likes."""
    return ", ".join(key[:_MAX_KEY_CHARS] for key in itertools.islice(keys, _MAX_KEYS))


def nearest(key: str, known: Sequence[str]) -> str:
    """Say after an unknown key which is meant, or which there are."""
    near = difflib.get_close_matches(key[:_MAX_KEY_CHARS], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def split_unknown(
    kind: Any, table: Mapping[str, Any], parents: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Split the keys that are no field of a dataclass from a table and from the tables in it.

    Args:
        kind: the dataclass that the table is to become.
        table: the keys and values.
        parents: the keys that lead to the table.

    Returns:
        The rest of the table; the unknown keys' dotted places, each with the field that its key
        resembles, or an empty text. A similar field is searched for the first keys alone, for a
        search takes longer than reading the key.
    """
    known, unknown = dict[str, Any](), dict[str, str]()
    fields = _fields_at(kind, parents)
    for key, value in table.items():
        place = [*parents, key]
        if key not in fields:
            near = []
            if len(unknown) < _MAX_KEYS:
                near = difflib.get_close_matches(key[:_MAX_KEY_CHARS], fields, n=1)
            unknown[_dotted(place)] = near[0] if near else ""
        elif isinstance(value, dict) and _fields_at(kind, place):
            known[key], more = split_unknown(kind, value, place)
            unknown |= more
        else:
            known[key] = value
    return known, unknown


def _fields_at(kind: Any, location: Sequence[int | str]) -> list[str]:
    """List the fields of the dataclass at a place; indices and a dict's keys stay in it."""
    fields = _hints(kind)
    for step in location:
        if step in fields:
            fields = _hints(fields[str(step)])
    return list(fields)


_type_hints = functools.cache(typing.get_type_hints)


def _hints(hint: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, or of the one that a tuple, dict or union holds."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _type_hints(hint)
    return next(filter(None, map(_hints, typing.get_args(hint))), {})
