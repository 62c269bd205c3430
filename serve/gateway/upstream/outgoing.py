"""A request on its way from the gateway to an engine."""

import dataclasses
from collections.abc import Sequence

from serve.contract.messages import Priority
from serve.gateway.kserve.messages import Chunk
from serve.gateway.models import Target
from serve.gateway.observe.spans import NO_SPAN, RequestSpan


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A request that has been let in."""

    target: Target
    parts: Sequence[Chunk]  # of the serialised `ModelInferRequest`; its model's name may be any
    streamed: bool  # whether it may have several answers
    upload: str | None = None  # path of the request's audio, in the folder for uploads
    spans: RequestSpan = NO_SPAN
    priority: Priority = "file"  # in the engine's process
