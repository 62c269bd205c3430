"""Jobs over HTTP, below /v1.

    POST /v1/audio/jobs                a form with a file, or JSON with a url: 202 and the job
    GET  /v1/audio/jobs                the caller's, the newest first: ?limit=20&after=ID
    GET  /v1/audio/jobs/{id}
    POST /v1/audio/jobs/{id}/cancel
    GET  /v1/audio/jobs/{id}/result    ?response_format=srt

A job is on disk before the server answers 202. The jobs of other keys do not exist for a key.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import re
import secrets
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve.contract.codec import to_json
from serve.contract.errors import RequestError, shown
from serve.gateway import errors
from serve.gateway.context import Services
from serve.gateway.edge.headers import ignored, served_by, warnings
from serve.gateway.edge.uploads import while_client_waits
from serve.gateway.errors import ApiError, field_error
from serve.gateway.jobs import wire
from serve.gateway.jobs.runner import JobRunner
from serve.gateway.jobs.table import JobRecord
from serve.gateway.keys import KEY_SHARE, ApiKey
from serve.gateway.kserve.messages import request_parts
from serve.gateway.openai.form import received_form

_MAX_PAGE, _PAGE = 100, 20  # jobs of a page
# MiB of the audio of jobs without an end, and of all jobs' fields and results.
MAX_QUEUED_MB = 10_240
_MAX_IDEMPOTENCY = 255  # characters
_MIB = 2**20
_ID = re.compile(r"job_[0-9a-f]{32}")


class _ResultResponse(Response):
    """A result; its bytes count in `sending` until the client has taken them."""

    sending: contextlib.AbstractContextManager[None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        body = {"body": self.body, "more_body": True}
        with self.sending:
            await send({"type": "http.response.start", **start})
            await send({"type": "http.response.body", **body})
            await send({"type": "http.response.body"})  # waits for the client to take the body


class JobRoutes:
    """The addresses of jobs, and the work on jobs. For one event loop.

    Args:
        services: the gateway's services.

    Raises:
        ConfigError: the table, the folder or the secret cannot be used.
    """

    def __init__(self, services: Services) -> None:
        self._services, self._config = services, services.config
        self._runner = JobRunner(services)
        self._storage = self._runner.storage
        self._adding = asyncio.Lock()
        # Rendering slows down the event loop, so one thread does it all.
        self._renderer = ThreadPoolExecutor(1, "earshot-jobs-results")
        # A key's results are rendered one after another, so that others wait for one at most.
        self._render_locks = weakref.WeakValueDictionary[str, asyncio.Lock]()

    @property
    def routes(self) -> list[Route]:
        """The addresses, below /v1."""
        return [
            Route("/audio/jobs", self._accept, methods=["POST"]),
            Route("/audio/jobs", self._list),
            Route("/audio/jobs/{id}", self._show),
            Route("/audio/jobs/{id}/cancel", self._cancel, methods=["POST"]),
            Route("/audio/jobs/{id}/result", self._result),
        ]

    def start(self) -> None:
        self._runner.start()

    async def close(self) -> None:
        """End the work; the next process that claims open jobs begins them again."""
        await self._runner.close()
        self._renderer.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ accepting

    async def _accept(self, request: Request) -> Response:
        api_key = self._services.keys.of_request(request)
        self._services.usage.require(api_key)
        await self._require_room(api_key.name)
        kind, _ = parse_options_header(request.headers.get("content-type", ""))
        async with contextlib.AsyncExitStack() as stack:
            permit = stack.enter_context(self._services.admission.admit(api_key))
            upload: UploadFile | None = None
            if kind == b"application/json":
                pairs = await wire.json_pairs(request, permit)
            else:
                received = received_form(request, permit, self._services.engines.uploads)
                form = await stack.enter_async_context(received)
                pairs, upload = form.pairs, form.file
            unknown = self._config.gateway.unknown_fields
            job_form = wire.read_job_form(pairs, unknown, upload is not None)
            job = await self._add(self._job(request, api_key, job_form), upload)
        self._runner.wake.set()
        headers = served_by(job.model) | ignored(job_form.fields.ignored)
        return JSONResponse(wire.described(job), 202, headers)

    async def _require_room(self, key: str) -> None:
        """Reject a job if its key or the server has too many.

        Raises:
            ApiError: there is no room.
        """
        load = await self._storage.do(self._storage.table.load)
        share = KEY_SHARE if self._services.keys.several else 1.0
        max_jobs, max_bytes = self._config.jobs.max_queued, MAX_QUEUED_MB * _MIB
        limits = (("jobs.max_queued", max_jobs), (f"{MAX_QUEUED_MB} MiB", max_bytes))
        for index, (name, limit) in enumerate(limits):
            if sum(counts[index] for counts in load.values()) >= limit:
                advice = "try again when jobs have ended, or have expired (jobs.keep_s)"
                raise errors.overloaded(f"the job queue is full ({name}); {advice}", "jobs")
            if load.get(key, (0, 0))[index] >= limit * share:
                raise errors.key_limit(f"share of {name}", key)

    def _job(self, request: Request, api_key: ApiKey, form: wire.JobForm) -> JobRecord:
        """Make a job of a form.

        Raises:
            ApiError: this server cannot do it.
        """
        request_parts(form.fields.request, None)  # tensors can hold the options
        if form.url:
            self._runner.outbound.require_allowed(form.url, "url")
        if form.webhook_url:
            if self._runner.secret is None:
                why = "jobs.webhook_secret_file of this server's config names no secret"
                raise field_error("webhook_url", f"webhook_url cannot be honoured: {why}")
            self._runner.outbound.require_allowed(form.webhook_url, "webhook_url")
        idempotency = request.headers.get("idempotency-key")
        if idempotency is not None and not 0 < len(idempotency) <= _MAX_IDEMPOTENCY:
            found = f"Idempotency-Key has {len(idempotency)} characters"
            raise errors.invalid(f"{found}; expected 1 to {_MAX_IDEMPOTENCY}")
        unknown = set(form.fields.ignored)
        return JobRecord(
            id=f"job_{secrets.token_hex(16)}",
            key=api_key.name,
            model=self._services.models.named(form.fields.model),
            task=form.fields.request.task,
            # Only the names of ignored fields, which the answer tells.
            pairs=to_json([(name, "" if name in unknown else text) for name, text in form.pairs]),
            url=form.url,
            webhook_url=form.webhook_url,
            idempotency=idempotency,
            created=time.time(),
        )

    async def _add(self, job: JobRecord, upload: UploadFile | None) -> JobRecord:
        """Store a job and its audio; return it, or the earlier job with its Idempotency-Key."""
        sha256, size, filename = "", 0, ""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._storage.discard, job.id)
            if upload is not None:
                sha256 = await self._storage.on_disk(self._storage.keep, job.id, upload.file)
                size, filename = self._storage.path(job.id).stat().st_size, upload.filename or ""
            body = to_json([job.pairs, job.task, job.url, job.webhook_url, sha256])
            job = dataclasses.replace(
                job,
                filename=filename.replace("\0", "")[:255],  # PostgreSQL takes no NUL
                audio_bytes=size,
                fingerprint=hashlib.sha256(body.encode()).hexdigest(),
            )
            async with self._adding:  # otherwise jobs that come at once would all find room
                await self._require_room(job.key)
                # Keep the audio from here on, because `add` may fail after it has stored the job.
                # If it has not, the clean-up of orphaned files removes the audio.
                on_failure.pop_all()
                added = await self._storage.do(self._storage.table.add, job)
        if added.id != job.id:
            self._storage.discard(job.id)
        if added.fingerprint != job.fingerprint:
            found = f"the Idempotency-Key is that of {added.id}, which was another request"
            raise ApiError(RequestError(f"{found}; use a new one for each job"), "idempotency")
        return added

    # ------------------------------------------------------------ reading

    async def _list(self, request: Request) -> Response:
        api_key, query = self._services.keys.of_request(request), request.query_params
        errors.require_known(query, ("limit", "after"))
        limit, after = query.get("limit", str(_PAGE)), query.get("after", "")
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MAX_PAGE):
            raise field_error("limit", f"limit = {shown(limit)}; expected 1 to {_MAX_PAGE}")
        if after:
            await self._find(api_key, after)
        newest, count = self._storage.table.newest, int(limit)
        jobs = await self._storage.do(newest, api_key.name, count + 1, after)
        page = [wire.described(job) for job in jobs[:count]]
        return JSONResponse(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(jobs) > count,
            }
        )

    async def _show(self, request: Request) -> Response:
        return JSONResponse(wire.described(await self._requested(request)))

    async def _cancel(self, request: Request) -> Response:
        job, cancel = await self._requested(request), self._storage.table.cancel
        if await self._storage.do(cancel, job.key, job.id, time.time()):
            self._runner.cancelled(job)
        return await self._show(request)

    async def _result(self, request: Request) -> Response:
        api_key = self._services.keys.of_request(request)
        job = await self._find(api_key, request.path_params["id"])
        wire.require_result(job)
        rendering = self._render(job, request.query_params.multi_items())
        response = await while_client_waits(request, rendering)
        response.sending = self._services.admission.sending(api_key, len(response.body))
        return response

    async def _render(self, job: JobRecord, query: list[tuple[str, str]]) -> _ResultResponse:
        """Return a result as the query asks for it."""

        def render(pairs: str, result: str) -> _ResultResponse:
            fields = wire.fields_of(dataclasses.replace(job, pairs=pairs), "ignore")
            transcript = wire.transcript_of(result, job.id)
            text, kind = wire.render_result(fields, transcript, query)
            headers = served_by(job.model) | warnings(transcript.warnings)
            return _ResultResponse(text, media_type=kind, headers=headers)

        async with self._render_locks.setdefault(job.key, asyncio.Lock()):
            row = await self._storage.do(self._storage.table.result, job.id)
            if row is None:
                raise _unknown(job.id)  # it has just expired
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._renderer, render, *row)

    async def _requested(self, request: Request) -> JobRecord:
        """Return the job that the path names."""
        api_key = self._services.keys.of_request(request)
        return await self._find(api_key, request.path_params["id"])

    async def _find(self, api_key: ApiKey, id: str) -> JobRecord:
        """Return a key's job.

        Raises:
            ApiError: 404, there is none.
        """
        job = None
        if _ID.fullmatch(id):
            job = await self._storage.do(self._storage.table.find, api_key.name, id)
        if job is None:
            raise _unknown(id)
        return job


def _unknown(id: str) -> ApiError:
    why = "it belongs to another API key, never existed, or has expired (jobs.keep_s)"
    return errors.not_found(f"job {shown(id)} not found: {why}")
