"""What is tried again, how, and when no more; the passes are played, no Ray."""

import pytest

from serve.bulk import store
from serve.bulk.sharding import BulkOutput, Shard
from serve.bulk.worker import ShardReport
from serve.contract.config import Config
from serve.contract.errors import EarshotError
from serve.contract.messages import Request

SHARDS = [Shard(number, (f"{number}a", f"{number}b")) for number in range(3)]


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Runs all shards by a function that plays what one is; gives the reports and the passes."""
    from serve.bulk import cluster  # which takes seconds, Ray's

    output = BulkOutput(str(tmp_path), "jsonl")
    passes = []

    def run(play):
        def one_pass(shards, in_hand, *_):
            passes.append([shard.number for shard in shards])
            for shard in shards:
                if (report := play(shard, in_hand, output)) is not None:
                    yield report

        monkeypatch.setattr(cluster, "_pass", one_pass)
        engines = cluster.EngineCapacity(1, Config(), 1, 0)
        return list(cluster.transcribe(SHARDS, engines, Request(b""), output))

    return run, passes


def do(shard, output):
    store.write(output.transcripts(shard.number), b"")
    return ShardReport(shard.number, len(shard.files))


def test_a_shard_that_was_lost_is_done_by_another_pass(played):
    run, passes = played

    def play(shard, in_hand, output):
        lost = shard.number == 1 and len(passes) < 3
        return ShardReport(1, undone="the device is gone") if lost else do(shard, output)

    reports = run(play)
    assert passes == [[0, 1, 2], [1], [1]]
    assert [report.number for report in reports if report.undone] == [1, 1]
    assert sum(report.files for report in reports) == 6


def test_what_nobody_can_do_ends_the_run_and_is_named_and_its_neighbour_is_done(played):
    run, passes = played

    def play(shard, in_hand, output):
        if shard.number == 0:
            return ShardReport(0, undone="the device is gone")
        return None if shard.number == 1 and in_hand > 1 else do(shard, output)

    with pytest.raises(
        EarshotError, match=r"1 shards failed repeatedly, such as 000000, .*0a: the device is gone"
    ):
        run(play)
    assert passes == [[0, 1, 2], [0, 1], [0, 1], [0], [0], [0]]
