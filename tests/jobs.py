"""What the tests of jobs share: a server outside, their configuration, and requests."""

import base64
import http.server
import json
import threading
from pathlib import Path

from serve.contract.jobs_config import JobsConfig
from serve.contract.keys import add_key, hash_of
from tests.gateways import until

SECRET = b"0123456789abcdef0123456789abcdef"
ALICE = {"authorization": "Bearer secret-a"}
BOB = {"authorization": "Bearer secret-b"}
JOBS = "/v1/audio/jobs"


class Hearer:
    """A server of somebody's: takes webhooks, has files, and answers as `statuses` say."""

    def __init__(self):
        self.hooks, self.statuses, self.files = [], [], {"/a.wav": b"RIFF from outside"}
        hearer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                hearer.hooks.append((dict(self.headers.items()), body))
                self.answer(hearer.statuses.pop(0) if hearer.statuses else 204, b"")

            def do_GET(self):
                status = hearer.statuses.pop(0) if hearer.statuses else 200
                if isinstance(status, str):
                    self.answer(302, b"", status)
                else:
                    content = hearer.files.get(self.path, b"")
                    self.answer(status if content or status != 200 else 404, content)

            def answer(self, status, body, location=None):
                self.send_response(status)
                if location:
                    self.send_header("location", location)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.place = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,)).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def jobs_config(folder, *places):
    """A configuration with a secret for webhooks, whose places lie on this machine."""
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


def form(audio=b"RIFF", **fields):
    """Body and headers of a form; a field that ends with _ is repeated as name[]."""
    parts = [f'name="{name}"\r\n\r\n{text}'.encode() for name, text in fields.items()]
    parts.append(b'name="file"; filename="talk.wav"\r\n\r\n' + audio)
    body = b"".join(b"--X\r\ncontent-disposition: form-data; " + p + b"\r\n" for p in parts)
    return body + b"--X--\r\n", {"content-type": "multipart/form-data; boundary=X"}


def send(running, audio=b"RIFF", headers=(), **fields):
    """Status and job, or error, of a job that is posted as a form; without audio as JSON."""
    body, kind = form(audio, **fields) if audio else (json.dumps(fields), _JSON)
    status, _, answer = running.ask("POST", JOBS, body, {**kind, **dict(headers)})
    answer = json.loads(answer)
    return status, answer if status == 202 else answer["error"]


_JSON = {"content-type": "application/json"}


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
