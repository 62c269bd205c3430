"""The job runner: claims jobs while other requests leave room, and records each job's end once.

One loop claims three kinds of work in the table: jobs whose audio is here, jobs whose url is to be
fetched, and webhooks. In each kind the API keys take turns. A slow url or receiver keeps no other
job waiting, for fetches and webhooks take none of the `jobs.workers`. A process may die at any
time; its claims expire.

`JobRunner._transcribe` alone sends a job's request, which is counted, limited and measured like any
other request of the key. A job fails if the error is its own. After a server error it is put back.
It fails after `MAX_TRIES` starts, because the job may be the reason that the server dies.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Set
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge

from serve.contract.codec import to_json
from serve.contract.errors import AudioError, DeadlineError, OverloadedError, RequestError
from serve.gateway import errors
from serve.gateway.background import Background
from serve.gateway.context import RequestContext, Services
from serve.gateway.engines import EngineRequest
from serve.gateway.errors import ApiError, openai_error
from serve.gateway.jobs import table
from serve.gateway.jobs.fetch import URL_AWAY, OutboundClient
from serve.gateway.jobs.storage import JobStorage
from serve.gateway.jobs.table import MAX_FETCHED_OF_KEY, JobRecord, Work
from serve.gateway.jobs.webhooks import post_webhook, read_secret
from serve.gateway.jobs.wire import fields_of
from serve.gateway.kserve.messages import request_parts
from serve.gateway.limits import Permit
from serve.gateway.models import Target
from serve.gateway.observe.log import LogRecord
from serve.gateway.target import HEAD_BYTES, AudioLength, audio_of_file

logger = logging.getLogger("earshot.gateway")

POLL_S = 1.0
"""Seconds between two looks at the table, at most."""
LEASE_S = 15.0
"""Seconds after which a job may be claimed again if its worker has not renewed the lease."""
FULL_S = 2.0
"""Minimum pause of claims, in seconds, if a key or the server has no room."""
MAX_BACK_OFF_S = 300.0
SWEEP_S = 30.0
MAX_TRIES = 10  # starts of a job that loses its server each time
GIVE_UP_S = 259_200.0  # from a job's creation to its failure
_MAX_TASKS = 64  # of fetches, and of webhooks
_MAX_WEBHOOKS_OF_KEY = 8
_WEBHOOK_LEASE_S = 60.0  # longer than the longest post
_MAX_FULL_S = 300.0  # after it a key is tried again, although its day is used up
_AHEAD_S = 600.0  # more than the longest time until a job is due
_KEY_LIMITS = ("key_limit", "insufficient_quota")


@dataclasses.dataclass(eq=False)
class _Workers:
    """The tasks of a process that do one kind of work."""

    work: Work
    run: Callable[[JobRecord], Coroutine[Any, Any, None]]
    lease_s: float  # duration of a claim
    max_tasks: int
    max_of_key: float = float("inf")  # maximum tasks of a key
    last_key: str = ""  # the key whose turn was last
    tasks: dict[asyncio.Task[None], JobRecord] = dataclasses.field(default_factory=dict)


class JobRunner(Background):
    """A process's work on jobs and webhooks. For one event loop.

    Args:
        services: the services that jobs' requests use.

    Raises:
        ConfigError: the table, the folder or the secret cannot be used.
    """

    def __init__(self, services: Services) -> None:
        config, self.services = services.config, services
        storage = self.storage = JobStorage(config)
        self._table, self._do, self._quietly = storage.table, storage.do, storage.quietly
        self.outbound = OutboundClient(config)
        """Fetches urls and posts webhooks."""
        path = config.jobs.webhook_secret_file
        self.secret = read_secret(path) if path else None
        """Signs webhooks; None: no webhook is sent."""
        # The number of requests that keep this process's share of all engines busy.
        slots = config.runtime.slots * len(self.services.engines.own)
        self._max_requests = max(1, slots // config.gateway.processes)
        self._transcribing = _Workers("transcribe", self._transcribe, LEASE_S, config.jobs.workers)
        self._fetching = _Workers("fetch", self._fetch, LEASE_S, _MAX_TASKS, MAX_FETCHED_OF_KEY)
        self._webhooks = _Workers(
            "webhook", self._post_webhook, _WEBHOOK_LEASE_S, _MAX_TASKS, _MAX_WEBHOOKS_OF_KEY
        )
        # Until when the jobs of a key without room are not claimed, by its name; "" stands for the
        # whole server.
        self._full_until_s: dict[str, float] = {}
        # While no engine is ready, no job is claimed: each would lose one of its tries.
        self._engines_lost = True
        self._swept_s = -SWEEP_S  # monotonic, as the times of `_full_until_s`
        self.wake = asyncio.Event()
        """Set to look for work now."""
        options: Any = {"namespace": "earshot_jobs", "registry": services.metrics.registry}
        self._open_jobs = Gauge("open", "Jobs without an end, of all processes", **options)
        self._ended_jobs = Counter("ended", "Jobs by how they ended", ("status",), **options)
        text = "Webhooks sent: delivered, failed and to be tried again, or given up"
        self._webhook_tries = Counter("webhook_tries", text, ("outcome",), **options)
        running = Gauge("running", "Jobs that are worked on", **options)
        tasks = self._transcribing.tasks, self._fetching.tasks
        running.set_function(lambda: sum(map(len, tasks)))

    def cancelled(self, job: JobRecord) -> None:
        """End the work on a job that has been cancelled."""
        for task, claimed in (*self._transcribing.tasks.items(), *self._fetching.tasks.items()):
            if claimed.id == job.id:
                task.cancel()
        self._ended(job, table.CANCELLED)

    async def close(self) -> None:
        """End the work; the next process that claims the jobs begins them again."""
        await super().close()
        workers = self._transcribing, self._fetching, self._webhooks
        tasks = [task for kind in workers for task in kind.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.outbound.close()
        await asyncio.to_thread(self.storage.close)

    # ------------------------------------------------------------ claims

    async def _run(self) -> None:
        while True:
            self.wake.clear()
            try:
                claimed = await self._claim_next()
            except Exception:  # one odd job must not keep the others waiting for ever
                logger.exception("jobs cannot be looked for")
                claimed = False
            if not claimed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self.wake.wait()

    async def _claim_next(self) -> bool:
        """Claim work of each kind that has room; return whether there was any."""
        if time.monotonic() > self._swept_s + SWEEP_S:
            await self._sweep()
        claimed = self.secret is not None and await self._claim(self._webhooks)
        admission, now_s = self.services.admission, time.monotonic()
        self._engines_lost = self._engines_lost and not await self.services.engines.ready()
        full_keys = {name for name, end_s in self._full_until_s.items() if end_s > now_s}
        if admission.draining or self._engines_lost or "" in full_keys:
            return claimed
        if admission.requests < self._max_requests:
            claimed |= await self._claim(self._transcribing, full_keys)
        return await self._claim(self._fetching, full_keys) or claimed

    async def _claim(self, workers: _Workers, full_keys: Set[str] = frozenset()) -> bool:
        """Claim a job of the next key that has room, and start it; return whether there was one."""
        if len(workers.tasks) >= workers.max_tasks:
            return False
        now, last_key = time.time(), workers.last_key
        counts = collections.Counter(job.key for job in workers.tasks.values())
        busy = {key for key, count in counts.items() if count >= workers.max_of_key}
        claim = workers.work, now, now + workers.lease_s, last_key, busy | full_keys
        job = await self._quietly(self._table.claim, *claim)
        if job is None:
            return False
        workers.last_key = job.key
        task = asyncio.create_task(workers.run(job))
        workers.tasks[task] = job
        task.add_done_callback(functools.partial(self._task_done, workers))
        return True

    def _task_done(self, workers: _Workers, task: asyncio.Task[None]) -> None:
        job = workers.tasks.pop(task)
        self.wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed in the gateway; it is tried again", job.id, exc_info=error)

    async def _sweep(self) -> None:
        """Fail overdue jobs, forget those that ended long ago, and count the open ones."""
        now = time.time()
        self._swept_s = time.monotonic()
        await self._quietly(self._table.follow_clock, now, _AHEAD_S, LEASE_S)
        for job in await self._quietly(self._table.overdue, now - GIVE_UP_S) or ():
            error = DeadlineError(f"no end came within {GIVE_UP_S:g} s")
            await self._fail(job, ApiError(error))
        await self._quietly(self._table.forget, now - self.services.config.jobs.keep_s)
        ids = await self._quietly(self._table.open_ids)
        if ids is not None:
            self._open_jobs.set(len(ids))
            with contextlib.suppress(ApiError):  # the log says why
                await self.storage.on_disk(self.storage.remove_orphans, ids)

    # ------------------------------------------------------------ work

    @contextlib.asynccontextmanager
    async def _claimed(self, job: JobRecord) -> AsyncIterator[None]:
        """Renew a job's lease during a `with` block, and put the job back if it is cancelled.

        Raises:
            ApiError: the job was begun too often.
        """
        lease = asyncio.create_task(self._keep_lease(job, asyncio.current_task()))
        try:
            if job.tries > MAX_TRIES:
                message = f"the server was lost {job.tries - 1} times while it worked on this job"
                raise errors.invalid(message)
            yield
        except asyncio.CancelledError:
            put_back = self._quietly(self._table.put_back, job, 0.0, False)
            await asyncio.shield(put_back)
            raise
        finally:
            lease.cancel()

    async def _keep_lease(self, job: JobRecord, work: "asyncio.Task[None] | None") -> None:
        """Renew a job's lease; end the work if another process has claimed the job."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            renewed = await self._quietly(self._table.renew, job, time.time() + LEASE_S)
            if renewed is False and work is not None:
                work.cancel()

    async def _fetch(self, job: JobRecord) -> None:
        """Fetch a job's audio; then the job waits for a worker."""
        part = self.storage.part(job.id, job.token)
        try:
            async with self._claimed(job):
                if not (size := await self.outbound.fetch(job.url, part)):
                    raise ApiError(AudioError("the url's file is empty"))
                await self.storage.on_disk(self.storage.seal, part, job.id)
                await self._do(self._table.fetched, job, size)
        except OSError as error:
            logger.error("a url's audio cannot be kept: %s", error)
            await self._handle_error(job, errors.no_room_for_upload(), counted=True)
        except ApiError as error:
            await self._handle_error(job, error, counted=error.reason == URL_AWAY)
        finally:
            part.unlink(missing_ok=True)

    async def _transcribe(self, job: JobRecord) -> None:
        """Send a job's request, as its key would, and record the answer."""
        record, sent = LogRecord(id=job.id, model=job.model), False
        identify = functools.partial(self.services.keys.named_as, job.key)
        try:
            async with (
                self._claimed(job),
                RequestContext(self.services, record, "jobs", identify) as context,
            ):
                # The engine's process takes a copy of the audio from the uploads folder.
                with tempfile.NamedTemporaryFile(dir=self.services.engines.uploads) as copy:
                    with context.admit() as permit:
                        request = await self._request(job, permit, copy.name)
                        call = context.start(request, permit)
                    sent = True
                    with call:
                        transcript = await call.transcript()
                    result, seconds = to_json(transcript), transcript.duration
                    # Nothing changes if the job has ended otherwise.
                    if await self._do(self._table.complete, job, time.time(), result, seconds):
                        context.answered(transcript)
                        self._ended(job, table.COMPLETED)
        except ApiError as error:
            await self._handle_error(job, error, counted=sent)

    async def _request(self, job: JobRecord, permit: Permit, copy_path: str) -> EngineRequest:
        """Make a job's request, and copy its audio.

        Raises:
            ApiError: the request cannot be made.
        """
        path = self.storage.path(job.id)
        try:
            size = path.stat().st_size
        except OSError:
            why = RequestError("the job's audio is missing from storage")
            raise ApiError(why, "jobs_audio") from None
        permit.charge(size)
        target = Target(self.services.models.named(job.model), segments=False)
        fields = fields_of(job, self.services.config.gateway.unknown_fields)
        await self.storage.on_disk(shutil.copyfile, path, copy_path)
        length = await self.storage.on_disk(_audio_length, path, size)
        parts = request_parts(fields.request, None)
        return EngineRequest(target, parts, audio_file=copy_path, priority="job", audio=length)

    async def _handle_error(self, job: JobRecord, error: ApiError, counted: bool) -> None:
        """Let a job fail by its own error, and put it back after one of the server.

        Args:
            job: the job.
            error: the error.
            counted: whether the try counts, unless the server has no room.
        """
        if isinstance(error.error, RequestError):
            await self._fail(job, error)
            return
        wait_s = min(max(FULL_S, error.retry_after_s), _MAX_FULL_S)
        if isinstance(error.error, OverloadedError):
            counted = False
            full_key = job.key if error.reason in _KEY_LIMITS else ""
            self._full_until_s[full_key] = time.monotonic() + wait_s
        elif error.reason != URL_AWAY:
            self._engines_lost = True
        if counted:
            wait_s = min(2.0**job.tries, MAX_BACK_OFF_S)
        logger.info("%s waits for %.0f s: %s", job.id, wait_s, error)
        due = time.time() + wait_s * random.uniform(1.0, 1.2)
        await self._quietly(self._table.put_back, job, due, counted)

    async def _fail(self, job: JobRecord, error: ApiError) -> None:
        body = to_json(openai_error(error)["error"])
        if await self._quietly(self._table.fail, job, time.time(), body):
            self._ended(job, table.FAILED)

    def _ended(self, job: JobRecord, status: str) -> None:
        self._ended_jobs.labels(status).inc()
        self.storage.discard(job.id)
        self.wake.set()

    async def _post_webhook(self, job: JobRecord) -> None:
        assert self.secret is not None  # else no webhook is claimed
        state, due = await post_webhook(self.outbound, self.secret, job)
        self._webhook_tries.labels("failed" if state == "pending" else state).inc()
        await self._quietly(self._table.webhook_done, job, state, due)


def _audio_length(path: Path, size: int) -> AudioLength:
    """Estimate the length of a job's audio from its beginning."""
    with path.open("rb") as file:
        return audio_of_file(file.read(HEAD_BYTES), size)
