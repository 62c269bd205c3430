"""The log: one line per request, and messages of the gateway, a few times a minute.

A client that is not served can cause a message a million times, so messages are rate-limited. No
line has audio, texts or keys in it.
"""

import contextlib
import dataclasses
import json
import logging
import os
import queue
import re
import sys
import time
import uuid
from collections.abc import Callable, Hashable, Mapping
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from serve.contract.server_config import LogKind
from serve.gateway.observe.spans import NO_SPAN, RequestSpan

MAX_LINES = 30
"""Maximum lines a minute of each logging call."""
MAX_REFUSALS = 120
"""Maximum lines a minute of rejected requests of one key and reason."""
OK = "ok"
"""The outcome of a request that was answered."""

_MINUTE_S = 60.0
_WAITING = 10_000  # maximum of lines that are formatted and not written
FLUSH_S = 1.0
_FIELDS = (
    *("id", "route", "trace_id", "key", "model", "audio_s", "queue_s", "first_text_s"),
    *("total_s", "outcome", "param"),
)
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
        fields = {
            name: round(value, 4) if isinstance(value, float) else value
            for name in _FIELDS
            if (value := getattr(self, name)) not in ("", None)
        }
        source = None if self.outcome == OK else (self.outcome, self.key)
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        extra = {"fields": fields, "source": source, "max_lines": MAX_REFUSALS}
        requests.info("%s", text, extra=extra)


def _shown(value: object) -> str:
    """Show a value as one word of a line."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class LogRateLimiter(logging.Filter):
    """Passes a few lines of each logging call in each minute.

    The first line of the next minute tells how many were dropped. A record may name its own
    `source`, in place of its logging call; None: it always passes. It may also name `max_lines`.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By source: when its minute began, and the lines since then, with the dropped ones.
        self._sources: dict[Hashable, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        source = getattr(record, "source", (record.pathname, record.lineno))
        if source is None:
            return True
        now_s, max_lines = self._clock(), getattr(record, "max_lines", MAX_LINES)
        since_s, lines = self._sources.get(source, (now_s, 0))
        if now_s - since_s >= _MINUTE_S:
            if (dropped := lines - max_lines) > 0:
                record.msg = f"{record.getMessage()} (and {dropped} more before)"
                record.args = ()
                record.left_out = dropped
            since_s, lines = now_s, 0
        self._sources[source] = since_s, lines + 1
        return lines < max_lines


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
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname}
        line["logger"] = record.name
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _LineWriter(QueueListener):
    """Writes lines to a file. It holds no lock that the process's end would wait for."""

    def __init__(self, lines: "queue.Queue[Any]", descriptor: int) -> None:
        super().__init__(lines)
        self._descriptor = descriptor

    def handle(self, record: logging.LogRecord) -> None:
        line = f"{record.getMessage()}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):  # the disk is full, or the reader has gone
            while line:
                line = line[os.write(self._descriptor, line) :]


class AsyncLogHandler(QueueHandler):
    """Writes in a separate thread, so that a slow or stalled reader stops no request.

    Lines beyond the queue's size are dropped, and a line tells how many.

    Args:
        descriptor: the file that it writes to.
    """

    def __init__(self, descriptor: int) -> None:
        self._lines = queue.Queue[Any](_WAITING)
        super().__init__(self._lines)
        self._dropped = 0
        _LineWriter(self._lines, descriptor).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self._dropped:
                text = f"dropped {self._dropped} log lines: the log's reader was too slow"
                warning = requests.name, logging.WARNING, __file__, 0, text, (), None
                self._lines.put_nowait(self.prepare(logging.LogRecord(*warning)))
                self._dropped = 0
            self._lines.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until all is written, for at most `FLUSH_S`."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_S)


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
