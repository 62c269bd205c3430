"""Jobs over HTTP, below /v1.

    POST /v1/audio/jobs                a form with a file, or JSON with a url: 202 and the job
    GET  /v1/audio/jobs                the caller's, the newest first: ?limit=20&after=ID
    GET  /v1/audio/jobs/{id}
    POST /v1/audio/jobs/{id}/cancel
    GET  /v1/audio/jobs/{id}/result    ?response_format=srt

What 202 was said of is on the disk. Jobs of other keys are not there for a caller.
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
from serve.contract.config import Config
from serve.contract.errors import RequestError, shown
from serve.gateway import refusals
from serve.gateway.callers import Caller
from serve.gateway.door import Door
from serve.gateway.envelope import request_parts
from serve.gateway.headers import ignored, served_by, warnings
from serve.gateway.jobs.counts import Counts
from serve.gateway.jobs.forms import Asked, Pairs, json_pairs, read_asked
from serve.gateway.jobs.keeper import Keeper
from serve.gateway.jobs.outside import Outside
from serve.gateway.jobs.runner import Runner
from serve.gateway.jobs.table import CANCELLED, OPEN, Job
from serve.gateway.jobs.webhooks import Webhooks
from serve.gateway.jobs.wire import (
    delivery,
    described,
    fields_of,
    rendered,
    require_result,
    transcript_of,
)
from serve.gateway.limits import Ticket
from serve.gateway.openai.form import received_form
from serve.gateway.refusals import FieldRefusal, Refusal
from serve.gateway.uploads import while_client_waits

_MOST_A_PAGE, _A_PAGE = 100, 20
_MAX_IDEMPOTENCY = 255  # characters
_MIB = 2**20
_ID = re.compile(r"job_[0-9a-f]{32}")


_Written = tuple[bytes, str, dict[str, str]]
"""A result's body, its media type, and headers."""


