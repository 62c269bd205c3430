"""Read declarations in audio files without decoding: pure functions of a file's bytes.

Decoding libraries correct a wrong length silently, so truncation is detected here. Containers
declare their parts' sizes, so a truncation inside a part is detected even if the duration is not
declared. A browser's recorder, for example, writes WebM without a duration, but with the size of
each block. A file that ends between two parts looks complete.

Sizes and offsets are in bytes.
"""

import dataclasses
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

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

    def __getitem__(self, key: slice) -> bytes:
        begin, end, _ = key.indices(len(self))
        shift = self._begin - len(self._header)
        content = self._file[max(self._begin, begin + shift) : max(self._begin, end + shift)]
        return self._header[begin:end] + content if begin < len(self._header) else content


Bytes = bytes | AudioFile | FileSlice
"""A file's bytes, which support only len() and slices."""


class ChunkLayout(NamedTuple):
    """The layout of a format's chunks."""

    head: struct.Struct  # name and size
    first: int  # offset of the first chunk
    pad: int  # alignment of chunks in bytes


RIFF = ChunkLayout(struct.Struct("<4sI"), 12, 2)
AIFF = ChunkLayout(struct.Struct(">4sI"), 12, 2)
CAF = ChunkLayout(struct.Struct(">4sq"), 8, 1)

STREAM_BYTES = 0x7FFF0000
"""Chunk sizes of this value or more are written by streams and mean "read to the end"."""
_MAX_FORMAT_BYTES = 1 << 10  # maximum bytes of a WAV file's format chunk
WAV_TYPES = (b"RIFF", b"RF64", b"BW64")
MAX_CHUNKS = 1000
"""Maximum chunks of a WAV or AIFF file to read; ordinary files have about ten."""

OGG_HEADER = 27  # bytes before the segment table, which has one byte per segment
_OGG_PAGE = OGG_HEADER + 255 + 255 * 255  # maximum bytes of a page
_ID3_HEADER = 10
_ID3V1 = 128  # bytes of a tag after an MP3
_XING = struct.Struct(">4xIII")  # flags, and optional fields: frames, bytes
_XING_FRAMES, _XING_BYTES = 1, 2


@dataclasses.dataclass(frozen=True)
class WavHeader:
    """The header of a WAV or RF64 file."""

    begin: int  # offset of the samples
    declared: int  # bytes of samples; a truncated file has fewer
    file_bytes: int  # the declared size of the whole file
    is_stream: bool  # the declared sizes mean "up to the end"
    format: bytes  # the content of the format chunk
    tag: int  # the samples' coding
    channels: int
    rate: int
    byte_rate: int  # bytes of samples per second; 0: unknown
    frame_bytes: int
    bits: int  # per sample

    @property
    def end(self) -> int:
        """The declared end of the samples."""
        return self.begin + self.declared


def read_wav_header(audio: Bytes) -> WavHeader | None:
    """Read a WAV or RF64 file's header; None for another file, or if the header has no samples.

    Raises:
        AudioError: the header has too many chunks.
    """
    if audio[:4] not in WAV_TYPES or audio[8:12] != b"WAVE":
        return None
    position, size = find_chunk(audio, b"fmt ", RIFF)
    begin, declared = find_chunk(audio, b"data", RIFF)
    format = audio[position : position + min(size, _MAX_FORMAT_BYTES)]
    if len(format) < 16 or size > _MAX_FORMAT_BYTES or not position <= begin <= len(audio):
        return None
    riff = int.from_bytes(audio[4:8], "little")
    is_stream = declared >= STREAM_BYTES or (declared == 0 and riff in (0, 0xFFFFFFFF))
    if audio[:4] != b"RIFF" and declared == 0xFFFFFFFF:
        position, size = find_chunk(audio, b"ds64", RIFF)
        if size >= 16 and position + 16 <= len(audio):
            riff, declared = struct.unpack("<QQ", audio[position : position + 16])
            is_stream = declared >> 40 > 0 or (declared == 0 and riff == 0)
    fields = struct.unpack("<HHIIHH", format[:16])
    return WavHeader(begin, declared, riff + 8, is_stream, format, *fields)


def new_wav_header(format: bytes, size: int) -> bytes:
    """Return the header of a WAV file.

    Args:
        format: the content of the format chunk.
        size: bytes of the samples.
    """
    padded = format + b"\0" * (len(format) % 2)
    riff = struct.pack("<4sI8sI", b"RIFF", 20 + len(padded) + size, b"WAVEfmt ", len(format))
    return riff + padded + struct.pack("<4sI", b"data", size)


