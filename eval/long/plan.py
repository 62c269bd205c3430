"""Which recordings are made, and which systems hear them. Needs no package.

All systems have the same checkpoint, the same CPU threads, a beam of 5 and Whisper's temperatures,
as faster-whisper's defaults and our configs say. What faster-whisper is told of the checkpoint in
every row is the list of suppressed tokens; a row's options say the rest.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

Kind = Literal["pauses", "noise", "tones", "languages", "reading", "passage"]
"""The difficulty of a recording. All but the last two have pauses of up to 8 s."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A recording that is to be made."""

    kind: Kind
    languages: tuple[str, ...]  # that take turns
    minutes: float


PLAN = (
    Planned("languages", ("en", "es"), 10.0),
    Planned("tones", ("en",), 8.0),
    Planned("noise", ("es",), 6.0),
    Planned("pauses", ("en",), 12.0),
    Planned("tones", ("es",), 7.0),
    Planned("noise", ("en",), 9.0),
    Planned("pauses", ("es",), 5.0),
    Planned("languages", ("es", "en"), 18.5),
)
PEOPLE_PLAN = (
    Planned("reading", ("en",), 5.0),
    Planned("reading", ("de",), 5.0),
    Planned("reading", ("nl",), 3.0),
    Planned("noise", ("en",), 5.0),
    Planned("languages", ("en", "de"), 7.0),
)
"""Of people, by name, of whom the most is there in a language; then come their long passages."""


def minutes_of(rows: Sequence[Planned]) -> float:
    """Return how long recordings last together."""
    return sum(planned.minutes for planned in rows)


def plan(rows: Sequence[Planned], minutes: float | None = None) -> list[Planned]:
    """Return the first rows that together last so long; from the beginning again, if need be.

    Args:
        rows: in their order.
        minutes: None: all rows, once.
    """
    planned: list[Planned] = []
    while minutes_of(planned) < (minutes_of(rows) if minutes is None else minutes):
        planned.append(rows[len(planned) % len(rows)])
    return planned


OUR_DEFAULT = "earshot-parallel"
OURS: dict[str, dict[str, Any]] = {  # options of a request
    OUR_DEFAULT: {},
    "earshot-no-vad": {"vad": False},
    "earshot-sequential": {"mode": "sequential"},
    "earshot-no-timestamps": {"timestamps": False},
    "earshot-multilingual": {"multilingual": True},
}

_NO_CONTEXT: dict[str, Any] = {"condition_on_previous_text": False}
_VAD: dict[str, Any] = {"vad_filter": True}
THEIRS: dict[str, dict[str, Any]] = {  # options of a call
    "faster-whisper-default": {},
    "faster-whisper-vad": _VAD,
    "faster-whisper-no-context": _NO_CONTEXT,
    "faster-whisper-no-context-vad": _NO_CONTEXT | _VAD,
    "faster-whisper-multilingual": _NO_CONTEXT | _VAD | {"multilingual": True},
}
THEIRS_BATCHED: dict[str, dict[str, Any]] = {  # options of a call of BatchedInferencePipeline
    "faster-whisper-batched": {},
    "faster-whisper-batched-times": {"without_timestamps": False},
    "faster-whisper-batched-multilingual": {"multilingual": True},
}
NAMES = (*OURS, *THEIRS, *THEIRS_BATCHED)
HEARING_NOBODY = (
    "earshot-parallel",
    "earshot-no-vad",
    "faster-whisper-default",
    "faster-whisper-vad",
)
"""Those that short clips without speech are given to; the first is ours as configured."""

RIVALS: dict[str, tuple[str, ...]] = {
    OUR_DEFAULT: (
        "faster-whisper-default",
        "faster-whisper-vad",
        "faster-whisper-no-context",
        "faster-whisper-no-context-vad",
        "faster-whisper-batched-times",
    ),
    "earshot-no-timestamps": ("faster-whisper-batched",),
    "earshot-multilingual": ("faster-whisper-multilingual",),
}
"""Whom ours are held against: those that are asked for as much. `faster-whisper-batched` is not
asked for the times of its text, which is another task: it decodes without timestamps."""
