"""Declarations in audio files' headers, read without decoding: pure functions of a file's bytes.

The libraries that decode correct a wrong length silently; whoever wants to know whether a file is
whole has to look into it. Sizes and offsets are in bytes.
"""

import dataclasses
import struct

from serve.contract.errors import AudioError
from serve.contract.messages import AudioFile


class Section:
    """A part of a file, read as a file of its own, behind a header that replaces the file's.

    Args:
        file: the file's bytes.
        begin: the part's first byte.
        end: the byte after its last one.
        header: bytes to read before those of the file.
    """

    def __init__(
        self, file: "bytes | AudioFile | Section", begin: int, end: int, header: bytes = b""
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


Bytes = bytes | AudioFile | Section
"""A file's bytes: its length and slices are all that is asked for."""

STREAM_BYTES = 0x7FFF0000
"""Sizes of a chunk from here on stand in streams whose length was not known: "read to the end"."""
MAX_CHUNKS = 1000
"""Chunks of a WAV or AIFF file that are looked at; files that people make have some ten."""

_RIFF_HEADER = 12  # "RIFF" or "FORM", the file's size, "WAVE" or "AIFF"
OGG_HEADER = 27  # before the table of segments, of one byte each
_OGG_PAGE = OGG_HEADER + 255 + 255 * 255  # the longest
_ID3_HEADER = 10
_ID3V1 = 128  # a tag behind an MP3
_XING = struct.Struct(">4xIII")  # flags, and what they tell of: frames, bytes
_XING_FRAMES, _XING_BYTES = 1, 2


@dataclasses.dataclass(frozen=True)
class Pcm16Header:
    """The place of the samples in a WAV file of 16-bit samples."""

    begin: int
    declared_bytes: int  # of samples; more than there are in a file that was cut short
    channels: int
    rate: int


def pcm16_header(audio: Bytes) -> Pcm16Header | None:
    """Look into a WAV file of 16-bit samples that states its length; None for any other file."""
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
    """Count the bytes that a WAV or AIFF file's sample chunk declares, and those that are there."""
    little_endian = audio[:4] == b"RIFF"
    name, layout = (b"data", "<I") if little_endian else (b"SSND", ">I")
    at, size = find_chunk(audio, name, layout)
    return size, min(size, len(audio) - at)


def find_chunk(audio: Bytes, name: bytes, layout: str) -> tuple[int, int]:
    """Find a chunk of a WAV or AIFF file.

    Args:
        audio: the file.
        name: the chunk's name.
        layout: the format of a chunk's size, as of `struct`.

    Returns:
        The begin of the chunk's content, and its declared size; without such a chunk the file's
        end and 0.

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
    """Tell whether an OGG file ends with a complete page, as far as the page's header tells."""
    page = _last_ogg_page(audio)
    if len(page) < OGG_HEADER:
        return False
    segments = page[OGG_HEADER - 1]
    lengths = page[OGG_HEADER : OGG_HEADER + segments]
    return OGG_HEADER + segments + sum(lengths) <= len(page)


def _last_ogg_page(audio: Bytes) -> bytes:
    """Return an OGG file from where its last page begins; nothing where none does."""
    end = audio[max(0, len(audio) - _OGG_PAGE) : len(audio)]
    at = end.rfind(b"OggS")
    return end[at:] if at >= 0 else b""


def id3_bytes(audio: Bytes) -> int:
    """Return the length of the ID3 tag at a file's beginning; 0: there is none."""
    if audio[:3] != b"ID3" or len(audio) < _ID3_HEADER:
        return 0
    a, b, c, d = audio[6:10]  # the tag's size in four bytes of seven bits
    return _ID3_HEADER + (a << 21 | b << 14 | c << 7 | d)


def mp3_states_its_length(audio: Bytes) -> bool:
    """Tell whether an MP3's first frame says how many follow (a Xing or Info header)."""
    _, tag = _xing(audio)
    return bool(tag)


def mp3_goes_on(audio: Bytes) -> bool | None:
    """Tell whether another MP3 follows where the first one ends, as its first frame says.

    None: it does not say.
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
    """Return where an MP3's first frame begins, and its Xing or Info header, or nothing."""
    at = id3_bytes(audio)
    frame = audio[at : at + 64]
    place = max(frame.find(b"Xing"), frame.find(b"Info"))
    return at, frame[place:] if place >= 0 else b""
