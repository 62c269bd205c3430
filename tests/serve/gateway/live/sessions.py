"""Clients of live text, and a sense of speech that is quicker than a model's."""

import base64
import contextlib
import json

import numpy as np
import openai._models
import pytest
from openai.types.realtime import RealtimeServerEvent
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from serve.contract.server_config import LiveConfig
from serve.speech.vad import FRAME
from tests.gateways import WAIT_S

LIVE = LiveConfig(update_s=0.05)
RATE = 24_000


class LoudIsSpeech:
    """In place of `VadModel`."""

    def probabilities(self, samples):
        return (np.abs(samples.reshape(-1, FRAME)).max(axis=1) > 0.01).astype(np.float32)


def sound(seconds, level=0.1, rate=RATE):
    """PCM as it is sent; level 0 is silence."""
    samples = np.sin(np.arange(round(seconds * rate)) * 0.1) * level
    return (samples * 32767).astype("<i2").tobytes()


class Talk:
    """One client's connection. Every event that comes is as the package `openai` has it."""

    def __init__(self, socket):
        self.socket = socket
        self.events = []

    def say(self, kind, **fields):
        self.socket.send(json.dumps({"type": kind, **fields}))

    def audio(self, data):
        audio = base64.b64encode(data).decode()
        self.say("input_audio_buffer.append", audio=audio)

    def set(self, event_id=None, **input):
        session = {"type": "transcription", "audio": {"input": input}}
        named = {} if event_id is None else {"event_id": event_id}
        self.say("session.update", session=session, **named)

    def next(self):
        event = json.loads(self.socket.recv(timeout=WAIT_S))
        openai._models.validate_type(type_=RealtimeServerEvent, value=event)
        self.events.append(event)
        return event

    def until(self, kind):
        """The next event with a type that ends so; the events before it are in `events`."""
        while not (event := self.next())["type"].endswith(kind):
            pass
        return event

    def utterance(self, data):
        """Send audio; return the event with the text of the utterance that ends in it."""
        self.audio(data)
        return self.until(".completed")

    def commit(self):
        """End the utterance; return all its text."""
        self.say("input_audio_buffer.commit")
        return self.until(".completed")["transcript"]

    def end(self):
        """The code with which the server ends the session."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.next()
        return self.socket.close_code

    def deltas(self, item_id):
        return "".join(
            event["delta"]
            for event in self.events
            if event["type"].endswith(".delta") and event["item_id"] == item_id
        )


@contextlib.contextmanager
def session(running, query="", **options):
    """A client after the first event of its session; `options` are those of `connect`."""
    url = f"ws://{running.http}/v1/realtime{query}"
    with connect(url, close_timeout=1, **options) as socket:
        client = Talk(socket)
        client.running = running
        client.until("session.created")
        yield client


def refused_session(running, query="", **options):
    """Status and error of a handshake that is refused."""
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://{running.http}/v1/realtime{query}", **options)
    response = refused.value.response
    return response.status_code, json.loads(response.body)["error"]
