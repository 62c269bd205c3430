"""The spans of a request, as the rest of the gateway knows them: by default nothing is recorded.

`serve.gateway.telemetry` records them, and loads OpenTelemetry; a gateway without traces does not.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve.contract.messages import Phase

Line = Any
"""A line of the log, of `serve.gateway.log`, which has its request's spans."""


class Spans:
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
    def part(self, name: str) -> Iterator["Spans"]:
        """Record a part of it, which goes to servers by itself, for the length of a block."""
        yield self

    def end(self, line: Line) -> None:
        """Note that it has ended; its line tells how."""


NO_SPANS = Spans()


class Traces:
    """Makes the spans of requests; here none."""

    def begin(self, line: Line) -> Spans:
        """Begin those of a request, which came when its line was made."""
        return NO_SPANS

    async def close(self) -> None:
        """Send what is left, but wait for that no longer than a moment."""
