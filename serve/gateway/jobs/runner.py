"""The job runner: claims jobs while other requests leave room, and records each job's end once.

Its processes may die at any time. A job with a url gets one of the `jobs.workers` once its audio is
here, so slow urls keep no other job waiting. A key has few fetches at a time.

`JobRunner._ask` alone sends a job's request, which is counted, limited and measured like any other
request of the key. A job fails if the error is its own. After a server error it is put back.
It fails after `MAX_TRIES` starts, because the job may be the reason that the server dies.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from serve.contract.codec import to_json
from serve.contract.errors import DeadlineError, OverloadedError, RequestError, UnavailableError
from serve.contract.messages import Transcript
from serve.gateway.context import RequestContext, Services
from serve.gateway.engine import EngineRequest
from serve.gateway.engines import EngineCall
from serve.gateway.errors import ApiError, openai_error
from serve.gateway.jobs.fetch import URL_AWAY, OutboundClient
from serve.gateway.jobs.storage import JobStorage
from serve.gateway.jobs.table import COMPLETED, FAILED, JobRecord
from serve.gateway.jobs.webhooks import Webhooks
from serve.gateway.jobs.wire import fields_of
from serve.gateway.jobs.workers import KeyTurns, WorkerPool, keys_with
from serve.gateway.kserve.messages import request_parts
from serve.gateway.limits import Permit
from serve.gateway.models import Target
from serve.gateway.observe.log import LogRecord
from serve.gateway.openai.fields import FIELDS
from serve.gateway.openai.form import SPOOL_BYTES
from serve.gateway.target import HEAD_BYTES, AudioLength, audio_of_file

logger = logging.getLogger("earshot.gateway")

LEASE_S = 15.0
"""Seconds after which a job may be claimed again if its worker has not renewed the lease."""
NOT_NOW_S = 2.0
"""Seconds for which a model, or a key, is left alone that has no room."""
MAX_BACK_OFF_S = 300.0
SWEEP_S = 30.0
MAX_TRIES = 10  # starts of a job that loses its server each time
GIVE_UP_S = 259_200.0  # from a job's creation to its failure
_MAX_NOT_NOW_S = 300.0  # after which a key is tried again although its day is used up
_AHEAD_S = 600.0  # more than the farthest time from now that a job may be due
_FETCHES, _FETCHES_OF_A_KEY = 64, 4  # claimed jobs with a url
_KEY_LIMITS = ("key_limit", "insufficient_quota")


class JobCounters:
    """Metrics of jobs.

    Args:
        registry: the registry of the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open_jobs = 0
        """Jobs without an end, at the latest sweep."""
        options: Any = {"namespace": "earshot_jobs", "registry": registry}
        open_jobs = Gauge("open", "Jobs without an end, of all processes", **options)
        open_jobs.set_function(lambda: self.open_jobs)
        self.running = Gauge("running", "Jobs that are worked on", **options)
        self._ended = Counter("ended", "Jobs by how they ended", ("status",), **options)
        text = "Webhooks sent: delivered, failed and to be tried again, or given up"
        self.webhooks = Counter("webhook_tries", text, ("outcome",), **options)

    def ended(self, status: str) -> None:
        """Count a job that has ended in this process."""
        self._ended.labels(status).inc()


@dataclasses.dataclass
class _ClaimedJob:
    job: JobRecord
    sent: bool = False  # an engine has had its request


