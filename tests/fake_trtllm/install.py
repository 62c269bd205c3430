"""Put the stand-in where the real library would be, and make small checkpoints for it."""

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import threading
import types
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers

from build.builders import build_engine
from build.checkpoint import open_checkpoint
from build.config import BuildConfig, BuildProduct
from eval.random_whisper import PUBLISHED
from serve.contract.config import RuntimeConfig
from serve.contract.runtimes import TrtllmConfig
from serve.trtllm import llm_api, worker
from tests.checkpoints import NANO, write_nano

HERE = Path(__file__).parent


def install(monkeypatch, tmp_path, capability=(9, 0)):
    """Make `import tensorrt_llm`, `trtllm-build` and a GPU appear; returns the fake executor."""
    pretend(monkeypatch, HERE, capability)
    bin_folder = tmp_path / "fake-bin"
    bin_folder.mkdir()
    command = bin_folder / "trtllm-build"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "trtllm_build.py"} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    return imported("tensorrt_llm.bindings.executor")


def install_api(monkeypatch):
    """Make release 1.4 and a GPU appear; returns its fake `tensorrt_llm.llmapi`."""
    pretend(monkeypatch, HERE / "api", (9, 0))
    monkeypatch.setattr(llm_api, "spawn", OnThread)
    return imported("tensorrt_llm.llmapi")


class OnThread:
    """The library's process on a thread of this one, where tests can look into the stand-in."""

    def __init__(self, config, connection):
        mine = Connection(os.dup(connection.fileno()))
        self.end = socket.socket(fileno=os.dup(connection.fileno()))
        self.killed = False
        self.thread = threading.Thread(target=worker.serve, args=(mine, lambda: None), daemon=True)
        self.thread.start()

    def wait(self, timeout):
        if not self.killed:
            self.thread.join(timeout)
            if self.thread.is_alive():
                raise subprocess.TimeoutExpired("a thread", timeout)
        self.end.close()
        return -9 if self.killed else 0

    def kill(self):
        """End all of it that the other side can see."""
        self.killed = True
        with contextlib.suppress(OSError):  # it has ended already
            self.end.shutdown(socket.SHUT_RDWR)


def imported(name):
    """A module that warns on import, as the real library does; ours alone may not."""
    with warnings.catch_warnings(category=UserWarning, action="ignore"):
        return importlib.import_module(name)


def write_metadata(folder, name, version, more=""):
    """Make a package of this version look installed where the folder is in the path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(head + more)


def pretend(monkeypatch, folder, capability):
    """Make the packages in a folder importable, in place of others of the name, and show a GPU."""
    torch.set_num_threads(1)  # the networks are tiny: threads would only wait for each other
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = types.SimpleNamespace(name="Stand-in GPU", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)


def make_config(**trtllm):
    """A configuration for the small checkpoint; keywords are `TrtllmConfig`'s."""
    runtime = RuntimeConfig(
        device="cuda", slots=4, encoder_batch=2, tensorrt_llm=TrtllmConfig(**trtllm)
    )
    return BuildProduct(name="small", runtime=runtime)


def compile_engine(checkpoint, config, precision, target, log=lambda _: None):
    """Build for TensorRT-LLM 1.2, with the limits of `config.runtime`."""
    build = BuildConfig(runtime="tensorrt_llm", precision=precision)
    config = BuildProduct(engine=str(target), runtime=config.runtime, build=build)
    return build_engine(checkpoint, config, log)


def copy_engine(checkpoint, target, log=lambda _: None, **build):
    """Build for TensorRT-LLM's LLM API; keywords are `BuildConfig`'s."""
    build = BuildConfig(**{"runtime": "tensorrt_llm_api", "precision": "fp16", **build})
    return build_engine(checkpoint, BuildProduct(engine=str(target), build=build), log)


def dims_of(size):
    """Sizes of a published checkpoint."""
    return PUBLISHED[size].dims


def write_checkpoint_with_processor(folder):
    """A Hugging Face folder as the LLM API reads one, with random weights; returns it opened."""
    write_nano(folder)
    transformers.WhisperFeatureExtractor(feature_size=NANO.n_mels).save_pretrained(folder)
    return open_checkpoint(str(folder))
