"""What Ray costs beside a plain loop: both ways hear the same files; what counts as good."""

import json

import pytest

from eval.bulk import Cost, Pass, bulk
from eval.config import Config
from serve.contract.errors import EarshotError
from tests.serving import audio_file


@pytest.fixture
def config(nano_config):
    return Config(**vars(nano_config()))


def manifest(folder, *files):
    for name, content in files:
        (folder / name).write_bytes(content)
    lines = [{"file": name, "text": "some", "language": "en", "duration": 1.0} for name, _ in files]
    path = folder / "clips.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.mark.nightly
def test_both_ways_transcribe_every_file(config, tmp_path, run_of):
    clips = manifest(tmp_path, ("a.flac", audio_file(1.0)), ("b.flac", audio_file(1.0, seed=1)))
    said = []
    cost = bulk(run_of(config, "bulk", said), manifest=clips, times=2, passes=1).figures
    assert (cost.files, cost.audio_s) == (4, 4.0)
    for one in (*cost.loop, *cost.bulk):
        assert one.engines >= 1 and one.start_s > 0 and one.worked_s > 0
    assert len(said) == 2


def test_a_file_that_fails_is_no_throughput(config, tmp_path, run_of):
    clips = manifest(tmp_path, ("a.wav", b"no audio"))
    with pytest.raises(EarshotError, match="plain loop: 1 of 1 files failed"):
        bulk(run_of(config), manifest=clips, times=1, passes=1)


def test_shares_are_of_medians_with_the_start_and_without():
    loop = (Pass(1, 1.0, 9.0, 0), Pass(1, 1.0, 90.0, 0), Pass(1, 1.0, 9.0, 0))
    cost = Cost(90.0, 10, loop, (Pass(1, 5.0, 10.0, 0),) * 3)
    assert (cost.share, cost.whole_share) == (0.9, pytest.approx(10 / 15))
    assert cost.check.passed
    assert "90.0 % of the loop's throughput, 66.7 % with the start" in str(cost)
    assert not Cost(90.0, 10, loop, (Pass(1, 5.0, 10.1, 0),) * 3).check.passed
