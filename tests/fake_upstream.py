"""A stand-in for Triton on its Unix socket, and what stands around it in a run's folder.

What the models answer is told by the request's PROMPT: "wait", "error:" and what Triton is to say
(for a call, a gRPC status may come first), or else the TEXT of the answer.
"""

import asyncio
import os
import threading

import grpc
from tritonclient.grpc import service_pb2

from serve.gateway.upstream import SERVICE
from serve.triton.folder import HEARTBEATS, grpc_target
from serve.triton.wire import KEY_PARAMETER

LEAK = "Unable to find shared memory region: 'triton_python_backend_shm_region_1'"


class FakeTriton:
    """Answers as Triton does, in the folder of a run, on an event loop of its own.

    `ready`: what ServerReady says. `requests`: those that came, by their keys. `ended`: keys of
    those that it answered. `cancelled_calls`: calls that were cancelled, which must never be.
    A request that waits ends when its key is cancelled or `release` is called.
    """

    def __init__(self, folder):
        self.folder = folder
        self.ready = True
        self.connected = True
        self.requests, self.ended, self.cancelled, self.cancelled_calls = {}, [], [], 0
        self._waits = {}
        self._keys = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.beat()
        self.start()

    # ---------------------------------------------------------------- for tests

    def beat(self, age_s=0.0):
        for name in HEARTBEATS:
            path = self.folder / name
            path.touch()
            now = path.stat().st_mtime
            os.utime(path, (now - age_s, now - age_s))

    def start(self):
        self._run(self._start())

    def stop(self):
        self._run(self._server.stop(0))

    def close(self):
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def release(self):
        """Let every request that waits be answered."""
        for key in list(self._waits):
            self._end(key, False)

    # ---------------------------------------------------------------- as `CancelClient`

    def new_key(self):
        self._keys += 1
        return f"test-{self._keys}"

    def cancel(self, key):
        self.cancelled.append(key)
        self._end(key, True)

    # ---------------------------------------------------------------- as Triton

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def _end(self, key, cancelled):
        wait = self._waits.get(key)
        if wait is not None:
            self._loop.call_soon_threadsafe(lambda: wait.done() or wait.set_result(cancelled))

    async def _start(self):
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        self._server.add_generic_rpc_handlers((_Methods(self),))
        self._server.add_insecure_port(grpc_target(self.folder))
        await self._server.start()

    async def server_ready(self, message, context):
        return service_pb2.ServerReadyResponse(ready=self.ready).SerializeToString()

    async def server_metadata(self, message, context):
        extensions = ["binary_tensor_data", "system_shared_memory", "model_repository"]
        answer = service_pb2.ServerMetadataResponse(
            name="triton", version="2.51.0", extensions=extensions
        )
        return answer.SerializeToString()

    async def model_metadata(self, message, context):
        asked = service_pb2.ModelMetadataRequest.FromString(message)
        answer = service_pb2.ModelMetadataResponse(name=asked.name, versions=["1"])
        answer.inputs.add(name="AUDIO", datatype="BYTES", shape=[1])
        return answer.SerializeToString()

    async def infer(self, message, context):
        request = service_pb2.ModelInferRequest.FromString(message)
        try:
            return (await self._answer(request, context)).SerializeToString()
        except asyncio.CancelledError:
            self.cancelled_calls += 1
            raise

    async def stream(self, messages, context):
        try:
            async for message in messages:
                request = service_pb2.ModelInferRequest.FromString(message)
                prompt = _prompt(request)
                if prompt.startswith("error:"):
                    error = prompt.removeprefix("error:")
                    yield service_pb2.ModelStreamInferResponse(
                        error_message=error
                    ).SerializeToString()
                    continue
                for text in ("one", "two") if prompt != "wait" else ("one",):
                    response = service_pb2.ModelStreamInferResponse(
                        infer_response=_response(request, text)
                    )
                    yield response.SerializeToString()
                if prompt == "wait":
                    answer = await self._answer(request, context, in_stream=True)
                    yield answer.SerializeToString()
        except asyncio.CancelledError:
            self.cancelled_calls += 1
            raise

    async def _answer(self, request, context, in_stream=False):
        key = request.parameters[KEY_PARAMETER].string_param
        self.requests[key] = request
        prompt = _prompt(request)
        cancelled = False
        if prompt == "wait":
            self._waits[key] = self._loop.create_future()
            cancelled = await self._waits[key]
            del self._waits[key]
        self.ended.append(key)
        error = prompt.removeprefix("error:") if prompt.startswith("error:") else None
        if cancelled:
            error = "CancelledError: cancelled"
        if in_stream:
            if error:
                return service_pb2.ModelStreamInferResponse(error_message=error)
            return service_pb2.ModelStreamInferResponse(infer_response=_response(request, "end"))
        if error:
            name, _, _ = error.partition(" ")
            code = getattr(grpc.StatusCode, name, None)
            text = error if code is None else error.removeprefix(name).strip()
            await context.abort(code or grpc.StatusCode.INVALID_ARGUMENT, text)
        return _response(request, prompt or "hello")


def _prompt(request):
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=False):
        if tensor.name == "PROMPT":
            return raw[4:].decode()
    return ""


def _response(request, text):
    """TEXT, LANGUAGE_PROB and DURATION, those that were asked for."""
    response = service_pb2.ModelInferResponse(
        model_name=request.model_name, model_version="1", id=request.id
    )
    data = text.encode()
    outputs = {
        "TEXT": ("BYTES", len(data).to_bytes(4, "little") + data),
        "LANGUAGE_PROB": ("FP32", b"\xcd\xccL>"),  # 0.2
        "DURATION": ("FP64", b"\0\0\0\0\0\0\xf8?"),  # 1.5
    }
    asked = [output.name for output in request.outputs] or list(outputs)
    for name in asked:
        datatype, raw = outputs[name]
        response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(raw)
    return response


class _Methods(grpc.GenericRpcHandler):
    def __init__(self, triton):
        self._handlers = {
            "ServerReady": grpc.unary_unary_rpc_method_handler(triton.server_ready),
            "ServerMetadata": grpc.unary_unary_rpc_method_handler(triton.server_metadata),
            "ModelMetadata": grpc.unary_unary_rpc_method_handler(triton.model_metadata),
            "ModelInfer": grpc.unary_unary_rpc_method_handler(triton.infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(triton.stream),
        }

    def service(self, details):
        return self._handlers.get(details.method.removeprefix(SERVICE))
