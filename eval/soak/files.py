"""Short clips in the formats that clients send, and an MPEG-TS that is damaged."""

import dataclasses
import io
from collections.abc import Iterator, Sequence

import av
import numpy as np
import soundfile

from build.clips import Clip
from eval.clients import PATIENCE_S, Ask
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
