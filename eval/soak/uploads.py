"""Scenarios of uploads and connections: too large, endless, too slow, too many."""

import contextlib
import itertools
import resource
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future

import psutil

from eval.config import Config, changed
from eval.memory import Watch
from eval.record import Check
from eval.server import connect
from eval.soak.client import (
    Ending,
    all_answered,
    by_grpc,
    by_http,
    channel_to,
    counted,
    crowd,
    endings,
    http_body,
    infer,
)
from eval.soak.findings import Found
from eval.soak.memory import memory_of
from eval.soak.raw import Upload, chunked, head, upload
from eval.soak.stage import Stage

MAX_RATIO = 2.0
_MB = 2**20
_DECLARED_BYTES = 10**13
_AT_ONCE = 16
_EACH_MB = 128
_ENDLESS_MB = 4096  # where an endless upload that nobody refuses ends
_SLOW = 40
_SLOW_PIECE_S = 0.5
_SLOW_LIMIT_S = 10.0
_FILES = 128  # descriptors left to the process that clients reach
_TIMEOUT_S = 60.0
_COPIES = 6  # of a byte at once, in the gateway, Triton, shared memory and the model's process
_ASKS = 7


def large_uploads(stage: Stage) -> Found:
    """Send uploads larger than memory: refused by what they declare, and by what they are."""
    http, zeros = stage.at.http, bytes(_MB)
    limit_mb = stage.config.server.max_inflight_mb
    with Watch(memory_of(stage.processes)) as watch:
        declared = upload(http, head(http, Content_Length=_DECLARED_BYTES), _few(zeros), _TIMEOUT_S)
        stage.say(f"large uploads: 10 TB declared: {declared.ending}")
        body = chunked(itertools.repeat(zeros, _ENDLESS_MB))
        # Binary data may be more than JSON.
        top = head(http, Transfer_Encoding="chunked", Inference_Header_Content_Length=100)
        endless = upload(http, top, body, 2 * _TIMEOUT_S)
        stage.say(f"large uploads: endless: {endless.ending}, {endless.sent_bytes / _MB:.0f} MB")
        many = _many_at_once(stage, zeros)
        stage.say(f"large uploads: many at once: {counted(many)}")
        huge = by_grpc(stage.at, bytes(400 * _MB), _TIMEOUT_S)
        stage.say(f"large uploads: 400 MB by gRPC: {huge}")
    grown_mb = (watch.peak_bytes - watch.first_bytes) / _MB
    yield "sent before the endless one was refused, MB", endless.sent_bytes / _MB
    yield "memory before, MB", watch.first_bytes / _MB
    yield "memory at its peak on top, MB", grown_mb
    yield _refused_early("10 TB declared", declared)
    yield _refused_early("an endless body", endless)
    yield Check("400 MB by gRPC are refused", huge.kind == "refused", str(huge))
    ended = all(ending.kind in ("answered", "refused", "failed") for ending in many)
    yield Check(f"{_AT_ONCE} of {_EACH_MB} MB at once each get an answer", ended, counted(many))
    yield Check(
        f"memory grows by at most {_COPIES} times what may be in flight",
        grown_mb <= _COPIES * limit_mb,
        f"{grown_mb:.0f} MB against server.max_inflight_mb = {limit_mb}",
    )


def _refused_early(what: str, result: Upload) -> Check:
    early = result.ending.kind == "refused" and result.sent_bytes < _ENDLESS_MB / 2 * _MB
    detail = f"{result.ending}, after {result.sent_bytes / _MB:.0f} MB"
    return Check(f"{what} is refused before it is sent", early, detail)


def _few(piece: bytes) -> Iterator[bytes]:
    """Yield a few pieces with pauses, then silence: whoever waits for the rest waits in vain."""
    for _ in range(4):
        yield piece
        time.sleep(0.5)


def _many_at_once(stage: Stage, zeros: bytes) -> list[Ending]:
    """Send audio that is none, so that nobody decodes for long: all of it has to come."""
    start, tail = http_body(bytes(_EACH_MB * _MB))
    prefix = start + tail[:4]
    size = len(start) + len(tail)
    top = head(stage.at.http, Content_Length=size, Inference_Header_Content_Length=len(start))
    with crowd(_AT_ONCE) as pool:
        calls = [
            pool.submit(
                upload,
                stage.at.http,
                top,
                itertools.chain([prefix], itertools.repeat(zeros, _EACH_MB)),
                2 * _TIMEOUT_S,
            )
            for _ in range(_AT_ONCE)
        ]
        return [call.result().ending for call in calls]


