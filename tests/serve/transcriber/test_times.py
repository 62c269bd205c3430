"""Times in a request's answer, and the time during which requests were pending."""

from serve.contract.config import TranscriberConfig
from serve.runtime.protocol import DecodingOptions
from serve.transcriber.decoding_plan import DecodingPlan
from serve.transcriber.request_tracker import RequestTracker
from tests.harness import clock_of


def test_busy_time_is_that_with_something_pending(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("serve.transcriber.request_tracker.time", clock_of(lambda: now[0]))
    ledger, plan = (
        RequestTracker(TranscriberConfig()),
        DecodingPlan((1,), "en", DecodingOptions(), False),
    )

    def end(active):
        ledger.remove(active, "ok")
        ledger.mark_answered()

    first = ledger.accept(plan, print, 0)
    now[0] = 101.0
    second = ledger.accept(plan, print, 0)
    now[0] = 103.0
    assert ledger.counters()[0].busy_s == 3.0, "also while it lasts"
    end(first)
    now[0] = 104.0
    end(second)
    now[0] = 150.0
    assert ledger.counters()[0].busy_s == 4.0
