"""`python -m serve transcribe` and `triton`, as a user meets them."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

import serve.transcriber.open
from serve.cli import progress
from serve.cli.main import main
from serve.contract.errors import EarshotError
from serve.contract.keys import Key, hash_of, read_keys
from serve.contract.messages import Request, RequestFinished, SegmentReady
from serve.gateway.usage import UsageRecord, add_usage
from serve.speech import raw
from serve.supervisor.server import config_to_toml
from serve.supervisor.supervisor import free_ports
from serve.wire import tensors
from serve.wire.client import TritonClient
from tests.fakes import FakeTranscriber
from tests.gateways import full_disk
from tests.marks import nightly
from tests.serving import SEGMENT, TRANSCRIPT, accepted, audio_file, is_ready
from tests.waits import wait_until

WAIT_S = 120


@pytest.fixture
def fake(monkeypatch):
    fake = FakeTranscriber()
    monkeypatch.setattr(serve.transcriber.open, "open_transcriber", lambda config, engine: fake)
    return fake


@pytest.fixture
def toml(tmp_path):
    """A config with ports that nothing listens on."""
    http, grpc, metrics = free_ports("127.0.0.1", 3)
    path = tmp_path / "some.toml"
    path.write_text(f"[server]\nhttp_port = {http}\ngrpc_port = {grpc}\nmetrics_port = {metrics}\n")
    return path


@pytest.fixture
def files(tmp_path):
    for name in ("a.wav", "b.mp3", "empty.wav"):
        (tmp_path / name).write_bytes(b"" if name == "empty.wav" else name.encode())
    return {path.name: str(path) for path in tmp_path.iterdir()}


@pytest.fixture
def nano_toml(nano_config, tmp_path):
    path = tmp_path / "nano.toml"
    path.write_text(config_to_toml(nano_config()), encoding="utf-8")
    return path


def run(toml, *arguments):
    return main(["transcribe", "--config", str(toml), *arguments])


def test_one_file_is_its_text_alone(toml, files, fake, capsys):
    assert run(toml, files["a.wav"]) == 0
    output = capsys.readouterr()
    assert output.out == "Hello & goodbye.\n1 < 2 --> 3\n"
    assert "in this process" in output.err


def test_a_bad_file_is_reported_and_the_others_go_on(toml, files, fake, capsys):
    names = [files["a.wav"], files["empty.wav"], files["b.mp3"]]
    assert run(toml, *names) == 1
    output = capsys.readouterr()
    assert output.out.count("Hello") == 2
    assert output.out.index(names[0]) < output.out.index(names[2])
    assert f"error: {names[1]}: audio has 0 bytes" in output.err
    assert "2 of 3 files transcribed, 0 skipped, 1 failed; 4.0 s of audio in " in output.err
    assert "Traceback" not in output.err


def test_standard_input_is_a_recording(toml, fake, tmp_path, monkeypatch, capsys):
    for arguments in ([], ["--output", str(tmp_path)]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"RIFF\xff")))
        assert run(toml, "--format", "tsv", *arguments, "-") == 0
        assert fake.requests.pop().audio == b"RIFF\xff"
    text = (tmp_path / "stdin.tsv").read_text()
    assert (
        text
        == capsys.readouterr().out
        == ("start\tend\ttext\n0\t1000\tHello & goodbye.\n1000\t2000\t1 < 2 --> 3\n")
    )


def test_each_warning_has_a_line(toml, files, fake, capsys):
    warnings = ("two tracks; choose one with audio_track = 2", "send it with channels = split")
    answer = dataclasses.replace(TRANSCRIPT, warnings=warnings)
    fake.transcribe = lambda request, on_segment: answer
    assert run(toml, "--format", "json", files["a.wav"]) == 0
    output = capsys.readouterr()
    assert f"warning: {files['a.wav']}: send it with channels = split\n" in output.err
    assert output.err.count("warning: ") == 2
    assert json.loads(output.out)["warnings"] == list(warnings)


def test_raw_samples_need_their_type(toml, files, fake, capsys):
    kind = "audio/L16; rate=16000"
    assert run(toml, "--audio-type", kind, files["a.wav"]) == 0
    assert fake.requests.pop().audio == raw.with_header(b"a.wav", kind)
    assert run(toml, "--audio-type", "audio/wav", files["a.wav"]) == 1
    assert "audio's type is 'audio/wav'; expected a type such as" in capsys.readouterr().err


@pytest.mark.parametrize("format, suffix", [("text", "txt"), ("srt", "srt"), ("vtt", "vtt")])
def test_a_folder_of_audio_becomes_a_folder_of_files(toml, fake, tmp_path, capsys, format, suffix):
    for name in ("b.MP3", "below/a.wav", "notes.txt", ".hidden.wav"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    out = tmp_path / "new" / "out"
    assert run(toml, "--format", format, "--output", str(out), str(tmp_path / "in")) == 0
    written = {path for path in out.rglob("*") if path.is_file()}
    assert written == {out / f"b.{suffix}", out / f"below/a.{suffix}"}
    assert "goodbye" in (out / f"b.{suffix}").read_text(encoding="utf-8")
    output = capsys.readouterr()
    assert output.out == "" and "skipping 1 files that are not audio" in output.err


def test_a_transcript_that_cannot_be_written_is_reported_and_the_others_go_on(
    toml, files, fake, tmp_path, capsys
):
    out = tmp_path / "out"
    fake.transcribe = _and(fake.transcribe, lambda: (out / "a.txt").mkdir(exist_ok=True))
    assert run(toml, "--output", str(out), files["a.wav"], files["b.mp3"]) == 1
    errors = capsys.readouterr().err
    assert f"error: cannot write {out}/a.txt: Is a directory; choose another" in errors
    assert "1 of 2 files transcribed, 0 skipped, 1 failed" in errors
    assert "Traceback" not in errors
    assert "goodbye" in (out / "b.txt").read_text(encoding="utf-8")


def test_what_the_folder_has_is_skipped_unless_it_is_asked_for_again(
    toml, files, fake, tmp_path, capsys
):
    out, names = tmp_path / "out", [files["a.wav"], files["b.mp3"]]
    out.mkdir()
    (out / "a.txt").write_text("earlier\n")
    assert run(toml, "--output", str(out), *names) == 0
    errors = capsys.readouterr().err
    assert f"skipping 1 of 2 files that have a transcript in {out}; --again" in errors
    assert "1 of 2 files transcribed, 1 skipped, 0 failed" in errors
    assert [request.audio for request in fake.requests] == [b"b.mp3"]
    assert (out / "a.txt").read_text() == "earlier\n"
    # Where nothing is left no engine is opened.
    assert run(toml, "--engine", "/no/engine", "--output", str(out), *names) == 0
    assert len(fake.requests) == 1
    assert run(toml, "--again", "--output", str(out), *names) == 0
    assert "goodbye" in (out / "a.txt").read_text()
    assert run(toml, "--again", *names) == 2
    assert "--again needs --output FOLDER" in capsys.readouterr().err


def test_a_run_that_is_interrupted_tells_what_is_done(toml, files, fake, tmp_path, capsys):
    answer, first = fake.transcribe, tmp_path / "out" / "a.txt"

    def transcribe(request, on_segment):
        if request.audio == b"b.mp3":
            wait_until(first.exists, "nothing is done", WAIT_S)
            raise KeyboardInterrupt
        return answer(request, on_segment)

    fake.transcribe = transcribe
    assert run(toml, "--output", str(first.parent), files["a.wav"], files["b.mp3"]) == 130
    errors = capsys.readouterr().err
    assert "1 of 2 files transcribed, 0 skipped, 0 failed" in errors
    assert errors.endswith("interrupted\n") and "Traceback" not in errors


def test_a_full_disk_leaves_no_file_and_no_half_of_one(toml, files, fake, tmp_path, capsys):
    out = tmp_path / "out"
    with full_disk():
        assert run(toml, "--output", str(out), files["a.wav"]) == 1
    errors = capsys.readouterr().err
    assert f"error: cannot write {out}/a.txt: File too large; choose another --output" in errors
    assert "Traceback" not in errors and list(out.iterdir()) == []
    (out / "a.txt").write_text("earlier")
    with full_disk():
        assert run(toml, "--again", "--output", str(out), files["a.wav"]) == 1
    assert [path.read_text() for path in out.iterdir()] == ["earlier"]


def test_a_server_that_is_not_ready_is_named(toml, files, fake, monkeypatch, capsys):
    for state in ("silent", "not ready"):
        monkeypatch.setattr(TritonClient, "state", lambda client, timeout_s, state=state: state)
        assert run(toml, files["a.wav"]) == 1
        assert f" is {state}; try again" in capsys.readouterr().err
        assert run(toml, "--in-process", files["a.wav"]) == 0


def test_a_server_that_is_ready_is_used(toml, files, monkeypatch, capsys):
    answer = [SegmentReady(SEGMENT), RequestFinished(TRANSCRIPT)]
    monkeypatch.setattr(TritonClient, "state", lambda client, timeout_s: "ready")
    monkeypatch.setattr(TritonClient, "stream", lambda client, request: iter(answer))
    assert run(toml, files["a.wav"]) == 0
    output = capsys.readouterr()
    assert "using the server at 127.0.0.1:" in output.err and output.out == "¿Qué?\n¿Qué?\n"


def test_a_long_file_shows_how_far_it_is_where_there_is_no_terminal(
    toml, files, fake, monkeypatch, capsys
):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)

    def transcribe(request, on_segment):
        for end in (30.0, 60.0):
            on_segment(dataclasses.replace(SEGMENT, end=end))
        return dataclasses.replace(TRANSCRIPT, duration=75.0)

    fake.transcribe = transcribe
    assert run(toml, files["a.wav"]) == 0
    errors = capsys.readouterr().err
    for shown in ("0/1 files, 30.0 s of audio in ", "0/1 files, 60.0 s", "1/1 files, 75.0 s"):
        assert shown in errors


def _and(call, first):
    def both(*arguments):
        first()
        return call(*arguments)

    return both


def test_where_nothing_can_be_written_nothing_starts(toml, files, tmp_path, capsys):
    (tmp_path / "out" / "a.txt").mkdir(parents=True)
    for folder, told in (("out", "it is a folder"), ("a.wav/out", "cannot make the folder")):
        arguments = ["--engine", "/no/engine", "--output", str(tmp_path / folder)]
        assert run(toml, *arguments, files["a.wav"]) == 2
        assert told in capsys.readouterr().err


def others(**options):
    return [word for pair in options.items() for word in ("--option", "=".join(pair))]


def test_options_reach_the_request(toml, files, fake):
    options = ["--language", "es", "--task", "translate", "--prompt", "Zoë", "--word-timestamps"]
    options += ["--no-vad", "--temperature", "0.5", "--beam-size", "5"]
    options += others(timestamps="false", hotwords="Ångström", clip_timestamps="0,1.5,2")
    options += others(languages="es, en", low_confidence="0.4", max_tokens="7")
    assert run(toml, *options, files["a.wav"]) == 0
    found = vars(fake.requests.pop())
    asked = {"language": "es", "task": "translate", "prompt": "Zoë", "word_timestamps": True}
    asked |= {"vad": "off", "temperature": 0.5, "beam_size": 5, "timestamps": False}
    asked |= {"hotwords": "Ångström", "clip_timestamps": (0.0, 1.5, 2.0), "max_tokens": 7}
    asked |= {"languages": ("es", "en"), "low_confidence": 0.4}
    assert {name: found[name] for name in asked} == asked
    for vad in (["--vad=on"], ["--vad", "auto"], ["--vad", "--diarize"], []):
        assert run(toml, *vad, files["a.wav"]) == 0
    assert [request.vad for request in fake.requests] == ["on", "auto", "on", None]


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["--option", "patiense=2"], 2, "unknown option 'patiense'; did you mean 'patience'?"),
        (["--option", "patience"], 2, "--option 'patience'; expected NAME=VALUE"),
        (["--option", "patience=two"], 2, "patience = 'two'; expected a number"),
        (["--option", "partial=perhaps"], 2, "partial = 'perhaps'; expected true or false"),
        (["--cue", "max_line_width=x"], 2, "max_line_width = 'x'; expected a whole number"),
        (["--task", "sing"], 2, "task = 'sing'; expected one of transcribe, translate"),
        (["--known-speaker", "Ann=/no/such.wav"], 2, "error: cannot read /no/such.wav"),
        (["/no/such.wav", "/no/*.mp3"], 2, "error: not found: /no/such.wav, /no/*.mp3; expected"),
        (["--config", "/no/config.toml"], 2, "cannot read /no/config.toml: No such file or"),
        (["--engine", "/no/engine"], 1, "no engine at /no/engine"),
    ],
)
def test_what_makes_no_sense_is_told(toml, files, capsys, words, status, told):
    assert run(toml, files["a.wav"], *words) == status
    errors = capsys.readouterr().err
    assert told in errors and "Traceback" not in errors


def test_options_are_listed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["transcribe", "--help-options"])
    assert end.value.code == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert {"patience", "language", "max_line_width"} <= listed and "draft" not in listed


@pytest.mark.parametrize(
    "option", [["--cue", "highlight_words=true"], ["--cue", "max_words_per_line=1"]]
)
def test_subtitles_of_words_ask_for_words(option, toml, files, fake, capsys):
    assert run(toml, *option, "--format", "vtt", files["a.wav"]) == 0
    assert fake.requests.pop().word_timestamps
    assert run(toml, *option, "--format", "json", files["a.wav"]) == 2
    assert "needs --format srt or vtt, found json" in capsys.readouterr().err
    assert run(toml, "--format", "srt", files["a.wav"]) == 0
    assert not fake.requests.pop().word_timestamps


def test_subtitles_have_the_times_of_words_where_the_engine_knows_them(toml, files, fake, capsys):
    assert run(toml, "--format", "srt", files["a.wav"]) == 0
    assert fake.requests.pop().try_word_timestamps
    assert run(toml, "--format", "srt", "--task", "translate", files["a.wav"]) == 0
    assert run(toml, "--format", "tsv", files["a.wav"]) == 0
    assert not any(request.try_word_timestamps for request in fake.requests)
    assert capsys.readouterr().out.endswith("\n1000\t2000\t1 < 2 --> 3\n")


def test_lines_are_as_long_as_is_asked_for(toml, files, fake, capsys):
    lines = ["--cue", "max_line_width=9", "--cue", "max_line_count=1"]
    assert run(toml, "--format", "srt", *lines, files["a.wav"]) == 0
    assert "\nHello &\n\n2\n" in capsys.readouterr().out
    assert run(toml, "--format", "srt", "--cue", "max_words_per_line=0", files["a.wav"]) == 2
    assert "--cue max_words_per_line = 0; expected 1 to 300" in capsys.readouterr().err


COMMANDS = ["", "start", "reload", "transcribe", "bulk", "live", "shadow", "wyoming", "tensors"]
COMMANDS += ["keys new", "keys usage", "phrases", "jobs submit", "jobs result"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    assert 3 < len(capsys.readouterr().out.splitlines()) <= 40


@pytest.mark.parametrize("module", ["serve.cli.main", "build.__main__", "eval.__main__"])
def test_help_and_the_servers_first_process_load_no_torch(module):
    """Loading torch takes 2 s and 200 MB."""
    code = f"import {module}, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_tensors_are_listed_without_a_config(capsys):
    assert main(["tensors"]) == 0
    assert capsys.readouterr().out == tensors.describe()


def test_a_new_key_is_shown_once_and_kept_as_its_hash(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    new = ["keys", "new", "--name", "alice"]
    assert main([*new, "--file", str(path), "--requests-per-minute", "5"]) == 0
    key = capsys.readouterr().out.strip()
    assert read_keys(path) == {"alice": Key(hash_of(key), requests_per_minute=5)}
    assert key not in path.read_text()
    assert main([*new, "--file", str(path)]) == 2
    assert main(new) == 0
    output = capsys.readouterr()
    assert f"EARSHOT_API_KEYS=alice:{hash_of(output.out.strip())}" in output.err


def test_keys_are_listed_expire_and_are_revoked(tmp_path, capsys):
    path = str(tmp_path / "keys.toml")
    for name, more in (("alice", ["--expires", "2020-01-01"]), ("bob", ["--live-streams", "2"])):
        assert main(["keys", "new", "--name", name, "--file", path, *more]) == 0
    assert main(["keys", "expire", "--file", path, "--name", "bob", "--at", "9999-01-01"]) == 0
    capsys.readouterr()
    assert main(["keys", "list", "--file", path]) == 0
    head, alice, bob = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (head[0], head[-1]) == ("name", "expires")
    assert (alice[0], alice[-2:]) == ("alice", ["2020-01-01", "(expired)"])
    assert (bob[0], bob[-2:]) == ("bob", ["2", "9999-01-01"])
    assert main(["keys", "revoke", "--file", path, "--name", "alice"]) == 0
    assert list(read_keys(tmp_path / "keys.toml")) == ["bob"]
    assert main(["keys", "revoke", "--file", path, "--name", "alice"]) == 2


def test_usage_of_all_keys(toml, tmp_path, capsys):
    path = tmp_path / "usage.sqlite"
    usage = ["keys", "usage", "--config", str(toml)]
    assert main(usage) == 2
    assert "server.usage_file is not set" in capsys.readouterr().err
    more = f'usage_file = "{path}"\n'
    toml.write_text(f"{toml.read_text()}{more}")
    assert main(usage) == 2
    assert "does not exist" in capsys.readouterr().err
    days = ("2026-12-31", "2027-01-01", "2027-01-31", "2027-02-01")
    rows = [UsageRecord(day, key, "demo", 2, 90.0) for day in days for key in ("alice", "")]
    add_usage(path, rows, days[0])
    assert main([*usage, "--end", "2027-01-31"]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["day", "key", "model", "requests", "audio_s"]
    assert rows == [
        [day, key, "demo", "2", "90.0"]
        for day in ("2027-01-01", "2027-01-31")
        for key in ("-", "alice")
    ]
    assert main([*usage, "--start", "soon"]) == 2
    assert "expected one such as" in capsys.readouterr().err


def test_open_lets_everybody_in(toml, monkeypatch):
    started = []

    def start(config, *_):
        started.append(config.server.open)
        raise EarshotError("no")

    monkeypatch.setattr("serve.cli.start.running_server", start)
    for more in ([], ["--open"]):
        assert main(["start", "--config", str(toml), *more]) == 1
    assert started == [False, True]


# ---------------------------------------------------------------- with a real server


def triton(toml, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "serve", "start", "--config", str(toml), *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


@pytest.fixture
def temporary(monkeypatch):
    """A folder for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.server
