"""Scenarios of hostile clients: each disturbance beside a client that sends a short file."""

import collections
import contextlib
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import soundfile

from build.clips import Clip
from eval.clients import Answer, Ask, by_grpc, http_body
from eval.config import changed
from eval.processes import ChildProcess, Send, Watch, shared_memory_bytes
from eval.server import RunningServer
from eval.soak.attacks import FLOODS, KILLERS, chunked, flood, head, upload
from eval.soak.stage import Stage, crowd
from serve.speech import audio
from serve.speech.meter import AudioLimits
from serve.speech.rate import SAMPLE_RATE

MAX_RATIO = 2.0  # times the latency without the disturbance
_BESIDE_S = 6.0  # for which the honest client sends
_RISE_S = 2.0  # for a disturbance to rise, and for its rest to go
_MB = 2**20


def _beside(
    stage: Stage, server: RunningServer, disturbances: Mapping[str, AbstractContextManager[object]]
) -> None:
    """Compare the latency of an honest client beside each disturbance with that without."""
    quiet_s = statistics.median(stage.send_for(server, _BESIDE_S))
    stage.add("without a disturbance: median latency, s", quiet_s)
    for name, disturbance in disturbances.items():
        with disturbance:
            time.sleep(_RISE_S)
            median_s = statistics.median(stage.send_for(server, _BESIDE_S))
        stage.say(f"{name}: {median_s:.2f} s, {quiet_s:.2f} s without")
        stage.at_most(f"{name}: median latency, s", median_s, MAX_RATIO * quiet_s)
        time.sleep(_RISE_S)


