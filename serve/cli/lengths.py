"""Read the durations of audio files from their headers, in a separate process.

A damaged file may crash that process or exhaust its memory. Durations are then unknown, and
nothing else is lost. Run as a script, this module is that process: it reads file names and writes
durations, each a line of JSON.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

_MEMORY_BYTES = 1 << 30
_NICENESS = 10  # transcription has priority
_UNKNOWN_FRAMES = 1 << 60  # libsndfile returns at least this if a stream has no frame count


class Lengths:
    """A background reader of durations.

    Args:
        files: the names of the files.
        tell: called on a thread with the index of a file and its duration in seconds, if the
            header has it.
    """

    def __init__(self, files: Sequence[str], tell: Callable[[int, float], None]) -> None:
        self._files, self._tell = [os.path.abspath(file) for file in files], tell
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the command handles Ctrl-C and then ends this process
        )
        self._thread = threading.Thread(target=self._run, name="lengths", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the process and the thread."""
        self._process.kill()
        self._thread.join()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        names, lengths = self._process.stdin, self._process.stdout
        assert names is not None and lengths is not None
        with contextlib.suppress(OSError, ValueError):  # the process has ended
            for number, file in enumerate(self._files):
                names.write(json.dumps(file).encode() + b"\n")
                names.flush()
                if (length := json.loads(lengths.readline())) is not None:
                    self._tell(number, length)


def read_lengths() -> None:
    """Write the duration in seconds, or null, for each file name on standard input."""
    import resource  # noqa: PLC0415 - needed only in the separate process

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    os.nice(_NICENESS)
    for line in sys.stdin:
        print(json.dumps(_length_s(json.loads(line))), flush=True)


def _length_s(file: str) -> float | None:
    import av  # noqa: PLC0415
    import soundfile  # noqa: PLC0415

    if not os.path.isfile(file):  # reading a pipe would consume the audio
        return None
    with contextlib.suppress(soundfile.LibsndfileError, OSError):
        info = soundfile.info(file)
        if info.frames < _UNKNOWN_FRAMES:
            return float(info.duration)
    with contextlib.suppress(av.FFmpegError, OSError, ValueError), av.open(file) as container:
        if container.duration:
            return float(container.duration / av.time_base)
    return None


if __name__ == "__main__":
    read_lengths()