def pcm16_header(audio: Bytes) -> WavHeader | None:
    """Read the header of a 16-bit WAV file that declares its length; None for any other file."""
    header = read_wav_header(audio) if audio[:4] == b"RIFF" else None
    if header is None or header.is_stream or not header.declared or not header.channels:
        return None
    is_plain = (header.tag, header.bits, header.frame_bytes) == (1, 16, 2 * header.channels)
    return header if is_plain else None


def sample_bytes(audio: Bytes) -> tuple[int, int]:
    """Return the declared and the present bytes of a WAV or AIFF file's sample chunk."""
    name = b"data" if audio[:4] == b"RIFF" else b"SSND"
    offset, size = find_chunk(audio, name, RIFF if name == b"data" else AIFF)
    return size, min(size, len(audio) - offset)


def is_aiff_continued(audio: Bytes) -> bool:
    """Return whether an AIFF file's declared samples are followed by bytes that are no chunk."""
    begin, size = find_chunk(audio, b"SSND", AIFF)
    end = begin + size + size % 2
    name = audio[end : end + 4]
    return any(name) and not all(0x20 <= byte < 0x7F for byte in name)


def chunks(
    audio: Bytes, layout: ChunkLayout, offset: int | None = None
) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each chunk, and the offset and the declared bytes of its content.

    The last chunk may have a negative size, as in a CAF file of unknown length.

    Args:
        audio: the file.
        layout: the chunks' layout.
        offset: the offset of the first chunk; None: after the file's header.

    Raises:
        AudioError: there are more than `MAX_CHUNKS`.
    """
    offset = layout.first if offset is None else offset
    for _ in range(MAX_CHUNKS):
        offset += -offset % layout.pad
        head = audio[offset : offset + layout.head.size]
        if len(head) < layout.head.size:
            return
        name, size = layout.head.unpack(head)
        begin = offset + layout.head.size
        yield name, begin, size
        if size < 0:
            return
        offset = begin + size
    raise AudioError(f"audio has more than {MAX_CHUNKS} chunks; expected a file with fewer")


def find_chunk(audio: Bytes, name: bytes, layout: ChunkLayout) -> tuple[int, int]:
    """Find a chunk of a WAV or AIFF file.

    Returns:
        The offset of the chunk's content and its declared size; without such a chunk, the file's
        end and 0.

    Raises:
        AudioError: the chunk is not among the first `MAX_CHUNKS`.
    """
    for found, begin, size in chunks(audio, layout):
        if found == name:
            return begin, size
    return len(audio), 0


def boxes(audio: Bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the type, the offset and the end of an MP4's boxes; a last box may have no end."""
    offset = 0
    for _ in range(_MAX_ELEMENTS):
        head = audio[offset : offset + 16]
        if len(head) < 8:
            return
        size = int.from_bytes(head[:4], "big")
        if size == 1:
            size = int.from_bytes(head[8:], "big")
        if size < 8:  # up to the end of the file, or no box
            return
        yield head[4:8], offset, offset + size
        offset += size


def id3_bytes(audio: Bytes) -> int:
    """Return the length of the ID3 tag at a file's beginning; 0 if there is none."""
    if audio[:3] != b"ID3" or len(audio) < _ID3_HEADER:
        return 0
    a, b, c, d = audio[6:10]  # the tag's size, seven bits per byte
    return _ID3_HEADER + (a << 21 | b << 14 | c << 7 | d)


def mp3_declares_length(audio: Bytes) -> bool:
    """Return whether an MP3's first frame declares the length (a Xing or Info header)."""
    _, tag = _xing(audio)
    return bool(tag)


def another_mp3_follows(audio: Bytes) -> bool | None:
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
    offset = id3_bytes(audio)
    frame = audio[offset : offset + 64]
    index = max(frame.find(b"Xing"), frame.find(b"Info"))
    return offset, frame[index:] if index >= 0 else b""


_MAX_ELEMENTS = 100_000  # maximum parts to read; hours of audio have fewer
_CAF_UNKNOWN_SIZE = -1

_EBML, _SEGMENT, _CLUSTER = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75"
_CLUSTER_BYTES = 8 << 20  # bytes at the file's end to search for the last cluster
_CLUSTER_TRIES = 3  # audio data may contain the cluster's id by chance

_ASF_HEADER_BYTES = 1 << 16
_ASF = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
_ASF_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
_ASF_SIZE, _ASF_FLAGS, _ASF_STREAMED = 40, 88, 1  # two offsets in the properties, and a flag


