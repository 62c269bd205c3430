"""Who posts jobs while processes die, and who hears of their ends."""

import json
import threading

import pytest

from eval.server import Addresses, request
from eval.soak.jobs import SECRET, Poster, Receiver
from serve.gateway.jobs.webhooks import signed


@pytest.fixture
def receiver():
    with Receiver(seed=0) as receiver:
        threading.Thread(target=receiver.serve_forever, args=(0.01,), daemon=True).start()
        yield receiver
        receiver.shutdown()


def hook(receiver, id, body=b"{}", secret=SECRET):
    headers = signed(secret, id, 1, body)
    address = receiver.url.removeprefix("http://")
    return request(address, "POST", "/", body, headers, timeout_s=10.0)[0]


def test_webhooks_are_counted_by_their_ids(receiver):
    statuses = [hook(receiver, f"msg_{n}") for n in range(40)]
    refused = [n for n, status in enumerate(statuses) if status == 503]
    assert 0 < len(refused) < 20
    assert {hook(receiver, f"msg_{n}") for n in refused} == {204}  # once each
    assert len(receiver.taken) == 40
    taken = [hook(receiver, "msg_0", b'{"other": 1}') for _ in range(3)].count(204)
    assert receiver.taken["msg_0"] == 1 + taken >= 3
    assert len(receiver.bodies["msg_0"]) == 2


def test_a_forged_webhook_is_told(receiver):
    assert hook(receiver, "msg_0", secret=b"x" * 32) == 400
    assert (receiver.forged, len(receiver.taken)) == (1, 0)


def test_a_client_sends_each_job_until_it_is_accepted(monkeypatch):
    sent, answers = [], [OSError("away"), (503, {}), (202, {"id": "a"}), (202, {"id": "b"})]

    def asked(at, method, path, body, headers):
        sent.append(headers["Idempotency-Key"])
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer[0], json.dumps(answer[1]).encode()

    monkeypatch.setattr("eval.soak.jobs.asked", asked)
    monkeypatch.setattr("eval.soak.jobs._PAUSE_S", 0.0)
    poster = Poster(Addresses("nowhere", ""), b"RIFF", "http://hooks", 2, lambda: True)
    poster.run()
    assert (poster.ids, sent) == (["a", "b"], ["0", "0", "0", "1"])
    assert (poster.sent_again, dict(poster.refused)) == (2, {503: 1})
