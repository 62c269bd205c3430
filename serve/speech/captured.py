"""Extract the audio from a captured HTTP response: pure functions of a file's bytes.

Recorders of web radio may save the raw response. It has a header (`HTTP/1.1 200 OK` or
`ICY 200 OK`) and, if requested, interleaved blocks of metadata such as song titles.
"""

import io
import re

from serve.speech.containers import Bytes, FileSlice

_MAX_HEADER_BYTES = 1 << 16
_MAX_HEADERS = 10  # consecutive headers: redirections, then the response
_MIN_METADATA_BYTES = 1 << 10  # minimum audio between two blocks; servers use 8,192 to 32,768
_BEGIN = (b"HTTP/", b"ICY ")
_END = re.compile(rb"\r?\n\r?\n")
_METADATA = re.compile(rb"(?im)^icy-metaint: *([0-9]{1,9})\r?$")
_UNIT = 16  # bytes per unit of a metadata block's length


def body(audio: Bytes) -> Bytes:
    """Remove a file's HTTP header and the metadata blocks that the header announces."""
    for _ in range(_MAX_HEADERS):
        if not audio[:5].startswith(_BEGIN):
            break
        head = audio[:_MAX_HEADER_BYTES]
        if (end := _END.search(head)) is None:
            break
        audio = FileSlice(audio, end.end(), len(audio))
        if found := _METADATA.search(head, 0, end.start()):
            audio = _without_metadata(audio, int(found[1]))
    return audio


def _without_metadata(audio: Bytes, every: int) -> Bytes:
    """Remove the metadata blocks; each is a length byte followed by 16 times as many bytes."""
    if every < _MIN_METADATA_BYTES:
        return audio
    sound, at = io.BytesIO(), 0  # joining a list of pieces would need the memory twice
    while at < len(audio):
        piece = audio[at : at + every + 1]
        sound.write(piece[:every])
        at += every + 1 + (piece[every] * _UNIT if len(piece) > every else 0)
    return sound.getvalue()
