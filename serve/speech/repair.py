"""Correct wrong sizes in headers, and split joined files: pure functions of a file's bytes.

Recorders write the header first and the size of the samples when they stop. If they crash, are
killed or write to a pipe, the size remains 0, the size of the first write, or a placeholder. The
rules for WAV (also RF64), AIFF, W64, CAF and AU are:

- The declared size is 0, or it is smaller than the present size and is followed neither by chunks
  nor by text nor by zeros: all bytes to the end are samples, with a warning. A remainder of less
  than 20 ms is dropped.
- The declared size is 2 GiB (0x7FFF0000) or more, the format's value for "unknown", or 0 in a WAV
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

A file with its correct size in the header is not searched. Any other file is searched once, in
time proportional to its length. The headers have at least seven constant bytes, which audio data
does not contain by chance. MP3, AAC, AC3 and MPEG are not listed here, because joined streams of
frames are one stream. Sizes and offsets are in bytes.
"""

import dataclasses
import functools
import itertools
import re
import string
import struct
from collections.abc import Callable

from serve.contract.errors import AudioError
from serve.speech.containers import (
    AIFF,
    CAF,
    MAX_CHUNKS,
    OGG_HEADER,
    RIFF,
    STREAM_BYTES,
    W64,
    Bytes,
    ChunkLayout,
    FileSlice,
    boxes,
    chunks,
    find_chunk,
)

_MIN_PLACEHOLDER_BYTES = 100_000_000
_MIN_REST_S = 0.02
_MAX_WAV_BYTES = 0xFFFFFF00
_MAX_HEADER_BYTES = 1 << 20  # maximum bytes before a CAF or AU file's samples
_BLANK_BYTES = 1 << 20  # bytes per read
_TEXT_BYTES = 256
_TEXT = frozenset(string.printable.encode())
_TAGS = (b"TAG", b"ID3", b"APETAGEX")
_CHUNKS = frozenset(
    b"LIST,list,id3 ,ID3 ,bext,fact,cue ,smpl,inst,PEAK,JUNK,junk,FLLR,PAD ,_PMX,iXML,aXML,axml,"
    b"chna,cart,afsp,DISP,plst,labl,note,adtl,levl,umid,minf,elm1,regn,slnt,acid,strc,olym,AAPL,"
    b"ANNO,NAME,AUTH,(c) ,COMT,MARK,APPL,INST,MIDI,AESD,FVER,COMM,CHAN,chan,info,pakt,kuki,free,"
    b"strg,uuid,ovvw,peak,edct,mark,midi,umrk".split(b",")
)
"""Known chunk names, which count even if the chunk does not end within the file."""
_SAMPLE_CHUNKS = (b"data", b"riff", b"RIFF", b"RF64", b"BW64", b"FORM", b"caff")
_W64_DATA = bytes.fromhex("64617461f3acd3118cd100c04f8edb8a")
_W64_FMT = bytes.fromhex("666d7420f3acd3118cd100c04f8edb8a")
_AU_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 3, 5: 4, 6: 4, 7: 8, 27: 1}  # bytes per sample, by encoding
_AIFC_WIDTHS = {b"ulaw": 1, b"ULAW": 1, b"alaw": 1, b"ALAW": 1}
_AIFC_PLAIN = (b"NONE", b"twos", b"sowt", b"raw ", b"in24", b"in32", b"fl32", b"FL32", b"fl64")


@dataclasses.dataclass(frozen=True)
class SoundChunk:
    """The part of a file that holds its samples, as declared by its header."""

    begin: int
    declared: int  # bytes of samples
    written: int  # the chunk's size in the header, which may include more than the samples
    file_bytes: int | None  # the declared size of the whole file
    is_stream: bool  # the declared size means "up to the end"
    byte_rate: int  # bytes of samples per second; 0: unknown
    layout: ChunkLayout | None  # the layout of chunks that may follow the samples
    header: Callable[[int], bytes]  # returns a header for a number of bytes of samples

    @property
    def end(self) -> int:
        """The declared end of the samples."""
        return self.begin + self.declared


def sound_chunk(audio: Bytes) -> SoundChunk | None:
    """Find the samples; None if the format declares no size or the header has no samples.

    Raises:
        AudioError: the header has too many chunks.
    """
    head = audio[:16]
    return next(
        (read(audio) for begin, magic, read in _READERS if head.startswith(magic, begin)), None
    )


