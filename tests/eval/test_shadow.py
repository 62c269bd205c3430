"""How soon the shadow monitor finds a broken engine; engines are broken as it is told."""

import json
import math

import numpy as np
import pytest

from eval.config import Config, changed
from eval.shadow.broken import break_engine
from eval.shadow.cost import Pass, measure_cost
from eval.shadow.run import measure_shadow
from serve.contract.engine import open_engine
from serve.contract.errors import ConfigError
from serve.contract.messages import Segment, Timings, Transcript
from tests.serving import audio_file

CLIPS = 200
LAYER = "decoder.layers.0"
ORDERS = 5


@pytest.fixture
def config(nano_config):
    return Config(**vars(nano_config()))


@pytest.fixture
def clips(tmp_path):
    lines = []
    for number in range(CLIPS):
        name = f"{number}.flac"
        (tmp_path / name).write_bytes(audio_file(0.1, seed=number))
        half = ("choose", "report")[number % 2]
        lines.append({"file": name, "text": "x", "language": "en", "duration": 0.1, "half": half})
    path = tmp_path / "clips.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


class Noisy:
    """Says of each clip the same with other numbers: as far off as its engine is."""

    def __init__(self, engine, opened):
        opened.append(engine)
        self._off = 1.0 if "broken" in engine else 0.1
        self._chance = np.random.default_rng(len(opened))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def transcribe(self, request):
        logprob, no_speech, language = self._off * self._chance.normal(size=3)
        segment = Segment(0.0, 0.1, "x", (1,), logprob, odds(no_speech), 0.0, 1.0)
        timings = Timings(0.0, 0.0, 0.0, 0.0)
        return Transcript("x", "en", odds(language), 0.1, (segment,), timings)


def odds(log_odds):
    return 1 / (1 + math.exp(-log_odds))


def test_a_sound_engine_raises_no_alert_and_a_broken_one_soon(
    config, clips, tmp_path, run_of, monkeypatch
):
    opened = []
    monkeypatch.setattr("eval.shadow.run.open_transcriber", lambda _, name: Noisy(name, opened))
    reference = str(tmp_path / "reference")
    break_engine(config.engine, tmp_path / "reference", LAYER, 1.001)
    run = run_of(changed(config, "eval", manifest=clips), "shadow")
    options = {"layers": (LAYER,), "factor": 1.5, "requests": 2000, "orders": ORDERS}
    result = measure_shadow(run, reference=reference, **options)
    sound, broken = result.figures.found
    assert (sound.engine, broken.engine, sound.clips) == ("sound", LAYER, CLIPS // 2)
    assert result.figures.baseline_clips == CLIPS // 2
    assert sound.raised == []
    assert len(broken.raised) == ORDERS and broken.raised[-1] < 100
    assert [check.passed for check in result.checks] == [True, True]
    assert "[shadow.baseline]\nlog_probability = [" in result.text
    folder = str(tmp_path / "broken" / LAYER)
    assert opened == [reference, config.engine, config.engine, folder]
    again = measure_shadow(run, reference=reference, **options)  # of what was kept
    assert (again.figures, len(opened)) == (result.figures, 4)


def test_a_broken_engine_differs_in_its_scales_and_opens(config, tmp_path):
    break_engine(config.engine, tmp_path / "broken", LAYER, 2.0)
    before = open_engine(config.engine).load_weights()
    after = open_engine(tmp_path / "broken").load_weights()
    scaled = {name for name in before if not bool((before[name] == after[name]).all())}
    assert scaled == {name for name in before if name.startswith(LAYER) and name.endswith(".scale")}
    assert scaled


def test_a_layer_that_is_not_there_is_named(config, tmp_path):
    with pytest.raises(
        ConfigError, match=r"no scales of a layer decoder\.layers\.99; there are: d"
    ):
        break_engine(config.engine, tmp_path / "broken", "decoder.layers.99", 2.0)
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    ("slower", "compared", "passed"), [(1.05, 40, True), (1.2, 40, False), (1.2, 0, None)]
)
def test_the_cost_is_the_p99_of_all_passes_of_a_way(
    config, clips, run_of, monkeypatch, slower, compared, passed
):
    asked = []

    def timed(config, clips, requests, rate, seed):
        share = config.shadow.share
        asked.append((share, config.shadow.beam_size, len(clips), requests, rate, seed))
        took_s = np.linspace(1.0, 2.0, requests) * (slower if share else 1.0)
        return Pass(share, tuple(took_s), compared if share else 0, 0)

    monkeypatch.setattr("eval.shadow.cost._timed", timed)
    run = run_of(changed(config, "eval", manifest=clips), "shadow-cost")
    result = measure_cost(run, requests=10, rate=0.5, passes=2)
    assert asked == [(share, 8, CLIPS, 10, 0.5, n) for n in (0, 1) for share in (0.0, 1.0)]
    assert result.checks[0].passed is passed
    assert f"| 1     |       20 | {1.5 * slower:.3f} |" in result.text
