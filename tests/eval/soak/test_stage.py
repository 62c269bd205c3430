"""Rules say which outcomes of requests are wrong, and figures which limits are not kept."""

import contextlib
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from build.clips import load_clips
from eval.clients import CLIENTS, Answer
from eval.config import EvaluationProduct
from eval.server import Addresses
from eval.soak.attacks import ATTACKS
from eval.soak.mixed import judge_growth, uneven
from eval.soak.overload import OverloadClient, judge
from eval.soak.stage import Stage

SERVER = SimpleNamespace(addresses=[Addresses("", "")])
RIGHT, WRONG = Answer("answered", "hello", 1.0), Answer("answered", "hollow", 1.0)
LOST = Answer("lost", "Socket closed", 1.0)
TIMED_OUT = Answer("lost", "timed out", 60.0, waited_in_vain=True)
FAILED = Answer("failed", "500 an error of ours", 1.0)
REFUSED = Answer("refused", "503 full", 1.0, retry_after_s=1)
WITHOUT_DELAY = Answer("refused", "503 full", 1.0)
TEXTS = "texts that differ from the first one of their file"
REFUSALS = "honest requests refused"
CLIPS = load_clips("tests/data/manifest.jsonl")


@pytest.fixture
def stage(monkeypatch):
    """A stage after its client has had one right answer; tests set the next one, `stage.next`."""
    stage = Stage(EvaluationProduct(), CLIPS, lambda _: None)
    stage.next = RIGHT
    monkeypatch.setitem(CLIENTS, "any", lambda *_: stage.next)
    stage.send(SERVER, "any")
    return stage


def broken(stage):
    return {figure.name for figure in stage.figures if figure.passed is not True}


@pytest.mark.parametrize(
    ("answer", "options", "disrupted", "broken_rules"),
    [
        (RIGHT, {}, False, set()),
        (WRONG, {}, False, {TEXTS}),
        (WRONG, {}, True, {TEXTS}),
        (WRONG, {"patience_s": 1.0}, False, {TEXTS}),
        (LOST, {}, False, {"honest requests lost"}),
        (LOST, {}, True, set()),
        (LOST, {"patience_s": 1.0}, False, set()),
        (TIMED_OUT, {}, True, {"clients that waited in vain"}),
        (TIMED_OUT, {"patience_s": 1.0}, False, set()),
        (FAILED, {}, False, {"honest requests failed"}),
        (FAILED, {}, True, set()),
        (REFUSED, {}, False, {REFUSALS}),
        (WITHOUT_DELAY, {}, False, {REFUSALS, "HTTP refusals without Retry-After"}),
    ],
)
def test_an_honest_request_has_one_right_answer(stage, answer, options, disrupted, broken_rules):
    stage.next = answer
    with stage.disruption() if disrupted else contextlib.nullcontext():
        stage.send(SERVER, "any", **options)
    stage.apply_rules()
    assert broken(stage) == broken_rules
    stage.figures, stage.may_refuse = [], True
    stage.apply_rules()
    assert broken(stage) == broken_rules - {REFUSALS}


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("500 Internal Server Error", False),
        ("INTERNAL IndexError", False),
        ("503 full", True),
        ("400 AudioError", True),
        ("INVALID_ARGUMENT AudioError", True),
    ],
)
def test_a_hostile_client_is_refused_and_no_fault(stage, monkeypatch, text, passed):
    monkeypatch.setitem(ATTACKS, "odd", lambda *_: Answer("failed", text, 0.1))
    stage.attack(SERVER, "odd")
    stage.apply_rules()
    assert broken(stage) == (set() if passed else {"server errors for hostile clients"})


def test_an_attack_on_a_server_that_is_away_is_lost(stage, monkeypatch):
    monkeypatch.setitem(ATTACKS, "odd", Mock(side_effect=ConnectionRefusedError))
    assert stage.attack(SERVER, "odd").kind == "lost"


@pytest.mark.parametrize(
    ("growth", "jump", "actions", "passed"),
    [
        (0, 0, 200, True),
        (20, 0, 200, False),
        (0, 10_000, 200, None),  # the interval holds the limit
        (0, 0, 1, None),  # too few actions
    ],
)
def test_growth_is_judged_by_its_interval(stage, growth, jump, actions, passed):
    measurements = [
        (actions * n, 1e5 + 100 * n * growth + jump * (n % 4), 30 + n * growth + jump * (n % 4))
        for n in range(20)
    ]
    judge_growth(stage, "gateway", measurements)
    assert [figure.passed for figure in stage.figures] == [passed, passed]


PAGE = """earshot_accepted_total{model="whisper"} 9
earshot_requests_total{model="whisper",outcome="ok"} 5
earshot_requests_total{model="whisper",outcome="cancelled"} 4
earshot_requests_total{model="whisper",outcome="rejected"} 3
earshot_pending_requests{model="whisper"} 0
earshot_gateway_inflight_requests 0.0
"""


@pytest.mark.parametrize(
    ("page", "complaints"),
    [
        (PAGE, []),
        (PAGE.replace('"ok"} 5', '"ok"} 4'), ["9 were accepted and 8 ended"]),
        (PAGE.replace("_requests 0.0", "_requests 2.0"), ["gateway_inflight_requests is 2"]),
        ("", ["the page has no outcomes"]),
    ],
)
def test_the_servers_own_counts_must_be_even(page, complaints):
    assert uneven(page) == complaints


def test_overload_counts_answers_in_time_while_requests_arrive(stage):
    clients = [
        OverloadClient("a", 2.0, end_s=4.0, latency_s=1.0),
        OverloadClient("a", 2.0, end_s=7.0, latency_s=3.0),  # too late
        OverloadClient("a", 2.0, end_s=5.5, latency_s=0.5),
        OverloadClient("a", 2.0, end_s=1.0, latency_s=0.5),  # before it counts
        OverloadClient("a", 2.0),
    ]
    judge(stage, "a", clients, capacity=0.5, target_s=2.0, seconds=10.0)
    _, goodput, _, admitted = stage.figures
    assert (goodput.value, admitted.value) == (pytest.approx(4 / 8), 4)
    assert broken(stage) == {"a: p99 of admitted requests, s", "a: clients admitted"}
