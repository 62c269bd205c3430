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
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from python_multipart.multipart import parse_options_header
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
from serve.gateway.jobs.fetch import OutboundClient
from serve.gateway.jobs.runner import JobCounters, JobRunner
from serve.gateway.jobs.storage import JobStorage
from serve.gateway.jobs.table import CANCELLED, OPEN, JobRecord
from serve.gateway.jobs.webhooks import Webhooks
from serve.gateway.keys import KEY_SHARE, ApiKey
from serve.gateway.kserve.messages import request_parts
from serve.gateway.limits import Permit
from serve.gateway.openai.form import received_form

_MAX_PAGE, _PAGE = 100, 20  # jobs of a page
# MiB of the audio of jobs without an end, and of all jobs' fields and results.
MAX_QUEUED_MB = 10_240
_MAX_IDEMPOTENCY = 255  # characters
_MIB = 2**20
_ID = re.compile(r"job_[0-9a-f]{32}")

_Rendered = tuple[bytes, str, dict[str, str]]
"""A result's body, media type and headers."""


class _ResultReaders:
    """Requests of one key for results, which are rendered one after another."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = asyncio.Lock()
        self.wanted: tuple[str, list[tuple[str, str]]] | None = None  # a job's id and the query
        self.rendered: _Rendered = b"", "", {}  # the result that was `wanted`


class _ResultResponse(Response):
    """A result; the permit is charged with its bytes until the client has taken them."""

    def __init__(self, permit: Permit, body: bytes, **options: Any) -> None:
        super().__init__(body, **options)
        self._permit = permit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        body = {"body": self.body, "more_body": True}
        with self._permit:
            self._permit.charge(len(self.body))
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
        config = self._config = services.config
        self._services = services
        self._storage = JobStorage(config)
        self._outbound = OutboundClient(config)
        self._counters = JobCounters(services.metrics.registry)
        parts = self._storage, self._outbound
        self._webhooks = Webhooks(config, *parts, self._counters.webhooks)
        self._runner = JobRunner(services, *parts, self._webhooks, self._counters)
        self._adding = asyncio.Lock()
        # Rendering slows down the event loop, so one thread does it all.
        self._renderer = ThreadPoolExecutor(1, "earshot-jobs-results")
        self._readers: dict[str, _ResultReaders] = {}  # by key

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
        self._webhooks.start()

    async def close(self) -> None:
        """End the work; the next process that claims open jobs begins them again."""
        await self._runner.close()
        await self._webhooks.close()
        await self._outbound.close()
        await asyncio.to_thread(self._storage.close)
        self._renderer.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ accepting

    async def _accept(self, request: Request) -> Response:
        caller = self._identify(request)
        self._services.usage.require(caller)
        await self._require_room(caller.name)
        with self._services.admission.admit(caller) as permit:
            async with self._received(request, permit) as (pairs, file, filename):
                unknown = self._config.gateway.unknown_fields
                form = wire.read_job_form(pairs, unknown, file is not None)
                job = self._job(request, caller, form)
                kept = await self._keep(job, file, filename)
        self._runner.wake()
        headers = served_by(kept.model) | ignored(form.fields.ignored)
        return JSONResponse(wire.described(kept), 202, headers)

    async def _require_room(self, key: str) -> None:
        """Reject a job if its key or the server has too many.

        Raises:
            ApiError: there is no room.
        """
        jobs, load = self._config.jobs, await self._storage.do(self._storage.table.load)
        share = KEY_SHARE if self._services.keys.several else 1.0
        own = load.get(key, (0, 0))
        all_jobs, all_bytes = (sum(one[i] for one in load.values()) for i in (0, 1))
        for name, now, mine, limit in (
            ("jobs.max_queued", all_jobs, own[0], jobs.max_queued),
            (f"{MAX_QUEUED_MB} MiB", all_bytes, own[1], MAX_QUEUED_MB * _MIB),
        ):
            if now >= limit:
                raise errors.overloaded(
                    f"the job queue is full ({name}); try again when jobs have ended, or have "
                    "expired (jobs.keep_s)",
                    "jobs",
                )
            if mine >= limit * share:
                raise errors.key_limit(f"share of {name}", key)

    @contextlib.asynccontextmanager
    async def _received(
        self, request: Request, permit: Permit
    ) -> AsyncIterator[tuple[wire.Pairs, BinaryIO | None, str]]:
        """Receive a job's pairs, and its file and the file's name, if it has one."""
        kind, _ = parse_options_header(request.headers.get("content-type", ""))
        if kind == b"application/json":
            yield await wire.json_pairs(request, permit), None, ""
            return
        async with received_form(request, permit, self._services.engines.uploads) as form:
            yield form.pairs, form.file.file, form.file.filename or ""

    def _job(self, request: Request, caller: ApiKey, form: wire.JobForm) -> JobRecord:
        """Make a job of a form.

        Raises:
            ApiError: this server cannot do it.
        """
        request_parts(form.fields.request, None)  # tensors can hold the options
        if form.url:
            self._outbound.require_allowed(form.url, "url")
        if form.webhook_url:
            if not self._webhooks.on:
                raise field_error(
                    "webhook_url",
                    "webhook_url cannot be honoured: jobs.webhook_secret_file of this server's "
                    "config names no secret to sign webhooks with",
                )
            self._outbound.require_allowed(form.webhook_url, "webhook_url")
        idempotency = request.headers.get("idempotency-key")
        if idempotency is not None and not 0 < len(idempotency) <= _MAX_IDEMPOTENCY:
            raise errors.invalid(
                f"Idempotency-Key has {len(idempotency)} characters; expected 1 to "
                f"{_MAX_IDEMPOTENCY}"
            )
        now, unknown = time.time(), form.fields.ignored
        return JobRecord(
            id=f"job_{secrets.token_hex(16)}",
            key=caller.name,
            model=self._services.models.named(form.fields.model),
            task=form.fields.request.task,
            # Only the names of ignored fields, which the answer tells.
            pairs=to_json([(name, "" if name in unknown else text) for name, text in form.pairs]),
            url=form.url,
            webhook_url=form.webhook_url,
            idempotency=idempotency,
            created=now,
            due=now,
        )

    async def _keep(self, job: JobRecord, file: BinaryIO | None, filename: str) -> JobRecord:
        """Store a job and its audio; return it, or the earlier job with its Idempotency-Key."""
        audio, sha256, size, added = self._storage.audio, "", 0, False
        try:
            if file is not None:
                sha256 = await self._storage.for_audio.do(audio.keep, job.id, file)
                size = audio.path(job.id).stat().st_size
            sent = to_json([job.pairs, job.task, job.url, job.webhook_url, sha256])
            job = dataclasses.replace(
                job,
                filename=filename.replace("\0", "")[:255],  # PostgreSQL takes no NUL
                audio_bytes=size,
                fingerprint=hashlib.sha256(sent.encode()).hexdigest(),
            )
            async with self._adding:  # otherwise jobs that come at once would all find room
                await self._require_room(job.key)
                added = True
                kept = await self._storage.do(self._storage.table.add, job)
        except BaseException:
            # The job may be in the table although the call has failed. If it is not, its audio is
            # removed with the other orphans.
            if not added:
                self._storage.discard(job.id)
            raise
        if kept.id != job.id:
            self._storage.discard(job.id)
        if kept.fingerprint != job.fingerprint:
            message = (
                f"the Idempotency-Key is that of {kept.id}, which was another request; use a new "
                "one for each job"
            )
            raise ApiError(RequestError(message), "idempotency")
        return kept

    # ------------------------------------------------------------ reading

    async def _list(self, request: Request) -> Response:
        caller, query = self._identify(request), request.query_params
        errors.require_known(query, ("limit", "after"))
        limit = query.get("limit", str(_PAGE))
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MAX_PAGE):
            raise field_error("limit", f"limit = {shown(limit)}; expected 1 to {_MAX_PAGE}")
        after = query.get("after", "")
        if after:
            await self._found(caller, after)
        table, count = self._storage.table, int(limit)
        jobs = await self._storage.do(table.newest, caller.name, count + 1, after)
        told = [wire.described(job) for job in jobs[:count]]
        page = {
            "object": "list",
            "data": told,
            "first_id": told[0]["id"] if told else None,
            "last_id": told[-1]["id"] if told else None,
            "has_more": len(jobs) > count,
        }
        return JSONResponse(page)

    async def _show(self, request: Request) -> Response:
        return JSONResponse(wire.described(await self._named(request)))

    async def _cancel(self, request: Request) -> Response:
        job = await self._named(request)
        if job.status in OPEN:
            table, now = self._storage.table, time.time()
            if await self._storage.do(table.cancel, job.key, job.id, now):
                self._runner.cancelled(job.id)
                self._counters.ended(CANCELLED)
                self._storage.discard(job.id)
                self._webhooks.wake()
            job = await self._named(request)
        return JSONResponse(wire.described(job))

    async def _result(self, request: Request) -> Response:
        caller = self._identify(request)
        job = await self._found(caller, request.path_params["id"])
        wire.require_result(job)
        rendering = self._rendered(job, request.query_params.multi_items())
        body, kind, headers = await while_client_waits(request, rendering)
        permit = self._services.admission.admit_unchecked(caller)
        return _ResultResponse(permit, body, media_type=kind, headers=headers)

    async def _rendered(self, job: JobRecord, query: list[tuple[str, str]]) -> _Rendered:
        """Return a result as the query asks for it.

        A key's results are rendered one after another. Requests for the same one that come
        meanwhile share it.
        """
        readers = self._readers.setdefault(job.key, _ResultReaders())
        readers.count += 1
        try:
            async with readers.lock:
                if readers.wanted != (job.id, query):
                    readers.rendered = await self._render(job, query)
                    readers.wanted = (job.id, query)
                return readers.rendered
        finally:
            readers.count -= 1
            if not readers.count:
                del self._readers[job.key]

    async def _render(self, job: JobRecord, query: list[tuple[str, str]]) -> _Rendered:
        found = await self._storage.do(self._storage.table.result, job.id)
        if found is None:
            raise _unknown(job.id)  # it has just expired
        pairs, result = found
        fields = wire.fields_of(dataclasses.replace(job, pairs=pairs), "ignore")

        def render() -> _Rendered:  # splitting subtitles of long audio takes a while
            transcript = wire.transcript_of(result, job.id)
            text, kind = wire.render_result(fields, transcript, query)
            return text.encode(), kind, served_by(job.model) | warnings(transcript.warnings)

        return await asyncio.get_running_loop().run_in_executor(self._renderer, render)

    def _identify(self, request: Request) -> ApiKey:
        return self._services.keys.of_request(request)

    async def _named(self, request: Request) -> JobRecord:
        return await self._found(self._identify(request), request.path_params["id"])

    async def _found(self, caller: ApiKey, id: str) -> JobRecord:
        find, known = self._storage.table.find, _ID.fullmatch(id)
        job = await self._storage.do(find, caller.name, id) if known else None
        if job is None:
            raise _unknown(id)
        return job


def _unknown(id: str) -> ApiError:
    return errors.not_found(
        f"job {shown(id)} not found: it belongs to another API key, never existed, or has expired "
        "(jobs.keep_s)"
    )