def is_cut_off(audio: Bytes) -> bool:
    """Return whether a file ends inside a part of the container.

    This detects OGG, MP4, WebM, CAF, AVI, W64 and WMA; for other formats it returns False.
    """
    head = audio[:16]
    check = next((check for offset, magic, check in _KNOWN if head.startswith(magic, offset)), None)
    return check is not None and check(audio)


def _ogg(audio: Bytes) -> bool:
    """Return whether the last page ends early, according to its header."""
    tail = audio[max(0, len(audio) - _OGG_PAGE) : len(audio)]
    begin = tail.rfind(b"OggS")
    page = tail[begin:] if begin >= 0 else b""
    if len(page) < OGG_HEADER:
        return True
    segments = page[OGG_HEADER - 1]
    lengths = page[OGG_HEADER : OGG_HEADER + segments]
    return OGG_HEADER + segments + sum(lengths) > len(page)


def _mp4(audio: Bytes) -> bool:
    return any(end > len(audio) for _, _, end in boxes(audio))


def _caf(audio: Bytes) -> bool:
    return any(
        size < _CAF_UNKNOWN_SIZE or begin + size > len(audio)
        for _, begin, size in chunks(audio, CAF)
    )


def _avi(audio: Bytes) -> bool:
    size = int.from_bytes(audio[4:8], "little")
    return size < STREAM_BYTES and 8 + size > len(audio)


def _asf(audio: Bytes) -> bool:
    header = audio[:_ASF_HEADER_BYTES]
    offset = header.find(_ASF_PROPERTIES)
    if offset < 0 or header[offset + _ASF_FLAGS : offset + _ASF_FLAGS + 1] == b"":
        return False
    streamed = header[offset + _ASF_FLAGS] & _ASF_STREAMED
    size = int.from_bytes(header[offset + _ASF_SIZE : offset + _ASF_SIZE + 8], "little")
    return not streamed and size > len(audio)


def _webm(audio: Bytes) -> bool:
    """Follow the elements: id, size, and content that may be elements again.

    The first two elements declare the size of the whole file, but a live recorder leaves the second
    size unknown. Then the elements of the last cluster are followed.
    """
    if not _elements_fit(audio, 0, 2, descend_into=()):
        return True
    end = audio[max(0, len(audio) - _CLUSTER_BYTES) : len(audio)]
    offsets = list(islice(_offsets_of(end, _CLUSTER), _CLUSTER_TRIES))
    return bool(offsets) and not any(
        _elements_fit(end, offset, _MAX_ELEMENTS, descend_into=(_SEGMENT, _CLUSTER))
        for offset in offsets
    )


def _offsets_of(data: bytes, mark: bytes) -> Iterator[int]:
    """Yield the offsets of a byte sequence, last one first."""
    offset = len(data)
    while (offset := data.rfind(mark, 0, offset)) >= 0:
        yield offset


def _elements_fit(
    audio: Bytes, offset: int, max_elements: int, descend_into: tuple[bytes, ...]
) -> bool:
    """Return whether EBML elements end within the file.

    Args:
        audio: the file.
        offset: the offset of the first element.
        max_elements: maximum number of elements to follow.
        descend_into: ids of elements to descend into if their size is unknown.
    """
    for _ in range(max_elements):
        if offset >= len(audio):
            break
        head = audio[offset : offset + 12]
        id_bytes = 9 - head[0].bit_length()  # bytes of the id, encoded in its leading zeros
        # More: no element, because the file is damaged or padded. Chrome's slices end after an id.
        if id_bytes > 4 or id_bytes >= len(head):
            return True
        size_bytes = 9 - head[id_bytes].bit_length()
        if size_bytes > 8 or id_bytes + size_bytes > len(head):
            return True
        bits = 7 * size_bytes
        size = int.from_bytes(head[id_bytes : id_bytes + size_bytes], "big") & ((1 << bits) - 1)
        offset += id_bytes + size_bytes
        if size != (1 << bits) - 1:
            offset += size
        elif head[:id_bytes] not in descend_into:
            return True
    return offset <= len(audio)


_KNOWN: tuple[tuple[int, bytes, Callable[[Bytes], bool]], ...] = (
    (0, b"OggS", _ogg),
    (4, b"ftyp", _mp4),
    (4, b"moov", _mp4),
    (4, b"mdat", _mp4),
    (0, _EBML, _webm),
    (0, b"caff", _caf),
    (8, b"AVI ", _avi),
    (0, b"riff\x2e\x91\xcf\x11", lambda audio: int.from_bytes(audio[16:24], "little") > len(audio)),
    (0, _ASF, _asf),
)
