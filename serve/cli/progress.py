"""Show the progress over many recordings: a bar on a terminal, else a line every 30 s."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

from tqdm import tqdm

from serve.cli.lengths import Lengths

_BAR, _REMAINING = "{desc} |{bar}| {elapsed}", "<{remaining}"
_COLUMNS, _ROWS = 80, 24  # if the terminal's size is unknown
_REFRESH_S = 0.2  # between updates of the bar
LINE_EVERY_S = 30.0  # between lines if the output is not a terminal


class Progress:
    """The recordings and seconds of audio that are done, shown on standard error.

    Any thread may call it. A background thread writes the bar or the lines.

    Args:
        files: the names of the recordings; "" if the duration cannot be read.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._length_s: list[float | None] = [None] * len(files)  # None: unknown
        self._heard_s = [0.0] * len(files)
        self._ended, self.audio_s = 0, 0.0
        self._began_s = time.monotonic()
        self._stop = threading.Event()
        self._open = contextlib.ExitStack()
        self._terminal = sys.stderr.isatty()

    def heard(self, number: int, until_s: float) -> None:
        """Record that a recording is transcribed up to `until_s` seconds."""
        self._heard_s[number] = max(self._heard_s[number], until_s)

    def done(self, number: int, audio_s: float) -> None:
        """Count a transcribed recording of `audio_s` seconds."""
        self._heard_s[number] = self._length_s[number] = audio_s
        self._ended += 1
        self.audio_s += audio_s

    def failed(self, number: int) -> None:
        """Count a recording that failed."""
        self._heard_s[number] = self._length_s[number] = 0.0
        self._ended += 1

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began_s

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        thread = threading.Thread(target=self._run, name="progress", daemon=True)
        thread.start()
        self._open.callback(thread.join)
        self._open.callback(self._stop.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _run(self) -> None:
        if not self._terminal and self._stop.wait(LINE_EVERY_S):
            return  # short work needs no line
        with Lengths(self._files, self._note):
            (self._run_bar if self._terminal else self._run_lines)()

    def _run_bar(self) -> None:
        options: dict[str, Any] = {"dynamic_ncols": True}
        if os.get_terminal_size(sys.stderr.fileno()).columns == 0:  # for example under `script`
            options = {"ncols": _COLUMNS, "nrows": _ROWS}
        with tqdm(bar_format=_BAR, leave=False, file=sys.stderr, **options) as bar:
            while True:
                heard_s, total_s = self._seconds()
                bar.n, bar.total = heard_s, total_s or None
                bar.bar_format = _BAR + _REMAINING * bool(total_s)
                bar.set_description_str(self._text(heard_s, total_s))
                if self._stop.wait(_REFRESH_S):
                    return

    def _run_lines(self) -> None:
        while True:
            heard_s, total_s = self._seconds()
            left_s = (total_s - heard_s) * self.seconds / heard_s if heard_s and total_s else 0.0
            left = f", about {left_s / 60:.0f} min left" if left_s else ""
            tqdm.write(f"{self._text(heard_s, total_s)}{left}", file=sys.stderr)
            if self._stop.wait(LINE_EVERY_S):
                return

    def _note(self, number: int, length_s: float) -> None:
        if self._length_s[number] is None:
            self._length_s[number] = length_s

    def _seconds(self) -> tuple[float, float]:
        """Return the seconds of audio done, and an estimate of the total; 0: unknown."""
        known = [length for length in self._length_s if length is not None]
        heard_s = sum(self._heard_s)
        if not known or not any(known):
            return heard_s, 0.0
        total_s = sum(known) * len(self._length_s) / len(known)  # unknown ones count as the mean
        return heard_s, max(heard_s, total_s)

    def _text(self, heard_s: float, total_s: float) -> str:
        files = f"{self._ended}/{len(self._files)} files"
        audio = f"{heard_s:.0f}/{total_s:.0f}" if total_s else f"{heard_s:.0f}"
        return f"{files}, {audio} s of audio, {heard_s / max(self.seconds, 1e-3):.1f} RTFx"
