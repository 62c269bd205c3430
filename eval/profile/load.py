"""A fixed load: the same requests, some at a time, through a transcriber in this process."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from build.clips import Clip
from eval.config import Config, changed
from eval.random_whisper.engine import random_engine, write_engine
from eval.random_whisper.shapes import published_shape
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine, Manifest, open_engine
from serve.contract.errors import UnavailableError
from serve.contract.messages import Request, Transcript
from serve.runtime.open import open_runtime
from serve.runtime.protocol import Gauges, Runtime
from serve.transcriber.loop import Transcriber
from serve.transcriber.open import open_transcriber


@dataclasses.dataclass(frozen=True)
class Done:
    """What came of the load."""

    answers: tuple[Transcript, ...]
    before: Gauges  # of the runtime
    after: Gauges


class Load:
    """Requests for the text of clips, one for each, over and over as many as there are to be.

    Args:
        transcriber: answers them.
        runtime: behind it.
        clips: in this order.
        requests: how many.
        at_once: how many at a time.
        words: whether their words are timed.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        runtime: Runtime,
        clips: Sequence[Clip],
        requests: int,
        at_once: int,
        words: bool,
    ) -> None:
        self._transcriber = transcriber
        self._runtime = runtime
        self._at_once = at_once
        files = [clip.path.read_bytes() for clip in clips]
        self._requests = [
            Request(files[i % len(files)], word_timestamps=words) for i in range(requests)
        ]

    def warm_up(self) -> None:
        """Answer as many as there are at a time.

        Raises:
            EarshotError: one failed.
        """
        self._answer(self._requests[: self._at_once])

    def run(self) -> Done:
        """Answer all.

        Raises:
            EarshotError: one failed.
        """
        before = self._runtime.gauges()
        answers = self._answer(self._requests)
        return Done(tuple(answers), before, self._runtime.gauges())

    def _answer(self, requests: Sequence[Request]) -> list[Transcript]:
        with ThreadPoolExecutor(self._at_once) as pool:
            return list(pool.map(self._transcriber.transcribe, requests))


@contextlib.contextmanager
def opened(config: Config, random_weights: bool) -> Iterator[tuple[Transcriber, Runtime, Manifest]]:
    """Open the config's engine, or one with random weights, for the length of a block.

    Random weights say as many tokens as they may, once, for every window.

    Raises:
        EarshotError: it cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(config.engine)
        if random_weights:
            config = changed(config, "transcriber", temperatures=(0.0,), language_tries=1)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="earshot-")))
            engine = random_engine(published_shape(config.build.checkpoint), config.build.precision)
            try:
                write_engine(engine, folder, config.runtime.device)
            except OSError as error:
                raise UnavailableError(
                    f"cannot write an engine to {folder}: {error.strerror}; free some space there "
                    "or set TMPDIR"
                ) from error
        runtimes: list[Runtime] = []

        def start(engine: Engine, runtime: RuntimeConfig) -> Runtime:
            runtimes.append(open_runtime(engine, runtime))
            return runtimes[0]

        transcriber = stack.enter_context(open_transcriber(config, str(folder), start))
        yield transcriber, runtimes[0], open_engine(folder).manifest


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
