"""Scenarios of uploads: too large, endless, too slow, very long."""

import io
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import soundfile

from build.clips import Clip
from eval.clients import Answer, Ask, all_answered, by_grpc, counted, http_body
from eval.processes import Watch, shared_memory_bytes
from eval.record import Check
from eval.soak.attacks import MAX_RATIO, Upload, chunked, head, upload
from eval.soak.stage import Found, Stage, crowd
from serve.speech import audio
from serve.speech.meter import AudioLimits
from serve.speech.rate import SAMPLE_RATE

LONG_LIMIT_S = 90.0  # request timeout for hours of audio, so that the scenario ends
SLOW_LIMIT_S = 10.0  # upload timeout for slow clients
MAX_BYTES = 4 * 2**30
_MB = 2**20
_DECLARED_BYTES = 10**13
_AT_ONCE, _EACH_MB = 16, 128
_ENDLESS_MB = 4096  # end of an endless upload that is not refused
_COPIES = 6  # of a byte at once, in the gateway, Triton, shared memory and the model's process
_SLOW, _SLOW_PIECE_S = 40, 0.5
_TIMEOUT_S = 60.0
_ASKS = 7
_HOUR_S = 3600
_LONG = 20
_BESIDE_ASKS = 5
_ARRIVED_S = 2.0  # for the uploads of all hours
_BLOCK = 1 << 16


def large_uploads(stage: Stage) -> Found:
    """Send uploads larger than memory: refused by their declared size, and by their real one."""
    http, zeros = stage.at.http, bytes(_MB)
    limit_mb = stage.server.config.server.max_inflight_mb
    with _watched(stage) as watch:
        declared = upload(http, head(http, Content_Length=_DECLARED_BYTES), _few(zeros), _TIMEOUT_S)
        stage.say(f"large uploads: 10 TB declared: {declared.answer}")
        body = chunked(itertools.repeat(zeros, _ENDLESS_MB))
        # Binary data may be larger than JSON.
        top = head(http, Transfer_Encoding="chunked", Inference_Header_Content_Length=100)
        endless = upload(http, top, body, 2 * _TIMEOUT_S)
        stage.say(f"large uploads: endless: {endless.answer}, {endless.sent_bytes / _MB:.0f} MB")
        many = _many_at_once(stage, zeros)
        stage.say(f"large uploads: many at once: {counted(many)}")
        huge = by_grpc(stage.at, Ask(bytes(400 * _MB)))
        stage.say(f"large uploads: 400 MB by gRPC: {huge}")
    grown_mb = (watch.peak_bytes - watch.first_bytes) / _MB
    yield "sent before the endless one was refused, MB", endless.sent_bytes / _MB
    yield "memory before, MB", watch.first_bytes / _MB
    yield "memory at its peak on top, MB", grown_mb
    yield _refused_early("10 TB declared", declared)
    yield _refused_early("an endless body", endless)
    yield Check("400 MB by gRPC are refused", huge.kind == "refused", str(huge))
    ended = all(answer.kind in ("answered", "refused", "failed") for answer in many)
    yield Check(f"{_AT_ONCE} of {_EACH_MB} MB at once each get an answer", ended, counted(many))
    yield Check(
        f"memory grows by at most {_COPIES} times what may be in flight",
        grown_mb <= _COPIES * limit_mb,
        f"{grown_mb:.0f} MB against server.max_inflight_mb = {limit_mb}",
    )


def _watched(stage: Stage) -> Watch:
    return Watch(lambda: shared_memory_bytes(stage.server.processes().values()))


def _refused_early(name: str, result: Upload) -> Check:
    early = result.answer.kind == "refused" and result.sent_bytes < _ENDLESS_MB / 2 * _MB
    detail = f"{result.answer}, after {result.sent_bytes / _MB:.0f} MB"
    return Check(f"{name} is refused before it is sent", early, detail)


def _few(piece: bytes) -> Iterator[bytes]:
    """Yield a few pieces with pauses; the rest never comes."""
    for _ in range(4):
        yield piece
        time.sleep(0.5)


def _many_at_once(stage: Stage, zeros: bytes) -> list[Answer]:
    """Send zeros in place of audio, which are refused only once they are complete."""
    start, tail = http_body(bytes(_EACH_MB * _MB))
    size = len(start) + len(tail)
    top = head(stage.at.http, Content_Length=size, Inference_Header_Content_Length=len(start))

    def send(_: int) -> Answer:
        pieces = itertools.chain([start + tail[:4]], itertools.repeat(zeros, _EACH_MB))
        return upload(stage.at.http, top, pieces, 2 * _TIMEOUT_S).answer

    with crowd(_AT_ONCE) as pool:
        return list(pool.map(send, range(_AT_ONCE)))


