"""The bench's arithmetic, its made-up engine, its workloads on a CPU and a tiny shape."""

import dataclasses
import json

import pytest
import torch

from eval.__main__ import main
from eval.bench import ablate as bench_ablate
from eval.bench import engine as bench_engine
from eval.bench import floor as bench_floor
from eval.bench import run as bench_run
from eval.bench import table as bench_table
from eval.bench import workloads as bench
from eval.bench.floor import Ceilings, Floor
from eval.bench.peers import run as bench_peers
from eval.bench.table import Row
from serve.config import RuntimeConfig, load_config
from serve.engine import open_engine, tensor_specs
from serve.errors import ConfigError, UnavailableError

TURBO = bench_engine.SHAPES["whisper-large-v3-turbo"]
LARGE = bench_engine.SHAPES["whisper-large-v3"]
CEILINGS = Ceilings(product=800e12, fp8_product=1600e12, attention=400e12, memory=4e12)
TINY = dataclasses.replace(
    TURBO, n_audio_state=64, n_audio_head=1, n_audio_layer=1, n_audio_ffn=64,
    n_text_state=64, n_text_head=1, n_text_layer=1, n_text_ffn=64,
)  # fmt: skip
PLAN = bench.Plan(slots=(2, 3), seconds=0.05, requests=2)


def quiet(line):
    pass


@pytest.fixture
def config(monkeypatch):
    """Of turbo, for a CPU, with lengths that take no time."""
    monkeypatch.setattr(bench, "THROUGHPUT_TOKENS", 5)
    monkeypatch.setattr(bench, "REQUEST_TOKENS", 3)
    monkeypatch.setattr(bench, "MLPERF_MAX", 6)
    monkeypatch.setattr(bench, "WARM_REQUESTS", 1)
    monkeypatch.setattr(bench_ablate, "WINDOWS", 1)
    monkeypatch.setattr(bench_ablate, "TOKENS", 3)
    turbo = load_config("configs/large-v3-turbo.toml")
    return dataclasses.replace(turbo, runtime=RuntimeConfig(slots=2, encoder_batch=2, threads=1))


@pytest.fixture
def engine(config):
    found = bench_engine.random_engine(config)
    return bench_engine.RandomEngine(found.path, dataclasses.replace(found.manifest, dims=TINY))


def test_the_least_work_is_what_a_count_by_hand_gives():
    # 32 layers of 2 x 1500 x 12 x 1280^2 and 4 x 1500^2 x 1280, convolutions, cross K and V
    turbo, large = (bench_floor.encoder_work(dims) for dims in (TURBO, LARGE))
    assert turbo.products == large.products == pytest.approx(1887e9, rel=1e-3)
    assert turbo.attention == large.attention == pytest.approx(368.6e9, rel=1e-3)
    assert turbo.rest == pytest.approx(17.7e9 + 39.3e9, rel=2e-3)
    assert large.rest == pytest.approx(17.7e9 + 314.6e9, rel=2e-3)
    # 91.8 M + 66.4 M weights; 30.7 MB + 1.3 MB of keys and values per slot
    count = bench_floor.step_bytes
    assert count(TURBO, "fp16", "full", 0, 0) == pytest.approx(2 * 158.2e6, rel=2e-3)
    assert count(TURBO, "int8", "full", 64, 64) == pytest.approx(
        158.2e6 + 64 * (30.72e6 + 1.31e6), rel=2e-3
    )
    assert count(TURBO, "int8", "int8", 64, 64) == pytest.approx(
        158.2e6 + 64 * (15.36e6 + 1.31e6), rel=2e-3
    )


def test_the_floor_of_a_window_is_its_encoding_and_its_share_of_the_steps(engine):
    manifest = dataclasses.replace(engine.manifest, dims=TURBO)
    full = Floor(manifest, RuntimeConfig(), CEILINGS)
    # 1887 GFLOP at 800 T, 368.6 at 400 T, 57 at 800 T
    assert 1e3 * full.encode_s == pytest.approx(2.359 + 0.922 + 0.071, rel=1e-3)
    # 131 steps of (158.2 MB / 64 + 30.72 MB + 66 x 20.5 kB) at 4 TB/s
    assert 1e3 * (full.window_s(128, 64) - full.encode_s) == pytest.approx(1.131, rel=2e-3)
    fast = Floor(manifest, RuntimeConfig(cross_kv="int8", encoder_precision="fp8"), CEILINGS)
    assert 1e3 * fast.encode_s == pytest.approx(2.359 / 2 + 0.922 + 0.071, rel=1e-3)
    assert 1e3 * (fast.window_s(128, 64) - fast.encode_s) == pytest.approx(0.628, rel=2e-3)


def test_ceilings_are_measured():
    found = bench_floor.measure(torch.device("cpu"), TINY)
    assert min(found.product, found.attention, found.memory) > 1e6
    assert found.fp8_product is None
    assert [row.system for row in found.rows()] == [
        "matrix product", "attention", "copy, read + write"
    ]  # fmt: skip
    assert len(list(CEILINGS.rows())) == 4


