"""Engines exchanged under a steady load: good ones, bad ones, and one that is killed midway.

Every request has one answer, and so has every utterance of a live session that lasts all the time.
A bad engine changes nothing for any client.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file
from websockets.exceptions import WebSocketException

from eval.clients import CLIENTS, Answer, Ask, Client, counted, live_session, utterance
from eval.processes import Watch, tree_memory_bytes
from eval.record import Check
from eval.server import Addresses, samples, total
from eval.soak.stage import Found, Stage, files_of
from serve.contract.codec import to_json
from serve.contract.errors import EarshotError
from serve.contract.manifest import WEIGHTS_FILE

_CALM_S = 20.0  # before the first exchange and after the last
_LIMIT_S = 180.0  # longest wait of a client
_BETWEEN_S = 2.0  # two exchanges
# Jobs are left out: they would wait for requests, which never pause here.
_CLIENTS = tuple(client for name, client in CLIENTS.items() if name != "job")


@dataclasses.dataclass(frozen=True)
class _Case:
    """An exchange, and whether it must succeed."""

    name: str
    engine: Path
    good: bool
    killed: bool = False  # the Triton that starts
    flags: tuple[str, ...] = ()


class _ReloadClients:
    """Clients that ask without a pause, one of them in a live session."""

    def __init__(self, at: Addresses, ask: Ask) -> None:
        self.answers: list[tuple[float, Answer]] = []  # with their start
        self.utterances = self.completed = 0
        self.session_error = ""
        self._at, self._ask = at, ask
        self._stopped = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Send requests during a `with` block; its end waits for the last answers."""
        with ThreadPoolExecutor(len(_CLIENTS) + 1) as pool:
            for client in _CLIENTS:
                pool.submit(self._ask_on, client)
            pool.submit(self._speak)
            try:
                yield
            finally:
                self._stopped.set()

    def between(self, begin_s: float, end_s: float) -> list[Answer]:
        """Return the answers of requests that began then."""
        return [answer for began_s, answer in self.answers if begin_s <= began_s < end_s]

    def _ask_on(self, client: Client) -> None:
        while not self._stopped.is_set():
            began_s = time.monotonic()
            self.answers.append((began_s, client(self._at, self._ask)))

    def _speak(self) -> None:
        """Say one utterance after another in one session."""
        try:
            with live_session(self._at, _LIMIT_S) as socket:
                while not self._stopped.is_set():
                    self.utterances += 1
                    for message in utterance(self._ask):
                        socket.send(message)
                    self.completed += _completed(socket)
        except (OSError, WebSocketException) as error:
            self.session_error = repr(error)


def _completed(socket: Any) -> int:
    """Count the answers to an utterance; the last event confirms that the silence is cleared."""
    count, kind = 0, ""
    while kind != "cleared":
        event = json.loads(socket.recv(timeout=_LIMIT_S))
        kind = str(event["type"]).rpartition(".")[2]
        if kind in ("completed", "failed"):
            count += kind == "completed"
            socket.send(to_json({"type": "input_audio_buffer.clear"}))
    return count


def reloads(stage: Stage) -> Found:
    """Exchange the engine under load."""
    own, cases = Path(stage.server.config.engine).absolute(), _cases(stage)
    clients = _ReloadClients(stage.at, files_of(stage.settings.clips)[0].ask(_LIMIT_S))
    during: dict[str, list[Answer]] = {"during": [], "during, in place": []}
    with Watch(lambda: tree_memory_bytes(stage.server.process.pid)) as memory, clients.running():
        began_s = time.monotonic()
        time.sleep(_CALM_S)
        alone_bytes, exchanges_s = memory.peak_bytes, time.monotonic()
        for case in cases:
            begin_s = time.monotonic()
            status, said = _exchange(stage, case)
            end_s = time.monotonic()
            during["during, in place" if case.flags else "during"] += clients.between(
                begin_s, end_s
            )
            yield f"{case.name}: took, s", end_s - begin_s
            yield Check(
                f"{case.name}: is {'taken' if case.good else 'refused'}",
                (status == 0) == case.good,
                next((line for line in said if line.startswith("error: ")), said[-1]),
            )
            time.sleep(_BETWEEN_S)
        after_s = time.monotonic()
        time.sleep(_CALM_S)
    for when, answers in {
        "before": clients.between(began_s, exchanges_s),
        **during,
        "after": clients.between(after_s, time.monotonic()),
    }.items():
        yield from _latency(when, answers)
    answers = [answer for _, answer in clients.answers]
    good = all(answer.kind == "answered" for answer in answers)
    yield Check("every request has one answer", good, counted(answers))
    texts = {answer.text for answer in answers if answer.kind == "answered"}
    yield "different texts of the one file", len(texts)
    yield Check(
        "every utterance of the session that lasts all the time is completed once",
        clients.utterances == clients.completed > 0 and not clients.session_error,
        f"{clients.completed} of {clients.utterances}. {clients.session_error}",
    )
    yield "memory before, MiB", alone_bytes / 2**20
    yield "memory at most, MiB", memory.peak_bytes / 2**20
    page = stage.server.page()
    outcomes = samples(page, "earshot_reloads_total")
    reported = {sample.labels["outcome"]: int(sample.value) for sample in outcomes}
    taken = sum(case.good for case in cases)
    expected = {"ok": taken, "failed": len(cases) - taken}
    yield Check("the server counts them so", reported == expected, str(reported))
    restarts = total(page, "earshot_restarts_total")
    yield Check("no process had to be started again", restarts == 0, f"{restarts:g} restarts")
    yield Check("its own engine is as it was", own.is_dir(), str(own))


