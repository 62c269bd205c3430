"""The gateway over gRPC, by calls of raw bytes and by tritonclient."""

import asyncio
import contextlib
import queue
import threading
import tracemalloc

import grpc
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2

from serve.gateway.engines import SERVICE
from serve.gateway.errors import ApiError
from serve.gateway.kserve.grpc import InferStream
from serve.gateway.observe.log import LogRecord
from serve.triton.cancellation import owner_of
from serve.wire import tensors
from serve.wire.folder import is_held
from tests.fake_upstream import LEAK, FakeTriton
from tests.gateways import WAIT_S, inputs, message, refusal, refused, until
from tests.serve.gateway.test_run import exchange


def test_tritons_client_finds_everything(shared):
    client = shared.grpc_client()
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("whisper")
    assert client.is_model_ready("whisper_stream", "1")
    metadata = client.get_server_metadata()
    assert (metadata.name, list(metadata.extensions)) == ("earshot", ["binary_tensor_data"])
    model = client.get_model_metadata("whisper_stream")
    assert (model.name, list(model.versions)) == ("whisper_stream", ["1"])
    for described, specs in ((model.inputs, tensors.INPUTS), (model.outputs, tensors.OUTPUTS)):
        found = [(one.name, one.datatype, tuple(one.shape)) for one in described]
        assert found == [(spec.name, spec.datatype, spec.dims) for spec in specs.values()]
    answer = client.infer("whisper", inputs(triton_grpc), request_id="7")
    assert answer.as_numpy("TEXT")[0] == b"hello"
    assert answer.get_response().id == "7"
    answers = queue.SimpleQueue()
    client.async_infer("whisper", inputs(triton_grpc), lambda result, error: answers.put(result))
    assert answers.get(timeout=WAIT_S).as_numpy("TEXT")[0] == b"hello"


def test_the_request_reaches_triton_as_it_was_with_a_key(running):
    sent = message(id="7")
    running.call()(sent)
    ((key, request),) = running.triton.requests.items()
    assert request.parameters.pop("earshot_key").string_param == key
    assert request == service_pb2.ModelInferRequest.FromString(sent)


def test_a_new_gateway_cancels_first_by_which_what_another_left_behind_ends(running):
    until(lambda: running.triton.introduced)
    running.call()(message())
    (first,), (key,) = running.triton.introduced, running.triton.requests
    assert owner_of(first) == owner_of(key) and first != key


def test_streams_mix_requests_and_answers(running):
    client = running.grpc_client()
    messages = queue.SimpleQueue()
    client.start_stream(lambda result, error: messages.put((result, error)))
    client.async_stream_infer("whisper_stream", inputs(triton_grpc, "wait"), request_id="a")
    assert messages.get(timeout=WAIT_S)[0].as_numpy("TEXT")[0] == b" wait"
    client.async_stream_infer("whisper_stream", inputs(triton_grpc, "one two"), request_id="b")
    for expected in (b" one", b" two", b"one two"):  # while the first one waits
        result, _ = messages.get(timeout=WAIT_S)
        assert (result.as_numpy("TEXT")[0], result.get_response().id) == (expected, "b")
    client.async_stream_infer("whisper_stream", inputs(triton_grpc, "error:OptionError: no"))
    _, error = messages.get(timeout=WAIT_S)
    assert error.message() == "OptionError: no"
    running.triton.release()
    assert messages.get(timeout=WAIT_S)[0].as_numpy("TEXT")[0] == b"wait"
    client.stop_stream()
    assert running.triton.cancelled == []


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_client_that_goes_cancels_by_key_and_the_call_is_drained(running, method):
    model = tensors.MODEL if method == "ModelInfer" else tensors.STREAM_MODEL
    call = running.channel.stream_stream(SERVICE + method)(iter([message("wait", model)]))
    until(lambda: running.triton.requests)
    (key,) = running.triton.requests
    call.cancel()
    until(lambda: running.triton.ended == [key])
    assert running.triton.cancelled == [key]
    assert running.triton.cancelled_calls == 0
    until(lambda: 'reason="client_gone"} 1.0' in running.page())


def test_a_cancel_waits_for_a_model_that_stands_still(running):
    """Triton gives up what it cannot hand on within a second, and the answer then crashes it."""
    call = running.call().future(message("wait"))
    until(lambda: running.triton.waiting)
    running.triton.beat(age_s=100.0)
    call.cancel()
    until(lambda: 'reason="client_gone"} 1.0' in running.page())
    assert running.triton.cancelled == []
    running.triton.beat()
    until(lambda: running.triton.cancelled)


def test_who_takes_no_answers_is_read_no_further_and_takes_no_memory(start):
    """What it sends is refused, and so not counted: it must not stay until that can be told."""
    running, size, most = start(max_inflight=5), 2**23, 5

    class Deaf:
        sent = 0

        def peer(self):
            return ""

        async def read(self):
            await asyncio.sleep(0 if self.sent < 3 * most else WAIT_S)
            self.sent += 1
            return bytes([0xF]) * size  # no request

        async def write(self, answer):
            await self.takes.wait()

    async def kept(context):
        context.takes = asyncio.Event()
        before, _ = tracemalloc.get_traced_memory()
        stream = asyncio.create_task(InferStream(running.services, context, LogRecord()).run())
        async with asyncio.timeout(WAIT_S):
            while context.sent <= most:
                await asyncio.sleep(0)
        for _ in range(100):  # turns of the loop, in which more would come
            await asyncio.sleep(0)
        after, _ = tracemalloc.get_traced_memory()
        sent = context.sent
        running.services.admission.draining = True
        context.takes.set()
        with pytest.raises(ApiError, match="is stopping"):
            await asyncio.wait_for(stream, WAIT_S / 2)
        return after - before, sent

    deaf = Deaf()
    tracemalloc.start()
    try:
        taken, sent = running.run(kept(deaf))
    finally:
        tracemalloc.stop()
    assert taken < 2 * size and sent == most + 1


