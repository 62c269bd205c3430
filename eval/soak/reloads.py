"""Engines exchanged under a steady load: good ones, bad ones, and one that is killed half-way.

Every request has one answer, and so has every utterance of a live session that lasts all along;
what goes wrong with a new engine changes nothing for anybody.
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
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from eval.clients import CLIENTS, LIVE, Answer, Ask, Client, counted, lost, utterance
from eval.memory import Watch, tree_memory_bytes
from eval.record import Check
from eval.server import Addresses, samples
from eval.soak.stage import Found, Stage, files_of
from serve.contract.codec import to_json
from serve.contract.errors import EarshotError
from serve.contract.manifest import WEIGHTS_FILE

_CALM_S = 20.0  # before the first exchange and after the last
_LIMIT_S = 180.0  # that a client waits
_BETWEEN_S = 2.0  # two exchanges
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class _Case:
    """An exchange, and whether it is to succeed."""

    name: str
    engine: Path
    good: bool
    killed: bool = False  # the Triton that starts
    flags: tuple[str, ...] = ()


class _Load:
    """Clients that ask without a pause, one of them in a live session, for a `with` block."""

    def __init__(self, at: Addresses, asked: Ask) -> None:
        self.answers: list[tuple[float, Answer]] = []  # and when they began
        self.utterances = self.completed = 0
        self.session_error = ""
        self._at = at
        self._asked = asked
        self._stopped = threading.Event()
        self._threads = [
            *(threading.Thread(target=self._ask, args=(client,)) for client in CLIENTS.values()),
            threading.Thread(target=self._speak),
        ]

    def __enter__(self) -> "_Load":
        """Begin, and return itself."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until everybody has their answer."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def between(self, begin_s: float, end_s: float) -> list[Answer]:
        """Return the answers of requests that began then."""
        return [answer for began_s, answer in self.answers if begin_s <= began_s < end_s]

    def _ask(self, client: Client) -> None:
        while not self._stopped.is_set():
            began_s = time.monotonic()
            try:
                answer = client(self._at, self._asked)
            except (OSError, WebSocketException) as error:
                answer = lost(error, began_s)
            self.answers.append((began_s, answer))

    def _speak(self) -> None:
        """Say one utterance after another in a session that lasts all along."""
        url = f"ws://{self._at.http}{LIVE}"
        try:
            with connect(url, open_timeout=_LIMIT_S, max_size=None, compression=None) as socket:
                while not self._stopped.is_set():
                    self.utterances += 1
                    for message in utterance(self._asked):
                        socket.send(message)
                    self.completed += _completed(socket)
        except (OSError, WebSocketException) as error:
            self.session_error = repr(error)


def _completed(socket: Connection) -> int:
    """Count the answers of an utterance; behind it the server says that it forgets the silence."""
    count, kind = 0, ""
    while kind != "cleared":
        event = json.loads(socket.recv(timeout=_LIMIT_S))
        kind = str(event["type"]).rpartition(".")[2]
        if kind in ("completed", "failed"):
            count += kind == "completed"
            socket.send(to_json({"type": "input_audio_buffer.clear"}))
    return count


def reloads(stage: Stage) -> Found:
    """Exchange the engine under load; yield figures and checks."""
    own, cases = Path(stage.config.engine).absolute(), _cases(stage)
    file = files_of(stage.clips)[0]
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}  # by being in place
    with (
        Watch(lambda: tree_memory_bytes(stage.server.process.pid)) as memory,
        _Load(stage.at, file.ask(_LIMIT_S)) as load,
    ):
        began_s = time.monotonic()
        time.sleep(_CALM_S)
        alone_bytes = memory.peak_bytes
        for case in cases:
            begin_s = time.monotonic()
            status, said = _exchange(stage, case)
            spans[bool(case.flags)].append((begin_s, time.monotonic()))
            yield f"{case.name}: took, s", time.monotonic() - begin_s
            yield Check(
                f"{case.name}: is {'taken' if case.good else 'refused'}",
                (status == 0) == case.good,
                next((line for line in said if line.startswith("error: ")), said[-1]),
            )
            time.sleep(_BETWEEN_S)
        after_s = time.monotonic()
        time.sleep(_CALM_S)
    yield from _told("before", load.between(began_s, spans[False][0][0]))
    for in_place, when in ((False, "during"), (True, "during, in place")):
        yield from _told(when, [each for span in spans[in_place] for each in load.between(*span)])
    yield from _told("after", load.between(after_s, time.monotonic()))
    answers = [answer for _, answer in load.answers]
    yield Check(
        "every request has one answer",
        all(answer.kind == "answered" for answer in answers),
        counted(answers),
    )
    texts = {answer.text for answer in answers if answer.kind == "answered"}
    yield "different texts of the one file", len(texts)
    yield Check(
        "every utterance of the session that lasts all along is completed once",
        load.utterances == load.completed > 0 and not load.session_error,
        f"{load.completed} of {load.utterances}. {load.session_error}",
    )
    yield "memory before, MiB", alone_bytes / _MIB
    yield "memory at most, MiB", memory.peak_bytes / _MIB
    counts = samples(stage.server.page(), "earshot_reloads_total")
    told = {sample.labels["outcome"]: int(sample.value) for sample in counts}
    good = sum(case.good for case in cases)
    wanted = {"ok": good, "failed": len(cases) - good}
    yield Check("the server counts them so", told == wanted, str(told))
    restarts = sum(
        sample.value for sample in samples(stage.server.page(), "earshot_restarts_total")
    )
    yield Check("nothing had to be started again", restarts == 0, f"{restarts:g} restarts")
    yield Check("its own engine is as it was", own.is_dir(), str(own))


