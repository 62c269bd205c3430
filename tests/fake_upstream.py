"""A stand-in for Triton on its Unix socket, and what stands around it in a run's folder.

What the model answers is told by the request's PROMPT: "error:" and what Triton is to say (with a
gRPC status first, the call ends with that), or else the text of the answer, each word of which is a
segment of a second. "wait" as its first word: the end of the answer waits; "late:" and what Triton
is to say: a stream has a segment first. Where word times are wanted, a word a second is
heard. A word of `CONFIDENCE` says how likely it is right. What stands behind a "|" is told instead
where the request names a beam.
"""

import asyncio
import dataclasses
import os
import threading
import time

import grpc
from tritonclient.grpc import service_pb2

from serve.contract.messages import Phase, Segment, Timings, TokenLogprob, Transcript, Word
from serve.gateway.engines import SERVICE
from serve.gateway.kserve.messages import LENGTH
from serve.wire import tensors, uploads
from serve.wire.folder import ALIVE, METRICS_SOCKET, grpc_target
from serve.wire.liveness import touch_heartbeat
from serve.wire.tensors import CANCEL_PARAMETER, KEY_PARAMETER, PHASES_PARAMETER, SEGMENTS_PARAMETER

CONFIDENCE = {"clear": 0.9, "mumbled": 0.254}
LEAK = "Unable to find shared memory region: 'triton_python_backend_shm_region_1'"


class FakeTriton:
    """Answers as Triton does, in the folder of a run, on its own event loop.

    `ready`: what ServerReady says. `requests`: those that came, by their keys. `ended`: keys of
    those that it answered. `files`: audio that came beside its request, by its key.
    `cancelled`: keys of requests that were cancelled; `introduced`: of none, as a new gateway does.
    `cancelled_calls`: calls that were cancelled, which must never be. `metrics`: the page of
    metrics, if there is one. A request that waits ends when its key is cancelled or `release` is
    called.
    """

    def __init__(self, folder, metrics=b""):
        self.folder = folder
        self.metrics = metrics
        self.ready = True
        self.requests, self.ended, self.cancelled, self.cancelled_calls = {}, [], [], 0
        self.files, self.introduced = {}, []
        self._waits = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.beat()
        self.start()

    # ---------------------------------------------------------------- for tests

    def beat(self, age_s=-3600.0):
        """A sign of life so old; from the future it is one for as long as any test takes."""
        path = self.folder / ALIVE
        touch_heartbeat(path)
        now = path.stat().st_mtime
        os.utime(path, (now - age_s, now - age_s))

    def start(self):
        self._run(self._start())

    def stop(self):
        self._run(self._server.stop(0))
        if self.metrics:
            self._loop.call_soon_threadsafe(self._teller.close)

    def close(self):
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def waiting(self):
        """Keys of the requests that wait."""
        return list(self._waits)

    @property
    def inputs(self):
        """The inputs of the requests that came, in order."""
        return [inputs_of(request) for request in list(self.requests.values())]

    def release(self):
        """Let every request that waits be answered."""
        for key in list(self._waits):
            self._end(key, False)

    # ---------------------------------------------------------------- as Triton

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def _end(self, key, cancelled):
        wait = self._waits.get(key)
        if wait is not None:
            self._loop.call_soon_threadsafe(lambda: wait.done() or wait.set_result(cancelled))

    async def _start(self):
        if self.metrics:
            self._teller = await asyncio.start_unix_server(self._tell, self.folder / METRICS_SOCKET)
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        self._server.add_generic_rpc_handlers((_Methods(self),))
        self._server.add_insecure_port(grpc_target(self.folder))
        await self._server.start()

    async def _tell(self, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + self.metrics)
        writer.close()

    async def server_ready(self, message, context):
        return service_pb2.ServerReadyResponse(ready=self.ready).SerializeToString()

    async def stream(self, messages, context):
        try:
            async for message in messages:
                request = service_pb2.ModelInferRequest.FromString(message)
                if CANCEL_PARAMETER in request.parameters:
                    self._cancel(request.parameters[CANCEL_PARAMETER].string_param)
                    yield _streamed(request, {})
                    continue
                came_s, transcript = time.time(), transcript_of(request)
                segments = SEGMENTS_PARAMETER in request.parameters
                if segments and not _prompt(request).startswith("error:"):
                    first = 1 if _prompt(request).startswith(("wait", "late:")) else None
                    for segment in transcript.segments[:first]:
                        yield _streamed(request, tensors.segment_outputs(segment))
                error = await self._work(request)
                if error is None:
                    traced = PHASES_PARAMETER in request.parameters
                    transcript = dataclasses.replace(transcript, phases=_phases(came_s))
                    yield _streamed(request, tensors.transcript_outputs(transcript, traced))
                else:
                    name, _, text = error.partition(" ")
                    if name in grpc.StatusCode.__members__:
                        await context.abort(grpc.StatusCode[name], text)
                    answer = service_pb2.ModelStreamInferResponse(error_message=error)
                    yield answer.SerializeToString()
        except asyncio.CancelledError:
            self.cancelled_calls += 1
            raise

    def _cancel(self, key):
        (self.cancelled if key in self.requests else self.introduced).append(key)
        self._end(key, True)

    async def _work(self, request):
        """Wait if that is asked for; the error that is to be the answer."""
        key = request.parameters[KEY_PARAMETER].string_param
        kind, _, error = _prompt(request).partition(":")
        if kind.startswith("wait"):
            self._waits[key] = self._loop.create_future()  # before anybody sees the request
        if (file := uploads.take(self.folder, key)) is not None:
            self.files[key] = file
        self.requests[key] = request
        cancelled = False
        if key in self._waits:
            cancelled = await self._waits[key]
            del self._waits[key]
        self.ended.append(key)
        if cancelled:
            return "CancelledError: cancelled"
        return error if kind in ("error", "late") else None


