"""`python -m serve jobs`, as a user meets it, before a gateway over a stand-in for Triton."""

import contextlib
import http.server
import json
import threading

import pytest

from serve.cli.main import main
from serve.contract.keys import add_key, hash_of
from serve.contract.server_config import JobsConfig
from serve.supervisor.server import config_to_toml
from tests.gateways import Running, until


@pytest.fixture
def running(tmp_path, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.runner.POLL_S", 0.05)
    monkeypatch.setattr("serve.cli.jobs.FIRST_S", 0.02)
    keys = tmp_path / "keys.toml"
    for name in ("alice", "bob"):
        add_key(keys, name, {"sha256": hash_of(f"secret-{name}")})
    (tmp_path / "run").mkdir()
    running = Running(
        tmp_path / "run", 600.0, jobs=JobsConfig(folder=str(tmp_path / "jobs")), keys_file=str(keys)
    )
    yield running
    running.triton.release()
    running.close()


@pytest.fixture
def jobs(running, tmp_path, capsys, monkeypatch):
    """Run a command; its status, and what it writes."""
    toml = tmp_path / "a.toml"
    toml.write_text(config_to_toml(running.config), encoding="utf-8")
    monkeypatch.setenv("EARSHOT_API_KEY", "secret-alice")

    def jobs(command, *arguments):
        status = main(["jobs", command, "--config", str(toml), *arguments])
        written = capsys.readouterr()
        return status, written.out, written.err

    return jobs


@pytest.fixture
def talk(tmp_path):
    path = tmp_path / "talk.wav"
    path.write_bytes(b"RIFF")
    return str(path)


def test_a_job_is_sent_listed_shown_and_its_result_fetched(jobs, running, talk, monkeypatch):
    status, id, _ = jobs(
        *("submit", talk, "--prompt", "one two", "--format", "verbose_json"),
        *("--word-timestamps", "--option", "languages=en,es", "--beam-size", "3", "--no-vad"),
    )
    id = id.strip()
    assert (status, id.startswith("job_")) == (0, True)
    until(lambda: "completed" in jobs("show", id)[1])
    assert json.loads(jobs("show", id)[1])["filename"] == "talk.wav"
    _, table, _ = jobs("list")
    head, row = table.splitlines()
    assert head.split() == ["id", "status", "created", "audio_s", "audio"]
    assert row.split()[:2] == [id, "completed"]
    assert json.loads(jobs("result", id)[1])["words"]
    status, text, _ = jobs("result", id, "--format", "srt", "--cue", "max_words_per_line=1")
    assert (status, text.count("-->")) == (0, 2)
    (request,) = running.triton.requests.values()
    sent = {
        one.name: raw for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }
    assert b"en" in sent["LANGUAGES"] and b"es" in sent["LANGUAGES"]
    assert (int.from_bytes(sent["BEAM_SIZE"], "little"), sent["VAD"][4:]) == (3, b"off")
    monkeypatch.setenv("EARSHOT_API_KEY", "secret-bob")
    assert jobs("list")[1].count("\n") == 1
    status, _, error = jobs("show", id)
    assert (status, "not found" in error) == (1, True)


def test_results_are_waited_for_and_written(jobs, running, talk, tmp_path):
    other = tmp_path / "other.wav"
    other.write_bytes(b"RIFF")
    status, text, told = jobs("submit", "--wait", talk, str(other), "--prompt", "two")
    assert (status, text) == (0, f"==> {talk} <==\ntwo\n==> {other} <==\ntwo\n")
    assert f"{talk}: job_" in told
    status, text, _ = jobs(
        "submit", "--wait", "--output", str(tmp_path / "texts"), talk, "--prompt", "one"
    )
    assert (status, text) == (0, "")
    assert (tmp_path / "texts" / "talk.txt").read_text() == "one\n"


def test_a_file_whose_name_is_not_utf_8_is_sent(jobs, talk, tmp_path):
    odd = tmp_path / "\udcff.wav"
    odd.write_bytes(b"RIFF")
    shown = tmp_path / "\ufffd.wav"
    status, text, _ = jobs("submit", "--wait", talk, str(odd), "--prompt", "two")
    assert (status, f"==> {shown} <==\ntwo\n" in text) == (0, True)


JOB = {"id": "job_1", "status": "completed", "ended_at": 1}
AWAY = (503, json.dumps({"error": {"message": "the server starts"}}))
LOST = (0, "")  # the connection ends without an answer


@pytest.fixture
def answering(tmp_path):
    """A server that answers in turn what `answers` has, and then the last of it for ever."""
    answers, keys = [], []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.command == "POST":
                keys.append(self.headers["idempotency-key"])
            status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            if not status:
                self.close_connection = True
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    toml = tmp_path / "a.toml"
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    with web as server, contextlib.ExitStack() as stack:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        stack.callback(server.shutdown)
        toml.write_text(f"[server]\nhttp_port = {server.server_port}\n")
        yield toml, answers, keys


def test_a_server_that_is_away_for_a_while_does_not_end_the_wait(answering, capsys, monkeypatch):
    monkeypatch.setattr("serve.cli.jobs.FIRST_S", 0.01)
    toml, answers, _ = answering
    answers += [(202, json.dumps(JOB)), AWAY, AWAY, (200, json.dumps(JOB)), (200, "one")]
    command = ["jobs", "submit", "--wait", "--config", str(toml), str(toml)]
    assert main(command) == 0
    assert capsys.readouterr().out == "one\n"
    monkeypatch.setattr("serve.cli.jobs.AWAY_S", 0.05)
    answers[:] = [(202, json.dumps(JOB)), AWAY]
    assert main(command) == 1
    assert "the server starts" in capsys.readouterr().err


def test_a_job_whose_answer_is_lost_is_sent_again_under_the_same_key(
    answering, capsys, monkeypatch
):
    monkeypatch.setattr("serve.cli.jobs.FIRST_S", 0.01)
    toml, answers, keys = answering
    answers += [LOST, AWAY, LOST, (202, json.dumps(JOB))]
    command = ["jobs", "submit", "--config", str(toml), str(toml)]
    assert main(command) == 0
    written = capsys.readouterr()
    assert (written.out, written.err.count("sending the job again")) == ("job_1\n", 1)
    assert len(keys) == 4 and len(set(keys)) == 1 and len(keys[0]) == 32
    assert main(command) == 0  # is another job
    assert keys[-1] != keys[0]
    monkeypatch.setattr("serve.cli.jobs.AWAY_S", 0.05)
    answers[:] = [LOST]
    assert main(command) == 1
    assert "check with `jobs list`" in capsys.readouterr().err


def test_a_job_that_is_refused_is_not_sent_again(answering, capsys):
    toml, answers, keys = answering
    answers += [AWAY]
    assert main(["jobs", "submit", "--config", str(toml), str(toml)]) == 1
    assert len(keys) == 1 and "the server starts" in capsys.readouterr().err


def test_a_job_that_fails_says_why(jobs, talk):
    status, text, told = jobs("submit", "--wait", talk, "--prompt", "error:AudioError: no sound")
    assert (status, text) == (1, "")
    assert "it is failed: no sound" in told and "1 of 1 failed" in told
    _, row = jobs("list")[1].splitlines()
    assert "no sound" in jobs("show", row.split()[0])[1]


def test_a_job_is_cancelled(jobs, running, talk):
    _, id, _ = jobs("submit", talk, "--prompt", "wait")
    until(lambda: running.triton.waiting)
    assert jobs("cancel", id.strip())[:2] == (0, "cancelled\n")
    status, _, error = jobs("result", id.strip())
    assert (status, "cancelled" in error) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "exit_status", "says"),
    [
        (("submit",), 2, "expected files, or URLs with --url"),
        (("submit", "nowhere.wav"), 2, "not found: nowhere.wav"),
        (("submit", "TALK", "--output", "texts"), 2, "--wait"),
        (("submit", "--url", "https://elsewhere.example.org/a.mp3"), 1, "allowed_hosts"),
        (("list", "--limit", "0"), 1, "expected 1 to 100"),
    ],
)
def test_what_cannot_be_done_is_said(jobs, talk, arguments, exit_status, says):
    status, text, error = jobs(*(talk if one == "TALK" else one for one in arguments))
    assert (status, text) == (exit_status, "")
    assert error.startswith("error: ") and says in error


def test_a_server_that_is_not_there_is_named(tmp_path, capsys):
    toml = tmp_path / "other.toml"
    toml.write_text("[server]\nhttp_port = 1\n")
    assert main(["jobs", "list", "--config", str(toml)]) == 1
    assert "cannot connect to http://127.0.0.1:1/v1/audio/jobs" in capsys.readouterr().err
