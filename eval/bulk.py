"""`python -m eval bulk`: the same files through Ray Data and through a plain loop, in turn.

Each pass is a process of its own, from the opening of the engine to the last answer. The loop is
what one would write without Ray: one engine with all cores, and a file for each of its slots.
"""

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eval.config import Config
from eval.corpora.find import find_clips
from eval.measurement import Check, Result, Run
from eval.processes import ChildProcess, Send
from serve.bulk.plan import Output, shards_of
from serve.cli.bulk import SHARD_FILES
from serve.contract.errors import EarshotError
from serve.contract.messages import Request

LEAST = 0.9  # of the loop's throughput, opening the engines apart


@dataclasses.dataclass(frozen=True)
class Pass:
    """The time that all files took one way."""

    engines: int
    start_s: float  # until the first engine was open
    worked_s: float  # from then on
    failed: int  # files without a transcript

    @property
    def whole_s(self) -> float:
        """Return the time of all of it."""
        return self.start_s + self.worked_s


@dataclasses.dataclass(frozen=True)
class Cost:
    """All that was measured."""

    audio_s: float  # of a pass
    files: int  # of a pass
    loop: tuple[Pass, ...]
    bulk: tuple[Pass, ...]

    @property
    def share(self) -> float:
        """Divide the throughput of bulk by that of the loop, opening the engines apart; medians."""
        return _median(self.loop, "worked_s") / _median(self.bulk, "worked_s")

    @property
    def whole_share(self) -> float:
        """Divide them from the start of Ray, and from that of the loop's engine."""
        return _median(self.loop, "whole_s") / _median(self.bulk, "whole_s")

    @property
    def check(self) -> Check:
        """Check that Ray takes no more than it may."""
        name = f"serve bulk has at least {LEAST:.0%} of the loop's throughput"
        return Check(name, self.share >= LEAST, f"{self.share:.1%}")

    def __str__(self) -> str:
        """Write lines of the report."""
        lines = [f"{self.files} files, {self.audio_s:.1f} s of audio, {len(self.loop)} passes"]
        for name, passes in (("plain loop", self.loop), ("serve bulk", self.bulk)):
            worked, start = _median(passes, "worked_s"), _median(passes, "start_s")
            lines.append(
                f"{name}  {self.audio_s / worked:6.1f} RTFx: {worked:.1f} s, after {start:.1f} s "
                f"until the first of {passes[0].engines} engines was open"
            )
        shares = f"{100 * self.share:.1f} % of the loop's throughput"
        return "\n".join([*lines, f"{shares}, {100 * self.whole_share:.1f} % with the start"])


def _median(passes: Sequence[Pass], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in passes))


def bulk(run: Run, *, manifest: str, times: int, passes: int) -> Result:
    """Transcribe all files each way as often as there are passes.

    Args:
        run: its config says how an engine runs.
        manifest: names the files.
        times: how often a pass has each of them.
        passes: of each way.

    Raises:
        EarshotError: an engine does not open, or files could not be transcribed.
    """
    clips, config = find_clips(manifest).clips, run.config
    files = times * [str(clip.path.absolute()) for clip in clips]
    limit_s = config.transcriber.request_timeout_s * len(files)
    by_way: dict[str, list[Pass]] = {"plain loop": [], "serve bulk": []}
    for number in range(passes):
        for name, work in (("plain loop", by_loop), ("serve bulk", by_bulk)):
            with ChildProcess(name, work, (config, files), None) as child:
                result = child.receive(limit_s)
                child.receive(limit_s)  # its end
            if result.failed:
                raise EarshotError(f"{name}: {result.failed} of {len(files)} files failed")
            run.say(
                f"pass {number + 1}: {name}: {result.start_s:.1f} s, then {result.worked_s:.1f} s"
            )
            by_way[name].append(result)
    audio_s = times * sum(clip.duration_s for clip in clips)
    cost = Cost(audio_s, len(files), *map(tuple, by_way.values()))
    return Result(cost, (cost.check,), str(cost))


def by_loop(send: Send, config: Config, files: Sequence[str]) -> None:
    """Transcribe files by an engine in this process; sends a `Pass`."""
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

    began = time.monotonic()
    with contextlib.closing(open_transcriber(config)) as transcriber:
        opened = time.monotonic()

        def fails(file: str) -> bool:
            try:
                transcriber.transcribe(Request(Path(file).read_bytes()))
            except EarshotError:
                return True
            return False

        with ThreadPoolExecutor(config.runtime.slots) as pool:
            failed = sum(pool.map(fails, files))
        send(Pass(1, opened - began, time.monotonic() - opened, failed))


def by_bulk(send: Send, config: Config, files: Sequence[str]) -> None:
    """Transcribe files as `serve bulk` does on this machine; sends a `Pass`."""
    from serve.bulk import cluster  # noqa: PLC0415 - loads Ray and torch

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="earshot-bulk-") as folder, cluster.connected(None):
        engine = os.path.abspath(config.engine)
        engines = cluster.engines_of(dataclasses.replace(config, engine=engine), None)
        shards = shards_of(list(files), SHARD_FILES)
        first, failed = float("inf"), 0
        output = Output(folder, "jsonl")
        for report in cluster.transcribe(shards, engines, Request(b""), output):
            first = min(first, time.monotonic() - report.seconds)
            failed += report.failed
        send(Pass(engines.count, first - began, time.monotonic() - first, failed))
