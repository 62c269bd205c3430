"""Read declarations in audio files' headers without decoding: pure functions of a file's bytes.

Decoding libraries correct a wrong length silently, so truncation is detected here. Sizes and
offsets are in bytes.
"""

import dataclasses
import struct

from serve.contract.errors import AudioError
from serve.contract.messages import AudioFile


class FileSlice:
    """A part of a file, readable as a file, optionally with a header before it.

    Args:
        file: the file's bytes.
        begin: offset of the part's first byte.
        end: offset after its last byte.
        header: bytes that precede the part.
    """

    def __init__(
        self, file: "bytes | AudioFile | FileSlice", begin: int, end: int, header: bytes = b""
    ) -> None:
        self._file, self._header = file, header
        self._begin, self._end = begin, max(begin, min(end, len(file)))

    def __len__(self) -> int:
        return len(self._header) + self._end - self._begin

    def __getitem__(self, place: slice) -> bytes:
        begin, end, _ = place.indices(len(self))
        shift = self._begin - len(self._header)
        rest = self._file[max(self._begin, begin + shift) : max(self._begin, end + shift)]
        return self._header[begin:end] + rest if begin < len(self._header) else rest


Bytes = bytes | AudioFile | FileSlice
"""A file's bytes, which support only len() and slices."""

STREAM_BYTES = 0x7FFF0000
"""Chunk sizes of this value or more are written by streams and mean "read to the end"."""
MAX_CHUNKS = 1000
"""Maximum chunks of a WAV or AIFF file to read; ordinary files have about ten."""

_RIFF_HEADER = 12  # "RIFF" or "FORM", the file's size, "WAVE" or "AIFF"
OGG_HEADER = 27  # bytes before the segment table, which has one byte per segment
_OGG_PAGE = OGG_HEADER + 255 + 255 * 255  # maximum bytes of a page
_ID3_HEADER = 10
_ID3V1 = 128  # bytes of a tag after an MP3
_XING = struct.Struct(">4xIII")  # flags, and optional fields: frames, bytes
_XING_FRAMES, _XING_BYTES = 1, 2


@dataclasses.dataclass(frozen=True)
class Pcm16Header:
    """The header of a WAV file of 16-bit samples."""

    begin: int  # offset of the samples
    declared_bytes: int  # bytes of samples; a truncated file has fewer
    channels: int
    rate: int


def pcm16_header(audio: Bytes) -> Pcm16Header | None:
    """Read the header of a 16-bit WAV file that declares its length; None for any other file."""
    if audio[:4] != b"RIFF" or audio[8:12] != b"WAVE":
        return None
    at, size = find_chunk(audio, b"fmt ", "<I")
    if size < 16 or at + size > len(audio):
        return None
    tag, channels, rate, _, frame_bytes, bits = struct.unpack("<HHIIHH", audio[at : at + 16])
    begin, declared = find_chunk(audio, b"data", "<I")
    plain = (tag, bits, frame_bytes) == (1, 16, 2 * channels) and channels > 0
    if not plain or begin < at or not 0 < declared < STREAM_BYTES:
        return None
    return Pcm16Header(begin, declared, channels, rate)


def sample_bytes(audio: Bytes) -> tuple[int, int]:
    """Return the declared and the present bytes of a WAV or AIFF file's sample chunk."""
    little_endian = audio[:4] == b"RIFF"
    name, layout = (b"data", "<I") if little_endian else (b"SSND", ">I")
    at, size = find_chunk(audio, name, layout)
    return size, min(size, len(audio) - at)


def find_chunk(audio: Bytes, name: bytes, layout: str) -> tuple[int, int]:
    """Find a chunk of a WAV or AIFF file.

    Args:
        audio: the file.
        name: the chunk's name.
        layout: the `struct` format of a chunk's size.

    Returns:
        The offset of the chunk's content and its declared size; without such a chunk, the file's
        end and 0.

    Raises:
        AudioError: the chunk is not among the first `MAX_CHUNKS`.
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
        f"audio has no chunk {name.decode()!r} among its first {MAX_CHUNKS}; expected a WAV or "
        "AIFF file with fewer chunks before its samples"
    )


def last_ogg_page_is_whole(audio: Bytes) -> bool:
    """Return whether an OGG file ends with a complete page, according to the page's header."""
    page = _last_ogg_page(audio)
    if len(page) < OGG_HEADER:
        return False
    segments = page[OGG_HEADER - 1]
    lengths = page[OGG_HEADER : OGG_HEADER + segments]
    return OGG_HEADER + segments + sum(lengths) <= len(page)


def _last_ogg_page(audio: Bytes) -> bytes:
    """Return an OGG file's bytes from its last page on; b"" if it has no page."""
    end = audio[max(0, len(audio) - _OGG_PAGE) : len(audio)]
    at = end.rfind(b"OggS")
    return end[at:] if at >= 0 else b""


def id3_bytes(audio: Bytes) -> int:
    """Return the length of the ID3 tag at a file's beginning; 0 if there is none."""
    if audio[:3] != b"ID3" or len(audio) < _ID3_HEADER:
        return 0
    a, b, c, d = audio[6:10]  # the tag's size, seven bits per byte
    return _ID3_HEADER + (a << 21 | b << 14 | c << 7 | d)


def mp3_states_its_length(audio: Bytes) -> bool:
    """Return whether an MP3's first frame declares the length (a Xing or Info header)."""
    _, tag = _xing(audio)
    return bool(tag)


def mp3_goes_on(audio: Bytes) -> bool | None:
    """Return whether another MP3 follows the declared end of the first one.

    None means that the first frame declares no size.
    """
    begin, tag = _xing(audio)
    if len(tag) < _XING.size:
        return None
    flags, frames, size = _XING.unpack(tag[: _XING.size])
    if not flags & _XING_BYTES:
        return None
    end = begin + (size if flags & _XING_FRAMES else frames)
    if audio[end : end + 3] == b"TAG":
        end += _ID3V1
    head = audio[end : end + 3]
    return head == b"ID3" or (len(head) == 3 and head[0] == 0xFF and head[1] >= 0xE0)


def _xing(audio: Bytes) -> tuple[int, bytes]:
    """Return the offset of an MP3's first frame, and its Xing or Info header or b""."""
    at = id3_bytes(audio)
    frame = audio[at : at + 64]
    place = max(frame.find(b"Xing"), frame.find(b"Info"))
    return at, frame[place:] if place >= 0 else b""
