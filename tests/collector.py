"""A collector of OpenTelemetry's: takes spans as OTLP over HTTP, and keeps or shows them.

`python -m tests.collector` listens on 127.0.0.1:4318 and shows each trace as a tree, with the
milliseconds at which each span began, after the trace did, and how long it took.
"""

import collections
import dataclasses
import http.server
import sys
import threading

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PORT = 4318


@dataclasses.dataclass(frozen=True)
class Span:
    """A span as it came; ids in hexadecimal, times in nanoseconds since 1970."""

    trace_id: str
    id: str
    parent_id: str
    name: str
    kind: int
    begin: int
    end: int
    attributes: dict
    failed: bool
    resource: dict


class Collector:
    """Listens until it is closed. `status`: what it answers; `spans`: all that came."""

    def __init__(self, port=0):
        self.spans, self.status = [], 200
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.status == 200 and self.path == "/v1/traces":
                    collector.spans += read(body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def read(message):
    """The spans of a serialised request to a collector."""
    request = ExportTraceServiceRequest.FromString(message)
    return [
        Span(
            trace_id=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            name=span.name,
            kind=span.kind,
            begin=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            attributes=_values(span.attributes),
            failed=span.status.code == span.status.STATUS_CODE_ERROR,
            resource=_values(of_process.resource.attributes),
        )
        for of_process in request.resource_spans
        for scope in of_process.scope_spans
        for span in scope.spans
    ]


def _values(attributes):
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


def tree(spans):
    """Lines that show a trace."""
    known = {span.id for span in spans}
    below = collections.defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        below[span.parent_id if span.parent_id in known else ""].append(span)
    began = min(span.begin for span in spans)

    def lines(parent, depth):
        for span in below[parent]:
            at_ms, took_ms = (span.begin - began) / 1e6, (span.end - span.begin) / 1e6
            name = "  " * depth + span.name
            told = [
                f"{key.removeprefix('earshot.')}={value:.4g}"
                for key, value in span.attributes.items()
                if isinstance(value, float)
            ]
            yield f"{name:34}{at_ms:9.1f}{took_ms:10.1f} ms  {' '.join(told)}".rstrip()
            yield from lines(span.id, depth + 1)

    return [f"trace {spans[0].trace_id}", *lines("", 1)]


def _show(collector):
    """Show each trace once its first span is there, which comes last."""
    shown = 0
    while True:
        threading.Event().wait(0.5)
        spans = list(collector.spans)
        traces = collections.defaultdict(list)
        for span in spans:
            traces[span.trace_id].append(span)
        for span in spans[shown:]:
            if span.kind == 2 and span.parent_id not in {one.id for one in spans}:
                print("\n".join(tree(traces[span.trace_id])), flush=True)
        shown = len(spans)


if __name__ == "__main__":
    try:
        _show(Collector(int(sys.argv[1]) if len(sys.argv) > 1 else PORT))
    except KeyboardInterrupt:
        sys.exit()
