"""The table of jobs, in SQLite or PostgreSQL. Its rows survive the process that wrote them.

Each change is one statement, which the database does as a whole or not at all. A worker may claim a
job without an end once the time `due` has passed. A new job is due at once, and a failed try sets
the time of the next try. While a worker has the job, `due` is the end of the worker's lease. Each
claim has its own token, and only the worker with the latest token can record an end. Webhooks
are claimed in the same way.

The table is created when it is first needed. While the database cannot be used each call fails, and
later calls succeed.
"""

import dataclasses
import secrets
import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError, IntegrityError, ProgrammingError, SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

from serve.contract.config import Config
from serve.contract.errors import ConfigError, FileError
from serve.contract.server_config import POSTGRESQL

FILE = "jobs.sqlite"
"""The file's name in the jobs' folder, if no database is configured."""
QUEUED, RUNNING = "queued", "in_progress"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
OPEN = (QUEUED, RUNNING)
"""The statuses of jobs without an end."""

Work = Literal["transcribe", "fetch", "webhook"]
"""The kinds of work: on jobs with audio, on jobs whose url is not fetched, on webhooks."""
MAX_FETCHED_OF_KEY = 4
"""Maximum jobs of a key whose url is fetched and that wait to be transcribed."""

_BUSY_S = 10.0  # maximum wait of a call for a lock that another process holds
_LOOK_S = 0.002  # between two tries to switch the file's journal
_AHEAD_S = 7200.0  # more than the farthest time from now that a webhook may be due
_ROW_BYTES = 1024  # counted for a job beside its texts
# A PostgreSQL that does not answer is given up after about `_BUSY_S`.
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
    key: str  # the API key's name; empty: the server has no keys
    model: str
    task: str
    pairs: str = ""  # JSON: names and texts of the fields in order; empty if read by `_BRIEF`
    url: str = ""  # of the audio; empty: it came with the job
    filename: str = ""  # the client's name of the audio
    audio_bytes: int = 0
    webhook_url: str = ""
    idempotency: str | None = None  # the Idempotency-Key
    fingerprint: str = ""  # of the whole request
    status: str = QUEUED
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    due: float = 0.0
    token: str = ""
    tries: int = 0  # times that it was begun
    duration: float | None = None  # s of audio
    error: str = ""  # JSON, as the API tells it
    webhook: str = ""  # "pending", "delivered" or "given_up"; empty: none is to be sent
    webhook_due: float = 0.0
    webhook_tries: int = 0
    stored_bytes: int = 0  # of the texts and the result in the table


_TYPES: dict[str, Any] = {"str": sa.Text, "int": sa.BigInteger, "float": sa.Double}


def _column(field: "dataclasses.Field[Any]") -> "sa.Column[Any]":
    name, _, optional = getattr(field.type, "__name__", str(field.type)).partition(" | ")
    return sa.Column(field.name, _TYPES[name], nullable=bool(optional))


JOBS = sa.Table(
    "earshot_jobs",
    sa.MetaData(),
    # In SQLite only a column of this type is an alias of the built-in row number.
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    # Large columns come last: SQLite reads a row from its beginning.
    *(_column(field) for field in dataclasses.fields(JobRecord) if field.name != "pairs"),
    sa.Column("pairs", sa.Text, nullable=False),
    sa.Column("result", sa.Text),  # JSON of a transcript
    sa.UniqueConstraint("id"),
    sa.UniqueConstraint("key", "idempotency"),
    sqlite_autoincrement=True,
)
_C = JOBS.c
# Literals: without them SQLite does not use the partial indexes below.
_IS_OPEN = sa.or_(*(_C.status == sa.literal_column(f"'{status}'") for status in OPEN))
_PENDING = _C.webhook == sa.literal_column("'pending'")
_HAS_AUDIO = _C.audio_bytes > sa.literal_column("0")
_FETCHED = sa.and_(_IS_OPEN, _C.url != sa.literal_column("''"), _HAS_AUDIO)


def _partial_index(name: str, condition: Any, *columns: Any) -> sa.Index:
    return sa.Index(name, *columns, sqlite_where=condition, postgresql_where=condition)


_INDEXES = (
    sa.Index("earshot_jobs_of_key", _C.key, _C.number),
    sa.Index("earshot_jobs_load", _C.key, _C.status, _C.audio_bytes, _C.stored_bytes),
    _partial_index("earshot_jobs_open", _IS_OPEN, _C.key, _C.number),
    _partial_index("earshot_jobs_fetched", _FETCHED, _C.key),
    _partial_index("earshot_jobs_webhooks_of_key", _PENDING, _C.key, _C.webhook_due),
)
_JOB = [_C[field.name] for field in dataclasses.fields(JobRecord)]
_BRIEF = [column for column in _JOB if column.name != "pairs"]


