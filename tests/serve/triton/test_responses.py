"""Exactly one last response, whatever happens; cancels; and Triton's traps."""

import threading

import pytest

from serve.errors import AudioError, EarshotError
from serve.messages import Failed, Finished, SegmentReady
from serve.triton import responses, wire
from serve.triton.responses import CancelWatch, Responder, ResponseQueue
from tests.serving import SEGMENT, TRANSCRIPT, wait_until

SEGMENT_READY, FINISHED = SegmentReady(SEGMENT), Finished(TRANSCRIPT)


class Sender:
    """Keeps what it is given; complains where Triton 24.10 would crash."""

    def __init__(self):
        self.sent = []  # (response, final)
        self.broken = None  # "response", "error_response" or "send": what raises
        self.cancelled = False
        self.asked = 0
        self.sending = threading.Event()  # set while `send` waits for `go_on`
        self.go_on = threading.Event()
        self.go_on.set()

    def response(self, outputs):
        self._maybe_break("response")
        return sorted(outputs)

    def error_response(self, error):
        self._maybe_break("error_response")
        return error

    def send(self, response, final):
        self.sending.set()
        assert self.go_on.wait(10)
        self._maybe_break("send")
        assert not (self.sent and self.sent[-1][1]), "a response after the last one"
        self.sent.append((response, final))

    def is_cancelled(self):
        assert not (self.sent and self.sent[-1][1]), "this crashes Triton 24.10"
        self.asked += 1
        return self.cancelled

    def _maybe_break(self, part):
        if self.broken == part:
            raise RuntimeError(f"{part} broke")


class Handle:
    def __init__(self):
        self.cancelled = threading.Event()
        self.cancel = self.cancelled.set


@pytest.fixture
def sender():
    return Sender()


WHOLE = sorted(wire.transcript_outputs(TRANSCRIPT))
PIECE = sorted(wire.segment_outputs(SEGMENT))


class TestResponder:
    def test_a_stream_gets_each_segment_and_then_the_answer(self, sender):
        responder = Responder(sender, stream=True)
        for event in (SEGMENT_READY, SEGMENT_READY):
            responder.send_event(event)
            assert not responder.done
        responder.send_event(FINISHED)
        assert responder.done
        assert sender.sent == [(PIECE, False), (PIECE, False), (WHOLE, True)]

    def test_without_a_stream_there_is_one_response(self, sender):
        responder = Responder(sender, stream=False)
        responder.send_event(SEGMENT_READY)
        assert not sender.sent
        responder.send_event(FINISHED)
        assert sender.sent == [(WHOLE, True)]

    @pytest.mark.parametrize("stream", [True, False])
    def test_an_error_ends_a_request_as_itself(self, sender, stream):
        responder = Responder(sender, stream)
        error = AudioError("audio has 0 bytes")
        responder.send_event(Failed(error))
        assert sender.sent == [(error, True)] and responder.done

    def test_an_unexpected_error_is_named_as_internal(self, sender):
        Responder(sender, stream=False).fail(KeyError("x"))
        ((error, final),) = sender.sent
        assert type(error) is EarshotError and str(error) == "internal error: KeyError('x')"
        assert final

    def test_nothing_follows_the_last_response(self, sender):
        responder = Responder(sender, stream=True)
        responder.send_event(FINISHED)
        responder.send_event(SEGMENT_READY)
        responder.send_event(FINISHED)
        responder.fail(AudioError("late"))
        assert len(sender.sent) == 1

    def test_a_request_that_has_ended_is_not_asked_about(self, sender):
        responder = Responder(sender, stream=False)
        sender.cancelled = True
        assert responder.cancelled() is True
        responder.send_event(FINISHED)
        assert responder.cancelled() is False
        assert sender.asked == 1

    def test_the_last_response_and_a_question_never_meet(self, sender):
        """The answer is on its way when the watch asks: it has to wait for the end of `send`."""
        responder = Responder(sender, stream=False)
        sender.go_on.clear()
        sending = threading.Thread(target=responder.send_event, args=(FINISHED,))
        sending.start()
        assert sender.sending.wait(10)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(responder.cancelled()))
        asking.start()
        asking.join(0.05)
        assert not answers and not sender.asked
        sender.go_on.set()
        sending.join(10)
        asking.join(10)
        assert answers == [False] and not sender.asked

    @pytest.mark.parametrize("event", [SEGMENT_READY, FINISHED])
    def test_an_answer_that_cannot_be_made_becomes_an_error(self, sender, event):
        responder = Responder(sender, stream=True)
        sender.broken = "response"
        responder.send_event(event)
        ((error, final),) = sender.sent
        assert "response broke" in str(error) and final
        assert responder.cancelled(), "nobody should go on working for it"

    def test_a_segment_that_cannot_be_sent_ends_the_request(self, sender):
        responder = Responder(sender, stream=True)
        sender.broken = "send"
        with pytest.raises(RuntimeError, match="send broke"):
            responder.send_event(SEGMENT_READY)
        assert responder.done and responder.cancelled()


class TestResponseQueue:
    @pytest.fixture
    def responses(self):
        responses = ResponseQueue()
        yield responses
        responses.close()

    def test_events_are_sent_in_order_and_the_end_waits_for_them(self, sender, responses):
        responder = Responder(sender, stream=True)
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
        broken.broken = "send"
        responses.put(Responder(broken, stream=False), FINISHED)
        responses.put(Responder(sender, stream=False), FINISHED)
        wait_until(lambda: sender.sent, "the thread ended")
        assert sender.sent == [(WHOLE, True)]


class TestCancelWatch:
    @pytest.fixture
    def watch(self, monkeypatch):
        monkeypatch.setattr(responses, "_CANCEL_POLL_S", 0.001)
        watch = CancelWatch()
        yield watch
        watch.close()
        assert not watch._thread.is_alive()

    def test_a_client_that_goes_cancels_its_request_alone(self, watch):
        senders, handles = [Sender(), Sender()], [Handle(), Handle()]
        for sender, handle in zip(senders, handles, strict=True):
            watch.add(Responder(sender, stream=True), handle)
        wait_until(lambda: all(sender.asked > 2 for sender in senders), "nobody asks")
        senders[1].cancelled = True
        assert handles[1].cancelled.wait(10)
        assert not handles[0].cancelled.is_set()

    def test_a_request_that_has_ended_is_forgotten(self, watch, sender):
        """Watched for ever, each request would make every look a little slower."""
        responder, other = Responder(sender, stream=False), Sender()
        watch.add(responder, Handle())
        watch.add(Responder(other, stream=False), Handle())
        responder.send_event(FINISHED)
        wait_until(lambda: len(watch._watched) == 1, "still watched")
        asked = other.asked
        wait_until(lambda: other.asked > asked, "the other one is watched no more")
