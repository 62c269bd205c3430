"""HTTP/2 by hand, as far as calls of gRPC need it."""

from serve.gateway.engines import SERVICE


def frame(kind, flags, stream, payload):
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def head(method):
    """The headers of a call, none of them compressed."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": f"{SERVICE}{method}".encode(),
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    return b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
