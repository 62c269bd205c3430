"""The compiler must take every kernel; the interpreter forgives more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.nightly
@pytest.mark.parametrize("capability", ["90", "89"])  # 8.9 has less shared memory than 8.0
def test_every_kernel_compiles_for_a_gpu(capability, tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    program = "tests.serve.native.kernels.compiled"
    command = [sys.executable, "-m", program, capability]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    hopper = {"flash_kernel", "linear_gelu_kernel", "stream_norm_kernel", "wide_rows_kernel"}
    hopper |= {"thin_kernel"}
    assert set(done.stdout.split()) == {
        "_scan_kernel",
        "_settle_kernel",
        "append_kernel",
        "cross_kernel",
        "cross_stream_kernel",
        "embed_kernel",
        "few_rows_kernel",
        "finish_kernel",
        "many_rows_kernel",
        "mean_kernel",
        "norm_kernel",
        "quantize_kernel",
        "score_kernel",
        "self_attention_kernel",
        "sums_kernel",
        "texts_kernel",
        "warp_kernel",
        *(hopper if capability == "90" else ()),
    }
