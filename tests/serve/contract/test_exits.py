"""How commands end."""

import os
import signal
import subprocess
import sys

import pytest

from serve.contract.errors import ConfigError, EarshotError, MissingCheckpointError
from serve.contract.exits import exit_status


def ending_with(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (EarshotError("no"), 1, "error: no\n"),
        (ConfigError("no"), 2, "error: no\n"),
        (MissingCheckpointError("no"), 3, "error: no\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_what_ends_a_command_is_told_and_is_its_status(capsys, error, status, told):
    assert exit_status(ending_with(error), interrupted="stopped") == status
    assert capsys.readouterr().err == told


def test_a_command_says_its_own_status_and_a_fault_of_ours_is_raised():
    assert exit_status(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        exit_status(lambda: 1 // 0)


WRITES = (
    "import sys\nfrom serve.contract.exits import exit_status\n"
    "sys.exit(exit_status(lambda: print('one line') or 0))\n"
)


def test_a_reader_that_has_gone_ends_a_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", WRITES], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_standard_output_on_a_full_disk_is_an_error_and_no_trace():
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", WRITES], stdout=full, stderr=subprocess.PIPE)
    told = b"error: cannot write the output: No space left on device; free some space\n"
    assert (ended.returncode, ended.stderr) == (1, told)
