"""Who posts jobs, and who is told by webhooks that they have ended."""

import base64
import hashlib
import hmac
import http.client
import http.server
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from eval.jobs.server import PAUSE_S, TIMEOUT_S, ask
from eval.server import post

SECRET = b"eval jobs signs its webhooks by this"

_REFUSED_SHARE = 0.1  # of first tries of webhooks


class Receiver(http.server.ThreadingHTTPServer):
    """Takes webhooks, refuses some at first, and notes each that is signed as it should be."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Hook)
        self.taken: Counter[str] = Counter()  # by webhook-id
        self.bodies: dict[str, set[bytes]] = {}
        self.refused: Counter[str] = Counter()
        self.forged = 0
        self.random = random.Random(seed)
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self.server_port}"

    def hear(self, headers: Any, body: bytes) -> int:
        """Note a webhook; return the status of the answer."""
        id = str(headers["webhook-id"])
        text = f"{id}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.digest(SECRET, text, hashlib.sha256)).decode()
        with self.lock:
            if headers["webhook-signature"] != f"v1,{expected}":
                self.forged += 1
                return 400
            self.bodies.setdefault(id, set()).add(body)
            if not self.refused[id] and self.random.random() < _REFUSED_SHARE:
                self.refused[id] += 1
                return 503
            self.taken[id] += 1
        return 204


class _Hook(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        """Answer a webhook."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.server.hear(self.headers, body))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Client(threading.Thread):
    """Posts jobs, each until it is accepted, and notes their ids.

    Args:
        address: of the server.
        key: of the client's.
        body: of the form.
        jobs: how many.
        go_on: says whether it may send the next one now; None ends it before.
    """

    def __init__(
        self, address: str, key: str, body: bytes, jobs: int, go_on: Callable[[], bool | None]
    ) -> None:
        super().__init__(daemon=True)
        self.key = key
        self.ids: list[str] = []
        self.sent_again = 0
        self.refused: Counter[int] = Counter()
        self._address = address
        self._body = body
        self._jobs = jobs
        self._go_on = go_on

    def run(self) -> None:
        """Post them."""
        for number in range(self._jobs):
            while (may := self._go_on()) is not None:
                if may and self._sent(number):
                    break
                self.sent_again += may
                time.sleep(PAUSE_S)

    def _sent(self, number: int) -> bool:
        headers = {
            "Authorization": f"Bearer {self.key}",
            "Content-Type": "multipart/form-data; boundary=X",
            "Idempotency-Key": str(number),
        }
        try:
            answer, text = post(self._address, "/v1/audio/jobs", self._body, headers, TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            return False
        if answer.status != 202:
            self.refused[answer.status] += 1
            return False
        self.ids.append(json.loads(text)["id"])
        return True

    def all_jobs(self) -> Iterator[dict[str, Any]]:
        """Yield the server's list of this key's jobs, page by page; raises OSError."""
        after = ""
        while True:
            status, text = ask(self._address, "GET", f"/v1/audio/jobs?limit=100{after}", self.key)
            if status != 200:
                raise OSError(f"the list is status {status}")
            page = json.loads(text)
            yield from page["data"]
            if not page["has_more"]:
                return
            after = f"&after={page['last_id']}"


def form(audio: bytes, webhook_url: str) -> bytes:
    """Return the body of a form that asks for little work, and for a webhook."""
    fields = {"webhook_url": webhook_url, "beam_size": "1", "best_of": "1", "short_encoder": "true"}
    parts = [f'name="{name}"\r\n\r\n{text}'.encode() for name, text in fields.items()]
    parts.append(b'name="file"; filename="a.wav"\r\n\r\n' + audio)
    head = b"--X\r\nContent-Disposition: form-data; "
    return b"".join(head + part + b"\r\n" for part in parts) + b"--X--\r\n"
