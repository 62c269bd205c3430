"""The needs of every scenario: its settings, the attacked server, and the files of clients."""

import contextlib
import dataclasses
import io
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import av
import numpy as np
import soundfile

from build.clips import Clip
from eval.clients import PATIENCE_S, Answer, Ask, by_grpc
from eval.config import EvaluationProduct
from eval.record import Check, Say
from eval.server import POLL_S, Addresses, RunningServer, running
from serve.contract.messages import Samples
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE
from serve.speech.meter import AudioLimits

_CLIPS = 3  # the shortest with speech
_FORMATS = {"wav": "WAV", "flac": "FLAC", "mp3": "MP3", "ogg": "OGG"}  # names of libsndfile
_MAX_CLIP_S = 600.0

Found = Iterator[Check | tuple[str, float]]
"""The result of a scenario: checks, and figures as a name with its value."""


@dataclasses.dataclass(frozen=True)
class SoakSettings:
    """The settings of a scenario."""

    config: EvaluationProduct
    clips: tuple[Clip, ...]
    say: Say
    seed: int = 0
    minutes: float = 5.0
    actions: int | None = None

    @property
    def short_clip(self) -> Clip:
        """Return the shortest clip with speech."""
        return min((clip for clip in self.clips if clip.text), key=lambda clip: clip.duration_s)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A running server, and what its clients send."""

    server: RunningServer
    settings: SoakSettings
    say: Say
    short: bytes  # the shortest clip's file

    @property
    def at(self) -> Addresses:
        """Return the server's addresses."""
        return self.server.at

    def ask(self, patience_s: float) -> Answer:
        """Send the short clip over gRPC and wait."""
        return by_grpc(self.at, Ask(self.short, patience_s=patience_s))

    def answers_again(self, timeout_s: float) -> tuple[float, Answer]:
        """Ask until there is a transcript; return the seconds it took and the last answer."""
        began, last = time.monotonic(), Answer("lost", "the server has ended", 0.0)
        while (left_s := timeout_s - (time.monotonic() - began)) > 0:
            if self.server.process.poll() is not None:
                break
            last = self.ask(left_s)
            if last.kind == "answered":
                break
            time.sleep(POLL_S)
        return time.monotonic() - began, last


@contextlib.contextmanager
def stage(settings: SoakSettings, *, keys: int = 0) -> Iterator[Stage]:
    """Run a server; arguments and errors as `eval.server.running`."""
    short = settings.short_clip.path.read_bytes()
    with running(settings.config, keys=keys) as server:
        yield Stage(server, settings, settings.say, short)


@contextlib.contextmanager
def crowd(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Give threads for clients; leaving does not wait for them: the server's end ends them."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="soak")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ---------------------------------------------------------------- files


@dataclasses.dataclass(frozen=True)
class SoakFile:
    """A file that a client sends."""

    name: str
    data: bytes
    samples: Samples  # (n,), 16 kHz mono, of the clip itself

    def ask(self, patience_s: float = PATIENCE_S) -> Ask:
        """Return a request with it."""
        return Ask(self.data, patience_s=patience_s, samples=self.samples)


def files_of(clips: Sequence[Clip]) -> list[SoakFile]:
    """Make files of the shortest clips with speech: each as WAV, FLAC, MP3, OGG and M4A.

    Raises:
        AudioError: a clip cannot be decoded.
    """
    files = []
    spoken = sorted((clip for clip in clips if clip.text), key=lambda clip: clip.duration_s)
    for clip in spoken[:_CLIPS]:
        samples = audio.whole(audio.decode(clip.path.read_bytes(), AudioLimits(_MAX_CLIP_S)))
        for ending, kind in _FORMATS.items():
            file = io.BytesIO()
            soundfile.write(file, samples, SAMPLE_RATE, format=kind)
            files.append(SoakFile(f"{clip.path.stem}.{ending}", file.getvalue(), samples))
        files.append(SoakFile(f"{clip.path.stem}.m4a", aac(samples, "mp4"), samples))
    return files


def aac(samples: Samples, container: str, **options: str) -> bytes:
    """Encode AAC in a container that libsndfile cannot write: mp4, mpegts."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as writer:
        stream = writer.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            (samples[None].clip(-1, 1) * 32767).astype(np.int16), format="s16", layout="mono"
        )
        frame.sample_rate = SAMPLE_RATE
        cut = av.AudioResampler(stream.format, "mono", SAMPLE_RATE, stream.frame_size or 1024)
        for part in [*cut.resample(frame), *cut.resample(None)]:
            part.pts = None
            writer.mux(stream.encode(part))
        writer.mux(stream.encode(None))
    return file.getvalue()


def changed_broadcast() -> bytes:
    """Make an MPEG-TS whose streams change midway, for which PyAV raises an IndexError."""
    quiet = np.zeros(SAMPLE_RATE, np.float32)
    later = aac(quiet, "mpegts", mpegts_start_pid="0x300", mpegts_pmt_start_pid="0x1100")
    return aac(quiet, "mpegts") * 20 + later
