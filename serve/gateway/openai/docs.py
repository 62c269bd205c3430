"""Descriptions of the HTTP routes: OpenAPI for programs, and a page for people made from it.

`openapi.json` describes everything but the fields of forms, which are added here.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

from serve.contract.options import Option
from serve.gateway.openai.fields import FIELDS
from serve.speech.file_types import EXPECTED

_DOCUMENT = Path(__file__).with_name("openapi.json")
_FORMS = "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/jobs"
_TYPES = {str: "string", float: "number", int: "integer", bool: "boolean"}
_STYLE = ":root{color-scheme:light dark}body{font-family:system-ui}th{text-align:left}"


def openapi() -> dict[str, Any]:
    """Describe the routes in OpenAPI 3.1."""
    document: dict[str, Any] = json.loads(_DOCUMENT.read_text(encoding="utf-8"))
    fields = {_wire_name(field): _schema(field) for field in FIELDS.values()}
    for path in _FORMS:
        for body in document["paths"][path]["post"]["requestBody"]["content"].values():
            body["schema"]["properties"] |= fields
    return document


def page() -> str:
    """Return an HTML page that describes the routes; it loads no other file."""
    document = openapi()
    rows = "".join(
        _row(f"{method.upper()} {path}", operation["summary"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    fields = _row(
        "file", f"the audio; {EXPECTED}; raw samples with a type such as audio/L16; rate=16000"
    )
    fields += "".join(_row(_wire_name(field), _description(field)) for field in FIELDS.values())
    responses = document["components"]["responses"]
    errors = "".join(
        _row(status, response["description"]) for status, response in responses.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Earshot</title>'
        '<meta name="viewport" content="width=device-width"><style>'
        f"{_STYLE}</style><h1>Earshot</h1><h2>Addresses</h2><table>{rows}</table>"
        "<h2>Fields of a form with audio</h2><p>multipart/form-data; all but <code>file</code> "
        f"may be left out.</p><table>{fields}</table><h2>Errors</h2>"
        '<p><code>{"error": {"message", "type", "param", "code"}}</code></p>'
        f"<table>{errors}</table></html>"
    )


def _row(name: str, text: str) -> str:
    return f"<tr><th><code>{escape(name)}</code></th><td>{escape(text)}</td></tr>"


def _wire_name(field: Option) -> str:
    return f"{field.name}[]" if field.many else field.name


def _description(field: Option) -> str:
    choices = f" ({', '.join(field.choices)})" if field.choices else ""
    return f"{field.meaning}{choices}"


def _schema(field: Option) -> dict[str, Any]:
    value: dict[str, Any] = {"type": _TYPES[field.kind]}
    if field.choices:
        value["enum"] = list(field.choices)
    schema = {"type": "array", "items": value} if field.many else value
    return {**schema, "description": field.meaning}
