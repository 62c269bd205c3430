"""The table of jobs, in SQLite or PostgreSQL: what is in it survives whoever wrote it.

Each change is one statement, which the database does whole or not at all. A job that has no end may
be claimed once its `due` is past: it is when the job was accepted, when it is to be tried again,
or, while somebody works on it, when that worker has said nothing for too long. Each claim has a
token of its own, and only who has the last one can record an end. Webhooks are claimed alike.

The table is made when it is first needed. A database that cannot be used fails each call alone, and
the calls succeed again once it can be used.
"""

import contextlib
import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    IntegrityError,
    NoSuchModuleError,
    SQLAlchemyError,
)
from sqlalchemy.schema import CreateIndex, CreateTable

from serve.contract.config import Config
from serve.contract.errors import ConfigError, FileError
from serve.contract.jobs_config import POSTGRESQL
from serve.gateway.usage import use_wal

FILE = "jobs.sqlite"
"""Name in the jobs' folder, where no database is configured."""
QUEUED, RUNNING = "queued", "in_progress"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
OPEN = (QUEUED, RUNNING)
"""Statuses without an end."""

_BUSY_S = 10.0  # most that another process is waited for
_AHEAD_S = 7200.0  # beyond the farthest time that a webhook may be due
_ROW_BYTES = 1024  # counted for a job beside its texts
# A PostgreSQL whose machine says nothing more is given up after about as long.
_POSTGRESQL = {
    "connect_timeout": int(_BUSY_S),
    "tcp_user_timeout": int(_BUSY_S * 1000),
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """A job without its result; times are seconds since 1970."""

    id: str
    key: str  # name of its caller's; empty where there are no keys
    model: str
    task: str
    pairs: str = ""  # JSON: the fields' names and texts in their order; empty in a `_BRIEF` job
    url: str = ""  # of its audio; empty: it came with the job
    filename: str = ""  # as its client calls it
    audio_bytes: int = 0
    webhook_url: str = ""
    idempotency: str | None = None  # the caller's key for it
    fingerprint: str = ""  # of all that was sent
    status: str = QUEUED
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    due: float = 0.0
    token: str = ""
    tries: int = 0  # the number of times that it was begun
    duration: float | None = None  # s of audio
    error: str = ""  # JSON, as the API tells it
    webhook: str = ""  # "pending", "delivered" or "given_up"; empty: there is none to send
    webhook_due: float = 0.0
    webhook_tries: int = 0
    stored_bytes: int = 0  # of its texts and its result in the table


_TYPES: dict[str, Any] = {"str": sa.Text, "int": sa.BigInteger, "float": sa.Double}


def _column(field: "dataclasses.Field[Any]") -> "sa.Column[Any]":
    name, _, optional = getattr(field.type, "__name__", str(field.type)).partition(" | ")
    return sa.Column(field.name, _TYPES[name], nullable=bool(optional))


JOBS = sa.Table(
    "earshot_jobs",
    sa.MetaData(),
    # An alias of SQLite's own number of a row has this very type.
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    # What may be large is behind the rest: SQLite reads a row from its beginning.
    *(_column(field) for field in dataclasses.fields(JobRecord) if field.name != "pairs"),
    sa.Column("pairs", sa.Text, nullable=False),
    sa.Column("result", sa.Text),  # JSON of a transcript
    sa.UniqueConstraint("id"),
    sa.UniqueConstraint("key", "idempotency"),
    sqlite_autoincrement=True,
)
_C = JOBS.c
# As literals, without which SQLite finds no use for the partial indexes below.
_IS_OPEN = sa.or_(*(_C.status == sa.literal_column(f"'{status}'") for status in OPEN))
_PENDING = _C.webhook == sa.literal_column("'pending'")
_INDEXES = (
    sa.Index("earshot_jobs_of_key", _C.key, _C.number),
    sa.Index("earshot_jobs_load", _C.key, _C.status, _C.audio_bytes, _C.stored_bytes),
    sa.Index(
        *("earshot_jobs_open", _C.key, _C.number), sqlite_where=_IS_OPEN, postgresql_where=_IS_OPEN
    ),
    sa.Index(
        *("earshot_jobs_webhooks_of_key", _C.key, _C.webhook_due),
        sqlite_where=_PENDING,
        postgresql_where=_PENDING,
    ),
)
_ADD_STORED_BYTES = sa.text(
    f"ALTER TABLE {JOBS.name} ADD COLUMN stored_bytes BIGINT DEFAULT 0 NOT NULL"
)
_JOB = [_C[field.name] for field in dataclasses.fields(JobRecord)]
_BRIEF = [column for column in _JOB if column.name != "pairs"]


class JobTable:
    """The table; its methods may be called by several threads.

    Args:
        config: says where it is.

    Raises:
        ConfigError: its address is malformed, or its driver is not installed.
    """

    def __init__(self, config: Config) -> None:
        self.name = config.jobs.database.rpartition("@")[2] or str(Path(config.jobs.folder) / FILE)
        if config.jobs.database:
            where = "postgresql+psycopg://" + config.jobs.database.removeprefix(POSTGRESQL)
            arguments: dict[str, Any] = dict(_POSTGRESQL)
        else:
            where = f"sqlite:///{Path(config.jobs.folder).absolute() / FILE}"
            arguments = {"timeout": _BUSY_S}
        try:
            self._engine = sa.create_engine(
                where, isolation_level="AUTOCOMMIT", connect_args=arguments, pool_pre_ping=True
            )
        except ModuleNotFoundError as error:
            raise ConfigError(
                "jobs.database is a PostgreSQL, and psycopg, which speaks to it, is not installed; "
                "pip install 'psycopg[binary]'"
            ) from error
        except (SQLAlchemyError, ArgumentError, NoSuchModuleError) as error:
            raise ConfigError(f"jobs cannot be kept in {self.name}: {_reason(error)}") from error
        if not config.jobs.database:
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
        self._made = False

    def _create(self) -> None:
        """Make the table unless it is there; another process or thread may do the same just now."""
        steps: list[sa.Executable] = [CreateTable(JOBS, if_not_exists=True)]
        steps += (CreateIndex(index, if_not_exists=True) for index in _INDEXES)
        self._repeat(steps[0])
        columns = {column["name"] for column in sa.inspect(self._engine).get_columns(JOBS.name)}
        if _C.stored_bytes.name not in columns:  # an older version has made the table
            # Another has just done it, or an index fails.
            with contextlib.suppress(SQLAlchemyError):
                self._execute(_ADD_STORED_BYTES)
        for step in steps[1:]:
            self._repeat(step)
        self._made = True

    def _repeat(self, step: sa.Executable) -> None:
        try:
            self._execute(step)
        except IntegrityError:  # PostgreSQL's, of two that begin at once
            self._execute(step)

    # ------------------------------------------------------------ what clients ask for

    def add(self, job: JobRecord) -> JobRecord:
        """Keep a job; return it, or the one that its caller has sent under the same key."""
        texts = (job.pairs, job.url, job.webhook_url, job.filename, job.idempotency or "")
        stored = _ROW_BYTES + sum(len(text.encode()) for text in texts)
        row = dataclasses.asdict(job) | {"stored_bytes": stored}
        try:
            self._rows(sa.insert(JOBS).values(row))
        except IntegrityError:
            same = sa.and_(_C.key == job.key, _C.idempotency == job.idempotency)
            (there,) = self._jobs(sa.select(*_BRIEF).where(same))
            return there
        return job

    def find(self, key: str, id: str) -> JobRecord | None:
        """Find a key's job; its `pairs` are not read."""
        return _first(self._jobs(sa.select(*_BRIEF).where(_C.key == key, _C.id == id)))

    def result(self, id: str) -> tuple[str, str] | None:
        """Return the `pairs` of a job that is completed, and its transcript as JSON."""
        rows = self._rows(sa.select(_C.pairs, _C.result).where(_C.id == id))
        return next(((pairs, result) for pairs, result in map(tuple, rows)), None)

    def newest(self, key: str, count: int, after: str) -> list[JobRecord]:
        """List a key's jobs, the newest first, from behind the one that is named; no `pairs`."""
        jobs = sa.select(*_BRIEF).where(_C.key == key)
        if after:
            number = sa.select(_C.number).where(_C.id == after, _C.key == key).scalar_subquery()
            jobs = jobs.where(_C.number < number)
        return self._jobs(jobs.order_by(_C.number.desc()).limit(count))

    def load(self) -> dict[str, tuple[int, int]]:
        """Count each key's jobs without an end, and the bytes that all of its jobs take.

        These are the audio of jobs without an end, and what the table holds of every job.
        """
        is_open = sa.case((_IS_OPEN, 1), else_=0)
        size = sa.func.sum(_C.stored_bytes + is_open * _C.audio_bytes)
        rows = self._rows(sa.select(_C.key, sa.func.sum(is_open), size).group_by(_C.key))
        return {key: (int(jobs), int(octets)) for key, jobs, octets in map(tuple, rows)}

    def cancel(self, key: str, id: str, now: float) -> bool:
        """End a key's job that has no end yet; tell whether it was one."""
        change = sa.update(JOBS).where(_C.key == key, _C.id == id, _IS_OPEN)
        return bool(self._rows(change.values(_ending(CANCELLED, now)).returning(_C.id)))

    # ------------------------------------------------------------ what workers do

    def keys(
        self, now: float, not_keys: Sequence[str], not_models: Sequence[str], urls: bool
    ) -> list[str]:
        """List the keys, but for some, whose jobs with a url, or with a file, may be claimed."""
        free = sa.and_(_free(now, not_models, urls), _C.key.not_in(not_keys))
        return [key for (key,) in self._rows(sa.select(_C.key).where(free).distinct())]

    def claim(
        self, now: float, until: float, key: str, not_models: Sequence[str], urls: bool
    ) -> JobRecord | None:
        """Take a key's oldest job with a url, or with a file, until a time."""
        free = _free(now, not_models, urls)
        oldest = sa.select(_C.number).where(free, _C.key == key).order_by(_C.number).limit(1)
        taken = sa.update(JOBS).where(
            _C.number == oldest.with_for_update(skip_locked=True).scalar_subquery(), free
        )
        taken = taken.values(
            status=RUNNING,
            due=until,
            token=secrets.token_hex(16),
            tries=_C.tries + 1,
            started=sa.func.coalesce(_C.started, now),
        )
        return _first(self._jobs(taken.returning(*_JOB)))

    def renew(self, job: JobRecord, until: float) -> bool:
        """Keep a claim until another time; tell whether it was still the job's last."""
        return self._change(job, due=until)

    def put_back(self, job: JobRecord, due: float, counted: bool) -> bool:
        """Let others have a claimed job from a time on; whether this try counts."""
        return self._change(job, due=due, status=QUEUED, token="", tries=job.tries - (not counted))

    def complete(self, job: JobRecord, now: float, result: str, duration: float) -> bool:
        """Record a claimed job's result; tell whether this is its one end."""
        stored = _C.stored_bytes + len(result.encode())
        ending = _ending(COMPLETED, now)
        return self._change(job, **ending, result=result, duration=duration, stored_bytes=stored)

    def fail(self, job: JobRecord, now: float, error: str) -> bool:
        """Record why a job has no result; tell whether this is its one end."""
        return self._change(job, **_ending(FAILED, now), error=error)

    def note_size(self, job: JobRecord, size: int) -> bool:
        """Note how much audio a claimed job's url has brought."""
        return self._change(job, audio_bytes=size)

    def overdue(self, before: float) -> list[JobRecord]:
        """List jobs without an end that were accepted before a time."""
        return self._jobs(sa.select(*_BRIEF).where(_IS_OPEN, _C.created < before).limit(100))

    def forget(self, before: float) -> int:
        """Remove jobs that had ended before a time and owe no webhook; count them."""
        old = sa.delete(JOBS).where(sa.not_(_IS_OPEN), _C.ended < before, sa.not_(_PENDING))
        return len(self._rows(old.returning(_C.id)))

    def follow_clock(self, now: float, ahead_s: float, lease_s: float) -> None:
        """Let jobs and webhooks be due whose time lies too far ahead: the clock was set back.

        Args:
            now: the time.
            ahead_s: beyond the farthest that a job may be due from now.
            lease_s: until a job is due that somebody works on, who renews it before.
        """
        far = sa.update(JOBS).where(_IS_OPEN, _C.due > now + ahead_s)
        self._rows(far.values(due=sa.case((_C.status == RUNNING, now + lease_s), else_=now)))
        untried = sa.and_(_C.webhook_tries == 0, _C.webhook_due > now)
        far = sa.update(JOBS).where(_PENDING, sa.or_(untried, _C.webhook_due > now + _AHEAD_S))
        self._rows(far.values(webhook_due=now))

    def open_ids(self) -> set[str]:
        """Return the ids of all jobs that have no end."""
        return {id for (id,) in self._rows(sa.select(_C.id).where(_IS_OPEN))}

    def webhook_keys(self, now: float, not_keys: Sequence[str]) -> list[str]:
        """List the keys, but for some, that have a webhook that is due."""
        due = sa.and_(_PENDING, _C.webhook_due <= now, _C.key.not_in(not_keys))
        return [key for (key,) in self._rows(sa.select(_C.key).where(due).distinct())]

    def claim_webhook(self, now: float, until: float, key: str) -> JobRecord | None:
        """Take a key's webhook that is due; if its sender dies it is due again at `until`."""
        due = sa.and_(_PENDING, _C.webhook_due <= now, _C.key == key)
        first = sa.select(_C.number).where(due).order_by(_C.webhook_due).limit(1)
        taken = sa.update(JOBS).where(
            _C.number == first.with_for_update(skip_locked=True).scalar_subquery(), due
        )
        taken = taken.values(webhook_due=until, webhook_tries=_C.webhook_tries + 1)
        return _first(self._jobs(taken.returning(*_BRIEF)))

    def webhook_done(self, job: JobRecord, how: str, due: float = 0.0) -> None:
        """Note how a webhook's try ended: "pending" until `due`, "delivered" or "given_up"."""
        change = sa.update(JOBS).where(_C.id == job.id, _PENDING)
        self._rows(change.values(webhook=how, webhook_due=due))

    def close(self) -> None:
        """Close it."""
        self._engine.dispose()

    # ------------------------------------------------------------ statements

    def _change(self, job: JobRecord, **values: Any) -> bool:
        """Change a job as its worker, or, unclaimed, as it was read."""
        mine = sa.and_(_C.id == job.id, _C.token == job.token, _IS_OPEN)
        return bool(self._rows(sa.update(JOBS).where(mine).values(values).returning(_C.id)))

    def _jobs(self, statement: sa.Executable) -> list[JobRecord]:
        return [JobRecord(**row._mapping) for row in self._rows(statement)]

    def _rows(self, statement: sa.Executable) -> Sequence[sa.Row[Any]]:
        """Execute a statement; its rows are read to the end, with which SQLite ends it.

        Raises:
            IntegrityError: there is such a row.
            FileError: the database cannot be used.
        """
        try:
            if not self._made:
                self._create()
            return self._execute(statement)
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            self._made = False  # another database may be there when it is tried again
            reason = _reason(error)
            if type(error) is DatabaseError:  # SQLite's, of a damaged file
                self._engine.dispose()  # connections to it, for another may take its place
                reason += "; restore the file, or move jobs.folder away and start the server again"
            raise FileError(f"jobs cannot be kept in {self.name}: {reason}") from error

    def _execute(self, statement: sa.Executable) -> Sequence[sa.Row[Any]]:
        with self._engine.connect() as connection:
            found = connection.execute(statement)
            return found.all() if found.returns_rows else ()


def _free(now: float, not_models: Sequence[str], urls: bool) -> "sa.ColumnElement[bool]":
    """Say which jobs may be claimed."""
    kind = _C.url != "" if urls else _C.url == ""
    return sa.and_(_IS_OPEN, _C.due <= now, _C.model.not_in(not_models), kind)


def _ending(status: str, now: float) -> Mapping[str, Any]:
    """Return the values of a job that ends; whoever had claimed it has no say any more."""
    pending = sa.case((_C.webhook_url == "", ""), else_="pending")
    return {"status": status, "ended": now, "token": "", "webhook": pending, "webhook_due": now}


def _first(jobs: Sequence[JobRecord]) -> JobRecord | None:
    return jobs[0] if jobs else None


def _prepare_sqlite(connection: Any, _record: object) -> None:
    use_wal(connection, _BUSY_S)
    # What was accepted is on the disk when that is said, also where the machine loses power.
    connection.execute("PRAGMA synchronous = FULL")


def _reason(error: Exception) -> str:
    """Say what went wrong, without the statement and its values."""
    return " ".join(str(getattr(error, "orig", None) or error).split())[:300]
