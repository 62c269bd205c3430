"""A server on one device and on several: what is sent, what is made of it, and one of them real."""

import dataclasses

import pytest

from eval.bench import scale
from eval.bench.plan import Load
from eval.bench.scale import Figure, check_load, measure_scaling, scaling_of, specs_of
from eval.random_whisper.engine import write_engine
from serve.contract.errors import ConfigError


def figure(engines, rtfx, gateway, engine):
    """Cores that are busy are one thread's each."""
    cores = {"gateway": gateway, "engine": engines * engine, "clients": 3.0}
    busiest = {"gateway": gateway, "engine": engine, "clients": 1.0}
    return Figure("cuda", engines, rtfx, rtfx / 20, 9.0, 100.0, 200.0, cores, {}, busiest)


def test_what_more_engines_would_meet():
    found = scaling_of([figure(1, 5000, 0.2, 0.7), figure(2, 9800, 0.5, 0.75)], cores=32)
    assert (found.ratio, found.efficiency) == (pytest.approx(1.96), pytest.approx(0.98))
    assert found.check.passed
    assert found.gateway_thread_binds_above == 4.0  # 0.25 of a core for each engine
    assert found.cores_bind_above == 32.0  # (0.5 + 1.5) / 2 for each; clients are elsewhere
    worse = scaling_of([figure(1, 5000, 0.2, 0.7), figure(2, 9740, 0.5, 0.75)], cores=32)
    assert not worse.check.passed


def test_lengths_lie_between_the_shortest_and_the_longest():
    specs = specs_of(Load())
    assert (specs[0].seconds, specs[-1].seconds) == (10.0, 30.0)
    assert (specs[0].tokens, specs[-1].tokens) == (43, 128)
    assert len({spec.seconds for spec in specs}) == scale.LENGTHS
    assert sum(spec.seconds for spec in specs) == 20.0 * scale.LENGTHS


@pytest.mark.parametrize("lengths", [(0.5, 30.0), (10.0, 31.0), (20.0, 10.0)])
def test_clips_of_more_than_a_window_are_refused(lengths):
    with pytest.raises(ConfigError, match="each is one window"):
        check_load(Load(shortest_s=lengths[0], longest_s=lengths[1]))


@pytest.mark.nightly
@pytest.mark.server
def test_two_engines_get_the_load_and_every_window_is_counted(cpu_config, engine, tmp_path):
    write_engine(engine, tmp_path, "cpu")
    both = dataclasses.replace(cpu_config.runtime, device="cpu,cpu")
    load, said = Load(clients=2, seconds=1.0, shortest_s=1.0, longest_s=2.0), []
    found = measure_scaling(cpu_config, tmp_path, [both], load, said.append)
    (one,) = found.figures
    assert (one.device, one.engines) == ("cpu,cpu", 2) and one.rtfx > 0
    assert one.cores.keys() == one.busiest_thread.keys() == one.cpu_s_per_audio_hour.keys()
    assert {"clients", "gateway", "tritonserver", "engine"} <= one.cores.keys()
    assert one.cores["engine"] > one.busiest_thread["engine"] > 0
    assert found.ratio == 1.0 and found.efficiency == 1.0
    assert "4 requests in flight" in said[0]