@pytest.mark.parametrize("name", ["large-v3-turbo", "large-v3"])
def test_a_made_up_engine_has_the_tensors_of_its_shape(name):
    config = load_config(f"configs/{name}.toml")
    engine = bench_engine.random_engine(config)
    small = dataclasses.replace(
        engine.manifest,
        dims=dataclasses.replace(
            engine.manifest.dims, n_audio_layer=1, n_text_layer=1, n_audio_ffn=64, n_text_ffn=64,
            n_vocab=99,
        ),
    )  # fmt: skip
    weights = bench_engine.RandomEngine(engine.path, small).load_weights()
    specs = tensor_specs(small.dims, small.precision)
    assert {k: (tuple(v.shape), v.dtype) for k, v in weights.items()} == {
        k: (v.shape, v.dtype) for k, v in specs.items()
    }
    assert engine.manifest.tokenizer.eot in engine.manifest.tokenizer.suppress_tokens


def test_a_config_without_a_published_shape_is_refused():
    with pytest.raises(ConfigError, match="knows the shapes whisper-large-v3-turbo"):
        bench_engine.random_engine(load_config("configs/demo.toml"))


def test_every_workload_ends_with_its_forced_lengths(config, engine):
    said = []
    rows = list(bench.run(engine, config, PLAN, CEILINGS, said.append))
    assert [(row.workload, row.system[-7:]) for row in rows] == [
        ("opening", "2 slots"),
        ("one request", "2 slots"),
        ("throughput", "2 slots"),
        ("saturated, 10 s requests", "2 slots"),
        *((f"open loop, {share} % load", "2 slots") for share in (30, 50, 70, 85, 95)),
        ("opening", "3 slots"),
        ("throughput", "3 slots"),
        ("MLPerf-shaped", "3 slots"),
        ("MLPerf-shaped, always full", "3 slots"),
    ]
    assert all(row.value > 0 and row.is_ours for row in rows)
    by_name = {row.workload: row for row in rows}
    assert by_name["MLPerf-shaped"].figures["windows"] >= 6
    for name in ("throughput", "MLPerf-shaped", "MLPerf-shaped, always full"):
        assert by_name[name].figures["seconds"] >= PLAN.seconds
    for share in (30, 95):
        found = by_name[f"open loop, {share} % load"].figures
        assert found["unfinished"] == 0 < found["p50_ms"] <= found["p99_ms"]
        assert found["jitter_ms"] == pytest.approx(found["p99_ms"] - found["p50_ms"])
    assert "workload d with 2 slots" in said


def test_only_the_workloads_that_were_chosen_are_run(config, engine):
    plan = dataclasses.replace(PLAN, workloads=("b",))
    rows = list(bench.run(engine, config, plan, CEILINGS, quiet))
    assert [row.workload for row in rows] == ["opening", "one request"]


def test_slots_that_the_machine_refuses_become_a_line(config, engine):
    config = dataclasses.replace(config, runtime=RuntimeConfig(cuda_graph=True, threads=1))
    (row,) = bench.run(engine, config, bench.Plan(slots=(2,)), CEILINGS, quiet)
    assert row.value is None and row.detail.startswith("refused: runtime.cuda_graph = true needs")


def test_mlperf_lengths_have_their_mean_and_their_limits():
    lengths = [next(dice) for dice in [bench.mlperf_lengths()] for _ in range(5000)]
    assert sum(lengths) / 5000 == pytest.approx(bench.MLPERF_MEAN, rel=0.02)
    assert min(lengths) >= 4 and max(lengths) == 200


def test_each_option_is_turned_alone_and_its_error_is_measured(config, engine):
    plan = dataclasses.replace(PLAN, seconds=0.01, requests=1)
    rows = list(bench_ablate.run(engine, config, plan, CEILINGS, quiet))
    systems = list(dict.fromkeys(row.system for row in rows))
    assert systems == [
        "earshot, full configuration",
        "cuda_graph true",
        "kernels torch, cuda_graph false",
        "cross_kv int8",
        "encoder_precision fp8",
        "weights fp16",
    ]
    of = {(row.system, row.workload): row for row in rows}
    assert of["cuda_graph true", "ablation, throughput"].value is None
    for system in (systems[0], systems[2], systems[5]):  # these compute as the reference does
        error = of[system, "ablation, logit error"]
        assert error.value < 1e-3 and error.figures["equal_tokens"] == 1.0
        assert error.figures["tokens"] == bench_ablate.TOKENS
    assert 1e-3 < of["cross_kv int8", "ablation, logit error"].value < 10
    slower = of["weights fp16", "ablation, throughput"]
    assert bench_table.ratio(slower, rows) == pytest.approx(
        of[systems[0], "ablation, throughput"].value / slower.value
    )


def test_a_turned_option_keeps_the_others():
    config = load_config("configs/large-v3-turbo.toml")
    full, *others = bench_ablate.variants(config, 64)
    assert full.runtime == config.runtime and full.precision == "int8"
    for other in others:
        changed = {
            field.name
            for field in dataclasses.fields(RuntimeConfig)
            if getattr(other.runtime, field.name) != getattr(full.runtime, field.name)
        }
        assert len(changed) <= (2 if other.runtime.kernels == "torch" else 1)
        assert bool(changed) != (other.precision != full.precision)


