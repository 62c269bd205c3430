"""The shadow monitor: what becomes a sample, when the reference is asked, and the figures."""

import asyncio
import dataclasses
import json
import math
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serve.cli.main import main
from serve.contract.messages import Segment, Timings, Transcript
from serve.contract.server_config import ShadowBaseline, ShadowConfig
from serve.gateway.shadow import monitor
from serve.gateway.shadow.figures import (
    BOUND,
    Comparison,
    DriftCusum,
    baseline_of,
    compare,
    pooled_cer,
    scored,
)
from serve.gateway.shadow.monitor import LOOK_S
from serve.supervisor.server import config_to_toml
from tests.gateways import WAIT_S, json_request, message, post, until
from tests.jobs import ALICE, BOB, accepted, keys_of

SHADOW = ShadowConfig(share=1.0, beam_size=8)
AUDIO = b"RIFF" + bytes(2**20)  # spooled


def infer(running, prompt="hello", **fields):
    status, error = running.infer(json.dumps(json_request(prompt, **fields)))
    assert (status, error) == (200, None)


def metric(running, name):
    """The value of a metric without labels, or with these."""
    (line,) = [line for line in running.page().splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def compared(running, count):
    until(lambda: running.services.shadow.compared == count)


@pytest.fixture
def running(start):
    return start(shadow=SHADOW)


@pytest.fixture(autouse=True)
def idle_at_once(monkeypatch):
    monkeypatch.setattr(monitor, "IDLE_S", 0.0)


@pytest.fixture
def busy(idle_at_once, monkeypatch):
    """The reference is not asked."""
    monkeypatch.setattr(monitor, "IDLE_S", 600.0)


@pytest.fixture
def little_room(monkeypatch):
    monkeypatch.setattr(monitor, "MAX_PENDING_MB", 1)


# ---------------------------------------------------------------- samples and the reference


def test_a_share_of_the_requests_is_sampled_and_the_same_ones_each_time(start, busy):
    share = 0.25
    running = start(shadow=dataclasses.replace(SHADOW, share=share))
    for _ in range(40):
        infer(running)
    chance = random.Random(20)
    expected = sum(chance.random() < share for _ in range(40))
    assert metric(running, "earshot_shadow_sampled_total") == expected
    assert len(running.services.shadow.pending) == expected


def test_the_reference_gets_what_was_asked_but_for_what_changes_no_word(running):
    words = {"name": "WORD_TIMESTAMPS", "datatype": "BOOL", "shape": [1], "data": [True]}
    request = json_request("hello")
    request["inputs"].append(words)
    running.infer(json.dumps(request))
    compared(running, 1)
    first, second = running.triton.inputs
    assert first.pop("WORD_TIMESTAMPS") is True
    assert second == {**first, "BEAM_SIZE": 8}


def test_a_request_of_each_door_is_sampled(start, config):
    running = start(shadow=SHADOW, jobs=config)
    running.transcribe(prompt="good morning|good mourning")
    compared(running, 1)
    running.call()(message("hello"))
    compared(running, 2)
    accepted(running)
    compared(running, 3)
    assert [one.edits for one in running.services.shadow.window] == [1, 0, 0]


def test_large_audio_is_handed_on_as_its_file_and_then_gone(running):
    running.transcribe(AUDIO)
    compared(running, 1)
    files = list(running.triton.files.values())
    assert len(files) == 2
    until(lambda: not list(running.services.engines.uploads.iterdir()))


def test_streams_and_answers_in_part_are_no_samples(running):
    running.transcribe(stream="true")
    infer(running, outputs=[{"name": "TEXT"}, {"name": "DURATION"}])
    infer(running)
    compared(running, 1)
    assert metric(running, "earshot_shadow_sampled_total") == 1


# ---------------------------------------------------------------- clients go first


def test_the_reference_waits_until_nothing_is_under_way(running):
    with ThreadPoolExecutor() as pool:
        client = pool.submit(infer, running, "wait hello|hello")
        until(lambda: running.triton.waiting)
        infer(running)
        running.run(asyncio.sleep(4 * LOOK_S))
        assert (len(running.services.shadow.pending), len(running.triton.inputs)) == (1, 2)
        running.triton.release()
        client.result(WAIT_S)
    compared(running, 2)


def test_a_client_that_comes_has_the_reference_cancelled_and_asked_again(running):
    infer(running, "hello|wait hello")
    until(lambda: running.triton.waiting)
    (reference,) = running.triton.waiting
    infer(running, "good bye")
    until(lambda: running.triton.cancelled == [reference])
    assert metric(running, "earshot_shadow_yielded_total") == 1
    until(lambda: running.triton.waiting not in ([], [reference]))
    running.triton.release()
    compared(running, 2)
    assert metric(running, "earshot_shadow_pending_bytes") == 0


def test_what_has_no_room_is_dropped_and_counted(busy, little_room, running):
    samples = 100_000  # of four bytes
    for _ in range(3):
        running.call()(message("hello", samples=samples))
    assert metric(running, "earshot_shadow_dropped_total") == 1
    assert len(running.services.shadow.pending) == 2
    assert 8 * samples < metric(running, "earshot_shadow_pending_bytes") < 2**20
    running.transcribe(AUDIO)  # larger than all the room
    assert metric(running, "earshot_shadow_dropped_total") == 2
    assert len(running.services.shadow.pending) == 2


def test_the_text_of_an_answer_counts_in_the_room_of_samples(busy, running):
    infer(running, "one " * 1000)
    assert metric(running, "earshot_shadow_pending_bytes") > 4 * 4000


def test_a_sample_that_costs_the_reference_its_server_holds_up_no_other(running, monkeypatch):
    monkeypatch.setattr(monitor, "AWAY_S", LOOK_S)
    infer(running, "hello|error:UNAVAILABLE lost")
    infer(running)
    compared(running, 1)
    until(lambda: metric(running, "earshot_shadow_failed_total") == 1)
    assert len(running.triton.inputs) == 5, "it is tried twice"


@pytest.mark.nightly
def test_hostile_clients_count_nothing_and_hold_up_nobody(start, little_room):
    """Bodies that are refused, clients that leave, a flood: samples are the other requests."""
    baseline = ShadowBaseline(log_probability=(-4.0, 0.5))
    running = start(shadow=dataclasses.replace(SHADOW, baseline=baseline))
    hostile = json.dumps(json_request("error:AudioError: no audio")).encode()
    leaving = post(json.dumps(json_request("wait")).encode())
    for _ in range(5):
        assert running.infer(hostile)[0] == 400
        assert running.infer(b"{" * 2**20)[0] == 400
        with running.connected(leaving):
            until(lambda: running.triton.waiting)
        until(lambda: not running.triton.waiting)
        with running.connected(post(b"x" * 1000, length=2**27)):
            infer(running)
    running.transcribe(b"RIFF" + bytes(2**21))  # larger than all the room
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: infer(running, "hello|hello"), range(30)))
    compared(running, 35)
    assert metric(running, "earshot_shadow_sampled_total") == 36
    assert metric(running, "earshot_shadow_dropped_total") == 1
    for name in ("failed_total", "drift", "pending_requests", "pending_bytes"):
        assert metric(running, f"earshot_shadow_{name}") == 0
    assert not list(running.services.engines.uploads.iterdir())


