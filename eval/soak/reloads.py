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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from safetensors.torch import load_file, save_file
from websockets.exceptions import WebSocketException

from eval.clients import CLIENTS, Ask, live_session, utterance
from eval.load import closed_loop
from eval.server import RunningServer, samples, total
from eval.soak.stage import Stage, crowd
from serve.contract.errors import EarshotError
from serve.contract.manifest import WEIGHTS_FILE

_CALM_S = 10.0  # before the first exchange and after the last
_LIMIT_S = 180.0  # longest wait of a client
# Jobs are left out: they would wait for requests, which never pause here.
_APIS = tuple(name for name in CLIENTS if name != "job")


class _Case(NamedTuple):
    """An exchange, and whether it must succeed."""

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
    with stage.server() as server, crowd(2) as pool:
        cases, stopped = _cases(server), threading.Event()

        def ask_on(api: str) -> None:
            while not stopped.is_set():
                stage.send(server, api, patience_s=_LIMIT_S)

        clients = pool.submit(closed_loop, ask_on, _APIS, at_once=len(_APIS))
        session = pool.submit(_speak, server, stage.files[stage.short], stopped)
        try:
            time.sleep(_CALM_S)
            for case in cases:
                _exchange(stage, server, case)
            time.sleep(_CALM_S)
        finally:
            stopped.set()
        clients.result(_LIMIT_S)
        said, completed = session.result(_LIMIT_S)
        stage.tell("utterances of the live session", said)
        stage.at_most("utterances not completed or doubled", said - completed, 0)
        outcomes = samples(server.page(), "earshot_reloads_total")
        counts = {one.labels["outcome"]: int(one.value) for one in outcomes}
        taken = sum(case.good for case in cases)
        right = counts == {"ok": taken, "failed": len(cases) - taken}
        stage.none_of("wrong counts of reloads by the server", [] if right else [counts])
        stage.at_most("restarts", total(server.page(), "earshot_restarts_total"), 0)


def _speak(server: RunningServer, ask: Ask, stopped: threading.Event) -> tuple[int, int]:
    """Say one utterance after another in one session; return how many were said and completed."""
    said, items = 0, list[str]()
    try:
        with live_session(server.at, _LIMIT_S) as socket:
            while not stopped.is_set():
                said += 1
                for message in utterance(ask):
                    socket.send(message)
                while len(items) < said:
                    event = json.loads(socket.recv(timeout=_LIMIT_S))
                    if event["type"].endswith(".completed"):
                        items.append(event["item_id"])
                    elif event["type"].endswith((".failed", "error")):
                        raise EarshotError(f"the live session: {event}")
    except WebSocketException as error:
        raise EarshotError(f"the live session ended: {error!r}") from error
    return said, len(set(items))


def _exchange(stage: Stage, server: RunningServer, case: _Case) -> None:
    """Ask for it as an operator does, and judge the exit status."""
    command = [sys.executable, "-m", "serve", "reload", "--config", str(server.toml)]
    command += ["--engine", str(case.engine), "--clips", str(server.config.eval.manifest)]
    stage.say(f"{case.name} …")
    before, new, began_s = _tritons(server), set[int](), time.monotonic()
    with subprocess.Popen([*command, *case.flags], stderr=subprocess.PIPE, text=True) as process:
        if case.killed:
            while process.poll() is None and not (new := _tritons(server) - before):
                time.sleep(0.05)
            for pid in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
        words = process.communicate()[1].strip()
    passed, limit = (process.returncode == 0) == case.good, "taken" if case.good else "refused"
    stage.decide(f"{case.name}, s", time.monotonic() - began_s, limit, passed, words[-300:])


def _tritons(server: RunningServer) -> set[int]:
    return {pid for role, pid in server.pids().items() if role.startswith("tritonserver")}


# ---------------------------------------------------------------- engines


def _cases(server: RunningServer) -> list[_Case]:
    """Make engines of each kind in the server's folder."""
    own, folder = Path(server.config.engine).absolute(), server.folder
    other = shutil.copytree(own, folder / "other")

    def bad(name: str, spoil: Callable[[Path], None]) -> Path:
        spoil(shutil.copytree(own, folder / name))
        return folder / name

    random_scales, in_place = bad("random", _randomize), ("--in-place",)
    return [
        _Case("1. a copy", other, good=True),
        _Case("2. truncated weights", bad("truncated", _truncate), good=False),
        _Case("3. the first again", own, good=True),
        _Case("4. random scales", random_scales, good=False),
        _Case("5. killed while it starts", other, good=False, killed=True),
        _Case("6. no such folder", folder / "none", good=False),
        _Case("7. in place", own, good=True, flags=in_place),
        _Case("8. random scales, in place", random_scales, good=False, flags=in_place),
    ]


def _truncate(engine: Path) -> None:
    with (engine / WEIGHTS_FILE).open("r+b") as file:
        file.truncate((engine / WEIGHTS_FILE).stat().st_size - 1000)


def _randomize(engine: Path) -> None:
    """Give every matrix wrong scales, or wrong weights if it has none, with the right hash."""
    path, manifest = engine / WEIGHTS_FILE, engine / "engine.json"
    tensors = load_file(path)
    for name, values in tensors.items():
        if name.endswith(".scale") or (name.endswith(".weight") and values.dim() == 2):
            noise = torch.rand(values.shape, generator=torch.Generator().manual_seed(0))
            tensors[name] = (noise * 0.1).to(values.dtype) if values.is_floating_point() else values
    save_file(tensors, path)
    facts = json.loads(manifest.read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    facts["files"][WEIGHTS_FILE] = {"sha256": digest, "bytes": path.stat().st_size}
    manifest.write_text(json.dumps(facts))
