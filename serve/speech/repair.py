"""Correct wrong sizes in WAV headers, and split joined files: pure functions of a file's bytes.

Recorders write the header first and the size of the samples when they stop. If they crash, are
killed or write to a pipe, the size remains 0, the size of the first write, or a placeholder. The
rules for WAV (also RF64) are:

- The declared size is 0, or it is smaller than the present size and is followed neither by chunks
  nor by text nor by zeros: all bytes to the end are samples, with a warning. A remainder of less
  than 20 ms is dropped.
- The declared size is 2 GiB (0x7FFF0000) or more, the format's value for "unknown", or 0 in a
  file with a declared total of 0. The file is a stream, and all bytes to the end are samples.
- The declared size is larger than the present size and is a placeholder: all bytes to the end are
  samples, with a warning. It is a placeholder in two cases. First, the declared size of the whole
  file is its true size, or less than half of the declared samples. Second, the declared size is at
  least 100 MB, and it or the declared size of the whole file is a round number: at most two
  digits other than 0, or a multiple of 2^24, or one less.
- Otherwise the file is truncated and stays unchanged.

Recorders append new files to old ones, and people join files with `cat`. Libraries read only the
first part, or apply its header to all parts. Here each part is found by its header and decoded as
a separate file.

A WAV file with its correct size in the header is not searched. Any other file is searched once, in
time proportional to its length. The headers have at least six constant bytes, which audio data
does not contain by chance. MP3, AAC, AC3 and MPEG are not listed here, because joined streams of
frames are one stream. Sizes and offsets are in bytes.
"""

import itertools
import re
import string
from collections.abc import Callable

from serve.contract.errors import AudioError
from serve.speech.containers import (
    MAX_CHUNKS,
    OGG_HEADER,
    RIFF,
    WAV_TYPES,
    Bytes,
    FileSlice,
    WavHeader,
    boxes,
    chunks,
    new_wav_header,
    read_wav_header,
)

_MIN_PLACEHOLDER_BYTES = 100_000_000
_MIN_REST_S = 0.02
_MAX_WAV_BYTES = 0xFFFFF000  # with the longest header less than 4 GiB
_BLANK_BYTES = 1 << 20  # bytes per read
_TEXT_BYTES = 256
_TEXT = frozenset(string.printable.encode())
_TAGS = (b"TAG", b"ID3", b"APETAGEX")
_CHUNKS = frozenset(
    b"LIST,list,id3 ,ID3 ,bext,fact,cue ,smpl,inst,PEAK,JUNK,junk,FLLR,PAD ,_PMX,iXML,aXML,axml,"
    b"chna,cart,afsp,DISP,plst,labl,note,adtl,levl,umid,minf,elm1,regn,slnt,acid,strc,"
    b"olym".split(b",")
)
"""Known chunk names, which count even if the chunk does not end within the file."""


def has_right_size(audio: Bytes) -> bool:
    """Return whether all declared samples of a WAV file are present and only chunks follow them."""
    header = _header_of_whole(audio)
    return header is not None and _chunks_reach_the_end(audio, header.end)


def _header_of_whole(audio: Bytes) -> WavHeader | None:
    """Read a WAV file's header; None if not all declared samples are present."""
    header = read_wav_header(audio)
    is_whole = header is not None and 0 < header.declared <= len(audio) - header.begin
    return header if is_whole else None


def corrected(audio: Bytes) -> tuple[Bytes, str]:
    """Correct a wrong size of a WAV file.

    Args:
        audio: a single file, without others joined to it.

    Returns:
        The file, with a new header if the size was wrong; and a warning or "".

    Raises:
        AudioError: the header has too many chunks.
    """
    header = read_wav_header(audio)
    if header is None:
        return audio, ""
    present = len(audio) - header.begin
    if not 0 < present <= _MAX_WAV_BYTES or _is_size_right(audio, header, present):
        return audio, ""
    file = FileSlice(audio, header.begin, len(audio), _with_size(header, present))
    if header.is_stream:
        return file, ""
    declared, found = (
        f"{size / header.byte_rate:.2f} s" if header.byte_rate else f"{size} bytes"
        for size in (header.declared, present)
    )
    return file, (
        f"the audio's header is incomplete: it declares {declared} of audio, but the file has "
        f"{found}; all of it is transcribed"
    )


def _with_size(header: WavHeader, size: int) -> bytes:
    """Return a header for a number of bytes of samples."""
    size = min(size, _MAX_WAV_BYTES)
    return new_wav_header(header.format, size - size % max(1, header.frame_bytes))


def _is_size_right(audio: Bytes, header: WavHeader, present: int) -> bool:
    """Return whether the size needs no correction: it is right, or the file is truncated."""
    if header.declared > present:
        return not (header.is_stream or _is_placeholder(audio, header))
    remainder = present - header.declared
    following = audio[header.end : header.end + _TEXT_BYTES]
    return (
        remainder < max(8, _MIN_REST_S * header.byte_rate)
        or following.startswith(_TAGS)
        or all(byte in _TEXT for byte in following)
        or not _CHUNKS.isdisjoint((following[:4], following[1:5]))  # a pad byte may be missing
        or _chunks_reach_the_end(audio, header.end)
        or _is_blank(audio, header.end)
    )


def _is_placeholder(audio: Bytes, header: WavHeader) -> bool:
    if abs(header.file_bytes - len(audio)) <= 1 or header.file_bytes < header.end // 2:
        return True
    sizes = (header.declared, header.file_bytes, header.file_bytes - 8)
    return header.declared >= _MIN_PLACEHOLDER_BYTES and any(map(_is_round, sizes))


