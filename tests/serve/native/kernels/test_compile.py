"""The compiler must take every kernel; the interpreter forgives more."""

import os
import subprocess
import sys

import pytest


@pytest.mark.nightly
@pytest.mark.parametrize("capability", ["90", "89"])  # 8.9 has less shared memory than 8.0
def test_every_kernel_compiles_for_a_gpu(capability, tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    program = "tests.serve.native.kernels.compiled"
    command = [sys.executable, "-m", program, capability]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == (22 if capability == "90" else 17)
