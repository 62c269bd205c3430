"""The backend of `serve transcribe`: the running server, or an engine in this process."""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from serve.cli.options import api_key, server_address
from serve.contract.config import Config
from serve.contract.errors import UnavailableError
from serve.contract.messages import Request, RequestFinished, Transcript

if TYPE_CHECKING:  # loaded only by the backend that uses it
    from serve.wire.client import TritonClient

Transcribe = Callable[[Request, Callable[[float], None]], Transcript]
"""Transcribes a request and reports progress: seconds of audio that have been transcribed."""

FIRST_LOOK_S = 2.0  # timeout of the first readiness check
PATIENCE_S = 60.0  # longest wait for a server that is reachable and not ready
LOOK_S = 1.0  # between readiness checks
_STATES = {"silent": "did not answer", "not ready": "was not ready"}


@contextlib.contextmanager
def open_backend(config: Config, args: argparse.Namespace) -> Iterator[Transcribe]:
    """Connect to the running server if there is one, else open a transcriber in this process.

    Args:
        config: the config with the server's address and the engine.
        args: the command's arguments; uses `in_process` and `engine`.

    Raises:
        EarshotError: the engine cannot be opened.
    """
    reason = ""
    if not (args.in_process or args.engine):
        from serve.wire.client import TritonClient  # noqa: PLC0415 - tritonclient, only if asked for

        address = server_address(config, config.server.grpc_port)
        with TritonClient(address, key=api_key()) as client:
            reason = _wait_for(client, address)
            if not reason:
                print(f"using the server at {address}", file=sys.stderr)
                yield functools.partial(_through, client)
                return
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

    engine = args.engine or config.engine
    print(f"{reason}using the engine {engine} in this process", file=sys.stderr)
    with open_transcriber(config, engine) as transcriber:
        yield lambda request, report: transcriber.transcribe(
            request, lambda segment: report(segment.end)
        )


def _wait_for(client: "TritonClient", address: str) -> str:
    """Wait for a reachable server; return why it cannot be used, or "" if it is ready."""
    state, deadline_s = client.state(FIRST_LOOK_S), time.monotonic() + PATIENCE_S
    if state in _STATES:
        print(
            f"the server at {address} {_STATES[state]} within {FIRST_LOOK_S:g} s; "
            f"waiting for it for at most {PATIENCE_S:g} s",
            file=sys.stderr,
        )
    while state in _STATES:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            return f"the server at {address} {_STATES[state]} within {PATIENCE_S:g} s; "
        time.sleep(min(LOOK_S, remaining_s))
        state = client.state(remaining_s)
    return "" if state == "ready" else f"no server at {address}; "


def _through(
    client: "TritonClient", request: Request, report: Callable[[float], None]
) -> Transcript:
    """Transcribe through the server; retry once if the stream fails after its first segment."""
    begun = False
    try:
        for event in client.stream(request):
            if isinstance(event, RequestFinished):
                return event.transcript
            begun = True
            report(event.segment.end)
    except UnavailableError:
        if not begun:
            raise
    return client.start(request).result()
