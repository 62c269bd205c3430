"""The backend of `serve transcribe`: the running server, or an engine in this process."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator

from serve.cli.options import api_key, server_address
from serve.contract.config import Config
from serve.contract.errors import UnavailableError
from serve.contract.messages import Request, RequestFinished, SegmentReady, Transcript

Transcribe = Callable[[Request, Callable[[float], None]], Transcript]
"""Transcribes a request and reports progress: seconds of audio that have been transcribed."""

ANSWER_S = 10.0
"""Timeout of the question whether a server is ready, in seconds."""


@contextlib.contextmanager
def open_backend(config: Config, args: argparse.Namespace) -> Iterator[Transcribe]:
    """Connect to the running server if there is one, else open a transcriber in this process.

    Args:
        config: the config with the server's address and the engine.
        args: the command's arguments; uses `in_process` and `engine`.

    Raises:
        UnavailableError: a server runs and is not ready.
        EarshotError: the engine cannot be opened.
    """
    reason = ""
    if not (args.in_process or args.engine):
        from serve.wire.client import TritonClient  # noqa: PLC0415 - tritonclient, only if asked for

        address = server_address(config, config.server.grpc_port)
        with TritonClient(address, key=api_key()) as client:
            state = client.state(ANSWER_S)
            if state == "ready":
                print(f"using the server at {address}", file=sys.stderr)
                yield lambda request, report: _last_of(client.stream(request), report)
                return
        if state != "absent":
            raise UnavailableError(
                f"the server at {address} is {state}; try again when it is ready, or use "
                "--in-process"
            )
        reason = f"no server at {address}; "
    from serve.transcriber.open import open_transcriber  # noqa: PLC0415 - loads torch

    engine = args.engine or config.engine
    print(f"{reason}using the engine {engine} in this process", file=sys.stderr)
    with open_transcriber(config, engine) as transcriber:
        yield lambda request, report: transcriber.transcribe(
            request, lambda segment: report(segment.end)
        )


def _last_of(
    events: Iterator[SegmentReady | RequestFinished], report: Callable[[float], None]
) -> Transcript:
    """Return the answer at the end of a stream, and report the end of each segment before it."""
    for event in events:
        if isinstance(event, RequestFinished):
            return event.transcript
        report(event.segment.end)
    raise AssertionError("a stream ends with an answer or an error")
