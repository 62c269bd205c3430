"""Jobs as the API tells them, and their results in whichever format is asked for."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, get_args

from serve.contract.codec import from_json
from serve.contract.errors import EarshotError, RequestError, shown
from serve.contract.messages import Task, Transcript
from serve.contract.server_config import UnknownFields
from serve.gateway.errors import ApiError, field_error
from serve.gateway.jobs.table import CANCELLED, COMPLETED, FAILED, OPEN, Job
from serve.gateway.openai.answers import body
from serve.gateway.openai.fields import Format, FormFields, read_fields
from serve.speech.formats import SUBTITLES

_FORMAT = "response_format"
_MAY_BE_ASKED = (
    *(_FORMAT, "max_line_width", "max_line_count", "max_words_per_line", "highlight_words"),
)


def described(job: Job) -> dict[str, Any]:
    """Describe a job as OpenAI's API describes a batch."""
    source = {"url": job.url.partition("?")[0]} if job.url else {"filename": job.filename}
    return {
        "id": job.id,
        "object": "audio.job",
        "status": job.status,
        "created_at": int(job.created),
        "started_at": _whole(job.started),
        "ended_at": _whole(job.ended),
        "model": job.model,
        "task": job.task,
        **source,
        "duration": job.duration,
        "tries": job.tries,
        "webhook_url": job.webhook_url.partition("?")[0] or None,
        "error": json.loads(job.error) if job.error else None,
    }


def delivery(job: Job) -> dict[str, Any]:
    """Tell how far its webhook is, which the webhook itself does not."""
    told = {"status": job.webhook or "waiting", "tries": job.webhook_tries}
    return {"webhook": told if job.webhook_url else None}


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def fields_of(job: Job, unknown: UnknownFields) -> FormFields:
    """Read what a job asks for, as it was read when it was accepted.

    Raises:
        ApiError: this server reads it otherwise.
    """
    pairs = from_json(tuple[tuple[str, str], ...], job.pairs, job.id)
    task: Task = "translate" if job.task == "translate" else "transcribe"
    return read_fields(pairs, task, unknown)


def require_result(job: Job) -> None:
    """Refuse to answer with a result that there is not.

    Raises:
        ApiError: the job has none, or none yet.
    """
    if job.status == COMPLETED:
        return
    if job.status in OPEN:
        raise ApiError(
            RequestError(f"{job.id} is {job.status}; ask again when it is {COMPLETED}"), "job_open"
        )
    why = json.loads(job.error)["message"] if job.error else "its caller has cancelled it"
    state = {FAILED: FAILED, CANCELLED: CANCELLED}[job.status]
    raise ApiError(RequestError(f"{job.id} has no result, it is {state}: {why}"), "job_failed")


def rendered(
    fields: FormFields, transcript: Transcript, asked: Iterable[tuple[str, str]]
) -> tuple[str, str]:
    """Write a result's text, and tell its media type.

    Args:
        fields: the job's.
        transcript: its result.
        asked: the query's names and texts: another format, and how subtitles are split.

    Raises:
        ApiError: that cannot be answered from this transcript.
    """
    pairs = tuple(asked)
    for name, _ in pairs:
        if name not in _MAY_BE_ASKED:
            known = ", ".join(_MAY_BE_ASKED)
            raise field_error(name[:60], f"{shown(name)} is unknown of a result; known: {known}")
    if not any(name == _FORMAT for name, _ in pairs):
        pairs = ((_FORMAT, fields.format), *pairs)
    wanted = read_fields(pairs, fields.request.task)
    _require_in_it(fields, wanted.format)
    cues = wanted.cues if len(pairs) > 1 or fields.format not in SUBTITLES else fields.cues
    if cues.needs_words and not all(segment.words is not None for segment in transcript.segments):
        raise field_error(
            "highlight_words",
            "words were not timed for this job; ask for them when it is sent, by "
            "highlight_words or by timestamp_granularities[]=word with verbose_json",
        )
    return body(transcript, dataclasses.replace(fields, format=wanted.format, cues=cues))


def _require_in_it(fields: FormFields, format: Format) -> None:
    """Refuse a format that holds what the job did not ask for."""
    assert format in get_args(Format)  # it was read as a field
    request = fields.request
    if format == "diarized_json" and not request.diarize and request.channels != "split":
        raise field_error(
            _FORMAT,
            "speakers were not told apart for this job; ask for it when it is sent, by "
            "diarize=true or response_format=diarized_json",
        )


def transcript_of(text: str, id: str) -> Transcript:
    """Read the transcript that a job has as its result.

    Raises:
        EarshotError: another version of Earshot has written it.
    """
    return from_json(
        Transcript, text, f"the result of {id}", error=EarshotError, advice="send the audio again"
    )
