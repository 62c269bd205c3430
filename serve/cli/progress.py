"""Show the progress over many files: a bar on a terminal, else a line every 30 s."""

import sys
import threading
import time
from typing import Self

from tqdm import tqdm

LINE_EVERY_S = 30.0  # between lines if the output is not a terminal


class Progress:
    """The files and the seconds of audio that are done, shown on standard error.

    It is a context manager. Any thread may call it.

    Args:
        files: the number of files.
    """

    def __init__(self, files: int) -> None:
        self._lock = threading.Lock()
        self._files, self._ended, self._audio_s = files, 0, 0.0
        self._began_s = self._shown_s = time.monotonic()
        self._bar = tqdm(
            total=files,
            desc=str(self),
            bar_format="{desc} |{bar}| {elapsed}<{remaining}",
            leave=False,
            disable=None,  # without a terminal
            miniters=0,
            file=sys.stderr,
            dynamic_ncols=True,
        )
        self._prints_lines = self._bar.disable

    def __str__(self) -> str:
        seconds, audio_s = time.monotonic() - self._began_s, self._audio_s
        return (
            f"{self._ended}/{self._files} files, {audio_s:.1f} s of audio in {seconds:.1f} s, "
            f"{audio_s / max(seconds, 1e-3):.1f} RTFx"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._prints_lines = False
            self._bar.close()

    def add(self, files: int, audio_s: float) -> None:
        """Count files that ended, and seconds of audio that were transcribed."""
        with self._lock:
            self._ended += files
            self._audio_s += audio_s
            self._bar.set_description_str(str(self), refresh=False)
            self._bar.update(files)
            now_s = time.monotonic()
            if self._prints_lines and now_s - self._shown_s >= LINE_EVERY_S:
                self._shown_s = now_s
                tqdm.write(str(self), file=sys.stderr)