def test_triton_serves_transcribe_until_ctrl_c(nano_toml, temporary, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("EARSHOT_API_KEYS", f"alice:{hash_of('secret')}")
    clip = "tests/data/en_two.wav"
    with triton(nano_toml, "--log", str(tmp_path / "log")) as server:
        ready = server.stdout.readline()
        assert ready.startswith("ready: HTTP 127.0.0.1:") and "/metrics" in ready, ready
        http = ready.split()[2].rstrip(",")
        assert run(nano_toml, clip) == 1
        assert "EARSHOT_API_KEY" in capfd.readouterr().err
        monkeypatch.setenv("EARSHOT_API_KEY", "secret")
        assert run(nano_toml, "--format", "json", clip) == 0
        output = capfd.readouterr()
        assert json.loads(output.out)["file"] == clip
        assert "using the server at 127.0.0.1:" in output.err
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=WAIT_S)
    assert server.returncode == 0
    assert "stopping" in errors and "Traceback" not in errors
    assert not is_ready(http)
    assert "whisper" in (tmp_path / "log").read_text()
    assert not list(temporary.iterdir())


@pytest.mark.server
@pytest.mark.parametrize("number", [signal.SIGINT, *nightly(signal.SIGTERM)])
def test_an_interrupted_start_leaves_nothing(nano_toml, number):
    with triton(nano_toml) as server:
        assert "starting" in server.stderr.readline()
        server.send_signal(number)
        _, errors = server.communicate(timeout=WAIT_S)
    assert server.returncode == 130
    assert errors == "interrupted\n"


