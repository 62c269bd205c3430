"""The parts of a request's time, as its trace shows them."""

import time

from serve.contract.messages import Phase
from serve.runtime.protocol import Scores


class Phases:
    """Notes when something was done for a request. Thread-safe.

    A phase of a long request is one, from its first beginning to its last end, however many windows
    it had: so an hour of audio says no more than a clip.
    """

    def __init__(self) -> None:
        # Name, begin and end by the monotonic clock, windows; appending needs no lock.
        self._noted: list[tuple[str, float, float, int]] = []

    def note(self, name: str, began_s: float, windows: int = 1) -> None:
        """Note that a part has ended just now.

        Args:
            name: of the phase.
            began_s: monotonic time.
            windows: that it was for; 0: for a part of one.
        """
        self._noted.append((name, began_s, time.monotonic(), windows))

    def note_scores(self, scores: Scores) -> None:
        """Note what the runtime did for a window that has ended just now."""
        now_s = time.monotonic()
        encode_s, decode_s = scores.encode_s, scores.decode_s
        encode_at, decode_at = scores.began_s or (now_s - decode_s - encode_s, now_s - decode_s)
        self._noted.append(("encode", encode_at, encode_at + encode_s, 1))
        self._noted.append(("steps", decode_at, decode_at + decode_s, 1))

    def seconds(self, name: str) -> float:
        """Add up the seconds of a phase's parts."""
        return sum(end_s - begin_s for noted, begin_s, end_s, _ in self._noted if noted == name)

    def told(self, accepted_s: float) -> tuple[Phase, ...]:
        """Return all phases and the waits between, by the clock of the wall, in order of time.

        Args:
            accepted_s: monotonic time at which the request was accepted.
        """
        noted, offset_s = list(self._noted), time.time() - time.monotonic()
        phases = []
        for name in dict.fromkeys(name for name, *_ in noted):
            parts = [part for part in noted if part[0] == name]
            begin_s = offset_s + min(begin_s for _, begin_s, _, _ in parts)
            end_s = offset_s + max(end_s for _, _, end_s, _ in parts)
            windows = sum(windows for *_, windows in parts)
            phases.append(Phase(name, begin_s, end_s, self.seconds(name), windows))
        for name, begin_s, end_s in _waits(noted, accepted_s):
            phases.append(Phase(name, offset_s + begin_s, offset_s + end_s, end_s - begin_s, 1))
        return tuple(sorted(phases, key=lambda phase: phase.begin))


def _waits(
    noted: list[tuple[str, float, float, int]], accepted_s: float
) -> list[tuple[str, float, float]]:
    """Find how long a request waited for a decoder thread, and its first window for a slot."""
    decoded = [part for part in noted if part[0] == "decode"]
    ready_s = [end_s for _, _, end_s, windows in decoded if windows]
    encoded_s = [begin_s for name, begin_s, _, _ in noted if name == "encode"]
    waits = []
    if decoded:
        begin_s = min(begin_s for _, begin_s, _, _ in decoded)
        waits.append(("queue.decoder", accepted_s, max(accepted_s, begin_s)))
    if ready_s and encoded_s:
        waits.append(("queue.slot", min(ready_s), max(min(ready_s), min(encoded_s))))
    return waits
