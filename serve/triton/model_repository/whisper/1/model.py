"""The Triton model `whisper`: called by Triton, and calling it.

It owns the engine. It is decoupled, so that an answer may be several messages: each segment as soon
as it is known, where a request asks for them. `execute` copies a request's tensors out, starts it
and returns; its response sender lives on in a `Responder`.
"""

import ctypes
import functools
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from serve.contract.config import load_config
from serve.contract.errors import EarshotError, OptionError, shown
from serve.triton.backends import EngineBackend, open_transcriber
from serve.triton.cancellation import MAX_KEY_CHARS
from serve.triton.heartbeat import Heartbeat
from serve.triton.responses import Responder, ResponseQueue, Sender
from serve.wire import folder as names
from serve.wire import tensors
from serve.wire.numpy_version import require_numpy_1

logger = logging.getLogger("earshot")

_SWITCH_S = 0.0005  # longest that one thread keeps the interpreter while another waits for it
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h


class TritonPythonModel:
    """The class that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Get ready to answer; it has transcribed once when this returns."""
        triton = os.getppid()
        # Tensors of a few MiB come with each step: the allocator keeps them, as it does by itself
        # where the environment does not set Triton's limits.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 26)
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
        # Python's 5 ms are several decoder steps, for which the device thread would stand still.
        sys.setswitchinterval(_SWITCH_S)
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(parameters["folder"])
        try:
            require_numpy_1()
            self._backend = open_backend(parameters)
        except Exception as error:
            if not isinstance(error, EarshotError):
                logger.exception("the model failed to start")
            # The supervisor looks for this file.
            (folder / names.FAILURE).write_text(str(error) or repr(error), encoding="utf-8")
            raise pb_utils.TritonModelException(str(error)) from error
        self._responses = ResponseQueue()
        self._heartbeat = Heartbeat(folder / names.ALIVE, triton)

    def execute(self, requests: list[Any]) -> None:
        """Start the requests, whose responses come from other threads, and cancel others."""
        for request in requests:
            # Flat: KServe's parameters are a map of texts, numbers, true and false.
            parameters, inputs = json.loads(request.parameters() or "{}"), _inputs(request)
            if (key := parameters.get(tensors.CANCEL_PARAMETER)) is not None:
                self._cancel(request, key)
                continue
            segments = tensors.SEGMENTS_PARAMETER in parameters
            streamed = bool(inputs.get("STREAM", [segments])[0])
            # No name for the sender: an error's traceback would keep it, and Triton the request.
            phases = tensors.PHASES_PARAMETER in parameters
            responder = Responder(Sender(request.get_response_sender(), pb_utils), streamed, phases)
            try:
                if streamed and not segments:
                    raise OptionError(
                        f"STREAM = true, but the model {tensors.MODEL} answers once; send the "
                        f"request to {tensors.STREAM_MODEL} over a gRPC stream"
                    )
                on_event = functools.partial(self._responses.put, responder)
                priority = parameters.get(tensors.PRIORITY_PARAMETER, "file")
                handle = self._backend.start(inputs, on_event, _key(parameters), priority)
            except Exception as error:  # one request must not hurt its neighbours
                if not isinstance(error, EarshotError):
                    logger.exception("a request failed")
                responder.fail(error)
            else:
                responder.set_handle(handle)

    def _cancel(self, request: Any, key: object) -> None:
        """Do what a request asks for that is no more than a cancel, and answer it with nothing."""
        self._backend.cancel(str(key))
        sender = Sender(request.get_response_sender(), pb_utils)
        sender.send(sender.response({}), final=True)

    def finalize(self) -> None:
        """Finish what was accepted and stop."""
        self._backend.close()
        self._responses.close()
        self._heartbeat.close()


def open_backend(parameters: dict[str, str]) -> EngineBackend:
    """Open the engine that the parameters of config.pbtxt name.

    Raises:
        EarshotError: the config or the engine cannot be had.
    """
    config = load_config(parameters["config"])
    return EngineBackend(
        open_transcriber(config, parameters["engine"]),
        config.server.drain_timeout_s,
        Path(parameters["folder"]),
        pb_utils.MetricFamily,
    )


def _key(parameters: Mapping[str, Any]) -> str | None:
    """Return a request's name for cancels, which its sender may have given it."""
    key = parameters.get(tensors.KEY_PARAMETER)
    if key is not None and not (isinstance(key, str) and 0 < len(key) <= MAX_KEY_CHARS):
        raise OptionError(
            f"parameter {tensors.KEY_PARAMETER} is {shown(key)}; expected a text of at most "
            f"{MAX_KEY_CHARS} characters"
        )
    return key


def _inputs(request: Any) -> dict[str, tensors.Tensor]:
    """Copy the tensors that were sent; Triton's own memory ends with `execute`."""
    inputs = ((name, pb_utils.get_input_tensor_by_name(request, name)) for name in tensors.INPUTS)
    return {name: np.array(tensor.as_numpy()) for name, tensor in inputs if tensor is not None}
