"""Runs jobs: takes one from the table while there is room beside other requests, and records its
end once, whoever dies meanwhile.

A job with a url gets a place among the `jobs.workers` when its audio is here, so slow urls keep no
other job waiting; and a key has few fetches at a time.

A job's request goes the way of any other of its key, in `Runner._ask` alone: it is counted, limited
and measured as these are. What fails by its own fault ends so. What fails by the server's is put
back, and a job that was begun `jobs.tries` times has failed: it may be what the server dies of.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import random
import tempfile
import time
from pathlib import Path

from serve.contract.codec import to_json
from serve.contract.config import Config
from serve.contract.errors import (
    DeadlineError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve.contract.messages import Transcript
from serve.gateway.context import RequestContext, Services
from serve.gateway.engine import EngineRequest
from serve.gateway.engines import EngineCall
from serve.gateway.errors import ApiError, openai_error
from serve.gateway.jobs.counts import Counts
from serve.gateway.jobs.keeper import Keeper
from serve.gateway.jobs.outside import URL_AWAY, Outside
from serve.gateway.jobs.table import COMPLETED, FAILED, Job
from serve.gateway.jobs.webhooks import Webhooks
from serve.gateway.jobs.wire import fields_of
from serve.gateway.jobs.workers import Workers, keys_with, next_key
from serve.gateway.kserve.messages import request_parts
from serve.gateway.limits import Permit
from serve.gateway.models import Target
from serve.gateway.observe.log import LogRecord
from serve.gateway.openai.fields import FIELDS
from serve.gateway.openai.form import SPOOL_BYTES
from serve.gateway.target import HEAD_BYTES, AudioLength, audio_of_file

logger = logging.getLogger("earshot.gateway")

LEASE_S = 15.0
"""A job whose worker has said nothing for so long is another's."""

NOT_NOW_S = 2.0  # that a model, or a key, is left alone for which there is no room
MOST_BACK_OFF_S = 300.0
_MOST_NOT_NOW_S = 300.0  # after which a key whose day is used up is tried again, too
_AHEAD_S = 600.0  # beyond the farthest time that a job may be due
SWEEP_S = 30.0
_FETCHES, _FETCHES_OF_A_KEY = 64, 4  # jobs with a url that are fetched, wait, or are asked for
_KEY_LIMITS = ("key_limit", "insufficient_quota")


@dataclasses.dataclass
class _Run:
    """A job that is being worked on."""

    job: Job
    given: bool = False  # a server has had it


