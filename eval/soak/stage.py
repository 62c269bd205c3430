"""The server under attack, with its clips."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from build.clips import Clip
from eval.clients import Answer, Ask, by_grpc
from eval.config import Config
from eval.record import Say
from eval.server import POLL_S, Addresses, RunningServer, running


@dataclasses.dataclass(frozen=True)
class Stage:
    """A running server, and what its clients send."""

    server: RunningServer
    clips: tuple[Clip, ...]
    say: Say
    seed: int = 0

    @property
    def at(self) -> Addresses:
        """Return where it listens."""
        return self.server.at

    @property
    def config(self) -> Config:
        """Return its config."""
        return self.server.config

    @property
    def short(self) -> bytes:
        """Read the shortest clip with speech that is a file of its own."""
        spoken = [clip for clip in self.clips if clip.text]
        return min(spoken, key=lambda clip: clip.duration_s).path.read_bytes()

    def ask(self, patience_s: float) -> Answer:
        """Send a short clip over gRPC and wait."""
        return by_grpc(self.at, Ask(self.short, patience_s=patience_s))

    def answers_again(self, timeout_s: float) -> tuple[float, Answer]:
        """Ask until there is a transcript; return the seconds it took and the last answer."""
        began, last = time.monotonic(), Answer("lost", "the server has ended", 0.0)
        while (left_s := timeout_s - (time.monotonic() - began)) > 0:
            if self.server.process.poll() is not None:
                break
            last = self.ask(left_s)
            if last.kind == "answered":
                break
            time.sleep(POLL_S)
        return time.monotonic() - began, last


@contextlib.contextmanager
def stage(
    config: Config, clips: tuple[Clip, ...], say: Say, *, keys: int = 0, seed: int = 0
) -> Iterator[Stage]:
    """Run a server; arguments and errors as of `running`."""
    with running(config, keys=keys) as server:
        yield Stage(server, clips, say, seed)
