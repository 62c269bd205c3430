"""The cost of several rows a slot: a decoder step, its cross-attention, the choice behind it.

Every slot has as many rows as every other, as if all searched with that beam. A slot's
cross-attention keys and values, most of what a step reads, are read once for all its rows, so the
ideal grows little with them. On a GPU each figure is of a replayed CUDA graph.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from eval.bench.choice import PHRASES, choice_of
from eval.bench.floor import Ceilings, median_seconds, step_bytes
from eval.bench.plan import Plan
from eval.bench.table import OURS, Measurement, refused
from eval.bench.workloads import release_memory
from eval.measurement import Say
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.fields import MAX_BEAMS
from serve.native.decoder import Cache
from serve.native.kernels.choose import choose
from serve.native.kernels.feed import Feed, Groups
from serve.native.network import Whisper

ROWS = (1, 5, 8, 16)  # a slot
AGE = 64  # tokens that each row has


def run_steps(
    engine: Engine, config: RuntimeConfig, plan: Plan, ceilings: Ceilings, progress: Say
) -> Iterator[Measurement]:
    """Yield some lines for each number of slots and of rows a slot; or one where memory ends."""
    device = torch.device(config.device)
    release_memory(config.device)
    counts = (1, *plan.slots)
    most = max(counts) * max(ROWS)
    ops = choose(
        config.kernels, device, engine.manifest.dims, most, compute_type=config.compute_type
    )
    with torch.inference_mode():
        weights = engine.load_weights(device)
        network = Whisper(engine.manifest.dims, weights, device, ops)
        for slots in counts:
            for rows in ROWS:
                progress(f"steps: {slots} slots, {rows} rows each")
                yield from _measured(network, engine, config, slots, rows, ceilings)


def _measured(
    network: Whisper,
    engine: Engine,
    config: RuntimeConfig,
    slots: int,
    rows: int,
    ceilings: Ceilings,
) -> Iterator[Measurement]:
    """Measure once, so that the caches go before the next ones are made."""
    system, device = f"{OURS}, {slots} slots", network.device
    names = (f"step, rows a slot: {rows}", f"cross-attention, rows: {rows}")
    release_memory(config.device)
    try:
        cache = network.new_cache(slots, slots * rows, config.cross_kv)
        feed = _feed(slots, rows, network.dims.n_text_ctx, device)
        step_s = _seconds(lambda: network.step(feed, cache), network)
        cross_s = _seconds(lambda: _cross_attention(network, feed, cache), network)
    except torch.OutOfMemoryError as error:
        yield refused(names[0], system, "ms", error)
        return
    dims, manifest = network.dims, engine.manifest
    size = step_bytes(dims, manifest.precision, config.cross_kv, slots, AGE, rows)
    yield Measurement(
        names[0],
        system,
        1e3 * step_s,
        "ms",
        1e3 * size / ceilings.memory,
        f"{slots * rows} tokens fed to rows of {AGE}; without the choice of the next",
    )
    ideal_s = cache.cross[0].nbytes / ceilings.memory
    yield Measurement(
        names[1],
        system,
        1e3 * cross_s / dims.n_text_layer,
        "ms",
        1e3 * ideal_s,
        f"of one of {dims.n_text_layer} layers; {cache.cross.dtype} keys and values",
    )
    if rows <= MAX_BEAMS:
        yield from _choices(network, engine, slots, rows)


def _choices(network: Whisper, engine: Engine, slots: int, rows: int) -> Iterator[Measurement]:
    """A line for the choice without phrases, and one for that with many."""
    for phrases in (0, PHRASES):
        with_phrases = phrases > 0
        choose = choice_of(network, engine, slots, rows, AGE, with_phrases)
        yield Measurement(
            f"choice, rows a slot: {rows}" + (f", {phrases} phrases" if with_phrases else ""),
            f"{OURS}, {slots} slots",
            1e3 * _seconds(choose, network),
            "ms",
            None,
            f"of the next tokens of {slots * rows} rows",
        )


def _feed(slots: int, rows: int, n_text_ctx: int, device: torch.device) -> Feed:
    """Return the feed of the token at AGE of every row."""
    everyone = torch.arange(slots * rows, device=device)
    each = torch.arange(slots, device=device)
    groups = Groups(
        slots=each,
        first=each * rows,
        count=torch.full_like(each, rows),
        most=rows,
        direct=rows == 1,
    )
    ids = torch.zeros((len(everyone), n_text_ctx), dtype=torch.int64, device=device)
    source = None if rows == 1 else everyone.int()[:, None].repeat(1, n_text_ctx)
    positions = torch.full_like(everyone, AGE)
    return Feed(ids, everyone, positions, groups, source, False, AGE + 1)


def _cross_attention(network: Whisper, feed: Feed, cache: Cache) -> None:
    """Run that of every layer, one after the other, as in a step."""
    query: Any = torch.zeros(
        (len(feed.rows), network.dims.n_text_state), device=network.device, dtype=network.dtype
    )
    for layer in range(network.dims.n_text_layer):
        network.ops.decoder.cross_attention(query, cache.cross_kv(layer), feed.groups)


def _seconds(work: Callable[[], object], network: Whisper) -> float:
    """Time work that the device does by itself, where kernels allow."""
    if network.ops.name != "triton":
        return median_seconds(work, network.device)
    with torch.cuda.device(network.device):
        work()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return median_seconds(graph.replay, network.device)
