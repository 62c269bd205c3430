"""One hostile client at a time, of every kind that has ended or frozen a server."""

import os
from collections.abc import Callable

from eval.soak.client import Ending, by_grpc
from eval.soak.doors import by_form
from eval.soak.files import changed_broadcast
from eval.soak.floods import FLOODS, flood_once
from eval.soak.harm import greedy_mp4
from eval.soak.killers import KILLERS
from eval.soak.stage import Stage

_FLOOD_S = 1.0
_TIMEOUT_S = 60.0
_UPLOAD_BYTES = 3 << 20  # more than a form keeps in memory
_GREEDY = greedy_mp4(40_000_000, tracks=3)


def _flood(name: str) -> Callable[[Stage], Ending]:
    def attack(stage: Stage) -> Ending:
        flood_once(name, stage.at.http, _FLOOD_S)
        return Ending("refused", "the client went", _FLOOD_S)

    return attack


ATTACKS: dict[str, Callable[[Stage], Ending]] = {
    **{name: _flood(name) for name in FLOODS},
    **KILLERS,
    "a greedy MP4": lambda stage: by_grpc(stage.at, _GREEDY, _TIMEOUT_S),
    "a broadcast that changes": lambda stage: by_grpc(stage.at, changed_broadcast(), _TIMEOUT_S),
    "an upload that is no audio": lambda stage: by_form(
        stage.at, os.urandom(_UPLOAD_BYTES), _TIMEOUT_S
    ),
}
"""Attacks by their names; each gives what the server said."""
