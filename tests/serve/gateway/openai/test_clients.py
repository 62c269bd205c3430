"""Requests as other programs send them, recorded from their versions that docs/api.md lists."""

import asyncio
import http.client
import io
import json

import aiohttp
import openai

from tests.fake_upstream import inputs_of

SOUND = b"RIFF and so on"


def sent(running):
    """The inputs of the request that came last."""
    return inputs_of(list(running.triton.requests.values())[-1])


def test_open_webui(shared):
    """A form whose file has no type and comes in chunks; the key that nobody set is empty."""

    async def pieces():
        for begin in range(0, len(SOUND), 5):
            yield SOUND[begin : begin + 5]

    async def ask(key, **fields):
        form = aiohttp.FormData()
        for name, value in fields.items():
            form.add_field(name, value)
        form.add_field("file", pieces(), filename="6f1c.webm")
        url = f"http://{shared.http}/v1/audio/transcriptions"
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, headers=headers, data=form) as answer,
        ):
            return answer.status, await answer.json()

    for key, fields in (
        ("", {"model": "whisper-1"}),
        ("sk-x", {"model": "", "language": "es"}),
        ("sk-x", {"model": "gpt-4o-transcribe"}),
    ):
        status, answer = asyncio.run(ask(key, **fields))
        assert (status, answer["text"]) == (http.client.OK, "hello")
        assert sent(shared)["AUDIO"] == SOUND
    status, answer = asyncio.run(ask("", model="tts-1"))
    assert (status, answer["error"]["param"]) == (http.client.NOT_FOUND, "model")


def test_langchain(shared, client):
    """`OpenAIWhisperParser`: parts of 20 minutes as MP3, named after the file, with its path."""
    for options in (
        {},
        {"response_format": "srt"},
        {"language": "es", "response_format": "verbose_json", "temperature": 0.0},
    ):
        file = io.BytesIO(SOUND)
        file.name = "/recordings/talk.wav_part_0.mp3"
        create = client.audio.transcriptions.create
        answer = create(model="whisper-1", file=file, prompt="one two", **options)
        text = answer if isinstance(answer, str) else answer.text
        assert "one" in text and "two" in text
        assert sent(shared)["AUDIO"] == SOUND


def test_livekit(shared, connect):
    """`livekit.plugins.openai.STT` of an utterance; its `detect_language` reads `languages`."""
    file = ("file.wav", SOUND, "audio/wav")

    async def ask(**options):
        async with connect(shared, openai.AsyncOpenAI) as client:
            create = client.audio.transcriptions.create
            return await create(file=file, prompt="one two", **options)

    answer = asyncio.run(ask(model="whisper-1", language="es", response_format="verbose_json"))
    assert (answer.text, answer.language) == ("one two", "spanish")
    answer = asyncio.run(ask(model="gpt-4o-mini-transcribe", response_format="json"))
    assert [one.code for one in answer.languages] == ["es"]
    hints = {"languages": ["en", "es"], "keywords": ["Zoë", "thank you"]}
    answer = asyncio.run(ask(model="gpt-transcribe", response_format="json", **hints))
    assert answer.text == "one two"
    assert sent(shared)["HOTWORDS"] == "Zoë, thank you"


def test_silence_has_no_languages(shared, client):
    answer = client.audio.transcriptions.create(
        model="gpt-transcribe", file=("a.wav", SOUND), prompt="silence"
    )
    assert answer.languages == []
    assert json.loads(answer.to_json())["text"] == ""