def has_right_size(audio: Bytes) -> bool:
    """Return whether all declared samples are present and only chunks follow them."""
    chunk = sound_chunk(audio)
    if chunk is None or not chunk.declared or chunk.end > len(audio):
        return False
    return _chunks_reach_the_end(audio, chunk, chunk.end)


def corrected(audio: Bytes) -> tuple[Bytes, str]:
    """Correct a wrong size.

    Args:
        audio: a single file, without others joined to it.

    Returns:
        The file, with a new header if the size was wrong; and a warning or "".

    Raises:
        AudioError: the header has too many chunks.
    """
    chunk = sound_chunk(audio)
    if chunk is None:
        return audio, ""
    present = len(audio) - chunk.begin
    if present <= 0 or _is_size_right(audio, chunk, present):
        return audio, ""
    header = chunk.header(present)
    if not header:
        return audio, ""
    file = FileSlice(audio, chunk.begin, len(audio), header)
    if chunk.is_stream:
        return file, ""
    return file, (
        f"the audio's header is incomplete: it declares {_length(chunk, chunk.declared)} of audio, "
        f"but the file has {_length(chunk, present)}; all of it is transcribed"
    )


def _is_size_right(audio: Bytes, chunk: SoundChunk, present: int) -> bool:
    """Return whether the size needs no correction: it is right, or the file is truncated."""
    if chunk.declared > present:
        return not (chunk.is_stream or _is_placeholder(audio, chunk))
    remainder = present - chunk.declared
    following = audio[chunk.end : chunk.end + _TEXT_BYTES]
    return (
        remainder < max(8, _MIN_REST_S * chunk.byte_rate)
        or following.startswith(_TAGS)
        or all(byte in _TEXT for byte in following)
        or not _CHUNKS.isdisjoint((following[:4], following[1:5]))  # a pad byte may be missing
        or _chunks_reach_the_end(audio, chunk, chunk.end)
        or _is_blank(audio, chunk.end)
    )


def _is_placeholder(audio: Bytes, chunk: SoundChunk) -> bool:
    sizes = [chunk.declared, chunk.written]
    if chunk.file_bytes is not None:
        if abs(chunk.file_bytes - len(audio)) <= 1 or chunk.file_bytes < chunk.end // 2:
            return True
        sizes += [chunk.file_bytes, chunk.file_bytes - 8]
    return chunk.declared >= _MIN_PLACEHOLDER_BYTES and any(map(_is_round, sizes))


def _is_round(size: int) -> bool:
    return any(n % (1 << 24) == 0 or len(str(n).rstrip("0")) <= 2 for n in (size, size + 1))


def _chunks_reach_the_end(audio: Bytes, chunk: SoundChunk, position: int) -> bool:
    if (layout := chunk.layout) is None:
        return position == len(audio)
    for number, (name, begin, size) in enumerate(chunks(audio, layout, position), start=1):
        position = begin + size
        if size < 0 or position > len(audio) + layout.pad - 1:
            return False
        if not _is_name(name) or name[:4] in _SAMPLE_CHUNKS:
            return False
        if number == MAX_CHUNKS:
            return True
    return position == len(audio) or not any(audio[position + -position % layout.pad : len(audio)])


def _is_name(name: bytes) -> bool:
    if len(name) == 16:  # a GUID, in W64
        return name[7] == 0x11 and name[6] in (0xCF, 0xD2, 0xD3)
    return all(0x20 <= byte < 0x7F for byte in name)


def _is_blank(audio: Bytes, position: int) -> bool:
    """Return whether all bytes from an offset on are zero."""
    for begin in range(position, len(audio), _BLANK_BYTES):
        if audio[begin : begin + _BLANK_BYTES].strip(b"\0"):
            return False
    return True


def _length(chunk: SoundChunk, size: int) -> str:
    return f"{size / chunk.byte_rate:.2f} s" if chunk.byte_rate else f"{size} bytes"


