"""Descriptions of the HTTP routes: OpenAPI for programs, and a page for people made from it."""

import re
from html import escape
from typing import Any, get_args

from serve.contract.messages import Task
from serve.contract.options import Option
from serve.gateway.openai.fields import FIELDS
from serve.speech.pcm import EXPECTED

_TYPES = {str: "string", float: "number", int: "integer", bool: "boolean"}
_AUDIO = {
    "/v1/audio/transcriptions": "Write down what a file says, in its language",
    "/v1/audio/translations": "Write down what a file says, in English",
}
_JOBS = "/v1/audio/jobs"
_JOB = "Keep a file, or a url, and write down later what it says: 202 and a job"
_SECRETS = "/v1/realtime/client_secrets"
_SECRET = "Make a short-lived key with which a browser opens sessions of live text"
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
    """Describe the addresses in OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Earshot",
            "version": "1",
            "description": "OpenAI's audio API before a Whisper of your own.",
        },
        "paths": {
            **{path: {"post": _audio(summary)} for path, summary in _AUDIO.items()},
            **{path: {"get": _other(path, summary)} for path, summary in _OTHERS.items()},
            _JOBS: {"post": _job(), "get": _other(_JOBS, _OTHERS[_JOBS])},
            _SECRETS: {"post": _secret()},
            f"{_JOBS}/{{id}}/cancel": {"post": _other(f"{_JOBS}/{{id}}/cancel", "End a job")},
        },
        "components": {"schemas": {"Error": _error()}},
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


def _schema(field: Option) -> dict[str, Any]:
    value: dict[str, Any] = {"type": _TYPES[field.kind]}
    if field.choices:
        value["enum"] = list(field.choices)
    whole = {"type": "array", "items": value} if field.many else value
    return {**whole, "description": field.meaning}


def _audio(summary: str) -> dict[str, Any]:
    properties = {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        **{_wire_name(field): _schema(field) for field in FIELDS.values()},
    }
    schema = {
        "type": "object",
        "required": ["file"],
        "properties": properties,
        "additionalProperties": False,
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}},
        "responses": {
            "200": {
                "description": "as `response_format` says, or as events where `stream` is true",
                "content": {
                    kind: {} for kind in ("application/json", "text/plain", "text/event-stream")
                },
            },
            **{status: _refusal(text) for status, text in _ERRORS.items()},
        },
    }


def _job() -> dict[str, Any]:
    """Describe how a job is sent: as a transcription is, and with where to tell of its end."""
    operation = _audio(_JOB)
    schema = operation["requestBody"]["content"]["multipart/form-data"]["schema"]
    text = {"type": "string"}
    schema["properties"] |= {
        "task": {**text, "enum": list(get_args(Task)), "description": "default: transcribe"},
        "webhook_url": {**text, "description": "is told of the job's end"},
    }
    properties = {**schema["properties"], "url": {**text, "description": "where the audio is"}}
    del properties["file"]
    by_url = {"type": "object", "required": ["url"], "properties": properties}
    operation["requestBody"]["content"]["application/json"] = {"schema": by_url}
    operation["responses"]["202"] = {"description": "the job"}
    del operation["responses"]["200"]
    return operation


def _secret() -> dict[str, Any]:
    """Describe how a client secret is made."""
    seconds = {"type": "integer", "minimum": 10, "maximum": 7200, "default": 600}
    expiry = {"anchor": {"type": "string", "enum": ["created_at"]}, "seconds": seconds}
    session = {"type": "object", "description": "settings, as of a session.update"}
    properties = {"expires_after": {"type": "object", "properties": expiry}, "session": session}
    schema = {"type": "object", "properties": properties}
    refused = {
        status: _refusal(text) for status, text in _ERRORS.items() if status in "400 429 503"
    }
    return {
        **_other(_SECRETS, _SECRET),
        "requestBody": {"content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "`value`, `expires_at` and `session`"}, **refused},
    }


def _other(path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "the answer"}},
    }
    if name := re.search(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name[1], "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _refusal(text: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": text, "content": content}


def _error() -> dict[str, Any]:
    text = {"type": "string"}
    maybe = {"type": ["string", "null"]}
    properties = {"message": text, "type": text, "param": maybe, "code": maybe}
    return {
        "type": "object",
        "properties": {"error": {"type": "object", "properties": properties}},
    }
