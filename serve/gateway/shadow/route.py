"""GET /v1/shadow: what the shadow monitor has found, and the texts that differ most.

The texts are clients', so that `shadow.readers` alone may read them. The address is none of
OpenAI's.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.contract.errors import AccessError
from serve.gateway.context import Services
from serve.gateway.errors import ApiError
from serve.gateway.shadow.figures import BOUND, Comparison, baseline_of, pooled_cer
from serve.gateway.shadow.monitor import Case, Shadow

_DIGITS = 6


class ShadowFindings:
    """The address, as an endpoint."""

    def __init__(self, door: Services) -> None:
        self._door = door

    async def answer(self, request: Request) -> Response:
        """Answer with what was found so far.

        Raises:
            ApiError: whoever it is may not read it.
        """
        callers, server = self._door.keys, self._door.config.server
        caller = callers.identify(request.headers.get("authorization"))
        readers = self._door.config.shadow.readers
        if not (caller.name in readers if callers.required else server.on_loopback):
            error = AccessError("texts of others are shown to the keys of shadow.readers alone")
            raise ApiError(error, "reader")
        return JSONResponse(_told(self._door.shadow), headers={"Cache-Control": "no-store"})


def _told(shadow: Shadow) -> dict[str, Any]:
    languages = sorted({one.language for one in shadow.window})
    return {
        "object": "shadow",
        "share": shadow.config.share,
        "compared": shadow.compared,
        "pending": len(shadow.pending),
        "cer": _rate(shadow.window),
        "cer_by_language": {
            language: _rate([one for one in shadow.window if one.language == language])
            for language in languages
        },
        "drift": round(shadow.drift.value, _DIGITS),
        "drift_bound": BOUND,
        "baseline": dataclasses.asdict(shadow.config.baseline),
        "gaps": dataclasses.asdict(baseline_of(shadow.window)),
        "worst": [_case(case) for case in shadow.worst],
    }


def _rate(comparisons: Sequence[Comparison]) -> dict[str, float] | None:
    rate = pooled_cer(comparisons)
    if rate is None:
        return None
    return {name: round(value, _DIGITS) for name, value in dataclasses.asdict(rate).items()}


def _case(case: Case) -> dict[str, Any]:
    told = dataclasses.asdict(case)
    return {**told.pop("comparison"), **told, "cer": round(case.cer, _DIGITS)}
