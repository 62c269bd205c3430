"""The stage of a scenario: its servers and clients, and the figures that decide whether they hold.

Every request of a client has one `RequestOutcome`; `Stage.apply_rules` counts the wrong ones.
"""

import contextlib
import dataclasses
import io
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import psutil
import soundfile

from build.clips import Clip
from eval.clients import CLIENTS, PATIENCE_S, Answer, Ask
from eval.config import EvaluationProduct
from eval.record import Check, Say
from eval.server import Addresses, RunningServer, running
from eval.soak.attacks import ATTACKS
from serve.contract.errors import EarshotError
from serve.contract.messages import Samples
from serve.speech import audio
from serve.speech.meter import AudioLimits
from serve.speech.rate import SAMPLE_RATE

_CLIPS = 3  # the shortest with speech
_FORMATS = {"wav": "WAV", "flac": "FLAC", "mp3": "MP3", "ogg": "OGG"}  # names of libsndfile
_MAX_CLIP_S = 600.0
_STOP_S = 30.0  # beyond the drain's limit
_GONE_S = 5.0  # for the last processes to end
_MIN_ASKS = 3
_SHOWN = 3  # wrong outcomes of a rule in the report
_SERVER_FAULT = re.compile(r"^5(?!03)\d\d |^(INTERNAL|UNKNOWN|DATA_LOSS)\b")
_FOLDER = re.compile(r"/\S*/earshot-\w+(?=/models)")  # a server's files, in command lines
_SHARED = Path("/dev/shm")


@dataclasses.dataclass(frozen=True)
class RequestOutcome:
    """One request and its only final answer.

    Attributes:
        name: the API and the file, or the attack.
        answer: its end.
        text: the first text of the same file and API; None for a hostile client.
        patient: whether the client waited for the answer.
        disrupted: whether the server was disrupted meanwhile.
    """

    name: str
    answer: Answer
    text: str | None = None
    patient: bool = True
    disrupted: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.answer}"


def shown(value: float) -> str:
    """Write a number with at most three decimals."""
    return f"{round(value, 3) + 0:,.3f}".rstrip("0").rstrip(".")


@dataclasses.dataclass(frozen=True)
class SoakFigure(Check):
    """One row of a scenario's table; its name ends in the unit, `detail` has examples.

    Attributes:
        value: the measured value.
        limit: the limit of the value in words; "" if it has none.
    """

    value: float
    limit: str