def _wav(audio: Bytes) -> SoundChunk | None:
    if audio[:4] not in (b"RIFF", b"RF64", b"BW64"):
        return None
    position, size = find_chunk(audio, b"fmt ", RIFF)
    coding = audio[position : position + min(size, 1 << 10)]
    begin, declared = find_chunk(audio, b"data", RIFF)
    if len(coding) < 16 or size > 1 << 10 or begin < position or begin > len(audio):
        return None
    riff = int.from_bytes(audio[4:8], "little")
    is_stream = declared >= STREAM_BYTES or (declared == 0 and riff in (0, 0xFFFFFFFF))
    file_bytes = riff + 8
    if audio[:4] != b"RIFF":
        position, size = find_chunk(audio, b"ds64", RIFF)
        if size >= 16 and position + 16 <= len(audio):
            riff, long = struct.unpack("<QQ", audio[position : position + 16])
            if declared == 0xFFFFFFFF:
                file_bytes, declared = riff + 8, long
                is_stream = long >> 40 > 0 or (long == 0 and riff == 0)
    (byte_rate,) = struct.unpack("<I", coding[8:12])
    header = functools.partial(_wav_header, coding)
    return SoundChunk(begin, declared, declared, file_bytes, is_stream, byte_rate, RIFF, header)


def _wav_header(coding: bytes, size: int) -> bytes:
    if size > _MAX_WAV_BYTES:
        return b""
    frame = max(1, int.from_bytes(coding[12:14], "little"))
    size -= size % frame
    coding = b"fmt " + struct.pack("<I", len(coding)) + coding + b"\0" * (len(coding) % 2)
    riff = struct.pack("<4sI4s", b"RIFF", 12 + len(coding) + size, b"WAVE")
    return riff + coding + struct.pack("<4sI", b"data", size)


def _w64(audio: Bytes) -> SoundChunk | None:
    coding = b""
    for name, begin, declared in chunks(audio, W64):
        if name == _W64_FMT:
            coding = audio[begin : begin + min(declared, 1 << 10)]
        if name == _W64_DATA:
            break
    else:
        return None
    if len(coding) < 16:
        return None
    (byte_rate,) = struct.unpack("<I", coding[8:12])
    file_bytes = int.from_bytes(audio[16:24], "little")
    written, is_stream = declared + 24, declared >= STREAM_BYTES << 8
    header = functools.partial(_wav_header, coding)
    return SoundChunk(
        begin, max(0, declared), written, file_bytes, is_stream, byte_rate, W64, header
    )


