"""Join pieces of speech with their voices to the turns of a recording."""

import dataclasses

from serve.speakers.clusters import Labels
from serve.speakers.inference import SpeakerEmbeddings
from serve.speakers.segmentation import HOP, OFFSET
from serve.speech.rate import SAMPLE_RATE


@dataclasses.dataclass(frozen=True)
class Smoothing:
    """The thresholds of turns, tuned with `python -m eval speakers`."""

    early_s: float = 0.045  # start a turn earlier by this much, because the network is late
    gap_s: float = 0.2  # fill shorter pauses of a speaker
    turn_s: float = 0.15  # drop shorter turns


def turns(
    pieces: SpeakerEmbeddings, labels: Labels, smoothing: Smoothing
) -> list[tuple[float, float, int]]:
    """Join pieces of speech to turns.

    Args:
        pieces: the m pieces of speech.
        labels: (m,), the voice of each piece.
        smoothing: the thresholds of turns.

    Returns:
        Start and end in seconds and the voice of each turn, in order of time.
    """
    joined = dict[int, list[tuple[float, float]]]()
    for start, end, voice in sorted(
        (start, end, int(voice))
        for spans, voice in zip(pieces.spans, labels, strict=True)
        for start, end in spans
    ):
        start_s, end_s = ((OFFSET + HOP * frame) / SAMPLE_RATE for frame in (start, end))
        start_s = max(0.0, start_s - smoothing.early_s)
        own = joined.setdefault(voice, [])
        if own and start_s - own[-1][1] < smoothing.gap_s:
            start_s, end_s = own[-1][0], max(end_s, own.pop()[1])
        own.append((start_s, min(end_s, pieces.seconds)))
    return sorted(
        (start_s, end_s, voice)
        for voice, own in joined.items()
        for start_s, end_s in own
        if end_s - start_s >= smoothing.turn_s
    )
