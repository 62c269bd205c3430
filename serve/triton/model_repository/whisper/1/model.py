"""The Triton model `whisper`, which owns the engine.

The model is decoupled: an answer may have several messages, one for each segment if a request asks
for them. `execute` copies a request's tensors, starts the request and returns. A `Responder` keeps
its response sender.
"""

import ctypes
import functools
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from serve.contract.config import load_config
from serve.contract.errors import EarshotError, OptionError
from serve.triton.heartbeat import Heartbeat
from serve.triton.responses import Responder, ResponseQueue
from serve.wire import folder as names
from serve.wire import tensors
from serve.wire.tensors import require_numpy_1

if TYPE_CHECKING:
    from serve.triton.backends import EngineBackend

logger = logging.getLogger("earshot")

_SWITCH_INTERVAL_S = 0.0005  # longest time that a thread keeps the GIL while another waits
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h


class TritonPythonModel:
    """The class that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the engine and transcribe once to warm it up."""
        triton = os.getppid()
        # Steps allocate tensors of a few MiB, and the allocator should keep their memory. That is
        # its default, but the environment has other limits for Triton.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 26)
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
        # The device thread would wait for Python's default of 5 ms, which is several decoder steps.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(parameters["folder"])
        self._heartbeat = Heartbeat(folder / names.ALIVE, triton)
        try:
            require_numpy_1()
            self._backend = open_backend(parameters)
        except Exception as error:
            if not isinstance(error, EarshotError):
                logger.exception("the model failed to start")
            # The supervisor reads this file.
            (folder / names.FAILURE).write_text(str(error) or repr(error), encoding="utf-8")
            raise pb_utils.TritonModelException(str(error)) from error
        self._responses = ResponseQueue()
        self._heartbeat.start()

    def execute(self, requests: list[Any]) -> None:
        """Start or cancel requests; other threads send the responses."""
        for request in requests:
            # KServe's parameters are a flat map of texts, numbers and booleans.
            parameters, inputs = json.loads(request.parameters() or "{}"), _inputs(request)
            if (cancelled_key := parameters.get(tensors.CANCEL_PARAMETER)) is not None:
                self._backend.cancel(cancelled_key)
                Responder(request.get_response_sender(), pb_utils).send({})
                continue
            segments = tensors.SEGMENTS_PARAMETER in parameters
            streamed = bool(inputs.get("STREAM", [segments])[0])
            # Keep no variable for the sender: a traceback would keep it, and so Triton the request.
            phases = tensors.PHASES_PARAMETER in parameters
            responder = Responder(request.get_response_sender(), pb_utils, streamed, phases)
            try:
                if streamed and not segments:
                    raise OptionError(
                        f"STREAM = true, but the model {tensors.MODEL} answers once; send the "
                        f"request to {tensors.STREAM_MODEL} over a gRPC stream"
                    )
                on_event = functools.partial(self._responses.put, responder)
                key = parameters.get(tensors.KEY_PARAMETER)
                priority = parameters.get(tensors.PRIORITY_PARAMETER, "file")
                self._backend.start(inputs, on_event, key, priority)
            except Exception as error:  # one request must not affect others
                if not isinstance(error, EarshotError):
                    logger.exception("a request failed")
                responder.fail(error)

    def finalize(self) -> None:
        """Finish the accepted requests and stop."""
        self._backend.close()
        self._responses.close()
        self._heartbeat.close()


def open_backend(parameters: dict[str, str]) -> "EngineBackend":
    """Open the engine that the parameters of config.pbtxt name.

    Raises:
        EarshotError: the config or the engine cannot be opened.
    """
    # These imports load torch; `initialize` reports their errors like those of the engine.
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415
    from serve.triton.backends import EngineBackend  # noqa: PLC0415

    config, began_s = load_config(parameters["config"]), time.monotonic()
    transcriber = open_transcriber(config, parameters["engine"])
    logger.info("the engine is open after %.1f s", time.monotonic() - began_s)
    drain_s, folder = config.server.drain_timeout_s, Path(parameters["folder"])
    return EngineBackend(transcriber, drain_s, folder, pb_utils.MetricFamily)


def _inputs(request: Any) -> dict[str, tensors.Tensor]:
    """Copy a request's tensors, because Triton frees their memory after `execute`."""
    return {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
