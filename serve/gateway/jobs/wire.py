"""The forms of jobs in the API: requests, descriptions, and results in every format."""

import dataclasses
import json
from typing import Any, cast, get_args

from starlette.requests import Request

from serve.contract.codec import from_json, to_json
from serve.contract.errors import EarshotError, RequestError
from serve.contract.messages import Task, Transcript
from serve.contract.options import Option
from serve.contract.server_config import UnknownFields
from serve.gateway.edge.uploads import json_object
from serve.gateway.errors import ApiError, field_error, invalid, require_known
from serve.gateway.jobs.table import COMPLETED, OPEN, JobRecord
from serve.gateway.limits import Permit
from serve.gateway.openai.answers import render_transcript
from serve.gateway.openai.fields import FormFields, read_field, read_fields
from serve.gateway.openai.form import MAX_FIELDS
from serve.speech.cues import CUE_OPTIONS

_MAX_JSON_BYTES = 2**20
_OWN_FIELDS = ("task", "webhook_url", "url")  # which other requests do not have
_EXPECTED = 'expected an object such as {"url": "https://files.example.org/a.mp3"}'
_FORMAT = "response_format"
_PARAMETERS = (_FORMAT, *CUE_OPTIONS)

_TASK = Option("task", str, "", choices=get_args(Task))

Pairs = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class JobForm:
    """The fields of a request for a job, without its file."""

    pairs: Pairs  # names and texts of the fields that other requests have, too
    fields: FormFields  # these, as they were read
    url: str
    webhook_url: str


def read_job_form(pairs: Pairs, unknown: UnknownFields, has_file: bool) -> JobForm:
    """Read the fields of a request for a job.

    Args:
        pairs: names and texts in their order.
        unknown: the treatment of unknown fields.
        has_file: whether the audio came beside them.

    Raises:
        ApiError: a field is unknown, malformed, or cannot be honoured.
    """
    own: dict[str, str] = {}
    common: list[tuple[str, str]] = []
    for name, text in pairs:
        if name not in _OWN_FIELDS:
            common.append((name, text))
        elif name in own:
            raise field_error(name, f"{name} came more than once; expected it once")
        elif text:
            own[name] = text
    if has_file and "url" in own:
        raise field_error("url", "url came beside a file; expected one of them")
    if not has_file and "url" not in own:
        raise field_error("url", f"url is missing; {_EXPECTED}, or a form with a file")
    fields = read_fields(common, read_field(_TASK, own.get("task", "transcribe")), unknown)
    if fields.stream:
        raise field_error("stream", "stream = true of a job, whose answer is fetched later")
    return JobForm(tuple(common), fields, own.get("url", ""), own.get("webhook_url", ""))


async def json_pairs(request: Request, permit: Permit) -> Pairs:
    """Receive a JSON object as the pairs that a form would have.

    Raises:
        ApiError: the body is no JSON object, too large, or too slow, or has too many fields.
    """
    body = await json_object(request, permit, _MAX_JSON_BYTES, "the job's JSON")
    if len(body) > MAX_FIELDS:
        raise invalid(f"the job's JSON has {len(body)} fields; expected at most {MAX_FIELDS}")
    return tuple((name, text) for name, value in body.items() for text in _texts(value))


def _texts(value: Any) -> list[str]:
    """Write a value as a form does: each item of a list is a text."""
    if value is None:
        return []
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value if isinstance(value, str) else to_json(value)]


# ---------------------------------------------------------------- descriptions


def described(job: JobRecord, delivery: bool = True) -> dict[str, Any]:
    """Describe a job as OpenAI's API describes a batch.

    Args:
        job: the job.
        delivery: also tell how far its webhook is; the webhook itself does not.
    """
    source = {"url": job.url.partition("?")[0]} if job.url else {"filename": job.filename}
    webhook = {"status": job.webhook or "waiting", "tries": job.webhook_tries}
    return {
        "id": job.id,
        "object": "audio.job",
        "status": job.status,
        "created_at": int(job.created),
        "started_at": None if job.started is None else int(job.started),
        "ended_at": None if job.ended is None else int(job.ended),
        "model": job.model,
        "task": job.task,
        **source,
        "duration": job.duration,
        "tries": job.tries,
        "webhook_url": job.webhook_url.partition("?")[0] or None,
        "error": json.loads(job.error) if job.error else None,
        **({"webhook": webhook if job.webhook_url else None} if delivery else {}),
    }


# ---------------------------------------------------------------- results


def fields_of(job: JobRecord, unknown: UnknownFields) -> FormFields:
    """Read a job's fields as they were read when it was accepted.

    Raises:
        ApiError: this server reads them otherwise.
    """
    pairs = from_json(Pairs, job.pairs, job.id)
    return read_fields(pairs, cast(Task, job.task), unknown)


def require_result(job: JobRecord) -> None:
    """Refuse a request for a result that does not exist.

    Raises:
        ApiError: the job has no result, or none yet.
    """
    if job.status == COMPLETED:
        return
    if job.status in OPEN:
        message = f"{job.id} is {job.status}; ask again when it is {COMPLETED}"
        raise ApiError(RequestError(message), "job_open")
    reason = json.loads(job.error)["message"] if job.error else "its caller has cancelled it"
    message = f"{job.id} has no result, it is {job.status}: {reason}"
    raise ApiError(RequestError(message), "job_failed")


def render_result(
    fields: FormFields, transcript: Transcript, query: list[tuple[str, str]]
) -> tuple[str, str]:
    """Return a result's text and its media type.

    Args:
        fields: the job's.
        transcript: the job's result.
        query: the URL's names and texts: another format, and how subtitles are split.

    Raises:
        ApiError: the format or the splitting needs speakers or word times that the result lacks.
    """
    require_known(dict(query), _PARAMETERS)
    pairs = query if _FORMAT in dict(query) else [(_FORMAT, fields.format), *query]
    requested, request = read_fields(pairs, fields.request.task), fields.request
    if requested.format == "diarized_json" and not request.diarize and request.channels != "split":
        advice = "send the job with diarize=true or response_format=diarized_json"
        raise field_error(_FORMAT, f"this job's result has no speakers; {advice}")
    cues = requested.cues if len(pairs) > 1 else fields.cues
    if cues.needs_words and not all(segment.words is not None for segment in transcript.segments):
        found = "this format needs word times, which this job's result lacks"
        advice = "send the job with highlight_words or max_words_per_line"
        raise field_error("highlight_words", f"{found}; {advice}")
    fields = dataclasses.replace(fields, format=requested.format, cues=cues)
    return render_transcript(transcript, fields)


def transcript_of(text: str, id: str) -> Transcript:
    """Read a job's result.

    Raises:
        EarshotError: another version of Earshot has written it.
    """
    return from_json(
        Transcript, text, f"the result of {id}", error=EarshotError, advice="send the audio again"
    )
