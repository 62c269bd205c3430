"""Convert JSON and TOML to frozen dataclasses, and check them against their types.

A field's annotation has all constraints of the value: `Annotated[int, Field(gt=0)]`, a `Literal`,
another dataclass. Reading is strict: an unknown key, a missing key or a wrong type is an error that
names the key, the found value and the expected one. An integer is accepted as a float; true and
false are never numbers.
"""

import contextlib
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

from serve.contract.errors import ConfigError, shown
from serve.contract.files import read_text

T = TypeVar("T")

_MAX_ERRORS = 1000  # with more, the message has only their number
_MAX_KEY_CHARS = 60  # characters of a key in an error message
_MAX_KEYS = 30
_UNKNOWN_KEY = "unexpected_keyword_argument"

# The expected value for each type of pydantic error; the error's context fills the braces.
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
    error: Callable[[str], Exception] = ConfigError,
    advice: str = "",
    extra: Literal["forbid", "ignore"] = "forbid",
) -> T:
    """Read a value of `kind` from JSON.

    Args:
        kind: a dataclass, or a tuple or dict of them.
        text: the JSON; bytes are UTF-8.
        where: the start of the error message, such as the file's name.
        error: the class of the error to raise, or a function that makes it of a message.
        advice: the end of the error message: what to do.
        extra: whether unknown keys are rejected or ignored.

    Raises:
        EarshotError: `error`; the text is not JSON, or not a valid `kind`.
    """
    try:
        value: T = _adapter(typing.cast(Any, kind)).validate_json(text, strict=True, extra=extra)
    except pydantic.ValidationError as problem:
        if problem.error_count() > _MAX_ERRORS:  # listing a million of them takes many seconds
            raise error(
                f"{where} has {problem.error_count()} errors; {advice or 'correct it'}"
            ) from None
        # Report an unknown key first: it may be a misspelt form of the missing one.
        errors = problem.errors(include_url=False)
        reported = min(errors, key=lambda details: details["type"] != _UNKNOWN_KEY)
        message = _error_message(kind, reported, where)
        raise error(f"{message}; {advice}" if advice else message) from problem
    return value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON to plain values; all texts are valid Unicode.

    Raises:
        ValueError: the text is not JSON, has more than 200 levels, or has half a surrogate pair,
            such as "\\ud800".
    """
    return pydantic_core.from_json(text)


def text_that(check: Callable[[str], Any], expected: str) -> pydantic.AfterValidator:
    """Make a validator that rejects a text if `check` returns false or raises a ValueError.

    `expected` describes valid texts in the error message.
    """

    def checked(text: str) -> str:
        with contextlib.suppress(ValueError):
            if check(text):
                return text
        raise pydantic_core.PydanticCustomError("text", "{expected}", {"expected": expected})

    return pydantic.AfterValidator(checked)


def to_json(value: Any, indent: int | None = None) -> str:
    """Serialize dataclasses and plain values as JSON, without escapes for non-ASCII text."""
    return pydantic_core.to_json(value, indent=indent).decode()


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            values |= flat(value, f"{above}{key}.")
        else:
            values[f"{above}{key}"] = value
    return values


def read_toml(
    path: Path, advice: str = "expected a config, such as configs/demo.toml"
) -> dict[str, Any]:
    """Read the tables of a TOML file.

    Args:
        path: the path; the error message shows it unchanged.
        advice: the end of the error message: what to do.

    Raises:
        FileError: the file cannot be read.
        ConfigError: the file is not TOML.
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
    error: Callable[[str], Exception] = ConfigError,
    advice: str = "",
) -> T:
    """Read a dataclass from a table of TOML or JSON; see `from_json` for the arguments.

    Raises:
        EarshotError: `error`; a key or a value is wrong.
    """
    # Convert to JSON first: strict reading of JSON accepts lists as tuples. Dates have no JSON.
    text = json.dumps(table, default=lambda value: {"date or time": str(value)})
    return from_json(kind, text, where, error=error, advice=advice)


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _error_message(kind: Any, details: ErrorDetails, where: str) -> str:
    """Return the message of one pydantic error."""
    problem, location, value = details["type"], details["loc"], details["input"]
    context = details.get("ctx", {})
    if problem == "json_invalid":
        return f"{where} is not JSON: {context['error']}"
    if problem == _UNKNOWN_KEY:
        *parents, key = location
        table = f"{where}: {_format_location(parents)}" if parents else where
        return f"{table}: unknown key {shown(key)}{nearest(str(key), _fields_at(kind, parents))}"
    if problem == "missing":
        found_keys = f"; has {_list_keys(value) or 'no keys'}" if isinstance(value, dict) else ""
        return f"{where}: {_format_location(location)} is missing{found_keys}"
    template = _EXPECTED.get(problem)
    expected = template.format(**context) if template else details["msg"]
    subject = f"{where}: {_format_location(location)} =" if location else f"{where} holds"
    return f"{subject} {shown(value)}; expected {expected}"


def _format_location(location: Sequence[int | str]) -> str:
    """Format a location, such as runtime.slots or temperatures[0]."""
    steps = (
        f"[{step}]" if isinstance(step, int) else f".{step[:_MAX_KEY_CHARS]}" for step in location
    )
    return "".join(steps).removeprefix(".")


def _list_keys(keys: Iterable[str]) -> str:
    """List the first keys of a table; the input bounds neither their number nor their length."""
    return ", ".join(key[:_MAX_KEY_CHARS] for key in itertools.islice(keys, _MAX_KEYS))


def nearest(key: str, known: Sequence[str]) -> str:
    """Return the hint for an unknown key: the most similar known key, or all known keys."""
    matches = difflib.get_close_matches(key[:_MAX_KEY_CHARS], known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known: {', '.join(known)}"


def split_unknown(
    kind: Any, table: Mapping[str, Any], parents: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Split a table, with its inner tables, into known and unknown keys of a dataclass.

    Args:
        kind: the dataclass.
        table: the keys and values.
        parents: the keys that lead to the table.

    Returns:
        The table without unknown keys, and the unknown keys: dotted location -> the most similar
        field, or "". Only the first keys get a similar field, because the search is slow.
    """
    known, unknown = dict[str, Any](), dict[str, str]()
    fields = _fields_at(kind, parents)
    for key, value in table.items():
        location = [*parents, key]
        if key not in fields:
            matches = []
            if len(unknown) < _MAX_KEYS:
                matches = difflib.get_close_matches(key[:_MAX_KEY_CHARS], fields, n=1)
            unknown[_format_location(location)] = matches[0] if matches else ""
        elif isinstance(value, dict) and _fields_at(kind, location):
            known[key], inner_unknown = split_unknown(kind, value, location)
            unknown |= inner_unknown
        else:
            known[key] = value
    return known, unknown


def _fields_at(kind: Any, location: Sequence[int | str]) -> list[str]:
    """List the fields of the dataclass at a location; skip indices and keys of a dict."""
    fields = _hints(kind)
    for step in location:
        if step in fields:
            fields = _hints(fields[str(step)])
    return list(fields)


_type_hints = functools.cache(typing.get_type_hints)


def _hints(hint: Any) -> dict[str, Any]:
    """Return the field types of a dataclass, or of the first one in a tuple, dict or union."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _type_hints(hint)
    return next(filter(None, map(_hints, typing.get_args(hint))), {})