def _is_round(size: int) -> bool:
    return any(n % (1 << 24) == 0 or len(str(n).rstrip("0")) <= 2 for n in (size, size + 1))


def _chunks_reach_the_end(audio: Bytes, position: int) -> bool:
    for number, (name, begin, size) in enumerate(chunks(audio, RIFF, position), start=1):
        position = begin + size
        if position > len(audio) + 1:
            return False
        if not all(0x20 <= byte < 0x7F for byte in name) or name in (b"data", *WAV_TYPES):
            return False
        if number == MAX_CHUNKS:
            return True
    return not any(audio[position + position % 2 : len(audio)])


def _is_blank(audio: Bytes, position: int) -> bool:
    """Return whether all bytes from an offset on are zero."""
    for begin in range(position, len(audio), _BLANK_BYTES):
        if audio[begin : begin + _BLANK_BYTES].strip(b"\0"):
            return False
    return True


MAX_PARTS = 1_000

_CHUNK_BYTES = 1 << 20  # bytes to search at a time
_PATTERN_BYTES = 128  # maximum length of a header in the patterns below
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
    head = audio[:_PATTERN_BYTES]
    kind = next((kind for kind in _JOINABLE if kind[0].match(head)), None)
    if kind is None:
        return [audio]
    pattern, skip_bytes = kind
    begins = [0]
    while True:
        part = FileSlice(audio, begins[-1], len(audio))
        skipped = max(1, skip_bytes(part)) if skip_bytes else 1
        begin = _find_header(pattern, audio, begins[-1] + skipped, check)
        if begin is None:
            break
        if len(begins) == MAX_PARTS:
            raise AudioError(
                f"audio is joined from more than {MAX_PARTS} files; expected at most that: send "
                "fewer per request"
            )
        begins.append(begin)
    if len(begins) == 1:
        return _split_data_chunks(audio)
    ends = [*begins[1:], len(audio)]
    files = [FileSlice(audio, begin, end) for begin, end in zip(begins, ends, strict=True)]
    return [part for file in files for part in _split_data_chunks(file)]


def _split_data_chunks(audio: Bytes) -> list[Bytes]:
    """Split a WAV file with several data chunks, which some recorders append."""
    header = _header_of_whole(audio)
    if header is None or audio[:4] != b"RIFF":
        return [audio]
    parts: list[Bytes] = [FileSlice(audio, 0, header.end)]
    for name, begin, size in itertools.islice(chunks(audio, RIFF, header.end), MAX_PARTS):
        if name == b"data":
            end = begin + size if size else len(audio)
            parts.append(FileSlice(audio, begin, end, _with_size(header, size)))
        if not size or begin + size > len(audio) or not name.isascii():
            break
    return parts if len(parts) > 1 else [audio]


def _find_header(
    pattern: re.Pattern[bytes], audio: Bytes, position: int, check: Callable[[], None]
) -> int | None:
    while position < len(audio):
        check()
        if found := pattern.search(audio[position : position + _CHUNK_BYTES + _PATTERN_BYTES]):
            return position + found.start()
        position += _CHUNK_BYTES
    return None


def _after_wav(part: Bytes) -> int:
    """Return the part's length if its size is right and only chunks follow the samples."""
    return len(part) if has_right_size(part) else 0


def _after_boxes(part: Bytes) -> int:
    """Return the offset of an MP4's second `ftyp` box, or the end of the boxes."""
    position, moov = 0, False
    for kind, begin, end in boxes(part):
        if begin and kind == b"ftyp" and moov:
            return begin
        position, moov = end, moov or kind == b"moov"
    # A last box of unknown size, or no box, reaches to the end.
    return position if len(part) - position < 8 else len(part)


def _after_ogg_begin(part: Bytes) -> int:
    """Return the end of an OGG file's begin-of-stream pages."""
    position = 0
    for _ in range(_MAX_BOS_PAGES):
        head = part[position : position + OGG_HEADER]
        if not _OGG_MARK.match(head) or len(head) < OGG_HEADER:
            break
        segments = head[OGG_HEADER - 1]
        table = position + OGG_HEADER
        position = table + segments + sum(part[table : table + segments])
    return position


def _after_segment(part: Bytes) -> int:
    """Return the end of a Matroska file's segment, if its size is known."""
    head = part[:_EBML_BYTES]
    position = head.find(b"\x18\x53\x80\x67") + 4
    if position < 4 or position >= len(head):
        return 0
    length = 9 - head[position].bit_length()
    size = int.from_bytes(head[position : position + length], "big") & ((1 << 7 * length) - 1)
    end = position + length + size
    return end if length <= 8 and end <= len(part) else 0


def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


_OGG_MARK = _compiled(rb"OggS\0[\x02\x06]")
# Header patterns, and functions that return how many bytes of a part cannot hold another header.
_JOINABLE: tuple[tuple[re.Pattern[bytes], Callable[[Bytes], int] | None], ...] = (
    (_compiled(rb"(?:RIFF|RF64|BW64)....WAVE"), _after_wav),
    (_compiled(rb"fLaC[\x00\x80]\0\0\x22"), None),
    (_OGG_MARK, _after_ogg_begin),
    (_compiled(rb"#!AMR(?:-WB)?(?:_MC1\.0)?\n"), None),
    (_compiled(rb"\0\0..ftyp"), _after_boxes),
    (_compiled(rb"\x1a\x45\xdf\xa3.{1,60}?\x42\x82.(?:webm|matroska)"), _after_segment),
)
