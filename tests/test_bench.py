"""The bench's arithmetic and its made-up engine; what it measures needs a GPU."""

import dataclasses

import pytest

from eval import bench, bench_engine, bench_peers, bench_table
from eval.__main__ import main
from serve.config import RuntimeConfig, load_config
from serve.engine import tensor_specs
from serve.errors import ConfigError

TURBO = bench_engine.SHAPES["whisper-large-v3-turbo"]
LARGE = bench_engine.SHAPES["whisper-large-v3"]


def test_the_least_work_is_what_a_count_by_hand_gives():
    # 32 layers of 2 x 1500 x 12 x 1280^2 and 4 x 1500^2 x 1280, convolutions, cross K and V
    by_hand = 1887e9 + 368.6e9 + 17.7e9
    assert bench.encode_flops(TURBO) == pytest.approx(by_hand + 39.3e9, rel=2e-3)
    assert bench.encode_flops(LARGE) == pytest.approx(by_hand + 314.6e9, rel=2e-3)
    # 91.8 M + 66.4 M weights; 30.7 MB + 1.3 MB of keys and values per slot
    assert bench.step_bytes(TURBO, "fp16", 0, 0) == pytest.approx(2 * 158.2e6, rel=2e-3)
    assert bench.step_bytes(TURBO, "int8", 64, 64) == pytest.approx(
        158.2e6 + 64 * (30.72e6 + 1.31e6), rel=2e-3
    )


@pytest.mark.parametrize("name", ["large-v3-turbo", "large-v3"])
def test_a_made_up_engine_has_the_tensors_of_its_shape(name):
    config = load_config(f"configs/{name}.toml")
    engine = bench_engine.random_engine(config)
    small = dataclasses.replace(
        engine.manifest,
        dims=dataclasses.replace(
            engine.manifest.dims, n_audio_layer=1, n_text_layer=1, n_audio_ffn=64, n_text_ffn=64
        ),
    )
    weights = bench_engine.RandomEngine(engine.path, small).load_weights()
    specs = tensor_specs(small.dims, small.precision)
    assert {k: (tuple(v.shape), v.dtype) for k, v in weights.items()} == {
        k: (v.shape, v.dtype) for k, v in specs.items()
    }
    assert engine.manifest.tokenizer.eot in engine.manifest.tokenizer.suppress_tokens


def test_a_config_without_a_published_shape_is_refused():
    with pytest.raises(ConfigError, match="knows the shapes whisper-large-v3-turbo"):
        bench_engine.random_engine(load_config("configs/demo.toml"))


def test_a_config_for_a_cpu_is_refused(capsys):
    assert main(["bench", "--config", "configs/demo.toml", "--random-weights"]) == 2
    assert 'bench needs runtime.device = "cuda"' in capsys.readouterr().err


def test_every_workload_ends_with_its_forced_lengths(monkeypatch):
    """On a CPU and a tiny shape: what counts is that windows come, end and are counted."""
    config = load_config("configs/large-v3-turbo.toml")
    engine = bench_engine.random_engine(config)
    dims = dataclasses.replace(
        engine.manifest.dims, n_audio_state=64, n_audio_head=1, n_audio_layer=1, n_audio_ffn=64,
        n_text_state=64, n_text_head=1, n_text_layer=1, n_text_ffn=64,
    )  # fmt: skip
    tiny = bench_engine.RandomEngine(engine.path, dataclasses.replace(engine.manifest, dims=dims))
    config = dataclasses.replace(config, runtime=RuntimeConfig(encoder_batch=2, threads=1))
    monkeypatch.setattr(bench, "ceilings", lambda device: (1e12, 1e11))
    monkeypatch.setattr(bench, "THROUGHPUT_TOKENS", 5)
    monkeypatch.setattr(bench, "MLPERF_MEAN", 5)
    said = []
    rows = list(bench.Bench(tiny, config, 0.05, said.append).rows(2, (2, 3)))
    assert [row.workload for row in rows] == [
        "ceiling", "ceiling", "one request", "throughput, 2 slots", "throughput, 3 slots",
        "MLPerf-shaped",
    ]  # fmt: skip
    assert all(row.value > 0 for row in rows) and len(said) == 2
    assert rows[-1].detail.startswith("8 windows at once")


def test_the_peer_generates_the_same_forced_lengths(monkeypatch):
    dims = dataclasses.replace(
        TURBO, n_audio_state=64, n_audio_head=1, n_audio_layer=1, n_audio_ffn=64, n_text_state=64,
        n_text_head=1, n_text_layer=1, n_text_ffn=64,
    )  # fmt: skip
    monkeypatch.setattr(bench, "THROUGHPUT_TOKENS", 3)
    monkeypatch.setattr(bench, "REQUEST_TOKENS", 2)
    rows = list(bench_peers.hugging_face(dims, "cpu", 2, lambda line: None))
    assert [row.unit for row in rows] == ["ms", "RTFx"]


def test_the_table_shows_the_share_of_the_ideal():
    rows = [
        bench_table.Row("throughput", "earshot", 3000.0, "RTFx", 6000.0, "64 slots"),
        bench_table.Row("one request", "earshot", 20.0, "ms", 5.0),
        bench_table.Row("throughput", "peer", 1000.0, "RTFx", None),
    ]
    lines = list(bench_table.render(rows))
    assert lines[1].split()[-4:] == ["50", "%", "64", "slots"]
    assert lines[2].split()[-2:] == ["25", "%"]
    assert lines[3].endswith("RTFx")
