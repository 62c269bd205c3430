"""The server under attack, the files that its clients send, and the findings."""

import contextlib
import dataclasses
import io
import time
from collections.abc import Iterator, Sequence

import av
import numpy as np
import soundfile

from build.clips import Clip
from eval.clients import PATIENCE_S, Answer, Ask, by_grpc
from eval.config import Config
from eval.record import Check, Result, Run, Say, Section, Table, Text, Verdict, loud, verdict
from eval.server import POLL_S, Addresses, RunningServer, running
from serve.contract.messages import Samples
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE
from serve.speech.meter import Limits

CLIPS = 3  # the shortest with speech
_FORMATS = {"wav": "WAV", "flac": "FLAC", "mp3": "MP3", "ogg": "OGG"}  # as libsndfile has them
_LIMIT_S = 600.0


@dataclasses.dataclass(frozen=True)
class File:
    """A file that a client sends."""

    name: str
    data: bytes
    samples: Samples  # (n,), 16 kHz mono, of the clip itself

    def ask(self, patience_s: float = PATIENCE_S) -> Ask:
        """Return a request with it."""
        return Ask(self.data, patience_s=patience_s, samples=self.samples)


def files_of(clips: Sequence[Clip]) -> list[File]:
    """Make files of the shortest clips with speech: each as WAV, FLAC, MP3, OGG and M4A.

    Raises:
        AudioError: a clip cannot be decoded.
    """
    spoken = sorted((clip for clip in clips if clip.text), key=lambda clip: clip.duration_s)
    return [file for clip in spoken[:CLIPS] for file in _formats(clip)]


def _formats(clip: Clip) -> Iterator[File]:
    samples = audio.whole(audio.decode(clip.path.read_bytes(), Limits(_LIMIT_S)))
    stem = clip.path.stem
    for ending, kind in _FORMATS.items():
        file = io.BytesIO()
        soundfile.write(file, samples, SAMPLE_RATE, format=kind)
        yield File(f"{stem}.{ending}", file.getvalue(), samples)
    yield File(f"{stem}.m4a", aac(samples, "mp4"), samples)


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
    """Make an MPEG-TS whose streams change on the way, of which PyAV raises an IndexError."""
    quiet = np.zeros(SAMPLE_RATE, np.float32)
    later = aac(quiet, "mpegts", mpegts_start_pid="0x300", mpegts_pmt_start_pid="0x1100")
    return aac(quiet, "mpegts") * 20 + later


# ---------------------------------------------------------------- findings


Found = Iterator[Check | tuple[str, float]]
"""Checks, and figures as a name with its value."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one scenario."""

    scenario: str
    title: str
    checks: tuple[Check, ...]
    figures: dict[str, float]  # by name, which ends in its unit
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of its checks."""
        return verdict(self.checks)


def kept(run: Run, findings: Sequence[Finding]) -> Result:
    """Keep the findings so far, and return the result.

    Raises:
        FileError: the record cannot be written.
    """
    rows = []
    for finding in findings:
        bad = [check for check in finding.checks if check.passed is not True]
        summary = "; ".join(f"{check.name}: {check.detail}" for check in bad or finding.checks)
        outcome = loud(finding.verdict)
        rows.append([finding.scenario, outcome, f"{finding.seconds:.0f} s", summary])
    header = ["scenario", "", "took", "what happened"]
    sections = [Section("Scenarios", [Table(header, rows, prose=True)])]
    for finding in findings:
        items = [
            f"{loud(verdict([check]))}: {check.name}: {check.detail}" for check in finding.checks
        ]
        values = [[name, f"{value:,.3f}"] for name, value in finding.figures.items()]
        parts = [Text("", items=items), Table(["figure", ""], values)]
        title = f"{finding.scenario}: {finding.title}"
        sections.append(Section(title, parts, printed=False))
    checks = tuple(check for finding in findings for check in finding.checks)
    result = Result({"scenarios": findings}, checks, tuple(sections))
    run.keep(result)
    return result


# ---------------------------------------------------------------- stage


@dataclasses.dataclass(frozen=True)
class Stage:
    """A running server, and what its clients send."""

    server: RunningServer
    clips: tuple[Clip, ...]
    say: Say
    seed: int = 0

    @property
    def at(self) -> Addresses:
        """Return where it listens."""
        return self.server.at

    @property
    def config(self) -> Config:
        """Return its config."""
        return self.server.config

    @property
    def short(self) -> bytes:
        """Read the shortest clip with speech that is a file of its own."""
        spoken = [clip for clip in self.clips if clip.text]
        return min(spoken, key=lambda clip: clip.duration_s).path.read_bytes()

    def ask(self, patience_s: float) -> Answer:
        """Send a short clip over gRPC and wait."""
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
def stage(
    config: Config, clips: tuple[Clip, ...], say: Say, *, keys: int = 0, seed: int = 0
) -> Iterator[Stage]:
    """Run a server; arguments and errors as of `running`."""
    with running(config, keys=keys) as server:
        yield Stage(server, clips, say, seed)
