"""Jobs on their way in: forms with a file, or JSON with a url."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from starlette.requests import Request

from serve.contract.codec import parse_json, to_json
from serve.contract.errors import shown
from serve.contract.messages import Task
from serve.contract.server_config import UnknownFields
from serve.gateway import errors
from serve.gateway.edge.uploads import whole_body
from serve.gateway.errors import field_error
from serve.gateway.limits import Permit, check_json
from serve.gateway.openai.fields import FormFields, read_fields

_MAX_JSON_BYTES = 2**20
_OWN = ("task", "webhook_url", "url")  # fields that requests for a transcript do not have
_EXPECTED = 'expected an object such as {"url": "https://files.example.org/a.mp3"}'

Pairs = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A job as its client asks for it, without its file."""

    pairs: Pairs  # of the fields that are a transcription's
    fields: FormFields  # what these say
    url: str
    webhook_url: str


def read_asked(pairs: Iterable[tuple[str, str]], unknown: UnknownFields, has_file: bool) -> Asked:
    """Read a job's fields.

    Args:
        pairs: names and texts in their order.
        unknown: what becomes of unknown ones.
        has_file: whether the audio came beside them.

    Raises:
        ApiError: one is unknown, malformed, or cannot be honoured.
    """
    own: dict[str, str] = {}
    rest: list[tuple[str, str]] = []
    for name, text in pairs:
        if name not in _OWN:
            rest.append((name, text))
        elif name in own:
            raise field_error(name, f"{name} came more than once; expected it once")
        elif text:
            own[name] = text
    if has_file and "url" in own:
        raise field_error("url", "url came beside a file; expected one of them")
    if not has_file and "url" not in own:
        raise field_error("url", f"url is missing; {_EXPECTED}, or a form with a file")
    fields = read_fields(rest, _task(own.get("task", "transcribe")), unknown)
    if fields.stream:
        raise field_error("stream", "stream = true of a job, whose answer is fetched later")
    return Asked(tuple(rest), fields, own.get("url", ""), own.get("webhook_url", ""))


def _task(text: str) -> Task:
    for task in get_args(Task):
        if text == task:
            return task  # type: ignore[no-any-return]
    raise field_error("task", f"task = {shown(text)}; expected one of {', '.join(get_args(Task))}")


async def json_pairs(request: Request, ticket: Permit, limit_s: float) -> Pairs:
    """Receive a JSON object as the pairs that a form would have.

    Raises:
        ApiError: it is none, too large, or too slow.
    """
    text = await whole_body(request, ticket, limit_s, _require_small)
    check_json(text, "the job")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise errors.invalid(f"the body is not JSON: {error}; {_EXPECTED}") from None
    if not isinstance(found, Mapping):
        raise errors.invalid(f"the body is no JSON object; {_EXPECTED}")
    return tuple((name, text) for name, value in found.items() for text in _texts(value))


def _require_small(size: int) -> None:
    if size > _MAX_JSON_BYTES:
        raise errors.too_large(
            f"the job's JSON has {size} bytes; expected at most {_MAX_JSON_BYTES}: send what is "
            "larger in a form"
        )


def _texts(value: Any) -> list[str]:
    """Write a value as a form does; each of a list is a text of its own."""
    if value is None:
        return []
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value if isinstance(value, str) else to_json(value)]
