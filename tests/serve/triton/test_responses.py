"""Exactly one last response, whatever happens."""

import threading
from types import SimpleNamespace

import pytest

from serve.contract.errors import AudioError
from serve.contract.messages import RequestFinished, SegmentReady
from serve.triton.responses import Responder, ResponseQueue
from serve.wire import tensors
from tests import fake_triton
from tests.serving import SEGMENT, TRANSCRIPT
from tests.waits import WAIT_S, wait_until

SEGMENT_READY, FINISHED = SegmentReady(SEGMENT), RequestFinished(TRANSCRIPT)


class Sender:
    """Keeps what it is given; complains where Triton would."""

    def __init__(self):
        self.sent = []  # (response, final)
        self.broken = False  # whether `send` raises
        self.go_on = threading.Event()
        self.go_on.set()

    def send(self, response, flags):
        assert self.go_on.wait(WAIT_S)
        if self.broken:
            raise RuntimeError("send broke")
        assert not (self.sent and self.sent[-1][1]), "a response after the last one"
        self.sent.append((response, flags == fake_triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL))


@pytest.fixture
def sender():
    return Sender()


WHOLE = sorted(tensors.transcript_outputs(TRANSCRIPT))


class TestResponder:
    def test_nothing_follows_the_last_response(self, sender):
        responder = Responder(sender, fake_triton, stream=True)
        responder.send_event(FINISHED)
        responder.send_event(SEGMENT_READY)
        responder.send_event(FINISHED)
        responder.fail(AudioError("late"))
        assert len(sender.sent) == 1

    @pytest.mark.parametrize("event", [SEGMENT_READY, FINISHED])
    def test_an_answer_that_cannot_be_made_becomes_an_error(self, sender, event):
        utils = SimpleNamespace(**{**vars(fake_triton), "Tensor": None})
        Responder(sender, utils, stream=True).send_event(event)
        ((response, final),) = sender.sent
        assert "not callable" in response.error.message and final


class TestResponseQueue:
    @pytest.fixture
    def responses(self):
        responses = ResponseQueue()
        yield responses
        responses.close()

    def test_events_are_sent_in_order_and_the_end_waits_for_them(self, sender, responses):
        responder = Responder(sender, fake_triton, stream=True)
        sender.go_on.clear()
        for _ in range(50):
            responses.put(responder, SEGMENT_READY)
        responses.put(responder, FINISHED)
        assert not responder.done  # `put` did not wait
        sender.go_on.set()
        responses.close()
        assert [final for _, final in sender.sent] == [False] * 50 + [True]

    def test_a_request_that_cannot_be_answered_does_not_stop_the_others(self, sender, responses):
        broken = Sender()
        broken.broken = True
        unheard = Responder(broken, fake_triton, stream=True)
        responses.put(unheard, SEGMENT_READY)
        responses.put(Responder(sender, fake_triton), FINISHED)
        wait_until(lambda: sender.sent, "the thread ended")
        assert unheard.done, "nothing more is sent to it"
        ((response, final),) = sender.sent
        assert sorted(response.outputs) == WHOLE and final
