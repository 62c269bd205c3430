"""Detect files that end inside a part of the container: pure functions of a file's bytes.

Containers declare their parts' sizes, so a truncation inside a part is detected even if the
duration is not declared. A browser's recorder, for example, writes WebM without a duration, but
with the size of each block. A file that ends between two parts looks complete.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from serve.speech.containers import STREAM_BYTES, Bytes, last_ogg_page_is_whole

_MAX_PARTS = 100_000  # maximum parts to read; hours of audio have fewer
_CAF_ENDLESS = -1

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
    ends = next((ends for at, mark, ends in _KNOWN if head.startswith(mark, at)), None)
    return ends is not None and ends(audio)


def _ogg(audio: Bytes) -> bool:
    return not last_ogg_page_is_whole(audio)


def _mp4(audio: Bytes) -> bool:
    """Follow the boxes: size and type; size 1: 64-bit size follows, size 0: up to the end."""
    at = 0
    for _ in range(_MAX_PARTS):
        head = audio[at : at + 16]
        if len(head) < 8:
            return False
        size = int.from_bytes(head[:4], "big")
        if size == 1:
            size = int.from_bytes(head[8:], "big")
        if size < 8:
            return False
        at += size
        if at > len(audio):
            return True
    return False


def _caf(audio: Bytes) -> bool:
    """Follow the chunks after the header of 8 bytes: type and size."""
    at = 8
    for _ in range(_MAX_PARTS):
        head = audio[at + 4 : at + 12]
        if len(head) < 8:
            return False
        size = int.from_bytes(head, "big", signed=True)
        if size < 0:
            return size != _CAF_ENDLESS
        at += 12 + size
        if at > len(audio):
            return True
    return False


def _avi(audio: Bytes) -> bool:
    size = int.from_bytes(audio[4:8], "little")
    return size < STREAM_BYTES and 8 + size > len(audio)


def _w64(audio: Bytes) -> bool:
    return int.from_bytes(audio[16:24], "little") > len(audio)


def _asf(audio: Bytes) -> bool:
    header = audio[:_ASF_HEADER_BYTES]
    at = header.find(_ASF_PROPERTIES)
    if at < 0 or header[at + _ASF_FLAGS : at + _ASF_FLAGS + 1] == b"":
        return False
    streamed = header[at + _ASF_FLAGS] & _ASF_STREAMED
    size = int.from_bytes(header[at + _ASF_SIZE : at + _ASF_SIZE + 8], "little")
    return not streamed and size > len(audio)


def _webm(audio: Bytes) -> bool:
    """Follow the elements: id, size, and content that may be elements again.

    The first two elements declare the size of the whole file, but a live recorder leaves the second
    size unknown. Then the elements of the last cluster are followed.
    """
    if not _fit(audio, 0, 2, through=()):
        return True
    end = audio[max(0, len(audio) - _CLUSTER_BYTES) : len(audio)]
    places = list(islice(_places(end, _CLUSTER), _CLUSTER_TRIES))
    return bool(places) and not any(
        _fit(end, at, _MAX_PARTS, through=(_SEGMENT, _CLUSTER)) for at in places
    )


def _places(data: bytes, mark: bytes) -> Iterator[int]:
    """Yield the offsets of a byte sequence, last one first."""
    at = len(data)
    while (at := data.rfind(mark, 0, at)) >= 0:
        yield at


def _fit(audio: Bytes, at: int, most: int, through: tuple[bytes, ...]) -> bool:
    """Return whether EBML elements end within the file.

    Args:
        audio: the file.
        at: offset of the first element.
        most: maximum number of elements to follow.
        through: ids of elements to descend into if their size is unknown.
    """
    for _ in range(most):
        if at >= len(audio):
            break
        head = audio[at : at + 12]
        named = 9 - head[0].bit_length()  # bytes of the id, encoded in its leading zeros
        if named > 4:
            return True  # no element: the file is damaged or padded
        if named >= len(head):
            return True  # only the id is present, as in slices that Chrome sends
        sized = 9 - head[named].bit_length()
        if sized > 8 or named + sized > len(head):
            return True
        bits = 7 * sized
        size = int.from_bytes(head[named : named + sized], "big") & ((1 << bits) - 1)
        at += named + sized
        if size != (1 << bits) - 1:
            at += size
        elif head[:named] not in through:
            return True
    return at <= len(audio)


_KNOWN: tuple[tuple[int, bytes, Callable[[Bytes], bool]], ...] = (
    (0, b"OggS", _ogg),
    (4, b"ftyp", _mp4),
    (4, b"moov", _mp4),
    (4, b"mdat", _mp4),
    (0, _EBML, _webm),
    (0, b"caff", _caf),
    (8, b"AVI ", _avi),
    (0, b"riff\x2e\x91\xcf\x11", _w64),
    (0, _ASF, _asf),
)