@dataclasses.dataclass
class Stage:
    """The settings of a scenario, its outcomes and its figures. Threads may share it."""

    config: EvaluationProduct
    clips: Sequence[Clip]
    say: Say
    seed: int = 0
    minutes: float = 5.0
    may_refuse: bool = False  # whether a scenario's honest requests may be refused
    figures: list[SoakFigure] = dataclasses.field(default_factory=list)
    outcomes: list[RequestOutcome] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.files = files_of(self.clips)
        self.shortest_file = next(iter(self.files), "")
        self._texts: dict[tuple[str, str], str] = {}
        self._disrupted_until_s = -math.inf

    # ------------------------------------------------------------ figures

    def add(
        self, name: str, value: float, limit: str = "", passed: bool | None = True, detail: str = ""
    ) -> None:
        """Add a figure, or one with a limit and its verdict."""
        self.figures.append(SoakFigure(name, passed, detail, float(value), limit))

    def at_most(self, name: str, value: float, limit: float, detail: str = "") -> None:
        """Add a figure and the largest value that it may have."""
        self.add(name, value, f"at most {shown(limit)}", value <= limit, detail)

    def at_least(self, name: str, value: float, limit: float, detail: str = "") -> None:
        """Add a figure and the smallest value that it may have."""
        self.add(name, value, f"at least {shown(limit)}", value >= limit, detail)

    def none_of(self, name: str, wrong: Sequence[object]) -> None:
        """Add the count of things that must not be, with examples."""
        self.at_most(name, len(wrong), 0, "; ".join(map(str, wrong[:_SHOWN])))

    def apply_rules(self) -> None:
        """Add the number of requests, and for each rule those that broke it."""
        if not self.outcomes:
            return
        honest = [outcome for outcome in self.outcomes if outcome.text is not None]
        patient = [outcome for outcome in honest if outcome.patient]
        steady = [outcome for outcome in patient if not outcome.disrupted]
        answered = _of_kind(self.outcomes, "answered")
        self.add("requests", len(self.outcomes))
        self.add("requests answered", len(answered))
        other_texts = [case for case in answered if case.text not in (None, case.answer.text)]
        self.none_of("texts that differ from the first one of their file", other_texts)
        in_vain = [outcome for outcome in patient if outcome.answer.waited_in_vain]
        self.none_of("clients that waited in vain", in_vain)
        self.none_of("honest requests lost", _of_kind(steady, "lost"))
        self.none_of("honest requests failed", _of_kind(steady, "failed"))
        refused = _of_kind(steady, "refused")
        if not self.may_refuse:
            self.none_of("honest requests refused", refused)
        by_http = [case for case in refused if case.answer.text.startswith(("429 ", "503 "))]
        without_delay = [case for case in by_http if case.answer.retry_after_s is None]
        self.none_of("HTTP refusals without Retry-After", without_delay)
        hostile = [case for case in self.outcomes if case.text is None and not case.disrupted]
        errors = [outcome for outcome in hostile if _SERVER_FAULT.match(outcome.answer.text)]
        self.none_of("server errors for hostile clients", errors)

    # ------------------------------------------------------------ servers and clients

    @contextlib.contextmanager
    def server(
        self, config: EvaluationProduct | None = None, *, keys: int = 0
    ) -> Iterator[RunningServer]:
        """Run a server with the stage's config or another one; it must leave nothing behind.

        Raises:
            EarshotError: it did not start, or ended by itself.
        """
        with running(config or self.config, keys=keys) as server:
            try:
                yield server
            except BaseException:  # clients may still wait; their requests end with the server
                self._disrupted_until_s = math.inf
                raise
            if failure := server.process.failure():
                raise EarshotError(f"the server ended by itself: {failure}")
            processes, folders = list(server.processes().values()), set[str]()
            for process in processes:
                with contextlib.suppress(psutil.Error):  # it has just ended
                    folders.update(_FOLDER.findall(" ".join(process.cmdline())))
            seconds = server.stop()
            limit_s = server.config.server.drain_timeout_s + _STOP_S
            self.at_most("time to stop after SIGTERM, s", seconds, limit_s)
            self.none_of("processes left", psutil.wait_procs(processes, _GONE_S)[1])
            shared = [path for name in folders for path in _SHARED.glob(f"{Path(name).name}*")]
            self.none_of("files left", [*filter(os.path.exists, folders), *shared])

    def send(
        self,
        server: RunningServer,
        api: str = "KServe gRPC",
        file: str = "",
        *,
        addresses: Addresses | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Answer:
        """Send an honest request, wait for its answer and note the outcome.

        Args:
            server: the server.
            api: a name of `CLIENTS`.
            file: a name of `files`; "" is the shortest one.
            addresses: the server's, with the API key; None takes the first one.
            patience_s: the longest wait; a client that leaves before 60 s may have no answer.
        """
        began_s, file = time.monotonic(), file or self.shortest_file
        ask = dataclasses.replace(self.files[file], patience_s=patience_s)
        answer, text = CLIENTS[api](addresses or server.addresses[0], ask), ""
        if answer.kind == "answered":
            text = self._texts.setdefault((api, file), answer.text)
        disrupted, patient = began_s <= self._disrupted_until_s, patience_s >= PATIENCE_S
        self.outcomes.append(RequestOutcome(f"{api}, {file}", answer, text, patient, disrupted))
        return answer

    def attack(self, server: RunningServer, name: str) -> Answer:
        """Let a hostile client of `ATTACKS` act, and note the outcome."""
        began_s = time.monotonic()
        try:
            answer = ATTACKS[name](server.addresses[0], self.files[self.shortest_file])
        except OSError as error:  # the server does not listen now
            answer = Answer("lost", repr(error), time.monotonic() - began_s)
        disrupted = began_s <= self._disrupted_until_s
        self.outcomes.append(RequestOutcome(name, answer, disrupted=disrupted))
        return answer

    def send_for(self, server: RunningServer, seconds: float) -> list[float]:
        """Send the shortest file again and again, at least thrice; return the latencies (s)."""
        latencies, end_s = list[float](), time.monotonic() + seconds
        while time.monotonic() < end_s or len(latencies) < _MIN_ASKS:
            latencies.append(self.send(server).seconds)
        return latencies

    @contextlib.contextmanager
    def disruption(self) -> Iterator[None]:
        """Mark the time of a block: requests in it may be lost."""
        self._disrupted_until_s = math.inf
        try:
            yield
        finally:
            self._disrupted_until_s = time.monotonic()


@contextlib.contextmanager
def crowd(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Give threads for clients; leaving does not wait for them: the server's end ends them."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="soak")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _of_kind(outcomes: Sequence[RequestOutcome], kind: str) -> list[RequestOutcome]:
    return [outcome for outcome in outcomes if outcome.answer.kind == kind]


def files_of(clips: Sequence[Clip]) -> dict[str, Ask]:
    """Make files of the shortest clips with speech: each as WAV, FLAC, MP3, OGG and M4A.

    Raises:
        AudioError: a clip cannot be decoded.
    """
    files = {}
    spoken = sorted((clip for clip in clips if clip.text), key=lambda clip: clip.duration_s)
    for clip in spoken[:_CLIPS]:
        samples = audio.join_blocks(audio.decode(clip.path.read_bytes(), AudioLimits(_MAX_CLIP_S)))
        for ending, kind in _FORMATS.items():
            file = io.BytesIO()
            soundfile.write(file, samples, SAMPLE_RATE, format=kind)
            files[f"{clip.path.stem}.{ending}"] = Ask(file.getvalue(), samples=samples)
        files[f"{clip.path.stem}.m4a"] = Ask(_m4a(samples), samples=samples)
    return files


def _m4a(samples: Samples) -> bytes:
    """Encode AAC, which libsndfile cannot write."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as writer:
        stream = writer.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        writer.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()