def inputs_of(request):
    """The values of a request's inputs, by name; AUDIO and SAMPLES as bytes."""
    found = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=False):
        if tensor.datatype == "BYTES":
            found[tensor.name] = raw[4:] if tensor.name == "AUDIO" else raw[4:].decode()
        elif tensor.name == "SAMPLES":
            found[tensor.name] = raw
        else:
            values = tensors.np.frombuffer(raw, tensors.NUMPY_TYPES[tensor.datatype])
            found[tensor.name] = values.item() if len(values) == 1 else values.tolist()
    return found


def transcript_of(request):
    """What the models answer."""
    asked = inputs_of(request)
    spoken = _prompt(request).split() or ["hello"]
    if "SAMPLES" in asked and "WORD_TIMESTAMPS" in asked:  # as many as have been said by then
        spoken = spoken[: round(len(asked["SAMPLES"]) / 4 / 16_000)]
    segments = tuple(
        Segment(
            start=float(i),
            end=i + 1.0,
            text=f" {word}",
            tokens=(i,),
            avg_logprob=-0.25,
            no_speech_prob=0.125,
            temperature=0.0,
            compression_ratio=1.0,
            words=(Word(float(i), i + 0.5, f" {word}", 0.75, CONFIDENCE.get(word)),)
            if "WORD_TIMESTAMPS" in asked
            else None,
            token_logprobs=(TokenLogprob(f" {word}", -0.5 - i),)
            if "TOKEN_LOGPROBS" in asked
            else None,
            speaker="AB"[i % 2] if "DIARIZE" in asked else None,  # who take turns
        )
        for i, word in enumerate([] if spoken == ["silence"] else spoken)
    )
    language = asked.get("LANGUAGE", "es")
    return Transcript(
        text="".join(segment.text for segment in segments).strip(),
        language=language if segments else None,
        language_prob=0.2 if segments else None,
        duration=1.5,
        segments=segments,
        timings=Timings(0.1, 0.2, 0.3, 0.7),
        tokens=tuple(range(50, 50 + len(segments))),
        warnings=("audio is cut short: 1.50 s\n",) if asked.get("PARTIAL") else (),
    )


def _phases(came_s):
    """Of a request that came then and is answered now, as if one took as long as another."""
    names = ("queue.decoder", "decode", "queue.slot", "encode", "steps")
    each_s = (time.time() - came_s) / len(names)
    times = [came_s + i * each_s for i in range(len(names) + 1)]
    return tuple(Phase(name, times[i], times[i + 1], each_s, 1) for i, name in enumerate(names))


def _prompt(request):
    asked = inputs_of(request)
    prompt, bar, beamed = asked.get("PROMPT", "").partition("|")
    return beamed if bar and "BEAM_SIZE" in asked else prompt


def _streamed(request, outputs):
    response = service_pb2.ModelStreamInferResponse(infer_response=_response(request, outputs))
    return response.SerializeToString()


def _response(request, outputs):
    """Those of the outputs that were asked for."""
    response = service_pb2.ModelInferResponse(
        model_name=request.model_name, model_version="1", id=request.id
    )
    asked = [output.name for output in request.outputs] or list(outputs)
    for name in asked:
        datatype, tensor = tensors.OUTPUTS[name].datatype, outputs[name]
        raw = LENGTH.pack(len(tensor[0])) + tensor[0] if datatype == "BYTES" else tensor.tobytes()
        response.outputs.add(name=name, datatype=datatype, shape=tensor.shape)
        response.raw_output_contents.append(raw)
    return response


class _Methods(grpc.GenericRpcHandler):
    def __init__(self, triton):
        self._handlers = {
            "ServerReady": grpc.unary_unary_rpc_method_handler(triton.server_ready),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(triton.stream),
        }

    def service(self, details):
        return self._handlers.get(details.method.removeprefix(SERVICE))
