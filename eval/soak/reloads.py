"""Engines exchanged under a steady load: good ones, bad ones, and one that is killed midway.

Every request has one answer, and so has every utterance of a live session that lasts all the time.
A bad engine changes nothing for any client.
"""

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from safetensors.torch import load_file, save_file
from websockets.exceptions import WebSocketException

from eval.clients import CLIENTS, Ask, live_session, utterance
from eval.config import changed
from eval.load import closed_loop
from eval.server import RunningServer, samples, total
from eval.soak.stage import Stage, crowd
from serve.contract.errors import EarshotError
from serve.contract.manifest import WEIGHTS_FILE

_CALM_S = 10.0  # before the first exchange and after the last
_LIMIT_S = 180.0  # longest wait of a client
_MAX_TOKENS = 100  # in a window; the clips' texts are shorter
# Jobs are left out: they would wait for requests, which never pause here.
_APIS = tuple(name for name in CLIENTS if name != "job")


class _Reload(NamedTuple):
    """A reload, and whether it must succeed."""

    name: str
    engine: Path
    good: bool
    killed: bool = False  # the Triton that starts
    flags: tuple[str, ...] = ()


def reloads(stage: Stage) -> None:
    """Exchange the engine under load; every good one gives the same texts.

    Raises:
        EarshotError: an utterance of the live session failed.
    """
    # A bad engine is never sure and never ends: its clips would take minutes on a CPU.
    limits = {"temperatures": (0.0,), "max_tokens": _MAX_TOKENS}
    config = changed(stage.config, "transcriber", **limits)
    with stage.server(config) as server, crowd(2) as pool:
        planned, stopped = _planned_reloads(server), threading.Event()

        def send_until_stopped(api: str) -> None:
            while not stopped.is_set():
                stage.send(server, api, patience_s=_LIMIT_S)

        clients = pool.submit(closed_loop, send_until_stopped, _APIS, at_once=len(_APIS))
        session = pool.submit(_speak, server, stage.files[stage.shortest_file], stopped)
        try:
            time.sleep(_CALM_S)
            for planned_reload in planned:
                _run_reload(stage, server, planned_reload)
            time.sleep(_CALM_S)
        finally:
            stopped.set()
        clients.result(_LIMIT_S)
        spoken, completed = session.result(_LIMIT_S)
        stage.add("utterances of the live session", spoken)
        stage.at_most("utterances not completed or doubled", spoken - completed, 0)
        outcomes = samples(server.page(), "earshot_reloads_total")
        counts = {sample.labels["outcome"]: int(sample.value) for sample in outcomes}
        good = sum(planned_reload.good for planned_reload in planned)
        right = counts == {"ok": good, "failed": len(planned) - good}
        stage.none_of("wrong counts of reloads by the server", [] if right else [counts])
        stage.at_most("restarts", total(server.page(), "earshot_restarts_total"), 0)


def _speak(server: RunningServer, ask: Ask, stopped: threading.Event) -> tuple[int, int]:
    """Say one utterance after another in one session; return the numbers of said and completed."""
    spoken, items = 0, list[str]()
    try:
        with live_session(server.addresses[0], _LIMIT_S) as socket:
            while not stopped.is_set():
                spoken += 1
                for message in utterance(ask):
                    socket.send(message)
                while len(items) < spoken:
                    event = json.loads(socket.recv(timeout=_LIMIT_S))
                    if event["type"].endswith(".completed"):
                        items.append(event["item_id"])
                    elif event["type"].endswith((".failed", "error")):
                        raise EarshotError(f"the live session: {event}")
    except WebSocketException as error:
        raise EarshotError(f"the live session ended: {error!r}") from error
    return spoken, len(set(items))


def _run_reload(stage: Stage, server: RunningServer, planned: _Reload) -> None:
    """Ask for a reload as an operator does, and judge the exit status."""
    command = [sys.executable, "-m", "serve", "reload", "--config", str(server.toml)]
    command += ["--engine", str(planned.engine), "--clips", str(server.config.eval.manifest)]
    stage.say(f"{planned.name} …")
    before, began_s = _tritons(server), time.monotonic()
    with subprocess.Popen([*command, *planned.flags], stderr=subprocess.PIPE, text=True) as process:
        while planned.killed and process.poll() is None:
            if new := _tritons(server) - before:
                for pid in new:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        psutil.Process(pid).kill()
                break
            time.sleep(0.05)
        output = process.communicate()[1].strip()
    passed = (process.returncode == 0) == planned.good
    limit, seconds = "taken" if planned.good else "refused", time.monotonic() - began_s
    stage.add(f"{planned.name}, s", seconds, limit, passed, output[-300:])


def _tritons(server: RunningServer) -> set[int]:
    return {pid for role, pid in server.pids().items() if role.startswith("tritonserver")}


# ---------------------------------------------------------------- engines


def _planned_reloads(server: RunningServer) -> list[_Reload]:
    """Make engines of each kind in the server's folder."""
    own, folder = Path(server.config.engine).absolute(), server.folder
    copy = Path(shutil.copytree(own, folder / "copy"))
    bad = Path(shutil.copytree(own, folder / "random"))
    _randomize(bad)
    return [
        _Reload("1. a copy", copy, good=True),
        _Reload("2. the first again", own, good=True),
        _Reload("3. random scales", bad, good=False),
        _Reload("4. killed while it starts", copy, good=False, killed=True),
        _Reload("5. no such folder", folder / "none", good=False),
        _Reload("6. in place", own, good=True, flags=("--in-place",)),
        _Reload("7. random scales, in place", bad, good=False, flags=("--in-place",)),
    ]


def _randomize(engine: Path) -> None:
    """Replace all scales and floating-point matrices by noise; update the manifest's hash."""
    path, manifest = engine / WEIGHTS_FILE, engine / "engine.json"
    tensors, random = load_file(path), torch.Generator().manual_seed(0)
    for name, values in tensors.items():
        if values.is_floating_point() and (name.endswith(".scale") or values.dim() == 2):
            noise = 0.1 * torch.rand(values.shape, generator=random)
            tensors[name] = noise.to(values.dtype)
    save_file(tensors, path)
    contents = json.loads(manifest.read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    contents["files"][WEIGHTS_FILE] = {"sha256": digest, "bytes": path.stat().st_size}
    manifest.write_text(json.dumps(contents))
