"""The description of the HTTP routes in OpenAPI.

`openapi.json` describes everything but the fields of forms, which are added here.
"""

import json
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.contract.options import Option
from serve.gateway.openai.fields import FIELDS

_DOCUMENT = Path(__file__).with_name("openapi.json")
_FORMS = "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/jobs"
_TYPES = {str: "string", float: "number", int: "integer", bool: "boolean"}


async def openapi(request: Request) -> Response:
    """Describe the routes in OpenAPI 3.1."""
    document: dict[str, Any] = json.loads(_DOCUMENT.read_text(encoding="utf-8"))
    fields = {
        f"{field.name}[]" if field.many else field.name: _schema(field) for field in FIELDS.values()
    }
    for path in _FORMS:
        for body in document["paths"][path]["post"]["requestBody"]["content"].values():
            body["schema"]["properties"] |= fields
    return JSONResponse(document)


def _schema(field: Option) -> dict[str, Any]:
    value: dict[str, Any] = {"type": _TYPES[field.kind]}
    if field.choices:
        value["enum"] = list(field.choices)
    schema = {"type": "array", "items": value} if field.many else value
    return {**schema, "description": field.meaning}
