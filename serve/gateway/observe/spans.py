"""Spans of requests, which record nothing by default.

`serve.gateway.observe.traces` records spans and loads OpenTelemetry; a gateway without traces does
not load either.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve.contract.messages import Phase

LogRecord = Any
"""A line of the log, of `serve.gateway.observe.log`, which has its request's spans."""


class RequestSpan:
    """The spans of a request that is not traced."""

    trace_id = ""
    """As 32 hexadecimal digits; empty where there are no traces."""
    recorded = False
    """Whether the engine is to tell the phases of its time."""

    def answer_headers(self) -> Mapping[str, str]:
        """Return headers of its answer that name the trace."""
        return {}

    def given(self, server: str) -> None:
        """Note that an engine has it from now on."""

    def answered(self, phases: Sequence[Phase]) -> None:
        """Note that its answer has come, and what that tells of its time."""

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator["RequestSpan"]:
        """Record a part of it, which goes to servers by itself, for the length of a block."""
        yield self

    def end(self, line: LogRecord) -> None:
        """Note that it has ended; its line tells how."""


NO_SPAN = RequestSpan()


class RequestTracer:
    """Makes the spans of requests; here none."""

    def begin(self, line: LogRecord) -> RequestSpan:
        """Begin those of a request, which came when its line was made."""
        return NO_SPAN

    async def close(self) -> None:
        """Send what is left, but wait for that no longer than a moment."""
