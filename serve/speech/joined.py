"""Split joined files into their parts: pure functions of a file's bytes.

Recorders append new files to old ones, and people join files with `cat`. Libraries read only the
first part, or apply its header to all parts. Here each part is found by its header and decoded as
a separate file.

A file with its correct size in the header is not searched. Any other file is searched once, in
time proportional to its length. The headers have at least seven constant bytes, which audio data
does not contain by chance. MP3, AAC, AC3 and MPEG are not listed here, because joined streams of
frames are one stream.
"""

import dataclasses
import re
from collections.abc import Callable

from serve.contract.errors import AudioError
from serve.speech.containers import OGG_HEADER, Bytes, FileSlice
from serve.speech.sizes import is_settled, sound_chunk

MAX_PARTS = 1_000

_CHUNK_BYTES = 1 << 20  # bytes to search at a time
_MARK_BYTES = 128  # maximum length of a header in the patterns below
_MAX_BOXES = 100_000  # maximum boxes of an MP4; hours of fragments have fewer
_MAX_BOS_PAGES = 100  # maximum begin-of-stream pages of an OGG file
_EBML_BYTES = 128  # bytes of a Matroska file before its segment


def split(audio: Bytes, check: Callable[[], None]) -> list[Bytes]:
    """Split a file into its parts.

    Args:
        audio: the file.
        check: called regularly; raises an error to stop the search.

    Returns:
        The parts in order; only the file itself if it is not joined.

    Raises:
        AudioError: the file has more than `MAX_PARTS` parts.
    """
    head = audio[:_MARK_BYTES]
    kind = next((kind for kind in _KINDS if kind.mark.match(head)), None)
    if kind is None:
        return [audio]
    begins = [0]
    while True:
        part = FileSlice(audio, begins[-1], len(audio))
        begin = _next_mark(kind.mark, audio, begins[-1] + max(1, kind.skip(part)), check)
        if begin is None:
            break
        if len(begins) == MAX_PARTS:
            raise AudioError(
                f"audio is joined from more than {MAX_PARTS} files; expected at most that: send "
                "fewer per request"
            )
        begins.append(begin)
    if len(begins) == 1:
        return _sounds(audio)
    ends = [*begins[1:], len(audio)]
    files = [FileSlice(audio, begin, end) for begin, end in zip(begins, ends, strict=True)]
    return [part for file in files for part in _sounds(file)]


def _sounds(audio: Bytes) -> list[Bytes]:
    """Split a WAV file with several data chunks, which some recorders append."""
    chunk = sound_chunk(audio)
    if audio[:4] != b"RIFF" or chunk is None or not 0 < chunk.declared <= len(audio) - chunk.begin:
        return [audio]
    parts: list[Bytes] = [FileSlice(audio, 0, chunk.end)]
    at = chunk.end
    for _ in range(MAX_PARTS):
        at += at % 2
        name, size = audio[at : at + 4], int.from_bytes(audio[at + 4 : at + 8], "little")
        end = at + 8 + size
        if name == b"data":
            header = chunk.header(size)
            parts.append(FileSlice(audio, at + 8, end if size else len(audio), header))
        if not size or end > len(audio) or not name.isascii():
            break
        at = end
    return parts if len(parts) > 1 else [audio]


def _next_mark(
    mark: re.Pattern[bytes], audio: Bytes, at: int, check: Callable[[], None]
) -> int | None:
    while at < len(audio):
        check()
        if found := mark.search(audio[at : at + _CHUNK_BYTES + _MARK_BYTES]):
            return at + found.start()
        at += _CHUNK_BYTES
    return None


def _after_sound(part: Bytes) -> int:
    """Return the part's length if its size is right and only chunks follow the samples."""
    return len(part) if is_settled(part) else 0


def _after_riff(part: Bytes) -> int:
    end = 8 + int.from_bytes(part[4:8], "little")
    return end if end <= len(part) else 0


def _after_boxes(part: Bytes) -> int:
    """Return the offset of an MP4's second `ftyp` box, or the end of the boxes."""
    at, moov = 0, False
    for _ in range(_MAX_BOXES):
        head = part[at : at + 16]
        if len(head) < 8 or (at and head[4:8] == b"ftyp" and moov):
            break
        moov = moov or head[4:8] == b"moov"
        size = int.from_bytes(head[:4], "big")
        if size == 1:
            size = int.from_bytes(head[8:], "big")
        if size < 8:
            return len(part)  # a last box of unknown size, or no box
        at += size
    return at


def _after_ogg_begin(part: Bytes) -> int:
    """Return the end of an OGG file's begin-of-stream pages."""
    at = 0
    for _ in range(_MAX_BOS_PAGES):
        head = part[at : at + OGG_HEADER]
        if not _OGG_MARK.match(head) or len(head) < OGG_HEADER:
            break
        segments = head[OGG_HEADER - 1]
        at += OGG_HEADER + segments + sum(part[at + OGG_HEADER : at + OGG_HEADER + segments])
    return at


def _after_segment(part: Bytes) -> int:
    """Return the end of a Matroska file's segment, if its size is known."""
    head = part[:_EBML_BYTES]
    at = head.find(b"\x18\x53\x80\x67") + 4
    if at < 4 or at >= len(head):
        return 0
    length = 9 - head[at].bit_length()
    size = int.from_bytes(head[at : at + length], "big") & ((1 << 7 * length) - 1)
    end = at + length + size
    return end if length <= 8 and end <= len(part) else 0


def _after_nothing(part: Bytes) -> int:
    return 0


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A format, recognised by the bytes at a file's beginning."""

    mark: re.Pattern[bytes]
    skip: Callable[[Bytes], int]  # number of bytes from a part's beginning without another part


def _mark(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


_OGG_MARK = _mark(rb"OggS\0[\x02\x06]")
_KINDS = (
    _Kind(_mark(rb"(?:RIFF|RF64|BW64)....WAVE"), _after_sound),
    _Kind(_mark(rb"FORM....AIF[FC]"), _after_sound),
    _Kind(_mark(rb"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0.{8}wave"), _after_sound),
    _Kind(_mark(rb"caff\0\x01..desc"), _after_sound),
    _Kind(_mark(rb"\.snd\0\0.{6}\0\0\0[\x01-\x1b]\0[\0-\x05]..\0\0\0[\x01-\xff]"), _after_sound),
    _Kind(_mark(rb"fLaC[\x00\x80]\0\0\x22"), _after_nothing),
    _Kind(_OGG_MARK, _after_ogg_begin),
    _Kind(_mark(rb"#!AMR(?:-WB)?(?:_MC1\.0)?\n"), _after_nothing),
    _Kind(_mark(rb"\0\0..ftyp"), _after_boxes),
    _Kind(_mark(rb"\x1a\x45\xdf\xa3.{1,60}?\x42\x82.(?:webm|matroska)"), _after_segment),
    _Kind(_mark(rb"RIFF....AVI LIST"), _after_riff),
    _Kind(_mark(rb"FLV\x01[\x01\x04\x05]\0\0\0\x09\0\0\0\0"), _after_nothing),
    _Kind(_mark(rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\0\xaa\0\x62\xce\x6c"), _after_nothing),
    _Kind(_mark(rb"NIST_1A\n +[0-9]+\n"), _after_nothing),
    _Kind(_mark(rb"Creative Voice File\x1a\x1a\0"), _after_nothing),
    _Kind(_mark(rb"TTA1[\x01\x02]\0[\x01-\x20]\0[\x08\x10\x18\x20]\0"), _after_nothing),
)