def with_short_uploads(config: Config) -> Config:
    """Return the config with a limit on an upload's time that the scenario can wait for."""
    return changed(config, "server", upload_timeout_s=_SLOW_LIMIT_S)


def slow_clients(stage: Stage) -> Found:
    """Send forty uploads that drip, beside clients that do not."""
    quiet = _asked(stage)
    start, tail = http_body(stage.short)
    size = len(start) + len(tail)
    top = head(stage.at.http, Content_Length=size, Inference_Header_Content_Length=len(start))
    with crowd(_SLOW) as pool:
        calls = [
            pool.submit(upload, stage.at.http, top, _drip(start + tail), 3 * _SLOW_LIMIT_S)
            for _ in range(_SLOW)
        ]
        time.sleep(2 * _SLOW_PIECE_S)
        beside = _asked(stage)
        stage.say(f"slow clients: {counted(beside)} beside {_SLOW} that drip")
        slow = [call.result().ending for call in calls]
    quiet_s, beside_s = _median_s(quiet), _median_s(beside)
    yield "short clip alone, median s", quiet_s
    yield f"short clip beside {_SLOW} slow uploads, median s", beside_s
    yield all_answered(quiet + beside)
    yield Check(
        f"a short clip takes at most {MAX_RATIO:g} times as long beside them",
        beside_s <= MAX_RATIO * quiet_s,
        f"{beside_s:.2f} s against {quiet_s:.2f} s",
    )
    ended = not any(ending.waited_in_vain for ending in slow)
    yield Check(f"each slow upload ends within {3 * _SLOW_LIMIT_S:g} s", ended, counted(slow))


def _drip(body: bytes) -> Iterator[bytes]:
    """Yield a hundred bytes at a time, with pauses, and it would take minutes."""
    for at in range(0, len(body), 100):
        yield body[at : at + 100]
        time.sleep(_SLOW_PIECE_S)


def descriptors(stage: Stage) -> Found:
    """Open idle connections until the process that clients reach has no descriptor left."""
    processes = stage.processes()
    process = processes.get("gateway") or processes["tritonserver"]
    limit = process.num_fds() + _FILES
    _, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (limit, hard))
    with contextlib.ExitStack() as stack, crowd(_ASKS) as pool:
        channel = stack.enter_context(channel_to(stage.at))
        first = infer(channel, stage.short, _TIMEOUT_S, stage.at.headers)
        opened = _idle_connections(stage, stack, 2 * _FILES)
        stage.say(f"descriptors: {opened} idle connections, {process.num_fds()} of {limit} in use")
        used = process.num_fds()
        connected = infer(channel, stage.short, _TIMEOUT_S, stage.at.headers)
        new: list[Future[Ending]] = [
            pool.submit(send, stage.at, stage.short, _TIMEOUT_S) for send in (by_grpc, by_http)
        ]
        came = endings(new)
        stage.say(f"descriptors: who came then: {counted(came)}")
        beside_s, beside = stage.answers_again(2 * _TIMEOUT_S)
    recovered_s, last = stage.answers_again(_TIMEOUT_S)
    yield "idle connections", opened
    yield "descriptors in use", used
    yield "descriptors allowed", limit
    yield "a new client answered beside them after, s", beside_s
    yield "answered again after they went, s", recovered_s
    good = all(ending.kind == "answered" for ending in (first, connected))
    yield Check("who is connected is still answered", good, counted([first, connected]))
    yield Check(
        "the server gives idle connections up, so that a new client is answered beside them",
        beside.kind == "answered",
        f"{beside}, {beside_s:.0f} s after those who came first: {counted(came)}",
    )
    yield Check("a new client is answered afterwards", last.kind == "answered", str(last))


def _idle_connections(stage: Stage, stack: contextlib.ExitStack, count: int) -> int:
    """Open connections that say nothing, to both addresses in turn; returns how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * count)), hard))
    opened = 0
    for address in itertools.islice(itertools.cycle((stage.at.http, stage.at.grpc)), count):
        with contextlib.suppress(OSError):
            stack.enter_context(connect(address, 1.0))
            opened += 1
    return opened


def _asked(stage: Stage) -> list[Ending]:
    return [stage.ask(_TIMEOUT_S) for _ in range(_ASKS)]


def _median_s(all_endings: list[Ending]) -> float:
    return statistics.median(ending.seconds for ending in all_endings)