def _told(when: str, answers: Sequence[Answer]) -> Iterator[tuple[str, float]]:
    seconds = sorted(answer.seconds for answer in answers)
    yield f"{when}: requests", len(seconds)
    yield f"{when}: not answered", sum(answer.kind != "answered" for answer in answers)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        if seconds:
            yield f"{when}: {name}, s", seconds[min(len(seconds) - 1, int(share * len(seconds)))]


def _exchange(stage: Stage, case: _Case) -> tuple[int, list[str]]:
    """Ask for it as an operator does; return the exit status and what was said."""
    command = [sys.executable, "-m", "serve", "reload", "--config", str(stage.server.toml)]
    command += ["--engine", str(case.engine), "--clips", str(Path(stage.config.eval.manifest))]
    stage.say(f"{case.name} …")
    before = set(_tritons(stage))
    with subprocess.Popen([*command, *case.flags], stderr=subprocess.PIPE, text=True) as process:
        if case.killed:
            while process.poll() is None and not (new := set(_tritons(stage)) - before):
                time.sleep(0.05)
            for pid in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
        said = process.communicate()[1].splitlines()
    return process.returncode, said


def _tritons(stage: Stage) -> list[int]:
    return [pid for role, pid in stage.server.pids().items() if role.startswith("tritonserver")]


# ---------------------------------------------------------------- engines


def _cases(stage: Stage) -> list[_Case]:
    """Make engines of each kind in the stage's folder."""
    own = Path(stage.config.engine).absolute()
    other = stage.server.folder / "other"
    precision = "int8" if stage.config.build.precision == "fp16" else "fp16"
    command = [sys.executable, "-m", "build", "engine", "--checkpoint"]
    command += [stage.config.build.checkpoint, "--precision", precision]
    done = subprocess.run(
        [*command, "--engine", str(other), "--no-verify"], capture_output=True, text=True
    )
    if done.returncode:
        raise EarshotError(f"the other engine cannot be built: {done.stderr.strip()}")

    def bad(name: str, spoil: Callable[[Path], None]) -> Path:
        folder = stage.server.folder / name
        shutil.copytree(own, folder)
        spoil(folder)
        return folder

    return [
        _Case(f"1. {precision}", other, good=True),
        _Case("2. truncated weights", bad("truncated", _truncate), good=False),
        _Case("3. the first again", own, good=True),
        _Case("4. wrong hash", bad("hash", _flip), good=False),
        _Case("5. random scales", bad("garbage", _garble), good=False),
        _Case("6. killed while it starts", other, good=False, killed=True),
        _Case(f"7. {precision}", other, good=True),
        _Case("8. no such folder", stage.server.folder / "none", good=False),
        _Case("9. in place", own, good=True, flags=("--in-place",)),
        _Case(
            "10. random scales, in place",
            stage.server.folder / "garbage",
            False,
            False,
            ("--in-place",),
        ),
    ]


def _truncate(engine: Path) -> None:
    with (engine / WEIGHTS_FILE).open("r+b") as file:
        file.truncate((engine / WEIGHTS_FILE).stat().st_size - 1000)


def _flip(engine: Path) -> None:
    weights = bytearray((engine / WEIGHTS_FILE).read_bytes())
    weights[-1] ^= 1
    (engine / WEIGHTS_FILE).write_bytes(weights)


def _garble(engine: Path) -> None:
    """Give every matrix wrong scales, or wrong weights where it has none, with the right hash."""
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