def test_a_reference_that_fails_is_counted_and_the_next_sample_compared(running):
    infer(running, "hello|error:AudioError: no such file")
    infer(running)
    compared(running, 1)
    assert metric(running, "earshot_shadow_failed_total") == 1


def test_nothing_of_it_is_counted_as_a_clients(running):
    infer(running)
    compared(running, 1)
    page = running.page()
    assert 'earshot_gateway_requests_total{key="",route="http",status="OK"} 1.0' in page
    assert 'earshot_gateway_audio_seconds_total{key="",route="http"} 1.5' in page
    _, _, usage = running.ask("GET", "/v1/usage")
    assert [row["requests"] for row in json.loads(usage)["data"]] == [1]


# ---------------------------------------------------------------- what is told


def test_the_rate_is_told_by_language_and_the_worst_texts_are_kept(running):
    for prompt in ("hello", "a b c d|a b c x", "one two|one ten", "yes|no"):
        infer(running, prompt)
    compared(running, 4)
    shown = json.loads(running.ask("GET", "/v1/shadow")[2])
    assert [(case["served"], case["reference"]) for case in shown["worst"]] == [
        ("yes", "no"),
        ("one two", "one ten"),
        ("a b c d", "a b c x"),
    ]
    assert shown["compared"] == 4
    edits, characters = 0 + 1 + 2 + 3, 5 + 7 + 7 + 2
    for language in ("all", "es"):
        told = metric(running, f'earshot_shadow_cer{{language="{language}"}}')
        assert told == pytest.approx(edits / characters)
    assert shown["cer"]["value"] == pytest.approx(edits / characters, abs=1e-6)


def test_the_command_tells_what_was_found(running, tmp_path, capsys):
    toml = tmp_path / "a.toml"
    toml.write_text(config_to_toml(running.config), encoding="utf-8")
    assert main(["shadow", "--config", str(toml)]) == 0
    assert "compared  0; 0 pending\nCER       -\n" in capsys.readouterr().out
    infer(running, "one two|one ten")
    compared(running, 1)
    assert main(["shadow", "--config", str(toml)]) == 0
    told = capsys.readouterr().out
    assert "CER       28.57 % [0.00, 100.00]\n  es      28.57 %" in told
    assert "served     one two\n  reference  one ten" in told
    assert "drift     unknown" in told
    assert "a few hundred requests are a baseline" in told and "[shadow.baseline]" in told


