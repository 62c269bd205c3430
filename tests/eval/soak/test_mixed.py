"""A mixed soak: a real server holds, and what would be wrong of one is said."""

import collections
import contextlib
import json
import time
from types import SimpleNamespace

import pytest

import eval.config
from eval.__main__ import main
from eval.clients import CLIENTS, Answer
from eval.record import Check
from eval.server import Addresses
from eval.soak import mixed
from eval.soak.attacks import ATTACKS
from eval.soak.mixed import DisruptionInterval, Tally, action, uneven
from eval.soak.run import soak

MINUTES = 1.0  # disruptions begin in its first fifth, 3 s after its start


@pytest.fixture
def product(nano_config):
    return eval.config.EvaluationProduct(**vars(nano_config()))


@pytest.mark.nightly
@pytest.mark.server
def test_a_real_server_holds(product, tmp_path, run_of):
    said = []
    run = run_of(product, "soak", said)
    soak(run, minutes=MINUTES, actions=None, seed=1, scenarios=None)
    record = json.loads((tmp_path / "soak.json").read_text())
    bad = [check for check in record["checks"] if check["passed"] is False]
    assert not bad, bad
    (finding,) = record["figures"]["scenarios"]
    figures = finding["figures"]
    assert figures["disruptions"] >= 1 and figures["actions: hostile"] >= 1, (figures, said)
    assert figures["actions: answered"] >= 1, figures


@pytest.fixture
def no_server(product, monkeypatch):
    """Stand-ins for servers, without disruptions; tests set the clients."""

    @contextlib.contextmanager
    def fake(settings, keys):
        server = SimpleNamespace(
            process=SimpleNamespace(poll=lambda: None),
            processes=dict,
            page=lambda: PAGE,
            keys=[f"key {number}" for number in range(keys)],
        )
        yield SimpleNamespace(
            at=Addresses("", ""), settings=settings, server=server, say=settings.say
        )

    monkeypatch.setattr(mixed, "stage", fake)
    monkeypatch.setattr(mixed, "_HOSTILE_SHARE", 0.0)
    monkeypatch.setattr(mixed, "_PAUSE_S", 0.0)
    monkeypatch.setattr(mixed, "disruptions", lambda seed: iter(()))
    monkeypatch.setattr("eval.__main__.load_config", lambda path: product)


FILES = 15


def client(name, answer, asked):
    """Give each file's hash as its text, and to every third later request another answer."""

    def ask(at, asked_for):
        asked[name] += 1
        odd = asked[name] > FILES and asked[name] % 3 == 0
        return answer if odd else Answer("answered", str(hash(asked_for.audio)), 0.01)

    return ask


@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        (Answer("answered", "other words", 0.01), 1, "every text is the same as in quiet: "),
        (Answer("lost", "Socket closed", 0.01), 1, "every request has its answer if nothing"),
        (Answer("refused", "503 full", 0.01), 0, "| mixed    | passed"),
    ],
)
def test_a_wrong_text_and_a_lost_answer_fail_it(
    no_server, tmp_path, monkeypatch, capsys, answer, status, told
):
    monkeypatch.setattr(mixed, "CLIENTS", {"odd": client("odd", answer, collections.Counter())})
    arguments = ["soak", "--config", "x", "--actions", "60", "--output", str(tmp_path)]
    assert main(arguments) == status
    assert told in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_counted(no_server, tmp_path, monkeypatch):
    def interrupted(self, clients):
        while self.tally.actions < 20:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(mixed, "CLIENTS", {"any": lambda *_: RIGHT})
    monkeypatch.setattr(mixed._Mixed, "_show", interrupted)
    assert main(["soak", "--config", "x", "--output", str(tmp_path)]) == 130
    (finding,) = json.loads((tmp_path / "soak.json").read_text())["figures"]["scenarios"]
    assert finding["figures"]["actions"] >= 20


def test_actions_follow_from_the_seed_and_have_their_shares():
    some = [action(7, number, 15) for number in range(4000)]
    assert some == [action(7, number, 15) for number in range(4000)]
    assert some[:100] != [action(8, number, 15) for number in range(100)]
    hostile = [one for one in some if one.attack]
    assert len(hostile) / 4000 == pytest.approx(0.1, abs=0.02)
    assert sum(one.patience_s is not None for one in some) / 4000 == pytest.approx(0.2, abs=0.02)
    assert {one.attack for one in hostile} == set(ATTACKS)
    assert {one.api for one in some} == set(CLIENTS)
    assert {one.file for one in some} == set(range(15))


def checks(tally):
    return {one.name: one for one in tally.found() if isinstance(one, Check)}


RIGHT, WRONG = Answer("answered", "hello", 1.0), Answer("answered", "hollow", 1.0)
LOST = Answer("lost", "Socket closed", 1.0)
VAIN = Answer("lost", "timed out", 60.0, waited_in_vain=True)
FAILED = Answer("failed", "500 an error of ours", 1.0)


@pytest.mark.parametrize(
    ("answer", "patient", "disrupted", "broken"),
    [
        (RIGHT, True, False, None),
        (WRONG, True, False, "every text is the same as in quiet"),
        (WRONG, True, True, "every text is the same as in quiet"),
        (WRONG, False, False, "every text is the same as in quiet"),
        (LOST, True, False, "every request has its answer if nothing was disrupted"),
        (LOST, True, True, None),
        (LOST, False, False, None),
        (VAIN, True, True, "no client waits in vain"),
        (VAIN, False, False, None),
        (FAILED, True, False, "no honest request fails if nothing was disrupted"),
        (FAILED, True, True, None),
    ],
)
def test_an_honest_request_has_one_right_answer(answer, patient, disrupted, broken):
    tally, now_s = Tally(), time.monotonic()
    tally.uneven = ""
    if disrupted:
        tally.disruptions.append(DisruptionInterval("gateway killed", now_s - 1))
    tally.honest("SSE, a.wav", now_s, answer, text="hello", patient=patient)
    found = [one.name for one in checks(tally).values() if not one.passed]
    assert found == ([broken] if broken else [])


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
def test_a_hostile_client_is_refused_and_no_fault(text, passed):
    tally = Tally()
    tally.hostile("a broadcast that changes", time.monotonic(), Answer("failed", text, 0.1))
    assert checks(tally)["no hostile client makes the server fail"].passed is passed


@pytest.mark.parametrize(("each", "passed"), [(0, True), (20, False)])
def test_growth_is_told_by_process(each, passed):
    tally = Tally()
    for number in range(20):
        tally.actions = 200 * number
        tally.sample("gateway", 1, 1e5 + 100 * number * each, 30 + number * each)
    found = checks(tally)
    assert found["gateway grows by at most 4 KB an action"].passed is passed
    assert found["gateway keeps at most 0.005 files an action"].passed is passed


PAGE = """earshot_accepted_total{model="whisper"} 9
earshot_requests_total{model="whisper",outcome="ok"} 5
earshot_requests_total{model="whisper",outcome="cancelled"} 4
earshot_requests_total{model="whisper",outcome="rejected"} 3
earshot_pending_requests{model="whisper"} 0
earshot_gateway_inflight_requests 0.0
"""


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (PAGE, ""),
        (PAGE.replace('"ok"} 5', '"ok"} 4'), "9 were accepted and 8 ended"),
        (PAGE.replace("_requests 0.0", "_requests 2.0"), "gateway_inflight_requests is 2"),
        ("", "the page has no outcomes"),
    ],
)
def test_the_servers_own_counts_must_be_even(page, told):
    assert uneven(page) == told
