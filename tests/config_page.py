"""The page docs/config.md, made of the dataclasses: `python -m tests.config_page` writes it."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.config import EvaluationProduct
from serve.contract.codec import flat, read_toml, to_json
from serve.contract.config import REMOVED as REMOVED_FILE

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
BEGIN = """\
# Configuration

[Back to the start](../README.md)

Which keys does a config have? A config is one TOML file, such as `configs/base.toml`. Each table
below is a section of it. A key that the file leaves out has its default.
`python -m tests.config_page` makes this page.
"""
_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text"}
_COMMENTED = re.compile(r"((?:^    # .*\n)+)    (\w+):", re.MULTILINE)
_LARGE = 1e7  # a bound that only keeps numbers finite


REMOVED = frozenset(flat(read_toml(REMOVED_FILE)))
"""Places that a file may not set."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a config's file."""

    section: str
    name: str
    type: str
    default: Any
    meaning: str  # "": none is written


def keys(kind: Any = EvaluationProduct, section: str = "") -> Iterator[Key]:
    """Return every key that a file may have, by section, a section's own keys first."""
    hints = typing.get_type_hints(kind, include_extras=True)
    meanings = dict(_meanings(kind))
    inner = []
    for field in dataclasses.fields(kind):
        place = f"{section}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(field.default):
            inner.append((type(field.default), place))
        elif place not in REMOVED:
            shown = _type(hints[field.name])
            yield Key(section, field.name, shown, field.default, meanings.get(field.name, ""))
    for sub, name in inner:
        yield from keys(sub, name)


def _meanings(kind: type) -> Iterator[tuple[str, str]]:
    """Return the comment above each field of a dataclass and of those that it inherits from."""
    for one in kind.__mro__[-2::-1]:
        for comment, name in _COMMENTED.findall(inspect.getsource(one)):
            yield name, " ".join(line.strip(" #") for line in comment.splitlines())


def _type(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        bounds = [bound for part in inner[1:] for bound in getattr(part, "metadata", ())]
        return _bounded(_type(inner[0]), {type(b).__name__: b for b in bounds})
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"list: {_type(inner[0])}"
        return f"[{', '.join(map(_type, inner))}]"
    return _TYPES[hint]


def _bounded(kind: str, bounds: dict[str, Any]) -> str:
    least = [f"{mark}{getattr(bounds[n], n.lower())}" for n, mark in _LEAST if n in bounds]
    most = [f"{mark}{getattr(bounds[n], n.lower())}" for n, mark in _MOST if n in bounds]
    most = [text for text in most if float(text.strip("≤< ")) < _LARGE]
    return " ".join([kind, *least, *most])


_LEAST, _MOST = (("Ge", "≥ "), ("Gt", "> ")), (("Le", "≤ "), ("Lt", "< "))


def page() -> str:
    """Return the page's text."""
    lines, section = [BEGIN], None
    for key in keys():
        if key.section != section:
            section = key.section
            title = f"`[{section}]`" if section else "Top of the file"
            lines.append(f"\n## {title}\n\n| key | type | default | |\n|---|---|---|---|\n")
        default = to_json(key.default)
        lines.append(f"| `{key.name}` | {key.type} | `{default}` | {key.meaning} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
