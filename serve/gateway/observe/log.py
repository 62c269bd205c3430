"""The log: one line of each request, and what else the gateway says, which is a few times a minute.

Whatever a client can make the gateway say without having been served, it can make it say a million
times. No line has audio, texts or keys in it.
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
"""Lines a minute, of each place in the source that speaks."""
MOST_REFUSALS = 120
"""Lines a minute of refused requests, of each key and reason."""
OK = "ok"
"""The outcome of a request that was answered."""

_MINUTE_S = 60.0
_WAITING = 10_000  # lines that are formatted and not written
FLUSH_S = 1.0
_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)

requests = logging.getLogger("earshot.requests")


@dataclasses.dataclass
class LogRecord:
    """A line of the log, of a request or of a live stream."""

    id: str = dataclasses.field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
    route: str = ""  # label of the metrics; empty as long as it is for no transcript
    trace_id: str = ""  # where requests are traced
    key: str = ""  # its key's name
    model: str = ""  # that it was given to
    audio_s: float | None = None
    queue_s: float | None = None  # before its first window is taken up; the longest of a stream's
    first_text_s: float | None = None  # since it came, as the total
    total_s: float | None = None
    outcome: str = ""  # OK, or why it was refused, as in the metrics
    param: str = ""  # the field that was refused
    # What follows is no part of the log.
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    left: Callable[[], Mapping[str, str]] = dict
    """Headers of its answer that tell what its key may have."""
    header: Callable[[str], str | None] = lambda name: None
    """What its client has sent as a header, or as metadata of gRPC."""
    path: str = ""  # of its address, over HTTP
    status: str = ""  # how it ended, as gRPC's
    http_status: int = 0  # and as HTTP's, over that
    spans: RequestSpan = NO_SPAN

    def add_audio(self, audio_s: float) -> None:
        """Note that it had so much more audio."""
        self.audio_s = (self.audio_s or 0.0) + audio_s

    def queued(self, queue_s: float | None) -> None:
        """Note that it has waited for so long; None: that is not known."""
        if queue_s is not None:
            self.queue_s = max(self.queue_s or 0.0, queue_s)

    def text_sent(self) -> float | None:
        """Note that text was sent; return the seconds since it came, where that is the first."""
        if self.first_text_s is not None:
            return None
        self.first_text_s = time.monotonic() - self.began_s
        return self.first_text_s

    def write(self) -> None:
        """Write it, at its end."""
        self.spans.end(self)
        if not requests.isEnabledFor(logging.INFO):
            return
        self.total_s = time.monotonic() - self.began_s
        fields = {
            name: value for name in _FIELDS if (value := getattr(self, name)) not in ("", None)
        }
        fields = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in fields.items()
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
    """Show a value in a line of text, as one word and in one line."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


@dataclasses.dataclass
class _Place:
    since_s: float
    lines: int = 0
    left_out: int = 0


class LogRateLimiter(logging.Filter):
    """Lets a few lines through of each place in the source, in each minute.

    The first of the next minute tells how many were left out. A record may name a place of its own,
    or None: then it always comes through.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[Hashable, _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        named = getattr(record, "place", (record.pathname, record.lineno))
        if named is None:
            return True
        now_s, most = self._clock(), getattr(record, "most", MOST)
        place = self._places.setdefault(named, _Place(now_s))
        if now_s - place.since_s >= _MINUTE_S:
            if place.left_out:
                record.msg = f"{record.getMessage()} (and {place.left_out} more before)"
                record.args = ()
                record.left_out = place.left_out
            place.since_s, place.lines, place.left_out = now_s, 0, 0
        place.lines += 1
        place.left_out += place.lines > most
        return place.lines <= most


class TextFormatter(logging.Formatter):
    """Lines for people."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")


class JsonFormatter(TextFormatter):
    """Lines that are JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
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
    """Writes in a thread of its own, so that a reader who is slow, or stands still, stops nobody.

    What is too much for it is left out, and how much that was is said.

    Args:
        descriptor: where to.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(_WAITING)
        self._left_out = 0
        Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            if self._left_out:
                self._lines.put_nowait(self.format(_unread(self._left_out)))
                self._left_out = 0
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._left_out += 1

    def flush(self) -> None:
        """Wait until all is written, but not for long."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(self._is_empty, FLUSH_S)

    def _is_empty(self) -> bool:
        return not self._lines.unfinished_tasks

    def _write(self) -> None:
        while True:
            left = f"{self._lines.get()}\n".encode()
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:  # the disk is full, or the reader has gone: there is nobody to tell
                pass
            finally:
                self._lines.task_done()


def _unread(lines: int) -> logging.LogRecord:
    text = f"{lines} lines are left out, nobody has read them in time"
    return logging.LogRecord(requests.name, logging.WARNING, __file__, 0, text, (), None)


def prepare(kind: LogKind, descriptor: int | None = None) -> None:
    """Begin to write the log of this process.

    Args:
        kind: what its lines look like; "off": there are none of requests.
        descriptor: where lines of requests go; None: to the others, which go to stderr.
    """
    formatter = JsonFormatter() if kind == "json" else TextFormatter()
    few = LogRateLimiter()
    others = logging.StreamHandler()
    handlers = {logging.getLogger(): others}
    if kind == "off":
        requests.disabled = True
    else:
        behind = AsyncLogHandler(sys.stderr.fileno() if descriptor is None else descriptor)
        handlers[requests] = behind  # type: ignore[assignment]
        requests.propagate = False
    for logger, handler in handlers.items():
        handler.setFormatter(formatter)
        handler.addFilter(few)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
