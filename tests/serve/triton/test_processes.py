"""Which processes live, and how much memory they took at most."""

import subprocess
import sys

import pytest

from serve.triton.processes import is_alive, live_children, peak_memory_bytes

MIB = 2**20


@pytest.fixture
def parent():
    """A process that starts a child in a thread for each line it reads, and says its pid."""
    code = (
        "import subprocess, sys, threading\n"
        "def start():\n"
        "    print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "    threading.Event().wait()\n"
        "for line in sys.stdin:\n"
        "    threading.Thread(target=start, daemon=True).start()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        for child in live_children(process.pid):
            subprocess.run(["kill", str(child)], check=True)
        process.kill()


def new_child(parent):
    parent.stdin.write("\n")
    parent.stdin.flush()
    return int(parent.stdout.readline())


def ended(pid):
    """Wait for a process to become a zombie: its parent never asks about it."""
    while is_alive(pid):
        pass
    return pid


def test_children_are_those_that_live_whichever_thread_made_them(parent):
    assert live_children(parent.pid) == []
    first, second = new_child(parent), new_child(parent)
    assert set(live_children(parent.pid)) == {first, second}
    assert is_alive(first)
    subprocess.run(["kill", "-KILL", str(first)], check=True)
    ended(first)
    assert live_children(parent.pid) == [second]


def test_a_process_that_is_gone_has_nothing():
    with subprocess.Popen(["true"]) as process:
        ended(process.pid)
        assert peak_memory_bytes(process.pid) == 0, "a zombie"
    assert is_alive(process.pid) is False
    assert live_children(process.pid) == []
    assert peak_memory_bytes(process.pid) == 0


def test_the_peak_stays_when_the_memory_is_given_back():
    code = (
        "import sys\n"
        "block = bytearray(b'x') * (200 * 2**20)\n"
        "del block\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"done\n"
        assert 200 * MIB < peak_memory_bytes(process.pid) < 260 * MIB
