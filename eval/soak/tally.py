"""Counts of a mixed soak, and what must hold of them."""

import collections
import dataclasses
import re
import threading
import time
from collections.abc import Iterator, Sequence

from eval.clients import Answer
from eval.memory import slope
from eval.record import Check
from eval.server import samples, total
from eval.soak.disruptions import MAX_RECOVERY_S, Span
from eval.soak.findings import Found

MAX_GROWTH_KB = 4.0  # an action: a million, 4 GB; pages that a process keeps come in MBs
MAX_DESCRIPTORS = 0.005  # that a process may have more after each action: one in 200
_LEAST_LOOKS = 12
_LEAST_ACTIONS = 2000  # seen by a process, before its growth tells anything
_SHOWN = 3  # complaints of a kind that are told in full
# The server's own faults, as its doors name them.
_FAULT = re.compile(r"^5(?!03)\d\d |^(INTERNAL|UNKNOWN|DATA_LOSS)\b")


@dataclasses.dataclass(frozen=True)
class Look:
    """The memory and descriptors of a process when so many actions were done."""

    actions: int
    memory_kb: float
    descriptors: int


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request of an honest client's."""

    what: str  # the way and the file
    text: str  # that the same server gave in quiet
    patient: bool  # else the client goes before it has an answer
    begin_s: float


class Tally:
    """Counts what came of actions. Thread-safe."""

    def __init__(self) -> None:
        self.actions = 0
        self.spans: list[Span] = []
        self.uneven: str | None = None  # what the server's own counts lack at the end
        self.began_s = time.monotonic()
        self._lock = threading.Lock()
        self._kinds: collections.Counter[str] = collections.Counter()
        self._bad: dict[str, list[str]] = {name: [] for name in _PROMISES}
        self._longest_s = [0.0, 0.0]  # in quiet, and where a disruption was under way
        self._recovered: dict[str, tuple[float, Answer]] = {}
        self._looks: dict[tuple[str, int], list[Look]] = {}

    def honest(self, request: Asked, answer: Answer) -> None:
        """Count an honest request that has ended by now."""
        now_s = time.monotonic()
        with self._lock:
            self.actions += 1
            disrupted = any(span.meets(request.begin_s, now_s) for span in self.spans)
            left = not request.patient and answer.kind != "answered"
            self._kinds["left" if left else answer.kind] += 1
            complaint = f"{request.what}: {answer}"
            if answer.kind == "answered" and answer.text != request.text:
                self._bad["wrong"].append(f"{complaint}, not {request.text!r}")
            if request.patient:
                self._longest_s[disrupted] = max(self._longest_s[disrupted], answer.seconds)
                if answer.waited_in_vain:
                    self._bad["vain"].append(complaint)
                elif answer.kind in ("lost", "failed") and not disrupted:
                    self._bad[answer.kind].append(complaint)

    def hostile(self, what: str, begin_s: float, answer: Answer) -> None:
        """Count a hostile client that has ended."""
        now_s = time.monotonic()
        with self._lock:
            self.actions += 1
            self._kinds["hostile"] += 1
            disrupted = any(span.meets(begin_s, now_s) for span in self.spans)
            if _FAULT.match(answer.text) and not disrupted:
                self._bad["fault"].append(f"{what}: {answer}")

    def recovered(self, what: str, seconds: float, last: Answer) -> None:
        """Note whether the server was itself again after a disruption."""
        with self._lock:
            self._kinds["disruptions"] += 1
            if what not in self._recovered or self._recovered[what][0] < seconds:
                self._recovered[what] = (seconds, last)
            if last.kind != "answered":
                self._bad["back"].append(f"{what}: after {seconds:.0f} s {last}")

    def look(self, role: str, pid: int, memory_kb: float, descriptors: int) -> None:
        """Note a look at a process."""
        with self._lock:
            looks = self._looks.setdefault((role, pid), [])
            looks.append(Look(self.actions, memory_kb, descriptors))

    def found(self) -> Found:
        """Yield all figures and checks."""
        with self._lock:
            yield "actions", self.actions
            took_s = time.monotonic() - self.began_s
            yield "actions a second", self.actions / took_s
            for kind in ("answered", "left", "refused", "failed", "lost", "hostile"):
                yield f"actions: {kind}", self._kinds[kind]
            yield "disruptions", self._kinds["disruptions"]
            for what, longest_s in zip(("beside", "in"), self._longest_s, strict=True):
                yield f"longest wait {what} disruptions, s", longest_s
            for what, (seconds, _) in self._recovered.items():
                yield f"{what}: itself again after, s", seconds
            for name, promise in _PROMISES.items():
                yield _check(promise, self._bad[name])
            even = None if self.uneven is None else not self.uneven
            yield Check("the server's own counts are even", even, self.uneven or "")
            for (role, _), looks in self._looks.items():
                yield from _growth(role, looks)


_PROMISES = {
    "wrong": "no text is another than in quiet",
    "vain": "nobody waits in vain",
    "lost": "every request has its answer where nothing was disrupted",
    "failed": "no honest request fails where nothing was disrupted",
    "fault": "no hostile client makes the server fail",
    "back": f"the server is itself again within {MAX_RECOVERY_S:g} s",
}


def _check(promise: str, bad: Sequence[str]) -> Check:
    detail = f"{len(bad)}: " + "; ".join(bad[:_SHOWN]) if bad else "none against it"
    return Check(promise, not bad, detail)


def _growth(role: str, looks: Sequence[Look]) -> Iterator[Check | tuple[str, float]]:
    if len(looks) < _LEAST_LOOKS or looks[0].actions == looks[-1].actions:
        return
    actions = [look.actions for look in looks]
    memory = slope(actions, [look.memory_kb for look in looks])
    files = slope(actions, [look.descriptors for look in looks])
    yield f"{role}: resident, MB", looks[-1].memory_kb / 1024
    yield f"{role}: descriptors", looks[-1].descriptors
    for promise, grown, limit in (
        (f"{role} grows by at most {MAX_GROWTH_KB:g} KB an action", memory, MAX_GROWTH_KB),
        (f"{role} keeps at most {MAX_DESCRIPTORS:g} files an action", files, MAX_DESCRIPTORS),
    ):
        count = actions[-1] - actions[0]
        shown = f"{grown.value:.4f} [{grown.low:.4f}, {grown.high:.4f}] in {count} actions"
        yield Check(promise, grown.within(limit) if count >= _LEAST_ACTIONS else None, shown)


def uneven(page: str) -> str:
    """Say what is not over by the server's metrics; "" where every request has its answer."""
    under_way = {name: total(page, f"earshot_{name}") for name in _UNDER_WAY}
    outcomes = samples(page, "earshot_requests_total")
    accepted = total(page, "earshot_accepted_total")
    ended = sum(each.value for each in outcomes if each.labels["outcome"] != "rejected")
    complaints = [f"{name} is {value:g}" for name, value in under_way.items() if value]
    if not outcomes:
        complaints.append("the page has no outcomes")
    if accepted != ended:
        complaints.append(f"{accepted:g} were accepted and {ended:g} ended")
    return "; ".join(complaints)


_UNDER_WAY = (
    "panswer_requests",
    "live_streams",
    "gateway_inflight_requests",
    "gateway_inflight_bytes",
    "gateway_inflight_upload_bytes",
)