class _Readers:
    """Requests of a key for results, which are written one after another."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = asyncio.Lock()
        self.wanted: tuple[str, list[tuple[str, str]]] | None = None  # a job's id and the query
        self.written: _Written = b"", "", {}  # the result that was `wanted`


class _ResultResponse(Response):
    """A result whose bytes count in `sending` until its client has taken them."""

    def __init__(
        self, sending: contextlib.AbstractContextManager[None], body: bytes, **options: Any
    ) -> None:
        super().__init__(body, **options)
        self._sending = sending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        body = {"body": self.body, "more_body": True}
        with self._sending:
            await send({"type": "http.response.start", **start})
            await send({"type": "http.response.body", **body})
            await send({"type": "http.response.body"})  # waits for the client to take the body


class Jobs:
    """All of them: their addresses, and the work on them. For one event loop.

    Args:
        config: of this process.
        door: their requests go in by it.

    Raises:
        ConfigError: the table, the folder or the secret cannot be used.
    """

    def __init__(self, config: Config, door: Door) -> None:
        self._config = config
        self._door = door
        self._keeper = Keeper(config)
        self._outside = Outside(config)
        counts = Counts(door.metrics.registry)
        self._counts = counts
        self._webhooks = Webhooks(config, self._keeper, self._outside, counts.webhooks)
        self._runner = Runner(config, door, self._keeper, self._outside, self._webhooks, counts)
        self._adding = asyncio.Lock()
        # One thread writes results: each holds up the event loop, and more would hold it up more.
        self._writer = ThreadPoolExecutor(1, "earshot-jobs-results")
        self._readers: dict[str, _Readers] = {}  # by key

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
        """Begin to work."""
        self._runner.start()
        self._webhooks.start()

    async def close(self) -> None:
        """End it; what has no end yet is gone on with by whoever comes next."""
        await self._runner.close()
        await self._webhooks.close()
        await self._outside.close()
        await asyncio.to_thread(self._keeper.close)
        self._writer.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ one more

    async def _accept(self, request: Request) -> Response:
        caller = self._identify(request)
        self._door.usage.require(caller)
        await self._require_room(caller.name)
        with self._door.admission.admit(caller.account) as ticket:
            async with self._received(request, ticket) as (pairs, file, filename):
                unknown = self._config.gateway.unknown_fields
                asked = read_asked(pairs, unknown, file is not None)
                job = self._job(request, caller, asked)
                kept = await self._keep(job, file, filename)
        ticket.close()
        self._runner.wake()
        headers = served_by(kept.model) | ignored(asked.fields.ignored)
        return JSONResponse(described(kept) | delivery(kept), 202, headers)

    async def _require_room(self, key: str) -> None:
        """Refuse a job beside which there are too many, of its key or of all."""
        jobs, load = self._config.jobs, await self._keeper.do(self._keeper.table.load)
        share = self._config.server.key_share if self._door.callers.several else 1.0
        own = load.get(key, (0, 0))
        all_jobs, all_bytes = (sum(one[i] for one in load.values()) for i in (0, 1))
        for name, now, mine, most in (
            ("jobs.max_queued", all_jobs, own[0], jobs.max_queued),
            ("jobs.max_queued_mb", all_bytes, own[1], jobs.max_queued_mb * _MIB),
        ):
            if now >= most:
                raise refusals.overloaded(
                    f"no room for another job ({name}); try again when jobs have ended, or are "
                    "forgotten (jobs.keep_s)",
                    "jobs",
                )
            if mine >= most * share:
                raise refusals.key_limit(f"share of {name}", key)

    @contextlib.asynccontextmanager
    async def _received(
        self, request: Request, ticket: Ticket
    ) -> AsyncIterator[tuple[Pairs, BinaryIO | None, str]]:
        """Receive a job: its pairs, and its file and that file's name where it has one."""
        limit_s, folder = self._door.upload_timeout_s, self._door.upstreams.uploads
        kind, _ = parse_options_header(request.headers.get("content-type", ""))
        if kind == b"application/json":
            yield await json_pairs(request, ticket, limit_s), None, ""
            return
        async with received_form(request, ticket, limit_s, folder) as form:
            yield form.pairs, form.file.file, form.file.filename or ""

    def _job(self, request: Request, caller: Caller, asked: Asked) -> Job:
        """Make a job of what was asked, which is one that this server can do."""
        request_parts(asked.fields.request, None)  # whether tensors can hold it
        if asked.url:
            self._outside.places.require(asked.url, "url")
        if asked.webhook_url:
            self._require_webhook(asked.webhook_url)
        idempotency = request.headers.get("idempotency-key")
        if idempotency is not None and not 0 < len(idempotency) <= _MAX_IDEMPOTENCY:
            raise refusals.invalid(
                f"Idempotency-Key has {len(idempotency)} characters; expected 1 to "
                f"{_MAX_IDEMPOTENCY}"
            )
        now = time.time()
        return Job(
            id=f"job_{secrets.token_hex(16)}",
            key=caller.name,
            model=self._door.models.named(asked.fields.model),
            task=asked.fields.request.task,
            # The names of ignored fields alone, which the answer tells.
            pairs=to_json(
                [(name, "" if name in asked.fields.ignored else text) for name, text in asked.pairs]
            ),
            url=asked.url,
            webhook_url=asked.webhook_url,
            idempotency=idempotency,
            created=now,
            due=now,
        )

    def _require_webhook(self, url: str) -> None:
        if not self._webhooks.on:
            raise FieldRefusal(
                "webhook_url",
                "webhook_url cannot be honoured: jobs.webhook_secret_file of this server's config "
                "names no secret to sign webhooks with",
            )
        self._outside.places.require(url, "webhook_url")

    async def _keep(self, job: Job, file: BinaryIO | None, filename: str) -> Job:
        """Keep a job and its audio; return it, or the one that was sent under its key before."""
        audio, sha256, size, added = self._keeper.audio, "", 0, False
        try:
            if file is not None:
                sha256 = await self._keeper.for_audio.do(audio.keep, job.id, file)
                size = audio.path(job.id).stat().st_size
            sent = to_json([job.pairs, job.task, job.url, job.webhook_url, sha256])
            job = dataclasses.replace(
                job,
                filename=filename.replace("\0", "")[:255],  # which PostgreSQL takes in no text
                audio_bytes=size,
                fingerprint=hashlib.sha256(sent.encode()).hexdigest(),
            )
            async with self._adding:  # else all that come at once would find room
                await self._require_room(job.key)
                added = True
                kept = await self._keeper.do(self._keeper.table.add, job)
        except BaseException:
            # A job may be in the table although the call has failed. If it is not, its audio is
            # removed with what else is of no job.
            if not added:
                self._keeper.discard(job.id)
            raise
        if kept.id != job.id:
            self._keeper.discard(job.id)
            if kept.fingerprint != job.fingerprint:
                raise Refusal(
                    RequestError(
                        f"the Idempotency-Key is that of {kept.id}, which was another request; use "
                        "a new one for each job"
                    ),
                    "idempotency",
                )
        return kept

    # ------------------------------------------------------------ those that there are

    async def _list(self, request: Request) -> Response:
        caller, query = self._identify(request), request.query_params
        for name in query:
            if name not in ("limit", "after"):
                raise FieldRefusal(name[:60], f"{shown(name)} is unknown; known: limit and after")
        limit = query.get("limit", str(_A_PAGE))
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST_A_PAGE):
            raise FieldRefusal("limit", f"limit = {shown(limit)}; expected 1 to {_MOST_A_PAGE}")
        after = query.get("after", "")
        if after:
            await self._found(caller, after)
        table, count = self._keeper.table, int(limit)
        jobs = await self._keeper.do(table.newest, caller.name, count + 1, after)
        told = [described(job) | delivery(job) for job in jobs[:count]]
        page = {
            "object": "list",
            "data": told,
            "first_id": told[0]["id"] if told else None,
            "last_id": told[-1]["id"] if told else None,
            "has_more": len(jobs) > count,
        }
        return JSONResponse(page)

    async def _show(self, request: Request) -> Response:
        job = await self._named(request)
        return JSONResponse(described(job) | delivery(job))

    async def _cancel(self, request: Request) -> Response:
        job = await self._named(request)
        if job.status in OPEN:
            table, now = self._keeper.table, time.time()
            if await self._keeper.do(table.cancel, job.key, job.id, now):
                self._runner.cancelled(job.id)
                self._counts.ended(CANCELLED)
                self._keeper.discard(job.id)
                self._webhooks.wake()
            job = await self._named(request)
        return JSONResponse(described(job) | delivery(job))

    async def _result(self, request: Request) -> Response:
        caller = self._identify(request)
        job = await self._found(caller, request.path_params["id"])
        require_result(job)
        reading = self._read(job, request.query_params.multi_items())
        body, kind, headers = await while_client_waits(request, reading)
        sending = self._door.admission.sending(caller.account, len(body))
        return _ResultResponse(sending, body, media_type=kind, headers=headers)

    async def _read(self, job: Job, asked: list[tuple[str, str]]) -> _Written:
        """Answer with a result as it is asked for: a key's are written one after another.

        Whoever asks for the same at the same time gets the same.
        """
        readers = self._readers.setdefault(job.key, _Readers())
        readers.count += 1
        try:
            async with readers.lock:
                if readers.wanted != (job.id, asked):
                    readers.written = await self._write(job, asked)
                    readers.wanted = (job.id, asked)
                return readers.written
        finally:
            readers.count -= 1
            if not readers.count:
                del self._readers[job.key]

    async def _write(self, job: Job, asked: list[tuple[str, str]]) -> _Written:
        found = await self._keeper.do(self._keeper.table.result, job.id)
        if found is None:
            raise _unknown(job.id)  # it has just been forgotten
        fields = fields_of(dataclasses.replace(job, pairs=found[0]), "ignore")

        def write() -> _Written:  # subtitles of long audio take a while to split
            transcript = transcript_of(found[1], job.id)
            text, kind = rendered(fields, transcript, asked)
            return text.encode(), kind, served_by(job.model) | warnings(transcript.warnings)

        return await asyncio.get_running_loop().run_in_executor(self._writer, write)

    def _identify(self, request: Request) -> Caller:
        return self._door.callers.identify(request.headers.get("authorization"))

    async def _named(self, request: Request) -> Job:
        return await self._found(self._identify(request), request.path_params["id"])

    async def _found(self, caller: Caller, id: str) -> Job:
        find, known = self._keeper.table.find, _ID.fullmatch(id)
        job = await self._keeper.do(find, caller.name, id) if known else None
        if job is None:
            raise _unknown(id)
        return job


def _unknown(id: str) -> Refusal:
    return refusals.not_found(
        f"no job {shown(id)}; it is another key's, was never there, or is forgotten (jobs.keep_s)"
    )
