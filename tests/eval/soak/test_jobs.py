"""The receiver of webhooks, and all of the scenario on a real server."""

import json
import threading

import pytest

import eval.config
from eval.server import request
from eval.soak.jobs import Receiver
from eval.soak.run import soak


@pytest.fixture
def receiver():
    with Receiver(seed=0) as receiver:
        threading.Thread(target=receiver.serve_forever, args=(0.01,), daemon=True).start()
        yield receiver
        receiver.shutdown()


def hook(receiver, id, body=b"{}"):
    address = receiver.url.removeprefix("http://")
    return request(address, "POST", "/", body, {"webhook-id": id}, timeout_s=10.0)[0]


def test_webhooks_are_counted_by_their_ids(receiver):
    statuses = [hook(receiver, f"msg_{n}") for n in range(40)]
    rejected = [n for n, status in enumerate(statuses) if status == 503]
    assert 0 < len(rejected) < 20
    assert {hook(receiver, f"msg_{n}") for n in rejected} == {204}  # once each
    assert len(receiver.taken) == 40
    taken = [hook(receiver, "msg_0", b'{"other": 1}') for _ in range(3)].count(204)
    assert receiver.taken["msg_0"] == 1 + taken >= 3
    assert len(receiver.bodies["msg_0"]) == 2


@pytest.mark.nightly
@pytest.mark.server
def test_no_job_is_lost_while_processes_are_killed(nano_config, tmp_path, run_of, monkeypatch):
    monkeypatch.setattr("eval.soak.jobs._APART_S", (1.0, 2.0))
    product = eval.config.EvaluationProduct(**vars(nano_config()))
    soak(run_of(product, "soak"), minutes=0.3, actions=None, seed=1, scenarios=["jobs"])
    record = json.loads((tmp_path / "soak.json").read_text())
    assert record["verdict"] == "passed", record["checks"]
    (finding,) = record["figures"]["scenarios"]
    assert finding["figures"]["kills"] >= 1 and finding["figures"]["accepted (202)"] == 12