def slow_clients(stage: Stage) -> Found:
    """Send forty slow uploads beside a client that is not slow."""
    quiet = _asked(stage)
    start, tail = http_body(stage.short)
    size = len(start) + len(tail)
    top = head(stage.at.http, Content_Length=size, Inference_Header_Content_Length=len(start))

    def send(_: int) -> Answer:
        return upload(stage.at.http, top, _drip(start + tail), 3 * SLOW_LIMIT_S).answer

    with crowd(_SLOW) as pool:
        uploads = pool.map(send, range(_SLOW))
        time.sleep(2 * _SLOW_PIECE_S)
        beside = _asked(stage)
        stage.say(f"slow clients: {counted(beside)} beside {_SLOW} slow ones")
        slow = list(uploads)
    quiet_s, beside_s = _median_s(quiet), _median_s(beside)
    yield "short clip alone, median s", quiet_s
    yield f"short clip beside {_SLOW} slow uploads, median s", beside_s
    yield all_answered(quiet + beside)
    yield _hardly_slower("a short clip takes", beside_s, quiet_s)
    ended = not any(answer.waited_in_vain for answer in slow)
    yield Check(f"each slow upload ends within {3 * SLOW_LIMIT_S:g} s", ended, counted(slow))


def _drip(body: bytes) -> Iterator[bytes]:
    """Yield a hundred bytes at a time, with pauses; the whole body would take minutes."""
    for at in range(0, len(body), 100):
        yield body[at : at + 100]
        time.sleep(_SLOW_PIECE_S)


def _asked(stage: Stage) -> list[Answer]:
    return [stage.ask(_TIMEOUT_S) for _ in range(_ASKS)]


def _median_s(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.seconds for answer in answers)


def _hardly_slower(what: str, beside_s: float, quiet_s: float) -> Check:
    return Check(
        f"{what} at most {MAX_RATIO:g} times as long beside them",
        beside_s <= MAX_RATIO * quiet_s,
        f"{beside_s:.2f} s against {quiet_s:.2f} s, {beside_s / quiet_s:.1f} times",
    )


# ---------------------------------------------------------------- hours of audio


def hour_of(clips: Sequence[Clip]) -> bytes:
    """Make an hour of the clips in turn, as an OGG Vorbis file of some 16 MB.

    Raises:
        AudioError: a clip cannot be decoded.
    """
    limits = AudioLimits(_HOUR_S)
    parts = [audio.whole(audio.decode(clip.path.read_bytes(), limits)) for clip in clips]
    samples = np.resize(np.concatenate(parts), _HOUR_S * SAMPLE_RATE)
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", SAMPLE_RATE, 1, format="OGG", subtype="VORBIS") as ogg:
        for start in range(0, len(samples), _BLOCK):  # libsndfile's stack is too small for all
            ogg.write(samples[start : start + _BLOCK])
    return file.getvalue()


def short_beside_long(stage: Stage) -> Found:
    """Send a short clip while 20 hours of audio wait: it takes at most twice its quiet time.

    Each of the long files is answered or refused, and memory stays bounded.
    """
    quiet = _asked(stage)
    yield all_answered(quiet)
    quiet_s = max(answer.seconds for answer in quiet)
    stage.say(f"short beside long: {quiet_s:.2f} s quiet; making an hour of audio …")
    hour = Ask(hour_of(stage.settings.clips), patience_s=4 * LONG_LIMIT_S)
    with _watched(stage) as watch, crowd(_LONG) as pool:
        calls = [pool.submit(by_grpc, stage.at, hour) for _ in range(_LONG)]
        time.sleep(_ARRIVED_S)
        beside = list[Answer]()
        while len(beside) < _BESIDE_ASKS and not all(call.done() for call in calls):
            beside.append(stage.ask(_TIMEOUT_S))
        stage.say(f"short beside long: {[f'{answer.seconds:.1f} s' for answer in beside]}")
        ended = [call.result() for call in calls]
    recovered_s, last = stage.answers_again(_TIMEOUT_S)
    beside_s = max(answer.seconds for answer in beside)
    yield "short clip alone, slowest, s", quiet_s
    yield f"short clip beside {_LONG} hours, slowest, s", beside_s
    yield "median beside them, s", _median_s(beside)
    yield "memory before, MB", watch.first_bytes / _MB
    yield "peak memory of all processes, MB", watch.peak_bytes / _MB
    yield "answered again after, s", recovered_s
    yield all_answered(beside)
    yield _hardly_slower("the slowest takes", beside_s, quiet_s)
    clear = all(answer.kind in ("answered", "refused") for answer in ended)
    yield Check("each hour is answered or refused", clear, counted(ended))
    yield Check(
        f"all processes together stay below {MAX_BYTES / 2**30:g} GB",
        watch.peak_bytes < MAX_BYTES,
        f"at most {watch.peak_bytes / 2**30:.2f} GB, shared pages counted once",
    )
    yield Check("a short clip is answered afterwards", last.kind == "answered", str(last))
