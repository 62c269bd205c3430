"""The bridge's process when every connection sends as much audio as it may."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serve.wyoming.bridge import MAX_CONNECTIONS
from tests.gateways import until

FORMAT = {"rate": 384_000, "width": 4, "channels": 8}
CHUNK = bytes(2**20)


def event(kind, data, payload=b""):
    head = {"type": kind, "data": data, "payload_length": len(payload)}
    return json.dumps(head).encode() + b"\n" + payload


def talk(address, said):
    """Send 16 MiB of audio; note the error that comes, if one does."""
    with contextlib.suppress(OSError), socket.create_connection(address, 60) as client:
        with contextlib.suppress(OSError):
            for _ in range(16):
                client.sendall(event("audio-chunk", FORMAT, CHUNK))
            client.sendall(event("audio-stop", {}))
        if received := client.recv(2**16):
            said.append(received)


@pytest.mark.nightly
def test_all_connections_together_hold_little():
    """The server behind the bridge begins to read each request and stops."""
    said, asked = [], []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    stack.callback(client.close)
                    read = 0
                    while read < 2**18:
                        read += len(client.recv(2**16))
                    asked.append(client)

        threading.Thread(target=serve, daemon=True).start()
        command = [sys.executable, "-m", "serve", "wyoming", "--listen", "127.0.0.1:0"]
        command += ["--server", f"http://127.0.0.1:{server.getsockname()[1]}"]
        bridge = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(bridge.kill)
        port = int(re.search(r"tcp://127\.0\.0\.1:(\d+)", bridge.stdout.readline())[1])
        for _ in range(MAX_CONNECTIONS):
            arguments = (("127.0.0.1", port), said)
            threading.Thread(target=talk, args=arguments, daemon=True).start()
        until(lambda: len(asked) == MAX_CONNECTIONS)
        status = Path(f"/proc/{bridge.pid}/status").read_text()
        assert int(re.search(r"VmHWM:\s+(\d+)", status)[1]) < 600 * 1024
        assert not said