@pytest.mark.nightly
@pytest.mark.server
def test_triton_says_why_it_cannot_start(nano_toml):
    with triton(nano_toml, "--engine", "/no/engine") as server:
        output, errors = server.communicate(timeout=WAIT_S)
    assert server.returncode == 1 and output == ""
    assert "no engine at /no/engine" in errors
    assert "make build-engine" in errors and "python3 -m build engine" in errors
    assert "Traceback" not in errors and len(errors.splitlines()) == 2


@pytest.mark.nightly
@pytest.mark.server
def test_a_terminal_sees_progress(nano_toml):
    """In process, with a terminal on stderr and a file on stdout."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    clips = ["tests/data/en_two.wav", "tests/data/en_question.wav"]
    done = subprocess.run(
        [sys.executable, "-m", "serve", "transcribe", "--config", str(nano_toml), *clips],
        stdout=subprocess.PIPE,
        stderr=slave,
        timeout=WAIT_S,
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(master, 100_000):
            shown += part
    os.close(master)
    assert done.returncode == 0, shown
    assert b"0/2 files" in shown and b"2 of 2 files transcribed, 0 skipped" in shown, shown
    assert done.stdout.decode().count("==> ") == 2


@pytest.mark.nightly
@pytest.mark.server
def test_a_second_ctrl_c_ends_it_with_requests_unanswered(nano_config, tmp_path):
    config = nano_config(drain_timeout_s=600.0)
    toml = tmp_path / "nano.toml"
    toml.write_text(config_to_toml(config), encoding="utf-8")
    with (
        triton(toml) as server,
        TritonClient(f"127.0.0.1:{config.server.grpc_port}", timeout_s=WAIT_S) as client,
    ):
        assert server.stdout.readline().startswith("ready: ")
        page = SimpleNamespace(metrics=f"127.0.0.1:{config.server.metrics_port}")
        before = accepted(page)
        for _ in range(20):
            client.start(Request(audio=audio_file(119.0)))
        wait_until(lambda: accepted(page) > before, "no request arrived")
        server.send_signal(signal.SIGINT)
        assert "starting" in server.stderr.readline()
        assert "stopping" in server.stderr.readline()
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=WAIT_S)
    assert "Traceback" not in errors
    *_, last = errors.splitlines()  # the log's lines of requests that were answered precede it
    assert (server.returncode, last) == (130, "interrupted")
