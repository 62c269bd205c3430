"""The log: one line per request, and messages of the gateway, a few times a minute.

A client that is not served can cause a message a million times, so messages are rate-limited. No
line has audio, texts or keys in it.
"""

import dataclasses
import itertools
import json
import logging
import os
import queue
import re
import sys
import time
import uuid
from collections.abc import Callable, Hashable, Mapping
from threading import Thread
from typing import Any

from serve.contract.server_config import LogKind
from serve.gateway.observe.spans import NO_SPAN, RequestSpan

MOST = 30
"""Maximum lines a minute of each logging call."""
MOST_REFUSALS = 120
"""Maximum lines a minute of rejected requests of one key and reason."""
OK = "ok"
"""The outcome of a request that was answered."""

_MINUTE_S = 60.0
_WAITING = 10_000  # maximum of lines that are formatted and not written
FLUSH_S = 1.0
_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)

requests = logging.getLogger("earshot.requests")


@dataclasses.dataclass
class LogRecord:
    """The log record of a request or of a live stream."""

    id: str = dataclasses.field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
    route: str = ""  # label of the metrics; empty until the request is known to be for a transcript
    trace_id: str = ""  # if the request is traced
    key: str = ""  # the API key's name
    model: str = ""  # the product that the request is for
    audio_s: float | None = None
    queue_s: float | None = None  # until its first window is started; a stream's longest
    first_text_s: float | None = None  # since it came, as the total
    total_s: float | None = None
    outcome: str = ""  # OK, or the reason of the rejection, as in the metrics
    param: str = ""  # the field that was rejected
    # The following fields are not part of the log.
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    limit_headers: Callable[[], Mapping[str, str]] = dict
    """Returns headers of the answer that tell the key's limits."""
    header: Callable[[str], str | None] = lambda name: None
    """Returns a header, or gRPC metadata, that the client sent."""
    path: str = ""  # of the URL; empty over gRPC and for jobs
    status: str = ""  # how it ended, as a status of gRPC
    http_status: int = 0  # and as one of HTTP
    span: RequestSpan = NO_SPAN

    def queued(self, queue_s: float | None) -> None:
        """Note seconds in the queue; None: they are unknown."""
        if queue_s is not None:
            self.queue_s = max(self.queue_s or 0.0, queue_s)

    def text_sent(self) -> float | None:
        """Note that text was sent; return the seconds until then if it is the first."""
        if self.first_text_s is not None:
            return None
        self.first_text_s = time.monotonic() - self.began_s
        return self.first_text_s

    def write(self) -> None:
        if not requests.isEnabledFor(logging.INFO):
            return
        self.total_s = time.monotonic() - self.began_s
        values = {name: getattr(self, name) for name in _FIELDS}
        fields = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in values.items()
            if value not in ("", None)
        }
        place = None if self.outcome == OK else (self.outcome, self.key)
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        more = {"fields": fields, "place": place, "most": MOST_REFUSALS}
        requests.info("%s", text, extra=more)


_FIELDS = tuple(
    itertools.takewhile(
        lambda name: name != "began_s", (field.name for field in dataclasses.fields(LogRecord))
    )
)


def _shown(value: object) -> str:
    """Show a value as one word of a line."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


@dataclasses.dataclass
class _SourceCounter:
    since_s: float
    lines: int = 0
    dropped: int = 0


class LogRateLimiter(logging.Filter):
    """Passes a few lines of each logging call in each minute.

    The first line of the next minute tells how many were dropped. A record may name its
    own `place`; None: it always passes.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[Hashable, _SourceCounter] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        named = getattr(record, "place", (record.pathname, record.lineno))
        if named is None:
            return True
        now_s, most = self._clock(), getattr(record, "most", MOST)
        place = self._places.setdefault(named, _SourceCounter(now_s))
        if now_s - place.since_s >= _MINUTE_S:
            if place.dropped:
                record.msg = f"{record.getMessage()} (and {place.dropped} more before)"
                record.args = ()
                record.left_out = place.dropped
            place.since_s, place.lines, place.dropped = now_s, 0, 0
        place.lines += 1
        place.dropped += place.lines > most
        return place.lines <= most


class TextFormatter(logging.Formatter):
    """Writes lines for people."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")


class JsonFormatter(TextFormatter):
    """Writes lines that are JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
        }
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class AsyncLogHandler(logging.Handler):
    """Writes in a separate thread, so that a slow or stalled reader stops no request.

    Lines beyond the queue's size are dropped, and a line tells how many.

    Args:
        descriptor: the file that it writes to.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(_WAITING)
        self._left_out = 0
        Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record."""
        try:
            if self._left_out:
                self._lines.put_nowait(self.format(_unread(self._left_out)))
                self._left_out = 0
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._left_out += 1

    def flush(self) -> None:
        """Wait until all is written, for at most `FLUSH_S`."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_S)

    def _write(self) -> None:
        while True:
            left = f"{self._lines.get()}\n".encode()
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:  # the disk is full, or the reader has gone
                pass
            finally:
                self._lines.task_done()


def _unread(lines: int) -> logging.LogRecord:
    text = f"dropped {lines} log lines: the log's reader was too slow"
    return logging.LogRecord(requests.name, logging.WARNING, __file__, 0, text, (), None)


def prepare(kind: LogKind, descriptor: int | None = None) -> None:
    """Set up the log of this process.

    Args:
        kind: the format of lines; "off": no lines for requests.
        descriptor: the file for the access log; None: stderr, as for all other lines.
    """
    formatter = JsonFormatter() if kind == "json" else TextFormatter()
    rate_limiter = LogRateLimiter()
    stderr_handler = logging.StreamHandler()
    handlers = {logging.getLogger(): stderr_handler}
    if kind == "off":
        requests.disabled = True
    else:
        access_handler = AsyncLogHandler(sys.stderr.fileno() if descriptor is None else descriptor)
        handlers[requests] = access_handler  # type: ignore[assignment]
        requests.propagate = False
    for logger, handler in handlers.items():
        handler.setFormatter(formatter)
        handler.addFilter(rate_limiter)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