class JobTable:
    """The table. Several threads may call its methods.

    Args:
        config: the database or the folder.

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
        except SQLAlchemyError as error:
            raise ConfigError(f"jobs cannot be kept in {self.name}: {_reason(error)}") from error
        if not config.jobs.database:
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
        self._made = False

    def _create(self) -> None:
        """Create the table if it does not exist. Other processes or threads may do the same now."""
        steps: list[sa.Executable] = [CreateTable(JOBS, if_not_exists=True)]
        steps += (CreateIndex(index, if_not_exists=True) for index in _INDEXES)
        for step in steps:
            try:
                self._execute(step)
            except (IntegrityError, ProgrammingError):  # PostgreSQL's, if two begin at once
                self._execute(step)
        self._made = True

    # ------------------------------------------------------------ for clients

    def add(self, job: JobRecord) -> JobRecord:
        """Add a job; return it, or the earlier job with its API key and Idempotency-Key."""
        texts = (job.pairs, job.url, job.webhook_url, job.filename, job.idempotency or "")
        stored = _ROW_BYTES + sum(len(text.encode()) for text in texts)
        row = dataclasses.asdict(job) | {"stored_bytes": stored}
        try:
            self._rows(sa.insert(JOBS).values(row))
        except IntegrityError:
            same = sa.and_(_C.key == job.key, _C.idempotency == job.idempotency)
            (earlier,) = self._jobs(sa.select(*_BRIEF).where(same))
            return earlier
        return job

    def find(self, key: str, id: str) -> JobRecord | None:
        """Return a key's job, without `pairs`."""
        return self._job(sa.select(*_BRIEF).where(_C.key == key, _C.id == id))

    def result(self, id: str) -> tuple[str, str] | None:
        """Return the `pairs` of a completed job, and its transcript as JSON."""
        rows = self._rows(sa.select(_C.pairs, _C.result).where(_C.id == id))
        return (rows[0].pairs, rows[0].result) if rows else None

    def newest(self, key: str, count: int, after: str) -> list[JobRecord]:
        """List a key's jobs after one of them, the newest first, without `pairs`."""
        jobs = sa.select(*_BRIEF).where(_C.key == key)
        if after:
            number = sa.select(_C.number).where(_C.id == after, _C.key == key).scalar_subquery()
            jobs = jobs.where(_C.number < number)
        return self._jobs(jobs.order_by(_C.number.desc()).limit(count))

    def load(self) -> dict[str, tuple[int, int]]:
        """Return each key's number of jobs without an end, and the bytes of all its jobs.

        These are the audio of jobs without an end, and the rows of all jobs.
        """
        is_open = sa.case((_IS_OPEN, 1), else_=0)
        size = sa.func.sum(_C.stored_bytes + is_open * _C.audio_bytes)
        rows = self._rows(sa.select(_C.key, sa.func.sum(is_open), size).group_by(_C.key))
        return {key: (int(jobs), int(octets)) for key, jobs, octets in map(tuple, rows)}

    def cancel(self, key: str, id: str, now: float) -> bool:
        """End a key's job; return whether it had no end before."""
        change = sa.update(JOBS).where(_C.key == key, _C.id == id, _IS_OPEN)
        return bool(self._rows(change.values(_ending(CANCELLED, now)).returning(_C.id)))

    # ------------------------------------------------------------ for workers

    def claim(
        self,
        work: Work,
        now: float,
        until: float,
        last_key: str = "",
        not_keys: Collection[str] = (),
    ) -> JobRecord | None:
        """Claim the oldest job that is due for this kind of work, of the next key in turn.

        Args:
            work: the kind of work.
            now: the time.
            until: the time at which the claim expires.
            last_key: the key whose turn was last; keys take turns in their order.
            not_keys: keys that get no turn.
        """
        values: dict[str, Any] = {"webhook_due": until, "webhook_tries": _C.webhook_tries + 1}
        if work == "webhook":
            due, columns, age = sa.and_(_PENDING, _C.webhook_due <= now), _BRIEF, _C.webhook_due
        else:
            to_fetch = sa.and_(_C.url != "", sa.not_(_HAS_AUDIO))
            kind = to_fetch if work == "fetch" else sa.not_(to_fetch)
            due = sa.and_(_IS_OPEN, _C.due <= now, kind)
            columns, age = _JOB, _C.number
            values = {
                "status": RUNNING,
                "due": until,
                "token": secrets.token_hex(16),
                "tries": _C.tries + 1,
                "started": sa.func.coalesce(_C.started, now),
            }
        free = sa.and_(due, _C.key.not_in(not_keys))
        if work == "fetch":
            fetched = sa.select(_C.key).where(_FETCHED).group_by(_C.key)
            many = sa.func.count() >= MAX_FETCHED_OF_KEY
            free = sa.and_(free, _C.key.not_in(fetched.having(many)))
        for turn in (_C.key > last_key, _C.key <= last_key):  # two queries, each by an index
            oldest = sa.select(_C.number).where(free, turn).order_by(_C.key, age).limit(1)
            number = oldest.with_for_update(skip_locked=True).scalar_subquery()
            claim = sa.update(JOBS).where(_C.number == number, due).values(values)
            if (job := self._job(claim.returning(*columns))) is not None:
                return job
        return None

    def renew(self, job: JobRecord, until: float) -> bool:
        """Extend a claim; return whether it was still the latest."""
        return self._change(job, due=until)

    def put_back(self, job: JobRecord, due: float, counted: bool) -> bool:
        """Give up a claim; the job is due at a time. `counted`: whether this try counts."""
        return self._change(job, due=due, status=QUEUED, token="", tries=job.tries - (not counted))

    def fetched(self, job: JobRecord, size: int) -> bool:
        """Give up a claim, with the number of bytes of the url's audio."""
        return self._change(job, due=0.0, token="", tries=job.tries - 1, audio_bytes=size)

    def complete(self, job: JobRecord, now: float, result: str, duration: float) -> bool:
        """Record a claimed job's result; return whether this is its only end."""
        stored = _C.stored_bytes + len(result.encode())
        ending = _ending(COMPLETED, now)
        return self._change(job, **ending, result=result, duration=duration, stored_bytes=stored)

    def fail(self, job: JobRecord, now: float, error: str) -> bool:
        """Record why a job has no result; return whether this is its only end."""
        return self._change(job, **_ending(FAILED, now), error=error)

    def overdue(self, before: float) -> list[JobRecord]:
        """List jobs without an end that were accepted before a time."""
        return self._jobs(sa.select(*_BRIEF).where(_IS_OPEN, _C.created < before).limit(100))

    def forget(self, before: float) -> int:
        """Remove jobs that ended before a time and have no pending webhook; return their number."""
        old = sa.delete(JOBS).where(sa.not_(_IS_OPEN), _C.ended < before, sa.not_(_PENDING))
        return len(self._rows(old.returning(_C.id)))

    def follow_clock(self, now: float, ahead_s: float, lease_s: float) -> None:
        """Make jobs and webhooks due if their time is too far ahead: the clock was set back.

        Args:
            now: the time.
            ahead_s: seconds from now that no job may be due after.
            lease_s: seconds after which a job is due that a worker has; the worker renews it.
        """
        far = sa.update(JOBS).where(_IS_OPEN, _C.due > now + ahead_s)
        self._rows(far.values(due=sa.case((_C.status == RUNNING, now + lease_s), else_=now)))
        untried = sa.and_(_C.webhook_tries == 0, _C.webhook_due > now)
        far = sa.update(JOBS).where(_PENDING, sa.or_(untried, _C.webhook_due > now + _AHEAD_S))
        self._rows(far.values(webhook_due=now))

    def open_ids(self) -> set[str]:
        """Return the ids of all jobs that have no end."""
        return {id for (id,) in self._rows(sa.select(_C.id).where(_IS_OPEN))}

    def webhook_done(self, job: JobRecord, how: str, due: float = 0.0) -> None:
        """Record how a webhook's try ended: "pending" until `due`, "delivered" or "given_up"."""
        change = sa.update(JOBS).where(_C.id == job.id, _PENDING)
        self._rows(change.values(webhook=how, webhook_due=due))

    def close(self) -> None:
        """Close the connections to the database."""
        self._engine.dispose()

    # ------------------------------------------------------------ statements

    def _change(self, job: JobRecord, **values: Any) -> bool:
        """Change a job if its token is still the latest; return whether it was."""
        claimed = sa.and_(_C.id == job.id, _C.token == job.token, _IS_OPEN)
        return bool(self._rows(sa.update(JOBS).where(claimed).values(values).returning(_C.id)))

    def _job(self, statement: sa.Executable) -> JobRecord | None:
        return next(iter(self._jobs(statement)), None)

    def _jobs(self, statement: sa.Executable) -> list[JobRecord]:
        return [JobRecord(**row._mapping) for row in self._rows(statement)]

    def _rows(self, statement: sa.Executable) -> Sequence[sa.Row[Any]]:
        """Execute a statement and read all rows, which ends it in SQLite.

        Raises:
            IntegrityError: such a row exists.
            FileError: the database cannot be used.
        """
        try:
            if not self._made:
                self._create()
            return self._execute(statement)
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            self._made = False  # the next call may find another database
            reason = _reason(error)
            if type(error) is DatabaseError:  # SQLite's, of a damaged file
                self._engine.dispose()  # closes the connections: another file may take its place
                reason += "; restore the file, or move jobs.folder away and start the server again"
            raise FileError(f"jobs cannot be kept in {self.name}: {reason}") from error

    def _execute(self, statement: sa.Executable) -> Sequence[sa.Row[Any]]:
        with self._engine.connect() as connection:
            result = connection.execute(statement)
            return result.all() if result.returns_rows else ()


def _ending(status: str, now: float) -> Mapping[str, Any]:
    """Return the values of a job that ends. Its claim ends with it."""
    pending = sa.case((_C.webhook_url == "", ""), else_="pending")
    return {"status": status, "ended": now, "token": "", "webhook": pending, "webhook_due": now}


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    """Switch a file to write-ahead logging, since several processes write it.

    SQLite itself does not wait if the last other process is just closing the file.
    """
    end_s = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end_s:
                raise
            time.sleep(_LOOK_S)
    # A job is on disk before the server answers 202, even if the machine then loses power.
    connection.execute("PRAGMA synchronous = FULL")


def _reason(error: Exception) -> str:
    """Return the error's message, without the statement and its values."""
    return " ".join(str(getattr(error, "orig", None) or error).split())[:300]
