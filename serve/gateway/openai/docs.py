"""Descriptions of the HTTP routes: OpenAPI for programs, and a page for people made from it."""

import re
from collections.abc import Collection
from html import escape
from typing import Any, get_args

from serve.contract.messages import Task
from serve.contract.options import Option
from serve.gateway.openai.fields import FIELDS
from serve.speech.file_types import EXPECTED

_TYPES = {str: "string", float: "number", int: "integer", bool: "boolean"}
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ANSWERS = ("application/json", "text/plain", "text/event-stream")
_JOBS = "/v1/audio/jobs"
_AUDIO = {
    "/v1/audio/transcriptions": "Write down what a file says, in its language",
    "/v1/audio/translations": "Write down what a file says, in English",
}
_OTHERS = {
    _JOBS: "The caller's jobs, the newest first: ?limit= and ?after=",
    f"{_JOBS}/{{id}}": "One of them; POST …/cancel ends it",
    f"{_JOBS}/{{id}}/result": "What it has written down, in any format: ?response_format=srt",
    "/v1/models": "The names that `model` may have",
    "/v1/models/{model}": "One of them",
    "/v1/usage": "What the caller's key has had, by day and model, of ?start= and ?end=",
    "/v1/shadow": "What the shadow monitor has found, for keys of `shadow.readers`",
    "/": "A page for people",
    "/state": "What that page shows of the server",
    "/health": "Whether a request that came now would be answered: 200, else 503",
    "/metrics": "What is counted, for Prometheus",
    "/openapi.json": "This, for programs",
    "/v2": "KServe v2: metadata; below it live, ready and infer, as Triton has them",
}
_ERRORS = {
    "400": "a field is wrong, or the file is no audio; `param` names it",
    "404": "there is no such model",
    "408": "the request took too long to come; try again",
    "413": "the request is too large",
    "415": "the body is no form",
    "422": "the audio is longer, or more work, than this server takes",
    "429": "the server has enough to do, or the key has had its share; Retry-After says when to "
    "come again",
    "503": "the server stops or starts; Retry-After says when to come again",
}
_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;"
    "margin:2rem auto;padding:0 1rem}table{border-collapse:collapse}td,th{text-align:left;"
    "vertical-align:top;padding:.2rem 1rem .2rem 0;border-bottom:1px solid #8884}"
)


def openapi() -> dict[str, Any]:
    """Describe the routes in OpenAPI 3.1."""
    error_fields = {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Earshot",
            "version": "1",
            "description": "OpenAI's audio API before a Whisper of your own.",
        },
        "paths": {
            **{path: {"post": _audio(path, summary)} for path, summary in _AUDIO.items()},
            **{path: {"get": _operation(path, summary)} for path, summary in _OTHERS.items()},
            _JOBS: {"post": _job(), "get": _operation(_JOBS, _OTHERS[_JOBS])},
            "/v1/realtime/client_secrets": {"post": _secret()},
            f"{_JOBS}/{{id}}/cancel": {"post": _operation(f"{_JOBS}/{{id}}/cancel", "End a job")},
        },
        "components": {"schemas": {"Error": _object({"error": _object(error_fields)})}},
    }


def page() -> str:
    """Describe the addresses on an HTML page that loads nothing."""
    document = openapi()
    rows = "".join(
        _row(f"{method.upper()} {path}", operation["summary"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    fields = _row(
        "file", f"the audio; {EXPECTED}; raw samples with a type such as audio/L16; rate=16000"
    )
    fields += "".join(_row(_wire_name(field), _meaning(field)) for field in FIELDS.values())
    errors = "".join(_row(status, text) for status, text in _ERRORS.items())
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


def _meaning(field: Option) -> str:
    choices = f" ({', '.join(field.choices)})" if field.choices else ""
    return f"{field.meaning}{choices}"


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def _schema(field: Option) -> dict[str, Any]:
    value: dict[str, Any] = {"type": _TYPES[field.kind]}
    if field.choices:
        value["enum"] = list(field.choices)
    whole = {"type": "array", "items": value} if field.many else value
    return {**whole, "description": field.meaning}


def _operation(
    path: str,
    summary: str,
    answer: str = "the answer",
    content: dict[str, Any] | None = None,
    errors: Collection[str] = (),
) -> dict[str, Any]:
    """Describe an operation.

    Args:
        path: its path, in which a name in braces is a parameter.
        summary: its summary.
        answer: the description of the answer with status 200.
        content: the schemas of the answer's body, by media type; None: it has no body.
        errors: the statuses of errors.
    """
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {
        status: {"description": _ERRORS[status], "content": error} for status in errors
    }
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": answer}, **responses},
    }
    if content is not None:
        schemas = {kind: {"schema": schema} for kind, schema in content.items()}
        operation["requestBody"] = {"content": schemas}
    if name := re.search(r"{(\w+)}", path):
        parameter = {"name": name[1], "in": "path", "required": True, "schema": _TEXT}
        operation["parameters"] = [parameter]
    return operation


def _audio(path: str, summary: str) -> dict[str, Any]:
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    fields = {_wire_name(field): _schema(field) for field in FIELDS.values()}
    form = _object({"file": file, **fields}, required=["file"], additionalProperties=False)
    answer = "as `response_format` says, or as events where `stream` is true"
    operation = _operation(path, summary, answer, {"multipart/form-data": form}, _ERRORS)
    operation["requestBody"]["required"] = True
    operation["responses"]["200"]["content"] = {kind: {} for kind in _ANSWERS}
    return operation


def _job() -> dict[str, Any]:
    """Describe how a job is sent: as a transcription, with the address of a webhook."""
    summary = "Keep a file, or a url, and write down later what it says: 202 and a job"
    operation = _audio(_JOBS, summary)
    content, responses = operation["requestBody"]["content"], operation["responses"]
    properties = content["multipart/form-data"]["schema"]["properties"]
    properties |= {
        "task": {**_TEXT, "enum": list(get_args(Task)), "description": "default: transcribe"},
        "webhook_url": {**_TEXT, "description": "is told of the job's end"},
    }
    by_url = {**properties, "url": {**_TEXT, "description": "where the audio is"}}
    del by_url["file"]
    content["application/json"] = {"schema": _object(by_url, required=["url"])}
    responses["202"] = {"description": "the job"}
    del responses["200"]
    return operation


def _secret() -> dict[str, Any]:
    """Describe how a client secret is made."""
    seconds = {"type": "integer", "minimum": 10, "maximum": 7200, "default": 600}
    expiry = _object({"anchor": {**_TEXT, "enum": ["created_at"]}, "seconds": seconds})
    session = {"type": "object", "description": "settings, as of a session.update"}
    body = {"application/json": _object({"expires_after": expiry, "session": session})}
    summary = "Make a short-lived key with which a browser opens sessions of live text"
    answer = "`value`, `expires_at` and `session`"
    return _operation("", summary, answer, body, ("400", "429", "503"))