def test_the_command_says_why_it_cannot(start, tmp_path, capsys):
    running = start(shadow=SHADOW, host="0.0.0.0", open=True)
    toml = tmp_path / "a.toml"
    toml.write_text(config_to_toml(running.config), encoding="utf-8")
    assert main(["shadow", "--config", str(toml)]) == 1
    assert "shown to the keys of shadow.readers alone" in capsys.readouterr().err


def test_texts_are_shown_to_readers_alone(start, tmp_path):
    shadow = dataclasses.replace(SHADOW, readers=("alice",))
    running = start(shadow=shadow, keys_file=keys_of(tmp_path))
    for headers, expected in ((ALICE, 200), (BOB, 403), ({}, 401)):
        assert running.ask("GET", "/v1/shadow", headers=headers)[0] == expected


# ---------------------------------------------------------------- figures


def answer(text, *logprobs, temperature=0.0, no_speech=0.5, language="en", sure=0.5):
    segments = tuple(
        Segment(0.0, 1.0, text, (1,) * tokens, logprob, no_speech, temperature, 1.0)
        for logprob, tokens in logprobs
    )
    whole = Transcript(text, language, sure, 1.0, segments, Timings(0.0, 0.0, 0.0, 0.0))
    return scored(whole)


def gaps(log_probability=None, no_speech=None, language=None):
    return {"log_probability": log_probability, "no_speech": no_speech, "language": language}


def test_texts_are_compared_without_case_and_punctuation():
    assert compare(answer("Hello, World!"), answer("hello word")).edits == 1
    assert compare(answer("well"), answer("...")) == Comparison("en", 4, 0, gaps(language=0.0))
    assert compare(answer(""), answer("well")).cer == 1.0


def test_gaps_are_of_what_both_answers_tell():
    served = answer("a b", (-0.1, 1), (-0.5, 3), no_speech=0.25, sure=0.9)
    found = compare(served, answer("a", (-0.3, 2))).gaps
    assert found == pytest.approx(gaps(0.1, math.log(3), math.log(9)))
    sampled = answer("a", (-0.3, 2), temperature=0.2, language="de")
    assert compare(served, sampled).gaps == gaps(no_speech=pytest.approx(math.log(3)))
    assert compare(served, answer("", no_speech=0.5, sure=None)).gaps == gaps()


@pytest.mark.nightly
def test_the_interval_holds_the_rate_as_often_as_it_says():
    chance = np.random.default_rng(0)
    true, held = 0.05, 0
    for _ in range(400):
        lengths = chance.integers(10, 100, 200)
        edits = chance.binomial(lengths, true)
        rate = pooled_cer(
            [Comparison("en", int(e), int(n), gaps()) for e, n in zip(edits, lengths, strict=True)]
        )
        held += rate["low"] <= true <= rate["high"]
    assert 0.92 <= held / 400 <= 0.98
    assert pooled_cer([Comparison("en", 1, 0, gaps())]) == {}


def test_a_drift_is_found_within_200_requests_and_none_in_2000_where_there_is_none():
    chance = np.random.default_rng(0)

    def draw(count, rise=0.0):
        values = np.exp(chance.normal((-1.0 + rise, 1.0 + rise), (1.0, 0.5), (count, 2)))
        return [gaps(log, None, language) for log, language in values]

    def drifted_after(rise):
        drift = DriftCusum(baseline)
        for count, found in enumerate(draw(2000, rise), start=1):
            drift.add(found)
            if drift.value > BOUND:
                return count
        return None

    baseline = baseline_of([Comparison("en", 0, 1, one) for one in draw(500)])
    assert (baseline.language, baseline.no_speech) == (pytest.approx((1.0, 0.5), abs=0.1), (0, 0))
    assert [drifted_after(0.0) for _ in range(20)] == [None] * 20
    unknown = DriftCusum(ShadowBaseline())
    unknown.add(gaps(100.0, 100.0, 100.0))
    assert unknown.value == 0.0
    assert max(drifted_after(0.7) for _ in range(20)) < 200


def test_a_drift_is_told_and_logged_once(start, caplog):
    baseline = ShadowBaseline(log_probability=(-30.0, 1.0))
    running = start(shadow=dataclasses.replace(SHADOW, baseline=baseline))
    for _ in range(12):
        infer(running)
    compared(running, 12)
    told = metric(running, "earshot_shadow_drift"), metric(running, "earshot_shadow_drift_bound")
    assert told == (12 * 2.5, BOUND)
    assert len([one for one in caplog.messages if "has drifted" in one]) == 1
