"""A clock that is set while the server runs: nothing waits until it is again what it was."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from tests.gateways import until
from tests.jobs import accepted, ended, show

HOUR_S = 3600.0


@pytest.fixture
def set_clock(monkeypatch):
    """Let the clock of jobs say so many seconds more than the true time; gRPC's cannot be set."""

    def set_clock(more_s):
        clock = SimpleNamespace(time=lambda: time.time() + more_s, monotonic=time.monotonic)
        for module in ("routes", "runner", "webhooks"):
            monkeypatch.setattr(f"serve.gateway.jobs.{module}.time", clock)

    return set_clock


@pytest.mark.parametrize("more_s", [-HOUR_S, HOUR_S])
def test_jobs_and_webhooks_do_not_wait_for_a_clock_that_was_set(
    start, config, hearer, monkeypatch, set_clock, more_s
):
    monkeypatch.setattr("serve.gateway.jobs.runner.SWEEP_S", 0.05)
    running = start(jobs=dataclasses.replace(config, workers=1))
    ended(running, accepted(running)["id"])
    running.triton.stop()
    first, second = (accepted(running, webhook_url=f"{hearer.place}/hook") for _ in range(2))
    until(lambda: 'refused_total{reason="server_away"}' in running.page())
    set_clock(more_s)
    running.triton.start()
    third = accepted(running, webhook_url=f"{hearer.place}/hook")
    for job in (first, second, third):
        assert ended(running, job["id"])["status"] == "completed"
        until(lambda job=job: show(running, job["id"])["webhook"]["status"] == "delivered")


def test_a_webhook_that_waits_is_sent_when_the_clock_is_set_back(
    start, config, hearer, monkeypatch, set_clock
):
    """Jobs that ended before the change have webhooks that are due an hour later."""
    monkeypatch.setattr("serve.gateway.jobs.runner.SWEEP_S", 0.05)
    monkeypatch.setattr("serve.gateway.jobs.webhooks.AT_A_TIME", 0)
    running = start(jobs=config)
    job = ended(running, accepted(running, webhook_url=f"{hearer.place}/hook")["id"])
    set_clock(-HOUR_S)
    monkeypatch.setattr("serve.gateway.jobs.webhooks.AT_A_TIME", 8)
    until(lambda: show(running, job["id"])["webhook"]["status"] == "delivered")
