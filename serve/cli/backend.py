"""The backend of `serve transcribe`: the running server, or an engine in this process."""

import argparse
import contextlib
import queue
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from serve.cli.options import api_key, server_address
from serve.contract.config import Config
from serve.contract.errors import DeadlineError, UnavailableError
from serve.contract.messages import (
    Request,
    RequestFailed,
    RequestFinished,
    SegmentReady,
    TranscriberEvent,
    Transcript,
)

if TYPE_CHECKING:  # loaded only by the backend that uses it
    from serve.transcriber.loop import Transcriber
    from serve.wire.client import TritonClient

Transcribe = Callable[[Request, Callable[[float], None]], Transcript]
"""Transcribes a request and reports progress: seconds of audio that have been transcribed."""

FIRST_LOOK_S = 2.0  # timeout of the first readiness check
PATIENCE_S = 60.0  # longest wait for a server that is reachable and not ready
LOOK_S = 1.0  # between readiness checks
_GRACE_S = 10.0  # beyond the transcriber's own limit
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
                yield lambda request, heard: _through(client, request, heard)
                return
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

    engine = args.engine or config.engine
    print(f"{reason}using the engine {engine} in this process", file=sys.stderr)
    limit_s = config.transcriber.request_timeout_s + _GRACE_S
    with open_transcriber(config, engine) as transcriber:
        yield lambda request, heard: _last(_events(transcriber, request, limit_s), heard)


def _wait_for(client: "TritonClient", address: str) -> str:
    """Wait for a reachable server; return why it cannot be used, or "" if it is ready."""
    state, end_s = client.state(FIRST_LOOK_S), time.monotonic() + PATIENCE_S
    if state in _STATES:
        print(
            f"the server at {address} {_STATES[state]} within {FIRST_LOOK_S:g} s; "
            f"waiting for it for at most {PATIENCE_S:g} s",
            file=sys.stderr,
        )
    while state in _STATES and (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(LOOK_S, left_s))
        state = client.state(left_s)
    if state == "ready":
        return ""
    if state in _STATES:
        return f"the server at {address} {_STATES[state]} within {PATIENCE_S:g} s; "
    return f"no server at {address}; "


def _through(
    client: "TritonClient", request: Request, heard: Callable[[float], None]
) -> Transcript:
    """Transcribe through the server; retry once if the stream fails after its first segment."""
    begun = False

    def note(until_s: float) -> None:
        nonlocal begun
        begun = True
        heard(until_s)

    try:
        return _last(client.stream(request), note)
    except UnavailableError:
        if not begun:
            raise
        return client.start(request).result()


def _last(
    events: Iterator[SegmentReady | RequestFinished], heard: Callable[[float], None]
) -> Transcript:
    """Return the transcript at the end of the events; report each segment's end in seconds."""
    for event in events:
        if isinstance(event, RequestFinished):
            return event.transcript
        heard(event.segment.end)
    raise AssertionError("the events ended without a transcript")


def _events(
    transcriber: "Transcriber", request: Request, limit_s: float
) -> Generator[SegmentReady | RequestFinished, None, None]:
    """Yield the events of a request to the transcriber in this process."""
    events: queue.SimpleQueue[TranscriberEvent] = queue.SimpleQueue()
    handle = transcriber.submit(request, events.put)
    end_s = time.monotonic() + limit_s
    try:
        while True:
            event = events.get(timeout=max(0.0, end_s - time.monotonic()))
            if isinstance(event, RequestFailed):
                raise event.error
            yield event
    except queue.Empty:
        raise DeadlineError(f"no result within {limit_s:g} s: the device hangs") from None
    finally:
        handle.cancel()