class Runner(Workers):
    """A process's workers. For one event loop.

    Args:
        config: says how many, and how long they try.
        door: jobs' requests go in by it.
        keeper: of the table.
        outside: where urls are fetched.
        webhooks: are woken at the end of each.
        counts: are told what happens.
    """

    def __init__(
        self,
        config: Config,
        door: Services,
        keeper: Keeper,
        outside: Outside,
        webhooks: Webhooks,
        counts: Counts,
    ) -> None:
        super().__init__()
        self._config = config
        self._door = door
        self._keeper = keeper
        self._outside = outside
        self._webhooks = webhooks
        self._counts = counts
        self._below = config.jobs.below or _slots(config, len(door.engines.own))
        self._placed: set[str] = set()  # ids of jobs that have a place among the workers
        self._fetched: dict[str, tuple[Job, asyncio.Event]] = {}  # jobs that wait for one
        self._last_key = self._last_fetching_key = ""
        self._last_was_fetched = False
        self._not_now: dict[tuple[str, str], float] = {}  # keys and models, until when
        # Models whose servers were lost, and until they are ready again nothing is begun of theirs:
        # else one that is away for a moment would cost each job that waits one of its tries.
        self._away = {door.models.default}
        self._swept_s = -SWEEP_S  # as `_not_now` by a clock that nobody sets
        counts.watch(self.tasks)

    def cancelled(self, id: str) -> None:
        """End a job's work that is done here, for it has been cancelled."""
        if (task := self.tasks.get(id)) is not None:
            task.cancel()

    # ------------------------------------------------------------ which one, and when

    def _has_room(self) -> bool:
        """Tell whether a job may start beside the requests that are under way."""
        room = len(self._placed) < self._config.jobs.workers
        return room and self._door.admission.requests < self._below

    async def _claimed(self) -> Job | None:
        if time.monotonic() > self._swept_s + SWEEP_S:
            await self._sweep()
        if self._door.admission.draining:
            return None
        now, begun_s = time.time(), time.monotonic()
        self._not_now = {what: until for what, until in self._not_now.items() if until > begun_s}
        keys = [name for kind, name in self._not_now if kind == "key"]
        models = [name for kind, name in self._not_now if kind == "model"]
        self._away = {name for name in self._away if not await self._door.engines.ready(name)}
        models += self._away
        if self._has_room() and (job := await self._to_begin(now, keys, models)) is not None:
            return job
        return await self._to_fetch(now, keys, models)

    async def _to_begin(self, now: float, keys: list[str], models: list[str]) -> Job | None:
        """Give a place to a job of the next key: claim one with a file, or wake a fetched one.

        Args:
            now: the time.
            keys: for whose jobs there is no room.
            models: for which there is none.

        Returns:
            The job with a file.
        """
        table = self._keeper.table
        files = await self._keeper.quietly(table.keys, now, keys, models, False) or []
        fetched: dict[str, tuple[Job, asyncio.Event]] = {}
        for job, placed in self._fetched.values():
            if job.key not in keys and job.model not in models:
                fetched.setdefault(job.key, (job, placed))
        key = next_key({*files, *fetched}, self._last_key)
        if key is None:
            return None
        self._last_key = key
        self._last_was_fetched = key in fetched and not (self._last_was_fetched and key in files)
        if self._last_was_fetched:
            first, placed = fetched[key]
            del self._fetched[first.id]
            self._placed.add(first.id)
            placed.set()
            self.wake()
            return None
        claim = table.claim
        claimed = await self._keeper.quietly(claim, now, now + LEASE_S, key, models, False)
        if claimed is not None:
            self._placed.add(claimed.id)
        return claimed

    async def _to_fetch(self, now: float, keys: list[str], models: list[str]) -> Job | None:
        """Claim a job whose url is to be fetched; see `_to_begin`."""
        table, fetching = self._keeper.table, [job for job in self.jobs.values() if job.url]
        if len(fetching) >= _FETCHES:
            return None
        keys = keys + keys_with(fetching, _FETCHES_OF_A_KEY)
        there = await self._keeper.quietly(table.keys, now, keys, models, True)
        key = next_key(there or (), self._last_fetching_key)
        if key is None:
            return None
        self._last_fetching_key = key
        return await self._keeper.quietly(table.claim, now, now + LEASE_S, key, models, True)

    async def _sweep(self) -> None:
        """Fail what waits for too long, forget what ended long ago, and count what there is."""
        now, jobs, table = time.time(), self._config.jobs, self._keeper.table
        self._swept_s = time.monotonic()
        await self._keeper.quietly(table.follow_clock, now, _AHEAD_S, LEASE_S)
        for job in await self._keeper.quietly(table.overdue, now - jobs.give_up_s) or ():
            error = DeadlineError(f"no end came within {jobs.give_up_s:g} s (jobs.give_up_s)")
            await self._fail(job, ApiError(error))
        await self._keeper.quietly(table.forget, now - jobs.keep_s)
        ids = await self._keeper.quietly(table.open_ids)
        if ids is not None:
            await self._keeper.for_audio.quietly(self._keeper.audio.remove_orphans, ids)
            self._counts.open_jobs = len(ids)

    # ------------------------------------------------------------ one job

    async def _work(self, job: Job) -> None:
        run, holding = _Run(job), asyncio.create_task(self._hold(job, asyncio.current_task()))
        try:
            if job.tries > self._config.jobs.tries:
                raise ApiError(
                    RequestError(
                        f"the server was lost {job.tries - 1} times while it worked on this job "
                        "(jobs.tries)"
                    ),
                    "jobs_tries",
                )
            await self._fetch(job)
            if job.url:
                await self._ask_when_placed(run)
            else:
                await self._ask(run)
        except ApiError as refusal:
            await self._not_answered(run, refusal)
        except asyncio.CancelledError:
            await asyncio.shield(self._put_back(job, time.time(), counted=False))
            raise
        finally:
            self._placed.discard(job.id)
            holding.cancel()

    async def _hold(self, job: Job, work: "asyncio.Task[None] | None") -> None:
        """Keep others from a job as long as it is worked on; end that where it is another's."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            renewed = await self._keeper.quietly(
                self._keeper.table.renew, job, time.time() + LEASE_S
            )
            if renewed is False and work is not None:
                work.cancel()

    async def _fetch(self, job: Job) -> None:
        """Have a job's audio here.

        Raises:
            ApiError: it cannot be had.
        """
        audio = self._keeper.audio
        if not job.url or audio.path(job.id).exists():
            return
        part = audio.part(job.id, job.token)
        try:
            size = await self._outside.fetch(job.url, part)
            await self._keeper.for_audio.do(audio.seal, part, job.id)
        except OSError as error:
            why = UnavailableError(f"no room for the url's audio: {error.strerror}")
            raise ApiError(why, URL_AWAY) from error
        finally:
            part.unlink(missing_ok=True)
        await self._keeper.do(self._keeper.table.note_size, job, size)

    async def _ask_when_placed(self, run: _Run) -> None:
        """Send a fetched job's request once it has a place.

        Where there is no room for it, it waits here for another place: if it were put back, its
        key's next url would be fetched, and fetched audio would fill the disk.

        Raises:
            ApiError: there is no answer.
        """
        job = run.job
        while True:
            run.given, placed = False, asyncio.Event()
            self._fetched[job.id] = job, placed
            self.wake()
            try:
                await placed.wait()
                return await self._ask(run)
            except ApiError as refusal:
                if not isinstance(refusal.error, OverloadedError):
                    raise
                self._leave_alone(job, refusal)
            finally:
                self._fetched.pop(job.id, None)
                self._placed.discard(job.id)

    async def _ask(self, run: _Run) -> None:
        """Send a job's request, as its caller would, and record the answer.

        Raises:
            ApiError: there is none.
        """
        line = LogRecord(id=run.job.id, model=run.job.model)
        identify = functools.partial(self._door.keys.named_as, run.job.key)
        async with RequestContext(self._door, line, "jobs", identify) as visit:
            with contextlib.ExitStack() as stack:
                with visit.admit() as ticket:
                    call = await self._begin(run, ticket, visit, stack)
                stack.enter_context(call)
                transcript = await call.transcript()
            await self._record(run.job, transcript, visit)

    async def _begin(
        self, run: _Run, ticket: Permit, visit: RequestContext, stack: contextlib.ExitStack
    ) -> EngineCall:
        job, keeper, copy = run.job, self._keeper, None
        fields = fields_of(job, self._config.gateway.unknown_fields)
        path = keeper.audio.path(job.id)
        try:
            size = path.stat().st_size
        except OSError:
            raise ApiError(RequestError("the job's audio is there no more"), "jobs_audio") from None
        ticket.charge(size)
        if size <= SPOOL_BYTES:
            parts = request_parts(fields.request, await keeper.for_audio.do(path.read_bytes))
        else:  # the engine's process takes it from where uploads lie, and keeps nothing there
            file = tempfile.NamedTemporaryFile(dir=self._door.engines.uploads)  # noqa: SIM115
            copy = stack.enter_context(file).name
            await keeper.for_audio.do(keeper.audio.copy, job.id, Path(copy))
            parts = request_parts(fields.request, None)
        audio = await keeper.for_audio.do(_audio_length, path, size)
        target = Target(job.model, False)
        request = EngineRequest(target, parts, audio_file=copy, priority="job", audio=audio)
        call = visit.start(request, ticket)
        run.given = True
        return call

    async def _record(self, job: Job, transcript: Transcript, visit: RequestContext) -> None:
        """Record a job's answer, and count it, unless the job has ended otherwise."""
        table, seconds = self._keeper.table, transcript.duration
        if await self._keeper.do(table.complete, job, time.time(), to_json(transcript), seconds):
            visit.answered(transcript)
            await self._over(job, COMPLETED)

    async def _not_answered(self, run: _Run, refusal: ApiError) -> None:
        """Let a job fail where the fault is its own, else put it back."""
        job, error = run.job, refusal.error
        if isinstance(error, RequestError):
            await self._fail(job, refusal)
            return
        full = isinstance(error, OverloadedError)
        counted = not full and (run.given or refusal.reason == URL_AWAY)
        wait_s = _wait_s(refusal)
        if full:
            self._leave_alone(job, refusal)
        elif refusal.reason != URL_AWAY:
            self._away.add(job.model)
        if counted:
            wait_s = min(2.0**job.tries, MOST_BACK_OFF_S)
        logger.info("%s waits for %.0f s: %s", job.id, wait_s, refusal)
        due = time.time() + wait_s * random.uniform(1.0, 1.2)
        await self._put_back(job, due, counted=counted)

    def _leave_alone(self, job: Job, refusal: ApiError) -> None:
        """Begin no job of a key, or of a model, for a while: there is no room for them."""
        what = ("key", job.key) if refusal.reason in _KEY_LIMITS else ("model", job.model)
        self._not_now[what] = time.monotonic() + _wait_s(refusal)

    async def _put_back(self, job: Job, due: float, counted: bool) -> None:
        await self._keeper.quietly(self._keeper.table.put_back, job, due, counted)

    async def _fail(self, job: Job, refusal: ApiError) -> None:
        error = to_json(openai_error(refusal, FIELDS)["error"])
        if await self._keeper.quietly(self._keeper.table.fail, job, time.time(), error):
            await self._over(job, FAILED)

    async def _over(self, job: Job, status: str) -> None:
        self._counts.ended(status)
        self._keeper.discard(job.id)
        self._webhooks.wake()


def _audio_length(path: Path, size: int) -> AudioLength:
    """Look at the beginning of a job's audio."""
    with path.open("rb") as file:
        return audio_of_file(file.read(HEAD_BYTES), size)


def _slots(config: Config, engines: int) -> int:
    """Return the number of requests that keep this process's share of all engines busy."""
    return max(1, config.runtime.slots * engines // config.gateway.processes)


def _wait_s(refusal: ApiError) -> float:
    """Return the seconds after which a job that got no answer may be tried again."""
    return min(max(NOT_NOW_S, refusal.retry_after_s), _MOST_NOT_NOW_S)
