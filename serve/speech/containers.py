"""What the headers of audio files declare, read without decoding: pure functions of a file's bytes.

The libraries that decode correct a wrong length silently; whoever wants to know whether a file is
whole has to look into it. Sizes and offsets are in bytes.
"""

import dataclasses
import struct

from serve.errors import AudioError
from serve.messages import AudioFile

Bytes = bytes | AudioFile
"""A file's bytes: its length and slices are all that is asked for."""

STREAM_BYTES = 0x7FFF0000
"""Sizes of a chunk from here on stand in streams whose length was not known: "read to the end"."""
MAX_CHUNKS = 1000
"""Chunks of a WAV or AIFF file that are looked at; files that people make have some ten."""

_RIFF_HEADER = 12  # "RIFF" or "FORM", the file's size, "WAVE" or "AIFF"
_OGG_HEADER = 27  # before the table of segments, of one byte each
_OGG_PAGE = _OGG_HEADER + 255 + 255 * 255  # the longest
_ID3_HEADER = 10


@dataclasses.dataclass(frozen=True)
class Pcm16:
    """Where the samples of a WAV file of 16-bit samples lie."""

    begin: int
    declared_bytes: int  # of samples; more than there are in a file that was cut short
    channels: int
    rate: int


def pcm16(audio: Bytes) -> Pcm16 | None:
    """Look into a WAV file of 16-bit samples that states its length; None for any other file."""
    if audio[:4] != b"RIFF" or audio[8:12] != b"WAVE":
        return None
    at, size = _chunk(audio, b"fmt ", "<I")
    if size < 16 or at + size > len(audio):
        return None
    tag, channels, rate, _, frame_bytes, bits = struct.unpack("<HHIIHH", audio[at : at + 16])
    begin, declared = _chunk(audio, b"data", "<I")
    plain = (tag, bits, frame_bytes) == (1, 16, 2 * channels) and channels > 0
    if not plain or begin < at or not 0 < declared < STREAM_BYTES:
        return None
    return Pcm16(begin, declared, channels, rate)


def sample_bytes(audio: Bytes) -> tuple[int, int]:
    """Bytes that the sample chunk of a WAV or AIFF file declares, and bytes that are there."""
    little_endian = audio[:4] == b"RIFF"
    name, layout = (b"data", "<I") if little_endian else (b"SSND", ">I")
    at, size = _chunk(audio, name, layout)
    return size, min(size, len(audio) - at)


def _chunk(audio: Bytes, name: bytes, layout: str) -> tuple[int, int]:
    """Where the content of a chunk of a WAV or AIFF file begins, and the size it declares.

    Without such a chunk, the file's end and 0.

    Raises:
        AudioError: so many chunks are before it that looking on would take long.
    """
    at = _RIFF_HEADER
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(audio):
            return len(audio), 0
        (size,) = struct.unpack(layout, audio[at + 4 : at + 8])
        if audio[at : at + 4] == name:
            return at + 8, size
        at += 8 + size + size % 2  # chunks begin at even offsets
    raise AudioError(
        f"audio's first {MAX_CHUNKS} chunks hold no {name.decode()!r}; expected a WAV or AIFF file "
        "with less before its sound"
    )


def last_ogg_page_is_whole(audio: Bytes) -> bool:
    """Whether an OGG file ends with a complete page, as far as the page's own header tells."""
    end = audio[max(0, len(audio) - _OGG_PAGE) : len(audio)]
    at = end.rfind(b"OggS")
    if at < 0 or at + _OGG_HEADER > len(end):
        return False
    segments = end[at + _OGG_HEADER - 1]
    lengths = end[at + _OGG_HEADER : at + _OGG_HEADER + segments]
    return at + _OGG_HEADER + segments + sum(lengths) <= len(end)


def mp3_states_its_length(audio: Bytes) -> bool:
    """Whether an MP3's first frame says how many frames follow (a Xing or Info header)."""
    at = 0
    if audio[:3] == b"ID3" and len(audio) >= _ID3_HEADER:
        a, b, c, d = audio[6:10]  # the tag's size in four bytes of seven bits
        at = _ID3_HEADER + (a << 21 | b << 14 | c << 7 | d)
    frame = audio[at : at + 64]
    return b"Xing" in frame or b"Info" in frame
