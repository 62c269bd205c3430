"""The transcriber behind `serve transcribe`: the running server, or an engine in this process."""

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

if TYPE_CHECKING:  # each is loaded where it is used
    from serve.transcriber.loop import Transcriber
    from serve.wire.client import TritonClient

Transcribe = Callable[[Request, Callable[[float], None]], Transcript]
"""Transcribes a request; calls a function with the seconds of audio that are done, now and then."""

FIRST_LOOK_S = 2.0
PATIENCE_S = 60.0  # longest wait for a server that is there and not ready
LOOK_S = 1.0  # between two looks at it
_GRACE_S = 10.0  # beyond the transcriber's own limit
_STATES = {"silent": "did not answer", "not ready": "was not ready"}


@contextlib.contextmanager
def open_backend(config: Config, args: argparse.Namespace) -> Iterator[Transcribe]:
    """Open the running server if there is one, else a transcriber of this process's own.

    Args:
        config: names the server's address and the engine.
        args: `in_process` and `engine` of the command.

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
                print(f"through the server at {address}", file=sys.stderr)
                yield lambda request, heard: _through(client, request, heard)
                return
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

    engine = args.engine or config.engine
    print(f"{reason}in this process, with the engine {engine}", file=sys.stderr)
    limit_s = config.transcriber.request_timeout_s + _GRACE_S
    with open_transcriber(config, engine) as transcriber:
        yield lambda request, heard: _last(_events(transcriber, request, limit_s), heard)


def _wait_for(client: "TritonClient", address: str) -> str:
    """Wait for a server that is there; return why it cannot be used, or "" if it is ready."""
    state, end_s = client.state(FIRST_LOOK_S), time.monotonic() + PATIENCE_S
    if state in _STATES:
        print(
            f"the server at {address} {_STATES[state]} within {FIRST_LOOK_S:g} s; "
            f"waiting for it, at most {PATIENCE_S:g} s",
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
    """Ask the server, once more if it lost the request after its first segment."""
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
    """Return the transcript that ends some events; tell each segment's end in seconds."""
    for event in events:
        if isinstance(event, RequestFinished):
            return event.transcript
        heard(event.segment.end)
    raise AssertionError("no event ended the request")


def _events(
    transcriber: "Transcriber", request: Request, limit_s: float
) -> Generator[SegmentReady | RequestFinished, None, None]:
    """Yield the events of a request to a transcriber of this process."""
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
        raise DeadlineError(f"no answer within {limit_s:g} s: the device hangs") from None
    finally:
        handle.cancel()