@dataclasses.dataclass(eq=False)
class JobRunner(WorkerPool):
    """A process's workers on jobs. For one event loop."""

    services: Services  # which jobs' requests use
    storage: JobStorage
    outbound: OutboundClient  # fetches urls
    webhooks: Webhooks  # woken at the end of each job
    counters: JobCounters

    def __post_init__(self) -> None:
        super().__init__()
        config, storage = self.services.config, self.storage
        self._table, self._do, self._quietly = storage.table, storage.do, storage.quietly
        # The number of requests that keep this process's share of all engines busy.
        slots = config.runtime.slots * len(self.services.engines.own)
        self._below = max(1, slots // config.gateway.processes)
        self._placed: set[str] = set()  # ids of the jobs that have a worker's place
        self._fetched: dict[str, tuple[JobRecord, asyncio.Event]] = {}  # jobs that wait for one
        self._turns, self._fetch_turns = KeyTurns(), KeyTurns()
        self._last_was_fetched = False
        self._not_now: dict[tuple[str, str], float] = {}  # keys and models without room, until when
        # Models that lost their engines. Their jobs wait until an engine is ready again, so that a
        # short absence of it costs no waiting job a try.
        self._away = {self.services.models.default}
        self._swept_s = -SWEEP_S  # monotonic, as the times of `_not_now`
        self.counters.running.set_function(self.tasks.__len__)

    def cancelled(self, id: str) -> None:
        """End the work on a job that has been cancelled."""
        if (task := self.tasks.get(id)) is not None:
            task.cancel()

    # ------------------------------------------------------------ the next job

    async def _claimed(self) -> JobRecord | None:
        if time.monotonic() > self._swept_s + SWEEP_S:
            await self._sweep()
        if self.services.admission.draining:
            return None
        now, now_s = time.time(), time.monotonic()
        self._not_now = {what: until for what, until in self._not_now.items() if until > now_s}
        keys = [name for kind, name in self._not_now if kind == "key"]
        models = [name for kind, name in self._not_now if kind == "model"]
        self._away = {name for name in self._away if not await self.services.engines.ready(name)}
        models += self._away
        room = (
            len(self._placed) < self.services.config.jobs.workers
            and self.services.admission.requests < self._below
        )
        if room and (job := await self._next_to_ask(now, keys, models)) is not None:
            return job
        return await self._next_to_fetch(now, keys, models)

    async def _next_to_ask(
        self, now: float, keys: list[str], models: list[str]
    ) -> JobRecord | None:
        """Give a worker's place to a job of the next key: one with a file, or a fetched one.

        Args:
            now: the time.
            keys: the keys without room.
            models: the models without room.

        Returns:
            The job with a file, which is claimed; None: a fetched job goes on, or there is none.
        """
        files = await self._quietly(self._table.keys, now, keys, models, False) or []
        fetched: dict[str, tuple[JobRecord, asyncio.Event]] = {}
        for job, placed in self._fetched.values():
            if job.key not in keys and job.model not in models:
                fetched.setdefault(job.key, (job, placed))
        if (key := self._turns.next({*files, *fetched})) is None:
            return None
        self._last_was_fetched = key in fetched and not (self._last_was_fetched and key in files)
        if self._last_was_fetched:
            first, placed = fetched[key]
            del self._fetched[first.id]
            self._placed.add(first.id)
            placed.set()
            self.wake()
            return None
        claim, until = self._table.claim, now + LEASE_S
        claimed = await self._quietly(claim, now, until, key, models, False)
        if claimed is not None:
            self._placed.add(claimed.id)
        return claimed

    async def _next_to_fetch(
        self, now: float, keys: list[str], models: list[str]
    ) -> JobRecord | None:
        """Claim a job with a url to fetch; see `_next_to_ask`."""
        fetching = [job for job in self.jobs.values() if job.url]
        if len(fetching) >= _FETCHES:
            return None
        keys = keys + keys_with(fetching, _FETCHES_OF_A_KEY)
        found = await self._quietly(self._table.keys, now, keys, models, True)
        if (key := self._fetch_turns.next(found or ())) is None:
            return None
        return await self._quietly(self._table.claim, now, now + LEASE_S, key, models, True)

    async def _sweep(self) -> None:
        """Fail overdue jobs, forget those that ended long ago, and count the open ones."""
        now, jobs, table = time.time(), self.services.config.jobs, self._table
        self._swept_s = time.monotonic()
        await self._quietly(table.follow_clock, now, _AHEAD_S, LEASE_S)
        for job in await self._quietly(table.overdue, now - GIVE_UP_S) or ():
            error = DeadlineError(f"no end came within {GIVE_UP_S:g} s")
            await self._fail(job, ApiError(error))
        await self._quietly(table.forget, now - jobs.keep_s)
        ids = await self._quietly(table.open_ids)
        if ids is not None:
            await self.storage.for_audio.quietly(self.storage.audio.remove_orphans, ids)
            self.counters.open_jobs = len(ids)

    # ------------------------------------------------------------ one job

    async def _work(self, job: JobRecord) -> None:
        claimed = _ClaimedJob(job)
        lease = asyncio.create_task(self._keep_lease(job, asyncio.current_task()))
        try:
            if job.tries > MAX_TRIES:
                message = f"the server was lost {job.tries - 1} times while it worked on this job"
                raise ApiError(RequestError(message), "jobs_tries")
            await self._fetch(job)
            if job.url:
                await self._ask_when_placed(claimed)
            else:
                await self._ask(claimed)
        except ApiError as error:
            await self._not_answered(claimed, error)
        except asyncio.CancelledError:
            put_back = self._quietly(self._table.put_back, job, time.time(), False)
            await asyncio.shield(put_back)
            raise
        finally:
            self._placed.discard(job.id)
            lease.cancel()

    async def _keep_lease(self, job: JobRecord, work: "asyncio.Task[None] | None") -> None:
        """Renew a job's lease; end the work if another process has claimed the job."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            renewed = await self._quietly(self._table.renew, job, time.time() + LEASE_S)
            if renewed is False and work is not None:
                work.cancel()

    async def _fetch(self, job: JobRecord) -> None:
        """Fetch a job's audio, unless it is here.

        Raises:
            ApiError: it cannot be had.
        """
        audio = self.storage.audio
        if not job.url or audio.path(job.id).exists():
            return
        part = audio.part(job.id, job.token)
        try:
            size = await self.outbound.fetch(job.url, part)
            await self.storage.for_audio.do(audio.seal, part, job.id)
        except OSError as error:
            why = UnavailableError(f"no room for the url's audio: {error.strerror}")
            raise ApiError(why, URL_AWAY) from error
        finally:
            part.unlink(missing_ok=True)
        await self._do(self._table.note_size, job, size)

    async def _ask_when_placed(self, claimed: _ClaimedJob) -> None:
        """Send a fetched job's request once it has a worker's place.

        If the server has no room, the job waits here for another place. If it were put back, its
        key's next url would be fetched, and fetched audio would fill the disk.

        Raises:
            ApiError: there is no answer.
        """
        job = claimed.job
        while True:
            claimed.sent, placed = False, asyncio.Event()
            self._fetched[job.id] = job, placed
            self.wake()
            try:
                await placed.wait()
                return await self._ask(claimed)
            except ApiError as error:
                if not isinstance(error.error, OverloadedError):
                    raise
                self._leave_alone(job, error)
            finally:
                self._fetched.pop(job.id, None)
                self._placed.discard(job.id)

    async def _ask(self, claimed: _ClaimedJob) -> None:
        """Send a job's request, as its key would, and record the answer.

        Raises:
            ApiError: there is none.
        """
        job = claimed.job
        record = LogRecord(id=job.id, model=job.model)
        identify = functools.partial(self.services.keys.named_as, job.key)
        async with RequestContext(self.services, record, "jobs", identify) as context:
            with contextlib.ExitStack() as stack:
                with context.admit() as permit:
                    call = await self._send(job, permit, context, stack)
                    claimed.sent = True
                stack.enter_context(call)
                transcript = await call.transcript()
            await self._record(job, transcript, context)

    async def _send(
        self, job: JobRecord, permit: Permit, context: RequestContext, stack: contextlib.ExitStack
    ) -> EngineCall:
        storage = self.storage
        fields = fields_of(job, self.services.config.gateway.unknown_fields)
        path = storage.audio.path(job.id)
        try:
            size = path.stat().st_size
        except OSError:
            why = RequestError("the job's audio is missing from storage")
            raise ApiError(why, "jobs_audio") from None
        permit.charge(size)
        audio, copy = None, None
        if size <= SPOOL_BYTES:
            audio = await storage.for_audio.do(path.read_bytes)
        else:  # the engine's process takes the copy from the uploads' folder
            file = tempfile.NamedTemporaryFile(dir=self.services.engines.uploads)  # noqa: SIM115
            copy = stack.enter_context(file).name
            await storage.for_audio.do(shutil.copyfile, path, copy)
        length = None
        if self.services.target is not None:
            length = await storage.for_audio.do(_audio_length, path, size)
        parts, target = request_parts(fields.request, audio), Target(job.model, False)
        request = EngineRequest(target, parts, audio_file=copy, priority="job", audio=length)
        return context.start(request, permit)

    async def _record(
        self, job: JobRecord, transcript: Transcript, context: RequestContext
    ) -> None:
        """Record a job's answer, and count it, unless the job has ended otherwise."""
        result, seconds = to_json(transcript), transcript.duration
        if await self._do(self._table.complete, job, time.time(), result, seconds):
            context.answered(transcript)
            self._ended(job, COMPLETED)

    async def _not_answered(self, claimed: _ClaimedJob, error: ApiError) -> None:
        """Let a job fail by its own error, and put it back after one of the server."""
        job = claimed.job
        if isinstance(error.error, RequestError):
            await self._fail(job, error)
            return
        full = isinstance(error.error, OverloadedError)
        counted = not full and (claimed.sent or error.reason == URL_AWAY)
        if full:
            self._leave_alone(job, error)
        elif error.reason != URL_AWAY:
            self._away.add(job.model)
        wait_s = min(2.0**job.tries, MAX_BACK_OFF_S) if counted else _wait_s(error)
        logger.info("%s waits for %.0f s: %s", job.id, wait_s, error)
        due = time.time() + wait_s * random.uniform(1.0, 1.2)
        await self._quietly(self._table.put_back, job, due, counted)

    def _leave_alone(self, job: JobRecord, error: ApiError) -> None:
        """Start no further job of this job's key or model for a while, for want of room."""
        what = ("key", job.key) if error.reason in _KEY_LIMITS else ("model", job.model)
        self._not_now[what] = time.monotonic() + _wait_s(error)

    async def _fail(self, job: JobRecord, error: ApiError) -> None:
        told = to_json(openai_error(error, FIELDS)["error"])
        if await self._quietly(self._table.fail, job, time.time(), told):
            self._ended(job, FAILED)

    def _ended(self, job: JobRecord, status: str) -> None:
        self.counters.ended(status)
        self.storage.discard(job.id)
        self.webhooks.wake()


def _audio_length(path: Path, size: int) -> AudioLength:
    """Estimate the length of a job's audio from its beginning."""
    with path.open("rb") as file:
        return audio_of_file(file.read(HEAD_BYTES), size)


def _wait_s(error: ApiError) -> float:
    """Return the seconds after which a job that got no answer may be tried again."""
    return min(max(NOT_NOW_S, error.retry_after_s), _MAX_NOT_NOW_S)