@contextlib.contextmanager
def _crowd_of(
    stage: Stage,
    name: str,
    count: int,
    send: Callable[[], Answer],
    is_wrong: Callable[[Answer], bool],
) -> Iterator[None]:
    """Let hostile clients send at once beside a block, and count their wrong answers."""
    with crowd(count) as pool:
        calls = [pool.submit(send) for _ in range(count)]
        yield
        answers = [call.result() for call in calls]
    kinds = collections.Counter(answer.kind for answer in answers)
    stage.say(f"{name}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
    stage.none_of(f"{name}: wrong answers", [answer for answer in answers if is_wrong(answer)])


def _memory_of(server: RunningServer) -> Watch:
    return Watch(lambda: shared_memory_bytes(server.processes().values()))


# ---------------------------------------------------------------- floods and killers


def floods(stage: Stage) -> None:
    """Send a short file beside each flood."""
    with stage.server() as server:

        @contextlib.contextmanager
        def flooding(name: str) -> Iterator[None]:
            arguments = (name, server.http)
            with ChildProcess(f"flood {name}", flood_nicely, arguments, log=None) as child:
                child.receive(_TIMEOUT_S)  # it begins
                yield

        _beside(stage, server, {name: flooding(name) for name in FLOODS})


def flood_nicely(send: Send, name: str, address: str) -> None:
    """Flood in a child; its own work slows others as little as possible."""
    os.nice(10)
    send("begins")
    flood(name, address)


_ALIVE_S = 10.0  # longest wait for a short file after a killer


def killers(stage: Stage) -> None:
    """Send each killer request once; the same processes must then answer a short file."""
    with stage.server() as server:
        stage.send(server)
        before = server.pids()
        for name in KILLERS:
            answer = stage.attack(server, name)
            next_answer, now = stage.send(server), server.pids()
            detail = f"the attack was {answer}; the short file after it was {next_answer}"
            if now != before:
                detail += f"; processes before {before}, now {now}"
            stage.say(f"{name}: {detail}")
            soon = next_answer.kind == "answered" and next_answer.seconds <= _ALIVE_S
            seconds, limit = next_answer.seconds, f"at most {_ALIVE_S:g}, same processes"
            stage.add(f"{name}: next answer, s", seconds, limit, soon and now == before, detail)
            if server.process.status() is not None:
                return
            before = now


# ---------------------------------------------------------------- uploads

_TIMEOUT_S = 60.0
_DECLARED_BYTES = 10**13
_AT_ONCE, _EACH_MB = 16, 128
_ENDLESS_MB = 4096  # end of an endless upload that is not refused
# Copies of a byte at once, in the gateway, Triton, shared memory and the model's process.
_COPIES = 6
_SLOW, _SLOW_PIECE_S = 40, 0.5
_SLOW_LIMIT_S = 10.0  # upload timeout for slow clients


def large_uploads(stage: Stage) -> None:
    """Send uploads larger than memory: refused by their declared size, and by their real one."""
    zeros, limit_mb = bytes(_MB), stage.config.server.max_inflight_mb
    with stage.server() as server:
        with _memory_of(server) as watch:
            top = head(server.http, Content_Length=_DECLARED_BYTES)
            declared = upload(server.http, top, _drip(bytes(4 * _MB), _MB), _TIMEOUT_S)
            _refused_early(stage, "10 TB declared", *declared)
            # Binary data may be larger than JSON.
            top = head(
                server.http, Transfer_Encoding="chunked", Inference_Header_Content_Length=100
            )
            body = chunked(itertools.repeat(zeros, _ENDLESS_MB))
            _refused_early(stage, "endless", *upload(server.http, top, body, 2 * _TIMEOUT_S))
            # Zeros in place of audio are refused only once they are complete.
            start, tail = http_body(bytes(_EACH_MB * _MB))
            top = _head_of(server, start, tail)

            def send() -> Answer:
                body = itertools.chain([start + tail[:4]], itertools.repeat(zeros, _EACH_MB))
                return upload(server.http, top, body, 2 * _TIMEOUT_S)[0]

            name = f"{_AT_ONCE} uploads of {_EACH_MB} MB"
            with _crowd_of(stage, name, _AT_ONCE, send, lambda answer: answer.kind == "lost"):
                pass
            huge = by_grpc(server.addresses[0], Ask(bytes(400 * _MB)))
            stage.none_of("400 MB by gRPC, not refused", [huge] if huge.kind != "refused" else [])
        grown_mb = (watch.peak_bytes - watch.first_bytes) / _MB
        stage.at_most("growth of memory to its peak, MB", grown_mb, _COPIES * limit_mb)
        stage.send(server)


def _refused_early(stage: Stage, name: str, answer: Answer, sent_bytes: int) -> None:
    sent_mb, limit_mb = sent_bytes / _MB, _ENDLESS_MB / 2
    early, limit = answer.kind == "refused" and sent_mb < limit_mb, f"refused below {limit_mb:g}"
    stage.add(f"{name}: sent before its refusal, MB", sent_mb, limit, early, str(answer))


def _head_of(server: RunningServer, start: bytes, tail: bytes) -> bytes:
    size = len(start) + len(tail)
    return head(server.http, Content_Length=size, Inference_Header_Content_Length=len(start))


def _drip(body: bytes, size: int) -> Iterator[bytes]:
    """Yield pieces of a size with pauses."""
    for start in range(0, len(body), size):
        yield body[start : start + size]
        time.sleep(_SLOW_PIECE_S)


def slow_clients(stage: Stage) -> None:
    """Send forty uploads, which would take minutes, beside a client that is not slow."""
    config = changed(stage.config, "server", upload_timeout_s=_SLOW_LIMIT_S)
    start, tail = http_body(stage.files[stage.shortest_file].audio)
    with stage.server(config) as server:
        top = _head_of(server, start, tail)

        def send() -> Answer:
            drips = _drip(start + tail, 100)
            return upload(server.http, top, drips, 3 * _SLOW_LIMIT_S)[0]

        name = f"{_SLOW} slow uploads"
        uploads = _crowd_of(stage, name, _SLOW, send, lambda answer: answer.waited_in_vain)
        _beside(stage, server, {name: uploads})


# ---------------------------------------------------------------- hours of audio

_HOUR_S = 3600
_LONG = 20
_LONG_LIMIT_S = 90.0  # request timeout for hours of audio, so that the scenario ends
_MAX_MB = 4096.0


def short_beside_long(stage: Stage) -> None:
    """Send a short file while 20 hours of audio wait; memory stays bounded."""
    config = changed(stage.config, "transcriber", request_timeout_s=_LONG_LIMIT_S)
    hour = Ask(hour_of(stage.clips), patience_s=4 * _LONG_LIMIT_S)
    with stage.server(config) as server:
        name = f"{_LONG} hours of audio"
        send = functools.partial(by_grpc, server.addresses[0], hour)
        uploads = _crowd_of(
            stage, name, _LONG, send, lambda answer: answer.kind in ("failed", "lost")
        )
        with _memory_of(server) as watch:
            _beside(stage, server, {name: uploads})
        stage.at_most("peak memory of all processes, MB", watch.peak_bytes / _MB, _MAX_MB)
        stage.send(server)


def hour_of(clips: Sequence[Clip]) -> bytes:
    """Make an hour of the clips in turn, as an MP3 file of some 20 MB.

    Raises:
        AudioError: a clip cannot be decoded.
    """
    limits = AudioLimits(_HOUR_S)
    parts = [audio.join_blocks(audio.decode(clip.path.read_bytes(), limits)) for clip in clips]
    samples = np.resize(np.concatenate(parts), _HOUR_S * SAMPLE_RATE)
    # A real file: during callbacks into Python soundfile would swallow Ctrl-C and SIGTERM.
    with tempfile.NamedTemporaryFile(suffix=".mp3") as file:
        soundfile.write(file.name, samples, SAMPLE_RATE)
        return file.read()
