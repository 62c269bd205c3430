"""Add a header to raw samples that a media type describes.

`audio/L16; rate=16000; channels=1` and `audio/pcm; …` are 16-bit integers. They are little-endian,
as clients nearly always send them, or big-endian (RFC 2586) with `endianness=big-endian`.
`audio/PCMU` and `audio/PCMA` (`audio/mulaw`, `audio/alaw`) are G.711 with 8 bits. Other parameters
are ignored. Without `rate` the body may be any file, because browsers and libraries use some of
these types for WAV and AU files, too.
"""

import re
import struct

from serve.contract.errors import AudioError, shown
from serve.speech.containers import STREAM_BYTES, new_wav_header

_PCM, _MULAW, _ALAW = "pcm", "mulaw", "alaw"
_CODINGS = {
    **dict.fromkeys(("l16", "pcm", "x-pcm"), _PCM),
    **dict.fromkeys(("pcmu", "mulaw", "x-mulaw"), _MULAW),
    **dict.fromkeys(("pcma", "alaw", "x-alaw"), _ALAW),
}
_WAV_TAGS = {_PCM: 1, _ALAW: 6, _MULAW: 7}
_AU_PCM, _AU_UNKNOWN = 3, 0xFFFFFFFF
_EXPECTED = "expected a type such as audio/L16; rate=16000; channels=1"
_MAXIMUM = {"rate": 1_000_000, "channels": 255}


def header(media_type: str, size: int) -> bytes:
    """Return the WAV or AU header for raw samples, or b"" if the type is not of raw samples.

    Args:
        media_type: the media type with its parameters, as in a form's part.
        size: bytes of the samples.

    Raises:
        AudioError: a parameter of the type is invalid.
    """
    kind, *parameters = (part.strip() for part in media_type.split(";"))
    coding = _CODINGS.get(kind.lower().removeprefix("audio/"))
    values = dict(_parameter(part) for part in parameters if part)
    if coding is None or "rate" not in values:
        return b""
    rate, channels = _number("rate", values), _number("channels", values)
    order = values.get("endianness", "little-endian").lower()
    if order not in ("little-endian", "big-endian"):
        raise AudioError(
            f"the audio's type has endianness = {shown(order)}; expected little-endian or "
            "big-endian"
        )
    width = 2 if coding == _PCM else 1
    if coding == _PCM and order == "big-endian":
        return struct.pack(">4s5I", b".snd", 24, min(size, _AU_UNKNOWN), _AU_PCM, rate, channels)
    return wav_header(rate, channels, width, size, _WAV_TAGS[coding])


def wav_header(
    rate: int, channels: int, width: int, size: int, tag: int = _WAV_TAGS[_PCM]
) -> bytes:
    """Return the WAV header for raw samples.

    Args:
        rate: the sample rate in Hz.
        channels: the number of interleaved channels.
        width: bytes per sample; samples of one byte are unsigned.
        size: bytes of the samples.
        tag: the format tag of the samples' coding.
    """
    frame = width * channels
    size = min(size - size % frame, STREAM_BYTES)
    format = struct.pack("<HHIIHH", tag, channels, rate, rate * frame, frame, 8 * width)
    return new_wav_header(format, size)


def with_header(audio: bytes, media_type: str) -> bytes:
    """Return raw samples as a file with a header.

    Raises:
        AudioError: the type is not of raw samples, or a parameter is invalid.
    """
    if not (head := header(media_type, len(audio))):
        raise AudioError(f"the audio's type is {shown(media_type)}; {_EXPECTED}")
    return head + audio


def _parameter(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip().lower(), value.strip().strip('"')


def _number(name: str, values: dict[str, str]) -> int:
    text = values.get(name, "1")
    if not re.fullmatch("[0-9]{1,7}", text) or not 0 < int(text) <= _MAXIMUM[name]:
        raise AudioError(f"the audio's type has {name} = {shown(text)}; {_EXPECTED}")
    return int(text)
