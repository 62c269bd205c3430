"""Scenarios of ordinary load that goes on: does memory level off, does a text stay the same?"""

import collections
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from eval.soak.client import WAYS, Ending, Send, counted, crowd, endings
from eval.soak.memory import Slope, resident_kb, slope
from eval.soak.stage import Stage
from eval.soak.verdict import Check

MAX_GROWTH_KB = 4.0  # per request: a million requests, 4 GB; pages that a process keeps come in MBs
_AT_ONCE = 8
_BATCH = 24  # requests between two looks at memory
_WARM_SHARE = 0.4  # of the time, in which caches, pools and arenas of malloc fill
_LEAST_LOOKS = 12  # after that
_TIMEOUT_S = 300.0
_REPEATS = 300

Found = Iterator[Check | tuple[str, float]]
"""Checks, and figures as a name with its value."""


def memory(stage: Stage, minutes: float) -> Found:
    """The bundled clips by gRPC, HTTP and streams; memory of each process after each batch."""
    files = [clip.path.read_bytes() for clip in stage.clips]
    sends = itertools.cycle(itertools.product(WAYS, files))
    began, found = time.monotonic(), list[Ending]()
    looks: dict[str, list[tuple[int, float]]] = {}
    warm_until_s = began + 60 * minutes * _WARM_SHARE
    warm_requests, counted_looks = 0, 0
    with crowd(_AT_ONCE) as pool:
        while time.monotonic() < began + 60 * minutes or counted_looks < _LEAST_LOOKS:
            found += _batch(stage, pool, list(itertools.islice(sends, _BATCH)))
            if time.monotonic() < warm_until_s:
                warm_requests = len(found)
                continue
            counted_looks += 1
            for role, process in stage.processes().items():
                looks.setdefault(role, []).append((len(found), resident_kb(process)))
            stage.say(f"memory: {len(found)} requests, {_latest(looks)}")
    yield "requests", len(found)
    yield "requests before the first look", warm_requests
    yield all_answered(found)
    for role, series in looks.items():
        yield f"{role}: resident, MB", series[-1][1] / 1024
        if len(series) == counted_looks:  # else it was started anew, which other checks find
            grown = slope(*zip(*series, strict=True))
            yield f"{role}: growth, KB a request", grown.value
            yield _growth(role, grown)


def same_text(stage: Stage, minutes: float) -> Found:
    """One clip again and again between all others: one text."""
    del minutes
    short, ways = stage.short, itertools.cycle(WAYS)
    files = itertools.cycle(clip.path.read_bytes() for clip in stage.clips)
    found: list[Ending] = []
    began = time.monotonic()
    with crowd(_AT_ONCE) as pool:
        while len(found) < _REPEATS:
            audios = [short if i % 8 else next(files) for i in range(_BATCH)]
            sends = [(next(ways), audio) for audio in audios]
            ended = _batch(stage, pool, sends)
            found += [end for audio, end in zip(audios, ended, strict=True) if audio == short]
            texts = collections.Counter(ending.text for ending in found)
            stage.say(f"same text: {len(found)} of {_REPEATS}, {len(texts)} texts")
    yield "requests of the clip", len(found)
    yield "requests of the clip, a second", len(found) / (time.monotonic() - began)
    yield all_answered(found)
    shown = "; ".join(f"{times} x {text!r}" for text, times in texts.items())
    yield Check("the clip has one text", len(texts) == 1, shown[:500])


def all_answered(found: list[Ending]) -> Check:
    """Whether every request has its transcript."""
    good = all(ending.kind == "answered" for ending in found)
    return Check("every request is answered", good, counted(found))


def _batch(
    stage: Stage, pool: ThreadPoolExecutor, sends: Sequence[tuple[Send, bytes]]
) -> list[Ending]:
    """Send all of them, so many at once as the pool has threads."""
    return endings([pool.submit(send, stage.at, audio, _TIMEOUT_S) for send, audio in sends])


def _growth(role: str, grown: Slope) -> Check:
    return Check(
        f"{role} grows by at most {MAX_GROWTH_KB:g} KB a request",
        grown.within(MAX_GROWTH_KB),
        f"{grown} KB a request",
    )


def _latest(looks: dict[str, list[tuple[int, float]]]) -> str:
    return ", ".join(f"{role} {series[-1][1] / 1024:.0f} MB" for role, series in looks.items())
