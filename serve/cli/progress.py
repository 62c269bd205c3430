"""Show the progress over many recordings: a bar on a terminal, else a line every 30 s.

The durations of the recordings come from their headers, which a separate process reads. A damaged
file may crash that process or exhaust its memory. Durations are then unknown, and nothing else is
lost. Run as a script, this module is that process: it reads a JSON list of file names and writes a
line of JSON with the duration of each.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from tqdm import tqdm

_BAR, _REMAINING = "{desc} |{bar}| {elapsed}", "<{remaining}"
_COLUMNS, _ROWS = 80, 24  # if the terminal's size is unknown
_REFRESH_S = 0.2  # between updates of the bar
LINE_EVERY_S = 30.0  # between lines if the output is not a terminal

_MEMORY_BYTES = 1 << 30
_NICENESS = 10  # transcription has priority
_UNKNOWN_FRAMES = 1 << 60  # libsndfile returns at least this if a stream has no frame count


class Progress:
    """The recordings and seconds of audio that are done, shown on standard error.

    Any thread may call it. A background thread writes the bar or the lines.

    Args:
        files: the names of the recordings; "" if the duration cannot be read.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._length_s: list[float | None] = [None] * len(files)  # None: unknown
        self._done_s = [0.0] * len(files)
        self._ended, self.audio_s = 0, 0.0
        self._began_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._terminal = sys.stderr.isatty()

    def advance(self, number: int, until_s: float) -> None:
        """Record that a recording is transcribed up to `until_s` seconds."""
        self._done_s[number] = max(self._done_s[number], until_s)

    def done(self, number: int, audio_s: float) -> None:
        """Count a transcribed recording of `audio_s` seconds."""
        self._done_s[number] = self._length_s[number] = audio_s
        self._ended += 1
        self.audio_s += audio_s

    def failed(self, number: int) -> None:
        """Count a recording that failed."""
        self._done_s[number] = self._length_s[number] = 0.0
        self._ended += 1

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began_s

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        if not self._terminal and self._stop.wait(LINE_EVERY_S):
            return  # short work needs no line
        with reading_lengths(self._files, self._note):
            (self._run_bar if self._terminal else self._run_lines)()

    def _run_bar(self) -> None:
        options: dict[str, Any] = {"dynamic_ncols": True}
        if os.get_terminal_size(sys.stderr.fileno()).columns == 0:  # for example under `script`
            options = {"ncols": _COLUMNS, "nrows": _ROWS}
        with tqdm(bar_format=_BAR, leave=False, file=sys.stderr, **options) as bar:
            while True:
                done_s, total_s = self._seconds()
                bar.n, bar.total = done_s, total_s or None
                bar.bar_format = _BAR + _REMAINING * bool(total_s)
                bar.set_description_str(self._text(done_s, total_s))
                if self._stop.wait(_REFRESH_S):
                    return

    def _run_lines(self) -> None:
        while True:
            done_s, total_s = self._seconds()
            remaining_s = (total_s - done_s) * self.seconds / done_s if done_s and total_s else 0.0
            remaining = f", about {remaining_s / 60:.0f} min left" if remaining_s else ""
            tqdm.write(f"{self._text(done_s, total_s)}{remaining}", file=sys.stderr)
            if self._stop.wait(LINE_EVERY_S):
                return

    def _note(self, number: int, length_s: float) -> None:
        if self._length_s[number] is None:
            self._length_s[number] = length_s

    def _seconds(self) -> tuple[float, float]:
        """Return the seconds of audio done, and an estimate of the total; 0: unknown."""
        known = [length for length in self._length_s if length is not None]
        done_s = sum(self._done_s)
        if not known or not any(known):
            return done_s, 0.0
        total_s = sum(known) * len(self._length_s) / len(known)  # unknown ones count as the mean
        return done_s, max(done_s, total_s)

    def _text(self, done_s: float, total_s: float) -> str:
        files = f"{self._ended}/{len(self._files)} files"
        audio = f"{done_s:.0f}/{total_s:.0f}" if total_s else f"{done_s:.0f}"
        return f"{files}, {audio} s of audio, {done_s / max(self.seconds, 1e-3):.1f} RTFx"


@contextlib.contextmanager
def reading_lengths(files: Sequence[str], note: Callable[[int, float], None]) -> Iterator[None]:
    """Read the durations in the background while the block runs.

    Args:
        files: the names of the files.
        note: called on a thread with the index of a file and its duration in seconds, if the
            header has it.
    """
    with subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the command handles Ctrl-C and then ends this process
        text=True,
    ) as process:
        names, lines = process.stdin, process.stdout
        assert names is not None and lines is not None

        def read() -> None:
            with contextlib.suppress(OSError, ValueError):  # the process has ended
                with names:
                    json.dump([os.path.abspath(file) for file in files], names)
                for number, line in enumerate(lines):
                    if (length_s := json.loads(line)) is not None:
                        note(number, length_s)

        thread = threading.Thread(target=read, name="lengths", daemon=True)
        thread.start()
        try:
            yield
        finally:
            process.kill()
            thread.join()


def write_lengths() -> None:
    """Write the duration in seconds, or null, for each of the files on standard input."""
    import resource  # noqa: PLC0415 - needed only in the separate process

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    os.nice(_NICENESS)
    for file in json.load(sys.stdin):
        print(json.dumps(_length_s(file)), flush=True)


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
    write_lengths()
