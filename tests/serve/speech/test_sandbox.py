"""What a file makes its decoder do ends with that file: memory, time, crashes, and their names."""

import contextlib
import errno
import operator
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from eval.soak.attacks import greedy_mp4
from serve.contract.errors import (
    AudioError,
    AudioLimitError,
    DeadlineError,
    OverloadedError,
    UnavailableError,
)
from serve.contract.messages import AudioFile
from serve.speech import audio, sources
from serve.speech.meter import AudioLimits
from serve.speech.sandbox import client
from serve.speech.sandbox import server as process
from tests.serve.speech.sounds import RATE, encode, encode_ffmpeg, recording, tone
from tests.waits import wait_until

LIMITS = AudioLimits(60.0)
LONG = encode(tone(seconds=50), "FLAC")
"""More than a socket holds, so that its process waits for a reader of the samples."""


def decode(data, limits=LIMITS, stopped=lambda: False):
    return audio.join_blocks(audio.decode(data, limits, stopped))


def server():
    client.start()
    return psutil.Process(client._server._process.pid)


def with_files():
    """The server's processes that have a file, which the limits tell from the one that waits."""
    found = []
    for child in server().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.rlimit(psutil.RLIMIT_NOFILE) == (1, 1):
                found.append(child)
    return found


def spare():
    wait_until(lambda: set(server().children()) - set(with_files()), "none waits for a file")
    (waiting,) = set(server().children()) - set(with_files())
    return waiting


def one_of_its_processes():
    wait_until(with_files, "no file has a process")
    return with_files()[0]


def test_a_kilobyte_takes_no_gigabytes(monkeypatch):
    """Without limits this file takes more than `client.MEMORY_BYTES` before the first block."""
    data = greedy_mp4(12_000_000)
    assert len(data) < 500
    taken = []
    honest = client._memory.record
    monkeypatch.setattr(
        client._memory, "record", lambda file, size: taken.append(size) or honest(file, size)
    )
    with pytest.raises(AudioError, match="no samples"):
        decode(data)
    assert 0 < taken[-1] < client.MEMORY_BYTES


def test_too_little_memory_has_a_name(monkeypatch):
    """Some libraries hide it and find no sound; where it is told, so is the client."""

    def here(limits, descriptors):
        file, results, _ = map(os.dup, descriptors)
        with socket.socket(fileno=results) as to:
            process._decode(AudioFile(file), to, limits)

    def greedy(*_):
        raise MemoryError

    monkeypatch.setattr(client._server, "send", here)
    monkeypatch.setattr(process, "_limit_this_process", lambda *_: None)
    monkeypatch.setattr(sources, "decode", greedy)
    with pytest.raises(AudioError, match="500 bytes needs more than"):
        decode(bytes(500))


@pytest.mark.parametrize("name", ["WAV-PCM_16", "FLAC-PCM_16", "MP3-MPEG_LAYER_III", "mp4-aac"])
def test_samples_are_those_that_are_decoded_here(name, tmp_path):
    data = recording(name, 50.0)
    expected = audio.join_blocks(sources.decode(data, LIMITS))
    np.testing.assert_array_equal(decode(data), expected)
    (tmp_path / "file").write_bytes(data)
    file = AudioFile(os.open(tmp_path / "file", os.O_RDONLY))
    np.testing.assert_array_equal(decode(file), expected)


def test_errors_keep_their_kind_and_words():
    with pytest.raises(AudioLimitError, match="expected at most 2 s"):
        decode(encode(tone(), "FLAC"), AudioLimits(2.0))
    with pytest.raises(AudioError, match="an unknown format") as caught:
        decode(b"RIFF" + bytes(500))
    assert type(caught.value) is AudioError


@pytest.mark.parametrize(
    ("ended_by", "kind", "words"),
    [
        (signal.SIGSEGV, AudioError, r"crashes its decoder \(SIGSEGV\)"),
        (signal.SIGXCPU, AudioLimitError, r"more CPU time than the 30 s"),
        (signal.SIGKILL, UnavailableError, "was killed; try again"),
    ],
)
def test_the_end_of_a_files_process_is_an_error_by_name(ended_by, kind, words):
    blocks = audio.decode(LONG, AudioLimits(60.0, max_cpu_s=30.0))
    next(blocks)
    one_of_its_processes().send_signal(ended_by)
    with pytest.raises(kind, match=words) as caught:
        list(blocks)
    assert type(caught.value) is kind
    assert len(decode(LONG))


def test_processor_time_ends_a_process_that_reads_nothing():
    """A limit of the system, since a library that loops checks nothing."""
    blocks = audio.decode(LONG, AudioLimits(60.0, max_cpu_s=5.0))
    next(blocks)
    its = one_of_its_processes()
    assert its.rlimit(psutil.RLIMIT_CPU) == (7, 8)
    assert its.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert its.rlimit(psutil.RLIMIT_NOFILE) == (1, 1)
    taken, _ = its.rlimit(psutil.RLIMIT_AS)
    assert taken <= its.memory_info().vms + client.MEMORY_BYTES + len(LONG)
    blocks.close()


