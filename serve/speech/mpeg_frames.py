"""Find frames of MP3 and AAC (ADTS) streams: pure functions of a file's bytes.

Each frame begins with a header that declares its format and length, and thus the next header's
offset. Audio data may look like a header by chance, so a frame counts only if two more follow it.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from serve.speech.containers import Bytes, id3_bytes

SEARCH_BYTES = 1 << 16
"""Number of bytes to search for a stream's first frame; a frame has at most 8,191."""

_MAX_FRAME_BYTES = 1 << 13
_MAX_GAPS = 1_000  # maximum gaps in an MP3, such as tags between joined files
_PIECE_BYTES = 1 << 20  # bytes per read
_CHAIN = 3  # minimum number of consecutive frames
_SYNC = re.compile(rb"\xff[\xe2-\xff]")
_ADTS, _MP3 = "aac", "mp3"  # names of FFmpeg's demuxers
_MPEG_1, _MPEG_2 = 3, 2
_KBITS = {  # by version and layer; other versions are like MPEG 2
    (_MPEG_1, 3): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (_MPEG_1, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (_MPEG_1, 1): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (_MPEG_2, 3): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (_MPEG_2, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (_MPEG_2, 1): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = (44_100, 48_000, 32_000)
_RESERVED = 1
_MONO = 3
_ADTS_RATES = 13


class Frame(NamedTuple):
    """The declarations of a frame's header."""

    demuxer: str  # name of FFmpeg's demuxer for the stream
    kind: tuple[int, ...]  # equal for all frames of a file
    size: int  # bytes up to the next header


def first_frame(audio: Bytes) -> tuple[int, str] | None:
    """Find the first frame of a stream that may begin inside a frame or after other bytes.

    Returns:
        The frame's offset, and the name of FFmpeg's demuxer for the stream. None if no frame begins
        within `SEARCH_BYTES` of the file's beginning or of the ID3 tag's end.
    """
    begin = id3_bytes(audio)
    data = audio[begin : begin + SEARCH_BYTES + _CHAIN * _MAX_FRAME_BYTES]
    at_end = begin + len(data) == len(audio)
    for found in _SYNC.finditer(data, 0, SEARCH_BYTES):
        if (frame := _chain(data, found.start(), at_end)) is not None:
            return begin + found.start(), frame.demuxer
    return None


def mp3_changes(audio: Bytes) -> bool:
    """Return whether an MP3 changes its rate or between mono and stereo, as joined files do."""
    kinds = (frame.kind for frame in _mp3_frames(audio))
    first = next(kinds, None)
    return any(kind != first for kind in kinds)


def _mp3_frames(audio: Bytes) -> Iterator[Frame]:
    """Yield the frames of an MP3, and skip other bytes between them."""
    at, gaps = id3_bytes(audio), 0
    data, begin = b"", 0  # a piece of the file, and its offset
    while at < len(audio) and gaps < _MAX_GAPS:
        at_end = begin + len(data) == len(audio)
        if not at_end and at > begin + len(data) - _CHAIN * _MAX_FRAME_BYTES:
            data, begin = audio[at : at + _PIECE_BYTES], at
            at_end = begin + len(data) == len(audio)
        frame = _frame(data, at - begin)
        if frame is not None and frame.demuxer == _MP3:
            yield frame
            at += frame.size
            continue
        gaps += 1
        found = next(
            (
                found.start()
                for found in _SYNC.finditer(data, at - begin + 1)
                if (frame := _chain(data, found.start(), at_end)) and frame.demuxer == _MP3
            ),
            None,
        )
        at = begin + (found if found is not None else max(len(data) - 1, at - begin + 1))


def _chain(data: bytes, at: int, at_end: bool) -> Frame | None:
    """Return the frame at an offset if frames of the same kind follow it, or it is the last one."""
    if (first := _frame(data, at)) is None:
        return None
    at += first.size
    for _ in range(_CHAIN - 1):
        if at_end and at == len(data):
            break
        following = _frame(data, at)
        if following is None or following[:2] != first[:2]:
            return None
        at += following.size
    return first


def _frame(data: bytes, at: int) -> Frame | None:
    """Parse the frame header at an offset; None if it is not a header."""
    head = data[at : at + 6]
    if len(head) < 6 or head[0] != 0xFF or head[1] < 0xE2:
        return None
    layer, rate = head[1] >> 1 & 3, head[2] >> 2 & 3
    if not layer:
        rate, size = head[2] >> 2 & 15, (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
        if head[1] < 0xF0 or rate >= _ADTS_RATES or size < 7:
            return None
        return Frame(_ADTS, (head[1] & 8, head[2] >> 6, rate), size)
    version, bits, padding = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 1 & 1
    if version == _RESERVED or bits in (0, 15) or rate >= len(_RATES):
        return None
    kbits = _KBITS[max(version, _MPEG_2), layer][bits]
    hertz = _RATES[rate] >> _MPEG_1 - max(version, 1)
    if layer == 3:
        size = (12_000 * kbits // hertz + padding) * 4
    else:
        half = layer == 1 and version != _MPEG_1
        size = (72_000 if half else 144_000) * kbits // hertz + padding
    return Frame(_MP3, (version, layer, rate, int(head[3] >> 6 == _MONO)), size)
