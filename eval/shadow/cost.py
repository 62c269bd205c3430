"""`python -m eval shadow-cost`: do clients wait longer where the shadow monitor works beside them?

A server without the monitor and one that samples every request get the same clips at the same
random moments, in turn. Samples pile up while there is work, and are answered again in pauses: a
client that comes then has the reference cancelled, and that is what it may wait for.
"""

import dataclasses
import random
import re
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from eval.config import Config
from eval.corpora.find import find_clips
from eval.measurement import Check, Result, Run, table
from serve.contract.fields import MAX_BEAMS
from serve.contract.files import read_bytes
from serve.supervisor.run import for_this_machine, running_server
from serve.wire.client import Client

MOST = 1.1
"""Times the p99 without the monitor that it may be with it."""
_PAGE_S = 10.0
_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Pass:
    """What clients of a server had."""

    share: float  # of the requests that were sampled
    took_s: tuple[float, ...]  # each request
    compared: int
    yielded: int

    def percentile(self, percent: float, others: Sequence["Pass"] = ()) -> float:
        """Return a percentile of these seconds, and of others'."""
        return float(
            np.percentile([took for one in (self, *others) for took in one.took_s], percent)
        )


def measure_cost(run: Run, *, requests: int, rate: float, passes: int) -> Result:
    """Time the same requests with and without the monitor.

    Args:
        run: of a config whose [shadow] names a reference; else it is the engine with a wide beam.
        requests: of each pass.
        rate: requests a second.
        passes: of each way, in turn.

    Raises:
        EarshotError: a server does not start, or a request fails.
    """
    clips = [read_bytes(Path(clip.path)) for clip in find_clips(run.config.eval.manifest).clips]
    found: dict[float, list[Pass]] = {0.0: [], 1.0: []}
    for number in range(passes):
        for share, of_share in found.items():
            one = _timed(_with_share(run.config, share), clips, requests, rate, seed=number)
            of_share.append(one)
            run.say(f"pass {number + 1}, share {share:g}: p99 {one.percentile(99):.3f} s")
    without, watched = found[0.0], found[1.0]
    times = watched[0].percentile(99, watched[1:]) / without[0].percentile(99, without[1:])
    compared = sum(one.compared for one in watched)
    check = Check(
        f"p99 with the monitor is at most {MOST:g} times that without",
        times <= MOST if compared else None,
        f"{times:.2f} times; {compared} samples were compared meanwhile",
    )
    return Result(found, (check,), _text(found))


def _with_share(config: Config, share: float) -> Config:
    shadow = dataclasses.replace(config.shadow, share=share)
    if not (shadow.engine or shadow.model or shadow.beam_size):
        shadow = dataclasses.replace(shadow, beam_size=MAX_BEAMS)
    return dataclasses.replace(config, shadow=shadow, server=for_this_machine(config.server))


def _timed(config: Config, clips: Sequence[bytes], requests: int, rate: float, seed: int) -> Pass:
    chance = random.Random(seed)
    with (
        running_server(config) as server,
        Client(server.grpc) as client,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):

        def ask(audio: bytes) -> float:
            began_s = time.monotonic()
            client.transcribe(audio)
            return time.monotonic() - began_s

        answers = []
        for _ in range(requests):
            time.sleep(chance.expovariate(rate))
            answers.append(pool.submit(ask, chance.choice(clips)))
        took_s = tuple(answer.result() for answer in answers)
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=_PAGE_S) as page:
            text = page.read().decode()
        server.require_unbroken()
    return Pass(config.shadow.share, took_s, _count("compared", text), _count("yielded", text))


def _count(name: str, page: str) -> int:
    values = re.findall(rf"^earshot_shadow_{name}_total(?:{{.*}})? (\S+)", page, re.MULTILINE)
    return int(sum(map(float, values)))


def _text(found: dict[float, list[Pass]]) -> str:
    rows = []
    for share, passes in found.items():
        first, *others = passes
        seconds = [f"{first.percentile(percent, others):.3f}" for percent in (50, 95, 99)]
        counts = [
            str(sum(getattr(one, name) for one in passes)) for name in ("compared", "yielded")
        ]
        rows.append((f"{share:g}", str(sum(len(one.took_s) for one in passes)), *seconds, *counts))
    return table(("share", "requests", "p50 s", "p95 s", "p99 s", "compared", "yielded"), rows)
