"""The page's files as they are sent, and what it is told of the server."""

import json
import re
from pathlib import Path

import pytest

from serve.gateway.page import routes

WEB = Path(routes.__file__).parent / "web"
KINDS = {
    "/": "text/html",
    "/page/style.css": "text/css",
    "/page/main.js": "text/javascript|application/javascript",
    "/page/icon.svg": "image/svg\\+xml",
}


def metrics():
    """Triton's page, with what the state is made from and other things."""
    info = 'languages="en,es",detects_language="true",words="true",beams="5"'
    return (
        "# HELP nv_inference_count of Triton's own\n"
        'nv_inference_count{model="whisper"} 7\n'
        f"earshot_engine_info{{{info}}} 1\n"
        "earshot_queue_depth 1\nearshot_busy_slots 2\nearshot_slots 4"
    ).encode()


def read_state(running):
    running.run(running.gateway.state.read())
    status, headers, body = running.ask("GET", "/state")
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    return json.loads(body)


def test_the_state_tells_what_the_engines_do(start):
    """Triton's metrics come and go one by one; an engine with a part of them counts as away."""
    running = start(triton_metrics=metrics(), devices=("cpu-0", "cpu-1"))
    shown = read_state(running)
    assert (shown["name"], shown["status"]) == ("demo", "ready")
    assert shown["now"] == {"queue": 2, "slots_busy": 4, "slots": 8}
    assert shown["offers"]["languages"] == {"en": "english", "es": "spanish"}
    assert (shown["offers"]["beams"], shown["offers"]["words"]) == (5, True)
    assert shown["engines"] == [{"name": f"cpu-{n}", "available": True} for n in (0, 1)]
    running.triton.metrics = re.sub(rb"\nearshot_slots.*", b"", metrics())
    assert read_state(running)["now"] == {"queue": 1, "slots_busy": 2, "slots": 4}
    for triton in running.tritons:
        triton.stop()
    shown = read_state(running)
    assert (shown["status"], shown["now"], shown["offers"]) == ("starting", None, None)
    for triton in running.tritons:
        triton.start()


def test_browsers_get_the_files_and_keep_them(shared):
    for path, kind in KINDS.items():
        status, headers, body = shared.ask("GET", path)
        assert status == 200 and body
        assert re.match(kind, headers["Content-Type"]), path
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        again, _, nothing = shared.ask("GET", path, headers={"If-None-Match": headers["ETag"]})
        assert (again, nothing) == (304, b"")
    for path in ("/page/nothing.js", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page/"):
        assert shared.ask("GET", path)[0] == 404
    assert shared.ask("POST", "/")[0] == 405


@pytest.mark.parametrize("path", sorted(WEB.iterdir()), ids=lambda path: path.name)
def test_files_of_the_page_name_nothing_foreign_and_stay_readable(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(
        r"""(?:https?:)?//[\w.-]+\.\w+""", re.sub(r"^// http.*$", "", text, flags=re.M)
    )
    assert set(links) <= {"http://www.w3.org"}  # names of SVG
    if path.suffix != ".css":
        assert len(text.splitlines()) <= 400
    if path.suffix == ".js":
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\b", text)
        assert max(map(len, text.splitlines())) <= 100


WORDS = [
    {"start": 0.0, "end": 0.5, "word": "Hello,"},
    {"start": 0.5, "end": 1.5, "word": "<you>."},
]
SEGMENTS = [
    {"start": 0, "end": 2.0, "text": " Hello, <you>.", "words": WORDS},
    {"start": 5.0, "end": 6.0, "text": "Corrected by hand.", "words": None},
]


def ask(running, headers=None, **fields):
    body = {"format": "vtt", "duration": 6.5, "segments": SEGMENTS, **fields}
    status, _, text = running.ask("POST", "/subtitles", json.dumps(body), headers)
    return status, text.decode()


def test_a_transcript_comes_back_as_subtitles(shared):
    assert ask(shared) == (
        200,
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello, &lt;you>.\n\n"
        "00:00:05.000 --> 00:00:06.000\nCorrected by hand.\n",
    )
    assert ask(shared, format="srt", segments=[])[1] == ""


def test_words_have_the_spaces_of_their_text(shared):
    words = [{"start": i, "end": i + 1, "word": word} for i, word in enumerate("声音と")]
    segments = [{"start": 0, "end": 3, "text": "声音と", "words": words}]
    assert ask(shared, format="srt", segments=segments)[1].endswith("\n声音と\n")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"format": "docx"}, "format"),
        ({"segments": [{"start": 0, "end": 1}]}, "text is missing"),
        ({"duration": "long"}, "expected a number"),
        ({"segments": [{"start": 0, "end": 1, "text": "a" * 300_001}]}, "300001 characters"),
    ],
)
def test_what_is_no_transcript_is_refused(shared, fields, told):
    status, text = ask(shared, **fields)
    assert status == 400 and told in text


def test_a_transcript_that_is_too_large_is_refused(running, monkeypatch):
    monkeypatch.setattr(routes, "MAX_BYTES", 100)
    assert ask(running)[0] == 413
    assert running.ask("GET", "/subtitles")[0] == 405
    assert not running.services.admission.requests
