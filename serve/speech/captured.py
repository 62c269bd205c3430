"""Take the audio out of a captured HTTP answer: pure functions of a file's bytes.

A recorder of web radio may write the answer as it comes: its header (`HTTP/1.1 200 OK`, or
`ICY 200 OK`), and in between blocks of metadata, such as a song's title, if it asked for them.
"""

import io
import re

from serve.speech.containers import Bytes, Section

_MAX_HEADER_BYTES = 1 << 16
_MAX_HEADERS = 10  # of redirections and of the answer itself, one behind the other
_MIN_METADATA_BYTES = 1 << 10  # between two blocks; servers use 8,192 to 32,768
_BEGIN = (b"HTTP/", b"ICY ")
_END = re.compile(rb"\r?\n\r?\n")
_METADATA = re.compile(rb"(?im)^icy-metaint: *([0-9]{1,9})\r?$")
_UNIT = 16  # bytes in which a block of metadata tells its length


def body(audio: Bytes) -> Bytes:
    """Return a file without the HTTP header before it, and without the header's metadata in it."""
    for _ in range(_MAX_HEADERS):
        if not audio[:5].startswith(_BEGIN):
            break
        head = audio[:_MAX_HEADER_BYTES]
        if (end := _END.search(head)) is None:
            break
        audio = Section(audio, end.end(), len(audio))
        if found := _METADATA.search(head, 0, end.start()):
            audio = _without_metadata(audio, int(found[1]))
    return audio


def _without_metadata(audio: Bytes, every: int) -> Bytes:
    """Leave out blocks of metadata: each is a length in a byte, and 16 times as many bytes."""
    if every < _MIN_METADATA_BYTES:
        return audio
    sound, at = io.BytesIO(), 0  # no list of pieces, which would take the same memory again
    while at < len(audio):
        piece = audio[at : at + every + 1]
        sound.write(piece[:every])
        at += every + 1 + (piece[every] * _UNIT if len(piece) > every else 0)
    return sound.getvalue()