def _latency(when: str, answers: Sequence[Answer]) -> Found:
    yield f"{when}: requests", len(answers)
    yield f"{when}: not answered", sum(answer.kind != "answered" for answer in answers)
    for rank in (50, 99) if answers else ():
        seconds = [answer.seconds for answer in answers]
        yield f"{when}: p{rank}, s", float(np.percentile(seconds, rank))


def _exchange(stage: Stage, case: _Case) -> tuple[int, list[str]]:
    """Ask for it as an operator does; return the exit status and the lines of stderr."""
    command = [sys.executable, "-m", "serve", "reload", "--config", str(stage.server.toml)]
    command += ["--engine", str(case.engine), "--clips", str(stage.server.config.eval.manifest)]
    stage.say(f"{case.name} …")
    before, new = _tritons(stage), set[int]()
    with subprocess.Popen([*command, *case.flags], stderr=subprocess.PIPE, text=True) as process:
        if case.killed:
            while process.poll() is None and not (new := _tritons(stage) - before):
                time.sleep(0.05)
            for pid in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
        said = process.communicate()[1].splitlines()
    return process.returncode, said


def _tritons(stage: Stage) -> set[int]:
    return {pid for role, pid in stage.server.pids().items() if role.startswith("tritonserver")}


# ---------------------------------------------------------------- engines


def _cases(stage: Stage) -> list[_Case]:
    """Make engines of each kind in the server's folder."""
    config, folder = stage.server.config, stage.server.folder
    own, other = Path(config.engine).absolute(), folder / "other"
    precision = "int8" if config.build.precision == "fp16" else "fp16"
    command = [sys.executable, "-m", "build", "engine", "--checkpoint", config.build.checkpoint]
    command += ["--precision", precision, "--engine", str(other), "--no-verify"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EarshotError(f"the other engine cannot be built: {done.stderr.strip()}")

    def bad(name: str, spoil: Callable[[Path], None]) -> Path:
        shutil.copytree(own, folder / name)
        spoil(folder / name)
        return folder / name

    random_scales, in_place = bad("random", _randomize), ("--in-place",)
    return [
        _Case(f"1. {precision}", other, good=True),
        _Case("2. truncated weights", bad("truncated", _truncate), good=False),
        _Case("3. the first again", own, good=True),
        _Case("4. wrong hash", bad("hash", _flip), good=False),
        _Case("5. random scales", random_scales, good=False),
        _Case("6. killed while it starts", other, good=False, killed=True),
        _Case(f"7. {precision}", other, good=True),
        _Case("8. no such folder", folder / "none", good=False),
        _Case("9. in place", own, good=True, flags=in_place),
        _Case("10. random scales, in place", random_scales, good=False, flags=in_place),
    ]


def _truncate(engine: Path) -> None:
    with (engine / WEIGHTS_FILE).open("r+b") as file:
        file.truncate((engine / WEIGHTS_FILE).stat().st_size - 1000)


def _flip(engine: Path) -> None:
    weights = bytearray((engine / WEIGHTS_FILE).read_bytes())
    weights[-1] ^= 1
    (engine / WEIGHTS_FILE).write_bytes(weights)


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