def _aiff(audio: Bytes) -> SoundChunk | None:
    if audio[8:12] not in (b"AIFF", b"AIFC"):
        return None
    position, size = find_chunk(audio, b"COMM", AIFF)
    common = audio[position : position + min(size, 1 << 10)]
    begin, declared = find_chunk(audio, b"SSND", AIFF)
    if len(common) < 18 or begin + 8 > len(audio):
        return None
    channels, _, bits, exponent, mantissa = struct.unpack(">HIHHQ", common[:18])
    coding = common[18:22] if audio[8:12] == b"AIFC" else b"NONE"
    width = _AIFC_WIDTHS.get(coding, (bits + 7) // 8 if coding in _AIFC_PLAIN else 0)
    if not (frame := width * channels):
        return None
    shift = exponent - 16383 - 63
    rate = mantissa >> -shift if -64 < shift <= 0 else 0  # an 80-bit float
    offset = int.from_bytes(audio[begin : begin + 4], "big")
    name, file_bytes = audio[8:12], int.from_bytes(audio[4:8], "big") + 8

    def header(size: int) -> bytes:
        if size > _MAX_WAV_BYTES:
            return b""
        size -= size % frame
        new_common = common[:2] + struct.pack(">I", size // frame) + common[6:]
        parts = b"FVER\0\0\0\4\xa2\x80\x51\x40" if name == b"AIFC" else b""
        padding = b"\0" * (len(new_common) % 2)
        parts += struct.pack(">4sI", b"COMM", len(new_common)) + new_common + padding
        parts += struct.pack(">4sIII", b"SSND", 8 + size, 0, 0)
        return struct.pack(">4sI4s", b"FORM", 4 + len(parts) + size, name) + parts

    is_stream, written = declared >= STREAM_BYTES, declared
    declared = max(0, declared - 8 - offset)
    begin, byte_rate = begin + 8 + offset, rate * frame
    return SoundChunk(begin, declared, written, file_bytes, is_stream, byte_rate, AIFF, header)


def _caf(audio: Bytes) -> SoundChunk | None:
    description = b""
    for name, begin, size in chunks(audio, CAF):  # noqa: B007 - the last size is read below
        if name == b"data":
            break
        if name == b"desc":
            description = audio[begin : begin + 32]
    else:
        return None
    if len(description) < 32 or begin > _MAX_HEADER_BYTES:
        return None
    rate, _, _, packet, frames = struct.unpack(">d4sIII", description[:24])
    if not packet or not frames or not 0 < rate < 1e6:
        return None  # packets of variable size, listed in a table
    header_bytes, byte_rate = audio[: begin - CAF.head.size], int(rate * packet / frames)

    def header(size: int) -> bytes:
        return header_bytes + struct.pack(">4sqI", b"data", 4 + size - size % packet, 0)

    # The samples follow a count of edits.
    return SoundChunk(begin + 4, max(0, size - 4), size, None, size == -1, byte_rate, CAF, header)


def _au(audio: Bytes) -> SoundChunk | None:
    head = audio[:24]
    if len(head) < 24:
        return None
    _, begin, declared, coding, rate, channels = struct.unpack(">6I", head)
    if not 24 <= begin <= min(len(audio), _MAX_HEADER_BYTES):
        return None
    header_bytes, is_stream = audio[12:begin], declared >= STREAM_BYTES
    frame = _AU_WIDTHS.get(coding, 0) * channels

    def header(size: int) -> bytes:
        return b".snd" + struct.pack(">II", begin, min(size, 0xFFFFFFFF)) + header_bytes

    return SoundChunk(begin, declared, declared, None, is_stream, rate * frame, None, header)


_READERS: tuple[tuple[int, bytes, Callable[[Bytes], SoundChunk | None]], ...] = (
    (8, b"WAVE", _wav),
    (0, b"FORM", _aiff),
    (0, b"riff\x2e\x91\xcf\x11", _w64),
    (0, b"caff", _caf),
    (0, b".snd", _au),
)


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
        begin = _find_header(pattern, audio, begins[-1] + max(1, skip_bytes(part)), check)
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
    chunk = sound_chunk(audio)
    if audio[:4] != b"RIFF" or chunk is None or not 0 < chunk.declared <= len(audio) - chunk.begin:
        return [audio]
    parts: list[Bytes] = [FileSlice(audio, 0, chunk.end)]
    for name, begin, size in itertools.islice(chunks(audio, RIFF, chunk.end), MAX_PARTS):
        if name == b"data":
            end = begin + size if size else len(audio)
            parts.append(FileSlice(audio, begin, end, chunk.header(size)))
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


def _after_sound(part: Bytes) -> int:
    """Return the part's length if its size is right and only chunks follow the samples."""
    return len(part) if has_right_size(part) else 0


def _after_riff(part: Bytes) -> int:
    end = 8 + int.from_bytes(part[4:8], "little")
    return end if end <= len(part) else 0


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


def _header(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


_OGG_MARK = _header(rb"OggS\0[\x02\x06]")
# Header patterns, and functions that return how many bytes of a part cannot hold another header.
_JOINABLE: tuple[tuple[re.Pattern[bytes], Callable[[Bytes], int]], ...] = (
    (_header(rb"(?:RIFF|RF64|BW64)....WAVE"), _after_sound),
    (_header(rb"FORM....AIF[FC]"), _after_sound),
    (_header(rb"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0.{8}wave"), _after_sound),
    (_header(rb"caff\0\x01..desc"), _after_sound),
    (_header(rb"\.snd\0\0.{6}\0\0\0[\x01-\x1b]\0[\0-\x05]..\0\0\0[\x01-\xff]"), _after_sound),
    (_header(rb"fLaC[\x00\x80]\0\0\x22"), lambda part: 0),
    (_OGG_MARK, _after_ogg_begin),
    (_header(rb"#!AMR(?:-WB)?(?:_MC1\.0)?\n"), lambda part: 0),
    (_header(rb"\0\0..ftyp"), _after_boxes),
    (_header(rb"\x1a\x45\xdf\xa3.{1,60}?\x42\x82.(?:webm|matroska)"), _after_segment),
    (_header(rb"RIFF....AVI LIST"), _after_riff),
    (_header(rb"FLV\x01[\x01\x04\x05]\0\0\0\x09\0\0\0\0"), lambda part: 0),
    (_header(rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\0\xaa\0\x62\xce\x6c"), lambda part: 0),
    (_header(rb"NIST_1A\n +[0-9]+\n"), lambda part: 0),
    (_header(rb"Creative Voice File\x1a\x1a\0"), lambda part: 0),
    (_header(rb"TTA1[\x01\x02]\0[\x01-\x20]\0[\x08\x10\x18\x20]\0"), lambda part: 0),
)
