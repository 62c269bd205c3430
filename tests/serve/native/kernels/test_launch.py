"""Kernels are compiled by several threads, and their launchers are loaded one after another."""

import threading

import pytest
import torch

pytest.importorskip("triton")


class Kernel:
    """A kernel whose launcher takes as long to load as another thread needs to meet it."""

    meeting = threading.Barrier(2)

    def __init__(self):
        self.alone = None

    @property
    def run(self):
        try:
            self.meeting.wait(0.2)
            self.alone = False
        except threading.BrokenBarrierError:
            self.meeting.reset()
            self.alone = True


def test_one_thread_at_a_time_loads_a_launcher(monkeypatch):
    """Python gives all launchers one module name, and would mix up two that are being loaded."""
    from triton.runtime._async_compile import active_mode

    from serve.native.kernels.launch import compile_in_parallel

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    compiled = threading.Barrier(2)
    kernels = [Kernel(), Kernel()]

    def compile_kernel(kernel):
        compiled.wait(60)
        return kernel

    with compile_in_parallel(torch.device("cuda:0")):
        for kernel in kernels:
            work = lambda kernel=kernel: compile_kernel(kernel)  # noqa: E731
            active_mode.get().submit(kernel, work, lambda kernel: None)
    assert [kernel.alone for kernel in kernels] == [True, True]
