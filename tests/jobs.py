"""What the tests of jobs share: a server outside, their configuration, and requests."""

import base64
import contextlib
import http.server
import json
import threading
from pathlib import Path

from serve.contract.keys import add_key, hash_of
from serve.contract.server_config import JobsConfig
from tests.gateways import FORM, WAIT_S, form, until

SECRET = b"0123456789abcdef0123456789abcdef"
ALICE = {"authorization": "Bearer secret-a"}
BOB = {"authorization": "Bearer secret-b"}
JOBS = "/v1/audio/jobs"
JSON = {"content-type": "application/json"}


AUDIO = b"RIFF from outside"


class Hearer:
    """A user's server: takes webhooks, has files, and answers as `statuses` say.

    What is below /slow is answered once `released` is set; `at_once`: the most of these at a time.
    Of /drip a byte comes now and then, without an end. `asked`: the paths of files.
    """

    def __init__(self, address="127.0.0.1", port=0):
        self.hooks, self.asked, self.statuses = [], [], []
        self.files = {"/none": b""}
        self.released, self.waiting, self.at_once = threading.Event(), 0, 0
        self.server = http.server.ThreadingHTTPServer((address, port), _Handler)
        self.server.hearer = self
        self.port = self.server.server_port
        self.place = f"http://{address}:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,)).start()

    def wait(self):
        self.waiting += 1
        self.at_once = max(self.at_once, self.waiting)
        self.released.wait(WAIT_S)
        self.waiting -= 1

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        hearer = self.server.hearer
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path.startswith("/slow"):
            hearer.wait()
        hearer.hooks.append((self.path, dict(self.headers.items()), body))
        self.answer(hearer.statuses.pop(0) if hearer.statuses else 204, b"")

    def do_GET(self):
        hearer = self.server.hearer
        hearer.asked.append(self.path)
        if self.path.startswith("/slow"):
            hearer.wait()
        status = hearer.statuses.pop(0) if hearer.statuses else 200
        content = hearer.files.get(self.path, AUDIO)
        if self.path == "/drip":
            self.drip(hearer)
        elif isinstance(status, str):
            self.answer(302, b"", status)
        else:
            self.answer(status if content or status != 200 else 404, content)

    def drip(self, hearer):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while not hearer.released.wait(0.02):
                self.wfile.write(b"R")

    def answer(self, status, body, location=None):
        with contextlib.suppress(OSError):  # the asker has gone
            self.send_response(status)
            if location:
                self.send_header("location", location)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def jobs_config(folder, *places):
    """A configuration with a secret for webhooks and places on this machine."""
    secret = folder / "secret"
    secret.write_text(f"whsec_{base64.b64encode(SECRET).decode()}\n")
    return JobsConfig(
        folder=str(folder / "jobs"),
        allowed_hosts=places,
        allowed_networks=("127.0.0.0/8",),
        webhook_secret_file=str(secret),
    )


def keys_of(folder, **limits):
    """The path of a file with the keys of `ALICE` and `BOB`; their limits by their names."""
    path = folder / "keys.toml"
    add_key(path, "alice", {"sha256": hash_of("secret-a"), **limits.get("alice", {})})
    add_key(path, "bob", {"sha256": hash_of("secret-b"), **limits.get("bob", {})})
    return str(path)


def send(running, audio=b"RIFF", headers=(), **fields):
    """Status and job, or error, of a job that is posted as a form; without audio as JSON."""
    body, kind = (form(audio, "talk.wav", **fields), FORM) if audio else (json.dumps(fields), JSON)
    status, _, answer = running.ask("POST", JOBS, body, {**kind, **dict(headers)})
    answer = json.loads(answer)
    return status, answer if status == 202 else answer["error"]


def accepted(running, *args, **fields):
    status, job = send(running, *args, **fields)
    assert status == 202, job
    return job


def show(running, id, headers=None):
    status, _, body = running.ask("GET", f"{JOBS}/{id}", headers=headers)
    assert status == 200, body
    return json.loads(body)


def ended(running, id, headers=None):
    until(lambda: show(running, id, headers)["ended_at"])
    return show(running, id, headers)


def result(running, id, query="", headers=None):
    status, _, body = running.ask("GET", f"{JOBS}/{id}/result{query}", headers=headers)
    return status, body.decode()


def audio_of(config):
    return sorted(path.name for path in (Path(config.folder) / "audio").iterdir())
