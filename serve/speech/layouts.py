"""Read channel layouts: the loudspeaker of each channel of a file, and its downmix weight.

Channels have FFmpeg's names: FL and FR are the front pair, FC is the front centre, LFE the low
frequency effects, BL, BR, BC, SL, SR the surrounds. An empty layout is unknown, as in recordings of
several microphones.
"""

import re
import struct

import numpy as np

from serve.contract.messages import Samples
from serve.speech.containers import Bytes

Layout = tuple[str, ...]
UNKNOWN: Layout = ()
CENTRE = "FC"

_GUESSED_CENTRE = 2
"""The centre's index in the default layouts of 3, 5, 6, 7 and 8 channels."""
_GUESSED_COUNTS = (3, 5, 6, 7, 8)

# The order of the bits in WAVE_FORMAT_EXTENSIBLE's channel mask.
_MASK_NAMES = tuple("FL FR FC LFE BL BR FLC FRC BC SL SR TC TFL TFC TFR TBL TBC TBR".split())
_FLAC_LAYOUTS: dict[int, Layout] = {
    3: ("FL", "FR", "FC"),
    4: ("FL", "FR", "BL", "BR"),
    5: ("FL", "FR", "FC", "BL", "BR"),
    6: ("FL", "FR", "FC", "LFE", "BL", "BR"),
    7: ("FL", "FR", "FC", "LFE", "BC", "SL", "SR"),
    8: ("FL", "FR", "FC", "LFE", "BL", "BR", "SL", "SR"),
}
_FLAC_MASK = re.compile(rb"WAVEFORMATEXTENSIBLE_CHANNEL_MASK=0x([0-9a-f]{1,8})", re.IGNORECASE)
_HEAD_BYTES = 1 << 14
_EXTENSIBLE = 0xFFFE

# ITU-R BS.775: centre and surrounds are attenuated by 3 dB, and the LFE channel is dropped.
_HALF_POWER = 0.5**0.5
_WEIGHTS = {
    **dict.fromkeys(("FL", "FR", "DL", "DR"), 1.0),
    **dict.fromkeys(("FC", "FLC", "FRC", "BL", "BR", "BC", "SL", "SR", "WL", "WR"), _HALF_POWER),
    **dict.fromkeys(("SDL", "SDR", "TC", "TFL", "TFC", "TFR", "TBL", "TBC", "TBR"), 0.5),
    **dict.fromkeys(("TSL", "TSR"), 0.5),
    **dict.fromkeys(("LFE", "LFE2"), 0.0),
}


def wav_layout(audio: Bytes, channels: int) -> Layout:
    """Return the layout of a WAV file, from its extensible format's channel mask."""
    head = audio[:_HEAD_BYTES]
    at = head.find(b"fmt ", 12)
    if at < 0 or len(head) < at + 32:
        return UNKNOWN
    (tag,) = struct.unpack("<H", head[at + 8 : at + 10])
    (mask,) = struct.unpack("<I", head[at + 28 : at + 32])
    return _of_mask(mask, channels) if tag == _EXTENSIBLE else UNKNOWN


def flac_layout(audio: Bytes, channels: int) -> Layout:
    """Return the layout of a FLAC file, from its comment or else the format's default."""
    if mask := _FLAC_MASK.search(audio[:_HEAD_BYTES]):
        return _of_mask(int(mask[1], 16), channels)
    return _FLAC_LAYOUTS.get(channels, UNKNOWN)


def known(names: Layout) -> Layout:
    """Return a layout if all its channels have a weight, else the unknown layout."""
    return names if all(name in _WEIGHTS for name in names) else UNKNOWN


def weights(layout: Layout, channels: int) -> Samples | None:
    """Return the downmix weights, float32 (channels,), with a sum of 1.

    None means equal weights: the layout is unknown, mono or stereo.
    """
    if channels < 3 or len(layout) != channels:
        return None
    values = np.array([_WEIGHTS[name] for name in layout], np.float32)
    total = values.sum()
    return values / total if total > 0 else None


def centre(layout: Layout, channels: int) -> int | None:
    """Return the index of the centre channel; None if there is none.

    For an unknown layout this is the index in the default layout.
    """
    if channels < 3:
        return None
    if len(layout) == channels:
        return layout.index(CENTRE) if CENTRE in layout else None
    return _GUESSED_CENTRE if channels in _GUESSED_COUNTS else None


def _of_mask(mask: int, channels: int) -> Layout:
    names = tuple(name for bit, name in enumerate(_MASK_NAMES) if mask >> bit & 1)
    return names if len(names) == channels else UNKNOWN
