"""Decoder steps by themselves, on a CPU and a tiny shape."""

import dataclasses

import pytest
import torch

from eval.bench import steps
from eval.bench.floor import step_bytes
from eval.bench.steps import run_steps
from serve.native.network import Whisper


def test_every_number_of_rows_is_fed_and_measured(
    engine, cpu_config, plan, ceilings, quiet, monkeypatch
):
    fed = []
    step = Whisper.step

    def noted(self, feed, cache):
        fed.append((len(feed.groups.slots), len(feed.rows), cache.self_k.shape[1]))
        return step(self, feed, cache)

    monkeypatch.setattr(Whisper, "step", noted)
    monkeypatch.setattr(steps, "ROWS", (1, 3))
    plan = dataclasses.replace(plan, slots=(2,))
    rows = list(run_steps(engine, cpu_config.runtime, plan, ceilings, quiet))
    assert set(fed) == {(1, 1, 1), (1, 3, 3), (2, 2, 2), (2, 6, 6)}
    assert [(row.workload, row.system) for row in rows] == [
        (what, f"earshot, {slots} slots")
        for slots in (1, 2)
        for each in (1, 3)
        for what in (
            f"step, rows a slot: {each}",
            f"cross-attention, rows: {each}",
            f"choice, rows a slot: {each}",
            f"choice, rows a slot: {each}, 1000 phrases",
        )
    ]
    assert all(row.value > 0 and row.is_ours for row in rows)
    assert all(row.ideal > 0 for row in rows if "choice" not in row.workload)


def test_rows_share_what_a_slot_has(turbo):
    one, five = (step_bytes(turbo, "int8", "int8", 64, 64, rows) for rows in (1, 5))
    # 4 more rows of 64 keys and values, 4 layers of 1280 channels in FP16
    assert five - one == pytest.approx(64 * 4 * (4 * 2 * 1280 * 2 * 64))


def test_what_memory_does_not_do_is_said(engine, cpu_config, plan, ceilings, quiet, monkeypatch):
    def no_room(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Whisper, "new_cache", no_room)
    monkeypatch.setattr(steps, "ROWS", (1,))
    rows = list(run_steps(engine, cpu_config.runtime, plan, ceilings, quiet))
    assert [row.value for row in rows] == [None] * 3 and "no room" in rows[0].detail