def test_peers_run_last_with_the_same_shape_and_time(config, engine, monkeypatch):
    def peer(dims, device, seconds, say):
        assert (dims, device, seconds) == (TINY, "cpu", PLAN.seconds)
        yield Row("throughput", "peer", 1.0, "RTFx", None)

    monkeypatch.setattr(bench_peers, "PEERS", {"one": peer, "other": None})
    plan = dataclasses.replace(PLAN, workloads=())
    rows = list(bench_run.rows(engine, config, plan, bench_run.Extras(peers=("one",)), quiet))
    assert [row.system for row in rows[3:]] == ["peer"]


def test_without_a_word_the_peers_are_those_that_are_installed(monkeypatch):
    def check(names):
        if "other" in names:
            raise UnavailableError("the peer other needs a package")

    monkeypatch.setattr(bench_peers, "PEERS", {"one": None, "other": None})
    monkeypatch.setattr(bench_peers, "check", check)
    said = []
    assert bench_run.installed_peers(said.append) == ("one",)
    assert said == ["left out: the peer other needs a package"]


def test_the_table_shows_the_share_of_the_ideal_and_the_ratio_to_peers():
    rows = [
        Row("throughput", "earshot, 64 slots", 3000.0, "RTFx", 6000.0, "n 7"),
        Row("throughput", "earshot, 256 slots", 4000.0, "RTFx", 6000.0),
        Row("one request", "earshot, 64 slots", 20.0, "ms", 5.0),
        Row("throughput", "peer", 1000.0, "RTFx", None),
        Row("one request", "peer", 50.0, "ms", None),
        Row("one request", "other", None, "ms", None, "refused: it is not installed"),
    ]
    _, *lines = bench_table.render(rows)
    assert lines[0].split()[-4:] == ["50", "%", "n", "7"]
    assert lines[2].split()[-2:] == ["25", "%"]
    assert lines[3].split()[-2:] == ["4.00", "x"]
    assert lines[4].split()[-2:] == ["2.50", "x"]
    assert lines[5].split()[3:] == "- ms - refused: it is not installed".split()


def test_what_was_measured_before_an_interruption_is_kept(config, tmp_path):
    path = tmp_path / "deeper" / "bench.json"
    record = bench_run.Record(config, PLAN, bench_run.Extras(), path)
    record.add(Row("one request", "earshot, 2 slots", 20.0, "ms", 5.0))
    kept = json.loads(path.read_text())
    assert kept["complete"] is False and kept["rows"][0]["value"] == 20.0
    assert kept["config"] == "large-v3-turbo" and kept["versions"]["torch"] == torch.__version__
    assert kept["settings"]["runtime"]["slots"] == 2 and kept["settings"]["seconds"] == 0.05
    record.finish()
    assert json.loads(path.read_text())["complete"] is True


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        bench_run.Record(config, PLAN, bench_run.Extras(), tmp_path / "file" / "bench.json")


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (("--config", "configs/demo.toml"), 'bench needs runtime.device = "cuda"', 2),
        (("--workloads", "a,x"), "unknown workloads: x; known: start, a, b, c, d", 2),
        (("--peers", "nobody"), "unknown peers: nobody; known: ", 2),
        ((), "torch sees 0 CUDA devices here", 1),
    ],
)
def test_what_cannot_run_is_refused_at_once(flags, message, code, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    line = ["bench", "--random-weights", "--config", "configs/large-v3-turbo.toml", *flags]
    assert main(line) == code
    assert message in capsys.readouterr().err


def test_the_command_ends_with_a_table_and_a_line_of_json(config, engine, capsys, monkeypatch):
    monkeypatch.setattr("eval.__main__.load_config", lambda path: config)
    monkeypatch.setattr(bench_run, "check", lambda *given: None)
    monkeypatch.setattr(bench_engine, "random_engine", lambda config: engine)
    flags = "--random-weights --config x --workloads start,b --slots 2 --requests 2 --seconds 1"
    assert main(["bench", *flags.split(), "--peers="]) == 0
    out = capsys.readouterr().out.splitlines()
    rows = json.loads(out[-1])["rows"]
    assert [row["workload"] for row in rows] == ["ceiling"] * 3 + [
        "start",
        "opening",
        "one request",
    ]
    assert len(out) == 1 + len(rows) + 1


def test_the_server_gets_the_same_engine_and_what_was_reached_in_process(
    config, engine, monkeypatch
):
    given = []

    def through_triton(config, folder, in_process, seconds, say):
        given.append((open_engine(folder).manifest.dims, in_process, seconds))
        yield Row("throughput", "earshot, through Triton", 1.0, "RTFx", None)

    monkeypatch.setattr("eval.bench.triton.through_triton", through_triton)
    plan = dataclasses.replace(PLAN, workloads=("a",), slots=(2,))
    extras = bench_run.Extras(through_triton=True)
    *_, ours, row = bench_run.rows(engine, config, plan, extras, quiet)
    assert row.system == "earshot, through Triton"
    assert given == [(TINY, ours.value, PLAN.seconds)]
