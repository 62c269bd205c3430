"""Recognise audio files by name, and describe the kind of an unreadable file by its bytes."""

import os
import string

from serve.speech.containers import Bytes

EXPECTED = (
    "expected a recording: WAV, FLAC, MP3, OGG, MP4, M4A, WebM, AAC, AMR, WMA, CAF or another "
    "common format"
)

# The suffixes to search a folder for; explicit names and patterns may have any suffix.
AUDIO_SUFFIXES = frozenset(
    ".3gp .aac .ac3 .aif .aiff .amr .au .avi .awb .caf .flac .flv .m4a .m4b .m4v .mka .mkv .mov "
    ".mp3 .mp4 .mpeg .mpg .mpga .oga .ogg .opus .sph .w64 .wav .webm .wma .wmv".split()
)
_HEAD_BYTES = 512
_TEXT_BYTES = frozenset(string.printable.encode()) | frozenset(range(0x80, 0x100))
# Offset and bytes of a signature, and the kind of file.
_KINDS = (
    (8, b"WAVE", "a WAV file"),
    (8, b"AVI ", "an AVI film"),
    (0, b"FORM", "an AIFF file"),
    (0, b"fLaC", "a FLAC file"),
    (0, b"OggS", "an OGG file"),
    (0, b"ID3", "an MP3 file"),
    (0, b"\xff\xfb", "an MP3 file"),
    (0, b"\xff\xf3", "an MP3 file"),
    (0, b"\xff\xf1", "an AAC file"),
    (4, b"ftyp", "an MP4, M4A or 3GP file"),
    (0, b"\x1a\x45\xdf\xa3", "a WebM or Matroska file"),
    (0, b"#!AMR", "an AMR file"),
    (0, b"caff", "a CAF file"),
    (0, b"\x0b\x77", "an AC3 file"),
    (0, b".snd", "an AU file"),
    (0, b"NIST_1A", "a SPHERE file"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "a WMA or WMV file"),
    (0, b"FLV", "an FLV film"),
)


def is_audio(name: str) -> bool:
    """Return whether a file found in a folder is audio, by its name."""
    base = os.path.basename(name)
    return not base.startswith(".") and os.path.splitext(base)[1].lower() in AUDIO_SUFFIXES


def refusal(audio: Bytes) -> str:
    """Return the error message for a file that no library can read."""
    head = audio[:_HEAD_BYTES]
    if kind := kind_of(head):
        return f"audio begins as {kind}, but cannot be read: it is damaged or truncated"
    if all(byte in _TEXT_BYTES for byte in head):
        return f"audio is text, not a recording; {EXPECTED}"
    return (
        f"audio of {len(audio)} bytes has an unknown format or a damaged beginning; {EXPECTED}; "
        "raw samples need their media type, such as audio/L16; rate=16000"
    )


def kind_of(head: bytes) -> str:
    """Return the kind of a recording by its first bytes; "" if it is unknown."""
    return next((name for offset, magic, name in _KINDS if head.startswith(magic, offset)), "")
