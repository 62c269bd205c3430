"""A server behind the gateway, as it knows it."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from serve.contract.messages import Priority
from serve.gateway.envelope import Part
from serve.gateway.models import Target
from serve.gateway.refusals import Refusal
from serve.gateway.spans import NO_SPANS, Spans
from serve.gateway.upstream.calls import Call


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A request that has been let in."""

    target: Target
    parts: Sequence[Part]  # of the serialised `ModelInferRequest`; its model's name may be any
    streamed: bool  # whether it may have several answers
    upload: str | None = None  # path of the request's audio, in the folder for uploads
    spans: Spans = NO_SPANS
    priority: Priority = "file"  # in the engine's process; another Earshot is not told


class Server(Protocol):
    """A server behind the gateway."""

    name: str
    """As metrics and /state call it."""
    models: tuple[str, ...]
    """The products that it serves."""
    inflight: int
    """Requests that the gateway has given to it and that have not ended."""

    def takes(self, model: str) -> bool:
        """Tell whether it may be given a request now, by what is known without asking it."""

    async def ready(self, model: str) -> bool:
        """Tell whether it would answer."""

    def answer_name(self, target: Target) -> str:
        """Return what its answers call the model."""

    def send(self, request: Outgoing) -> Call:
        """Give it a request; its answers are ModelStreamInferResponses.

        Raises:
            Refusal: it cannot be reached.
        """

    def failed(self, refusal: Refusal) -> None:
        """Note that a request of its ended so."""

    async def small(self, method: str, message: bytes) -> bytes:
        """Ask a small question, and return the answer.

        Raises:
            Refusal: there is none.
        """

    async def watch(self) -> None:
        """Look at it for as long as the gateway runs, where that is needed."""

    async def close(self) -> None:
        """Hang up."""
