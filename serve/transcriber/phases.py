"""Measure the phases of a request for its trace."""

import time

from serve.contract.messages import Phase
from serve.runtime.protocol import Scores


class Phases:
    """A recorder of the times at which work was done for a request. Thread-safe.

    Each phase is reported once, from its first start to its last end. The trace of an hour of audio
    therefore has as many spans as that of a clip.
    """

    def __init__(self) -> None:
        # Name, start and end in monotonic seconds, windows; appending needs no lock.
        self._recorded: list[tuple[str, float, float, int]] = []

    def note(self, name: str, began_s: float, windows: int = 1) -> None:
        """Record a piece of work that has just ended.

        Args:
            name: the phase's name.
            began_s: monotonic time at which the work began.
            windows: the number of windows processed; 0 for a part of one.
        """
        self._recorded.append((name, began_s, time.monotonic(), windows))

    def note_scores(self, scores: Scores) -> None:
        """Record the encoder's and the decoder's work for a window that has just ended."""
        now_s = time.monotonic()
        encode_s, decode_s = scores.encode_s, scores.decode_s
        encode_at, decode_at = scores.began_s or (now_s - decode_s - encode_s, now_s - decode_s)
        self._recorded.append(("encode", encode_at, encode_at + encode_s, 1))
        self._recorded.append(("steps", decode_at, decode_at + decode_s, 1))

    def seconds(self, name: str) -> float:
        """Sum the seconds of work in a phase."""
        return sum(end_s - begin_s for noted, begin_s, end_s, _ in self._recorded if noted == name)

    def told(self, accepted_s: float) -> tuple[Phase, ...]:
        """Return all phases and waits in wall-clock time, in order of start.

        Args:
            accepted_s: monotonic time at which the request was accepted.
        """
        recorded, offset_s = list(self._recorded), time.time() - time.monotonic()
        phases = []
        for name in dict.fromkeys(name for name, *_ in recorded):
            parts = [part for part in recorded if part[0] == name]
            begin_s = offset_s + min(begin_s for _, begin_s, _, _ in parts)
            end_s = offset_s + max(end_s for _, _, end_s, _ in parts)
            windows = sum(windows for *_, windows in parts)
            phases.append(Phase(name, begin_s, end_s, self.seconds(name), windows))
        for name, begin_s, end_s in _waits(recorded, accepted_s):
            phases.append(Phase(name, offset_s + begin_s, offset_s + end_s, end_s - begin_s, 1))
        return tuple(sorted(phases, key=lambda phase: phase.begin))


def _waits(
    noted: list[tuple[str, float, float, int]], accepted_s: float
) -> list[tuple[str, float, float]]:
    """Compute the wait for a decoder thread, and the first window's wait for a slot."""
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