@pytest.mark.parametrize("busy", [False, True])
def test_whoever_leaves_takes_the_process_along(busy):
    """Be it in a library that looks at nothing, for which one stands that stands still."""
    blocks = audio.decode(LONG, LIMITS)
    next(blocks)
    its = one_of_its_processes()
    if busy:
        its.suspend()
    blocks.close()
    wait_until(lambda: not its.is_running(), "it goes on for nobody")


def test_it_is_copied_while_it_has_one_thread():
    decode(LONG)
    assert server().num_threads() == 1


def test_a_process_that_ended_before_its_file_came_is_replaced():
    before = spare()
    before.kill()
    wait_until(lambda: not before.is_running(), "it was not reaped")
    assert len(decode(LONG)) == 50 * RATE


@pytest.mark.nightly
def test_nothing_is_left_of_files():
    """No descriptor here or there, and no process that was not reaped."""

    def some():
        for data in (LONG, encode(tone(), "MP3"), b"rubbish" * 9, greedy_mp4(100_000_000)):
            with contextlib.suppress(AudioError):
                decode(data)
            blocks = audio.decode(data, LIMITS)
            with contextlib.suppress(AudioError):
                next(blocks)
            blocks.close()
        wait_until(lambda: not with_files(), "a process is left")
        waiting = spare()
        assert server().children() == [waiting]
        return psutil.Process().num_fds(), server().num_fds(), waiting.num_fds()

    some()
    before = some()
    # What earlier tests left may still open and close some here; a leak adds to every count.
    assert any(all(map(operator.le, some(), before)) for _ in range(3))


@pytest.mark.parametrize("refused", ["memfd_create", "pipe"])
def test_what_the_system_refuses_has_a_name(refused, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    opened = psutil.Process().num_fds()
    monkeypatch.setattr(os, refused, refuse)
    with pytest.raises(UnavailableError, match="not permitted; try again, or send 16-bit WAV"):
        decode(LONG)
    assert psutil.Process().num_fds() == opened
    assert len(decode(encode(tone(), "WAV"))) == len(tone())


def test_a_server_that_cannot_be_started_has_a_name(monkeypatch):
    client._server.stop()
    monkeypatch.setattr(sys, "executable", "/none/python")
    with pytest.raises(UnavailableError, match="cannot start /none/python"):
        decode(LONG)
    monkeypatch.undo()
    monkeypatch.setattr(client, "_BOOTSTRAP", "raise SystemExit(3) # {path} {descriptor}")
    client._server.stop()
    with pytest.raises(UnavailableError, match="send 16-bit WAV, which needs no such process"):
        decode(LONG)
    client._server.stop()


def test_a_server_that_was_killed_is_started_anew_and_what_it_began_goes_on():
    blocks = audio.decode(LONG, LIMITS)
    first = next(blocks)
    before = server()
    before.kill()
    before.wait()
    assert len(decode(LONG)) == 50 * RATE
    assert server().pid != before.pid
    assert len(first) + sum(map(len, blocks)) == 50 * RATE


def test_a_server_that_stands_still_is_given_up(monkeypatch):
    monkeypatch.setattr(client, "STALL_S", 0.3)
    monkeypatch.setattr(client, "_END_S", 0.2)
    before = server()
    before.suspend()
    with pytest.raises(DeadlineError, match=r"returned no sample for 0\.3 s"):
        decode(LONG)
    assert not before.is_running()
    monkeypatch.undo()
    assert len(decode(LONG)) == 50 * RATE


def test_the_largest_of_many_is_refused(monkeypatch):
    """The first block of each says what it has taken so far."""
    monkeypatch.setattr(client._memory, "max_bytes", 1 << 14)
    files = encode(tone(), "FLAC"), encode_ffmpeg("mp4", "aac")
    small, large = (audio.decode(data, LIMITS) for data in files)
    with pytest.raises(OverloadedError, match="use too much memory, and this one uses the most"):
        for _ in zip(small, large, strict=False):
            pass


def test_keys_and_paths_do_not_reach_it(monkeypatch):
    client._server.stop()
    monkeypatch.setenv("EARSHOT_API_KEYS", "secret")
    given = {*client._ENVIRONMENT, "LD_LIBRARY_PATH", "LC_CTYPE"}
    assert set(server().environ()) <= given


@pytest.mark.nightly
def test_it_ends_with_the_process_that_started_it():
    code = (
        "import sys\n"
        "from serve.speech.sandbox import client\n"
        "client.start()\n"
        "print(client._server._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    wait_until(lambda: not child.is_running(), "it outlives who started it")


def test_many_at_once_each_get_their_own():
    files = [encode(tone(seconds=2 + i), "FLAC") for i in range(6)] * 4
    with ThreadPoolExecutor(8) as pool:
        assert list(map(len, pool.map(decode, files))) == [(2 + i) * RATE for i in range(6)] * 4
    wait_until(lambda: not with_files(), "a process is left")
