"""A diarizer of others, as its users run it, in a Python that has it: who speaks when.

PYTHON eval/speakers/peer.py senko|diarize WAV…    16 kHz mono, 16 bits

Prints a line of JSON for each file, `seconds` that it took, the first one's without what is loaded
once, and `turns`: start and end in seconds, and a speaker. Needs nothing of this project.
"""

import json
import sys
import time
from collections.abc import Callable

Found = list[tuple[float, float, str]]


def _senko() -> Callable[[str], Found]:
    import senko  # type: ignore[import-not-found]  # noqa: PLC0415 - one of them is there

    diarizer = senko.Diarizer(device="auto", warmup=True, quiet=True)

    def turns_of(path: str) -> Found:
        result = diarizer.diarize(path, generate_colors=False)
        segments = result["merged_segments"] if result else []
        return [(segment["start"], segment["end"], str(segment["speaker"])) for segment in segments]

    return turns_of


def _diarize() -> Callable[[str], Found]:
    import diarize  # type: ignore[import-not-found]  # noqa: PLC0415 - likewise

    def turns_of(path: str) -> Found:
        segments = diarize.diarize(path).segments
        return [(segment.start, segment.end, str(segment.speaker)) for segment in segments]

    return turns_of


PEERS = {"senko": _senko, "diarize": _diarize}


def main(name: str, paths: list[str]) -> None:
    """Tell who speaks when in each file."""
    turns_of = PEERS[name]()
    turns_of(paths[0])
    for path in paths:
        begin = time.perf_counter()
        turns = turns_of(path)
        line = json.dumps({"seconds": time.perf_counter() - begin, "turns": turns})
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