def test_no_more_connections_than_requests_and_some(start, monkeypatch):
    monkeypatch.setattr("serve.gateway.run.SPARE_CONNECTIONS", 3)
    running = start(max_inflight=4)
    with contextlib.ExitStack() as stack:
        answered = 0
        for _ in range(20):
            client = stack.enter_context(running.connected(address=running.grpc))
            with contextlib.suppress(OSError):
                client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
                answered += bool(client.recv(9))
    assert answered == 7
    assert running.call()(message(), wait_for_ready=True, timeout=WAIT_S)


def test_a_model_that_never_answers_is_given_up(start, monkeypatch):
    monkeypatch.setattr("serve.gateway.engines.GRACE_S", 0.1)
    running = start(request_timeout_s=0.1)
    status, text = refused(running, message("wait"))
    assert (status, text.split(":")[0]) == ("UNAVAILABLE", "DeadlineError")
    until(lambda: running.triton.cancelled)


def test_other_methods_are_not_offered(shared):
    for method in ("SystemSharedMemoryRegister", "RepositoryModelLoad", "LogSettings"):
        assert refused(shared, b"", method)[0] == "UNIMPLEMENTED"


def test_compressed_messages_are_refused_by_name(shared):
    call = shared.call().future(message(), compression=grpc.Compression.Gzip, timeout=WAIT_S)
    assert refusal(call) == ("UNIMPLEMENTED", "Compression algorithm 'gzip' is disabled.")


def test_only_our_models_answer(shared):
    assert refused(shared, message(model="tensorrt_llm"))[0] == "NOT_FOUND"
    assert refused(shared, message(model_version="2"))[0] == "NOT_FOUND"
    status, text = refused(shared, message(model="whisper_stream"))
    assert status == "INVALID_ARGUMENT"
    assert "ModelStreamInfer" in text
    request = service_pb2.ModelReadyRequest(name="other").SerializeToString()
    assert refused(shared, request, "ModelReady")[0] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("said", "status", "told"),
    [
        ("OptionError: no such language", "INVALID_ARGUMENT", "OptionError: no such language"),
        ("OverloadedError: full", "UNAVAILABLE", "OverloadedError: full"),
        (LEAK, "UNAVAILABLE", "UnavailableError: the server failed"),
        ("EarshotError: /home/a/b", "INTERNAL", "EarshotError: the server failed"),
        ("DeviceError: /home/a/b", "INTERNAL", "DeviceError: the server failed"),
        ("INTERNAL /home/a/b", "UNAVAILABLE", "UnavailableError: the server failed"),
        ("UNKNOWN /dev/shm/x is small", "INTERNAL", "EarshotError: the server failed"),
    ],
)
def test_what_triton_says_goes_no_further(shared, said, status, told, caplog):
    found = refused(shared, message(f"error:{said}"))
    assert found[0] == status
    assert found[1].startswith(told)
    assert "shm" not in found[1] and "/home" not in found[1]
    assert told in said or said.split(" ", 1)[1] in caplog.text


def test_while_triton_is_away_requests_are_refused_and_then_served_again(running):
    assert running.call()(message())
    waiting = running.call().future(message("wait"))
    until(lambda: len(running.triton.requests) == 2)
    running.triton.stop()
    assert refusal(waiting)[0] == "UNAVAILABLE"
    running.triton.cancelled_calls = 0  # that was its own end
    status, text = refused(running, message())
    assert (status, text.split(":")[0]) == ("UNAVAILABLE", "UnavailableError")
    assert not running.grpc_client().is_server_ready()
    running.triton.start()
    until(lambda: running.grpc_client().is_server_ready())
    assert running.call()(message())


def test_who_asks_whether_it_is_ready_is_answered_by_the_triton_that_was_asked(start, monkeypatch):
    """An exchange of Tritons meanwhile would close the connection, and cancel the asking task."""
    asked, answer = threading.Event(), threading.Event()

    async def late(triton, message, context):
        asked.set()
        await asyncio.to_thread(answer.wait, WAIT_S)
        return service_pb2.ServerReadyResponse(ready=True).SerializeToString()

    monkeypatch.setattr(FakeTriton, "server_ready", late)
    monkeypatch.setattr("serve.gateway.engines._READY_S", WAIT_S)
    running = start()
    asking = running.submit(running.services.ready())
    until(asked.is_set)
    with contextlib.closing(running.make_triton("other")) as other:
        exchange(running, other)
        until(lambda: is_held(other.folder))
        answer.set()
        assert asking.result(WAIT_S)
        until(lambda: not is_held(running.triton.folder))


def test_a_message_larger_than_a_request_may_be(start):
    running = start(max_request_mb=1)
    status, text = refused(running, message(samples=2**19))
    assert status == "RESOURCE_EXHAUSTED"
    assert "larger than max" in text
    status, text = refused(running, message(samples=2**18))  # within gRPC's own limit
    assert status == "RESOURCE_EXHAUSTED"
    assert "max_request_mb" in text
    assert running.triton.requests == {}
