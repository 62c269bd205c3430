"""The progress of commands, on a terminal."""

import os
import pty
import termios

import pytest

from serve.cli.progress import Progress


@pytest.mark.parametrize("size", [(24, 80), (0, 0)])
def test_a_terminal_shows_a_bar_even_if_its_size_is_unknown(monkeypatch, size):
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, size)
    with open(slave, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        with Progress(2):
            pass
        shown = os.read(master, 1000)
    os.close(master)
    assert b"0/2 files, 0.0 s of audio" in shown
