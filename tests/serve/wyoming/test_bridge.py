"""The bridge by the client that Home Assistant has, before a stand-in for the server."""

import asyncio
import contextlib
import functools
import inspect
import io
import wave
from types import SimpleNamespace

import pytest
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event, async_read_event
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong

from serve.wyoming import bridge as bridges
from serve.wyoming import utterance
from serve.wyoming.bridge import Bridge
from serve.wyoming.session import BridgeSettings
from serve.wyoming.upstream import SpeechApiClient
from tests.serve.wyoming.stub import Stub
from tests.waits import WAIT_S

FORMAT = {"rate": 16_000, "width": 2, "channels": 1}
SOUND = bytes(range(256)) * 125  # a second


class House:
    """A bridge, the stand-in behind it, and clients of it."""

    def __init__(self, stub, bridge, port):
        self.stub, self.bridge, self.port = stub, bridge, port

    def client(self):
        return AsyncTcpClient("127.0.0.1", self.port, read_timeout=WAIT_S)

    @contextlib.asynccontextmanager
    async def raw(self, sent):
        """A client that sends these bytes and then reads events."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        yield SimpleNamespace(read_event=lambda: async_read_event(reader))
        writer.close()


def in_house(**settings):
    """Turn a coroutine into a test; its first argument is a house with these settings."""

    def decorate(test):
        async def run(given):
            async with Stub().running() as stub:
                key, timeout_s = settings.get("key", ""), settings.get("timeout_s", WAIT_S)
                upstream = SpeechApiClient(settings.get("url", stub.url), key, timeout_s)
                known = {"languages": ("en", "es"), "language": settings.get("language")}
                bridge = Bridge(
                    BridgeSettings(upstream, **known, idle_s=settings.get("idle_s", WAIT_S))
                )
                house = House(stub, bridge, await bridge.start("127.0.0.1", 0))
                try:
                    await test(house, **given)
                finally:
                    await bridge.stop(WAIT_S)

        @functools.wraps(test)
        def made(**given):
            asyncio.run(run(given))

        _, *others = inspect.signature(test).parameters.values()
        made.__signature__ = inspect.Signature(others)
        return made

    return decorate


async def say(client, *events):
    for event in events:
        await client.write_event(event if isinstance(event, Event) else event.event())


async def hear(client, kind):
    event = await client.read_event()
    assert event is not None and kind.is_type(event.type), event
    return kind.from_event(event)


async def refused(client, words):
    """The next event is an error that has these words, and the last."""
    error = await hear(client, Error)
    assert words in error.text
    with contextlib.suppress(ConnectionError):
        assert await client.read_event() is None
    return error


def spoken(sound=SOUND, format=FORMAT, pieces=4):
    size = len(sound) // pieces
    chunks = [sound[at : at + size] for at in range(0, len(sound), size)]
    return (
        AudioStart(**format),
        *(AudioChunk(**format, audio=chunk) for chunk in chunks),
        AudioStop(),
    )


def form_of(body):
    """Fields of a form, and its file."""
    boundary = body.split(b"\r\n", 1)[0]
    found = {}
    for part in body.split(boundary)[1:-1]:
        head, _, value = part.removesuffix(b"\r\n").partition(b"\r\n\r\n")
        found.setdefault(head.split(b'name="')[1].split(b'"')[0].decode(), []).append(value)
    return found


@in_house(key="earshot_x")
async def test_home_assistant_describes_and_transcribes(house):
    async with house.client() as client:
        await say(client, Describe())
        (program,) = (await hear(client, Info)).asr
        assert (program.name, program.installed) == ("Earshot", True)
        assert [(model.name, model.languages) for model in program.models] == [
            ("nano", ["en", "es"])
        ]
    async with house.client() as client:
        await say(client, Transcribe(language="en"), *spoken())
        transcript = await hear(client, Transcript)
    assert (transcript.text, transcript.language) == ("Turn on the light.", "en")
    head, body = house.stub.asked[-1]
    assert head.startswith("POST /v1/audio/transcriptions HTTP/1.1")
    assert "\r\nAuthorization: Bearer earshot_x\r\n" in head
    form = form_of(body)
    (file,) = form.pop("file")
    assert form == {"response_format": [b"verbose_json"], "language": [b"en"]}
    with wave.open(io.BytesIO(file)) as audio:
        assert audio.getparams()[:4] == (1, 2, 16_000, 16_000)
        assert audio.readframes(16_000) == SOUND


@pytest.mark.parametrize(
    "width, channels, rate", [(1, 1, 8_000), (2, 2, 48_000), (3, 1, 48_000), (4, 2, 8_000)]
)
@in_house()
async def test_samples_of_any_kind(house, width, channels, rate):
    format = {"rate": rate, "width": width, "channels": channels}
    sound = bytes(width * channels * 1000)
    async with house.client() as client:
        await say(client, *spoken(sound, format))
        await hear(client, Transcript)
    (file,) = form_of(house.stub.asked[-1][1])["file"]
    with wave.open(io.BytesIO(file)) as audio:
        assert audio.getparams()[:4] == (channels, width, rate, 1000)


@in_house(language="es")
async def test_several_utterances_of_a_connection_and_what_each_asks_for(house):
    async with house.client() as client:
        asked = Transcribe(
            name="nano", language="de-DE", transcript_names=["Zoë"], transcript_terms=["sofa"]
        )
        await say(client, Ping("a"), asked, Event("unheard-of", {"x": 1}, b"y"), *spoken())
        assert (await hear(client, Pong)).text == "a"
        await hear(client, Transcript)
        chunk = AudioChunk(**FORMAT, audio=SOUND)  # without audio-start
        await say(client, chunk, AudioStop(), Ping("b"))
        await hear(client, Transcript)
        assert (await hear(client, Pong)).text == "b"
    first, second = (form_of(body) for _, body in house.stub.asked)
    assert (first["model"], first["language"]) == ([b"nano"], [b"de-DE"])
    assert first["keywords[]"] == ["Zoë".encode(), b"sofa"]
    assert second.keys() == {"response_format", "language", "file"}
    assert second["language"] == [b"es"]


@in_house()
async def test_who_says_nothing_is_told_so(house):
    async with house.client() as client:
        await say(client, AudioStart(**FORMAT), AudioStop())
        assert (await hear(client, Transcript)).text == ""
    assert house.stub.asked == []


@in_house()
async def test_an_unknown_language_of_a_transcript_is_left_out(house):
    house.stub.answer = (200, {"text": "", "language": "unknown", "duration": 1})
    async with house.client() as client:
        await say(client, *spoken())
        assert (await hear(client, Transcript)).language is None


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "answer, words, code",
    [
        ((401, {"error": {"message": "no API key"}}), "no API key", "UNAUTHENTICATED"),
        ((503, {"error": {"message": "it drains"}}), "it drains", "UNAVAILABLE"),
        ((200, {"transcription": "x"}), "text is missing", "UNAVAILABLE"),
        (b"", "disconnected without sending a response", "UNAVAILABLE"),
        (b"220 mail.example.org ESMTP\r\n", "did not answer with valid HTTP", "UNAVAILABLE"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 2**23, "did not answer", "UNAVAILABLE"),
    ],
)
@in_house()
async def test_what_the_server_refuses_is_told_and_ends_the_connection(house, answer, words, code):
    house.stub.answer = answer
    async with house.client() as client:
        await say(client, *spoken())
        assert (await refused(client, words)).code == code


@in_house(url="http://127.0.0.1:9")
async def test_no_server(house):
    for begin in ((Describe(),), spoken()):
        async with house.client() as client:
            await say(client, *begin)
            await refused(client, "cannot reach http://127.0.0.1:9: ")


@in_house(timeout_s=0.2)
async def test_a_server_that_never_answers(house):
    house.stub.answer = None
    async with house.client() as client:
        await say(client, *spoken())
        await refused(client, "did not answer in 0.2 s")


@in_house()
async def test_who_goes_is_not_transcribed_any_more(house):
    house.stub.answer = None
    async with house.client() as client:
        await say(client, *spoken())
        while not house.stub.asked:
            await asyncio.sleep(0.005)
    async with asyncio.timeout(WAIT_S):
        await house.stub.left.wait()


FAULTS = {
    "no JSON": (b"GET / HTTP/1.1\r\n\r\n", "an event is not JSON"),
    "long line": (b"x" * 2**17, "line is longer than 65536 bytes"),
    "much data": (b'{"type":"ping","data_length":65537}\n', "data_length = 65537; expected at"),
    "payload": (b'{"type":"x","payload_length":1048577}\n', "expected at most 1048576"),
    "width": (
        b'{"type":"audio-start","data":{"rate":16000,"width":5,"channels":1}}\n',
        "audio-start: width = 5; expected 1, 2, 3 or 4",
    ),
    "stop": (b'{"type":"audio-stop"}\n', "found audio-stop without audio"),
}


@pytest.mark.parametrize("fault", FAULTS)
@in_house()
async def test_what_is_no_event_is_told_and_ends_the_connection(house, fault):
    sent, words = FAULTS[fault]
    async with house.raw(sent) as client:
        assert (await refused(client, words)).code == "INVALID_ARGUMENT"


@in_house()
async def test_who_still_speaks_can_read_why_nobody_listens(house):
    async with house.client() as client:
        await say(client, AudioStop())
        for _ in range(100):
            await say(client, AudioChunk(**FORMAT, audio=SOUND))
        await refused(client, "found audio-stop without audio")


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (AudioChunk(**{**FORMAT, "rate": 8_000}, audio=SOUND), "as at the start of the audio"),
        (AudioChunk(**FORMAT, audio=b"abc"), "the audio has 3 bytes; expected a multiple of 2"),
    ],
)
@in_house()
async def test_audio_of_two_formats_or_of_half_a_sample(house, chunk, words):
    async with house.client() as client:
        await say(client, AudioStart(**FORMAT), chunk, AudioStop())
        await refused(client, words)


@pytest.mark.parametrize("limit, value", [("MAX_S", 0.5), ("MAX_BYTES", 10_000)])
@in_house()
async def test_an_utterance_without_an_end(house, monkeypatch, limit, value):
    monkeypatch.setattr(utterance, limit, value)
    async with house.client() as client:
        await say(client, AudioStart(**FORMAT), AudioChunk(**FORMAT, audio=SOUND))
        await refused(client, "before audio-stop")


@in_house(idle_s=0.2)
async def test_who_is_silent_makes_room(house):
    async with house.raw(b'{"type": "pi') as client:
        await refused(client, "no complete event within 0.2 s")


@in_house()
async def test_a_crowd(house, monkeypatch):
    monkeypatch.setattr(bridges, "MAX_CONNECTIONS", 1)
    async with house.client() as first:
        await say(first, Ping("x"))
        await hear(first, Pong)
        async with house.client() as second:
            await refused(second, "1 connections are open")
        await say(first, *spoken())
        await hear(first, Transcript)


@in_house()
async def test_at_the_end_what_is_being_said_becomes_text(house):
    async with house.client() as idle, house.client() as busy:
        first, *rest = spoken()
        await say(idle, Ping("x"))
        await say(busy, first, Ping("x"))
        await hear(idle, Pong)
        await hear(busy, Pong)
        ending = asyncio.create_task(house.bridge.stop(WAIT_S))
        assert await idle.read_event() is None
        await say(busy, *rest)
        await hear(busy, Transcript)
        assert await busy.read_event() is None
        await ending
        with pytest.raises(ConnectionError):
            await house.client().connect()
