"""A client of OpenAI's speech API over HTTP."""

import asyncio
import contextlib
import dataclasses
import http.client
import io
import re
import secrets
import ssl
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any, cast

from serve.contract.codec import from_json
from serve.contract.errors import (
    ConfigError,
    DeadlineError,
    EarshotError,
    UnavailableError,
    from_http,
    shown,
)
from serve.speech.languages import language_code
from serve.wyoming.utterance import TranscribeOptions, WyomingUtterance

_MAX_ANSWER_BYTES = 2**22
_CONNECT_S = 10.0
_PIECE_BYTES = 2**16
_HEADER_VALUE = re.compile(r"[!-~]*")


@dataclasses.dataclass(frozen=True)
class SpeechApiAnswer:
    """The server's answer to an utterance."""

    text: str
    language: str | None = None  # a code; None: unknown


@dataclasses.dataclass(frozen=True)
class _Model:
    id: str


@dataclasses.dataclass(frozen=True)
class _ModelList:
    data: tuple[_Model, ...]


@dataclasses.dataclass(frozen=True)
class _Error:
    message: str


@dataclasses.dataclass(frozen=True)
class _ErrorBody:
    error: _Error


class SpeechApiClient:
    """A client of one server.

    Args:
        url: http://host:port or https://host:port, with or without /v1.
        key: the API key; empty: none.
        timeout_s: the timeout of a request.

    Raises:
        ConfigError: the URL or the key is invalid.
    """

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.username:
            raise ConfigError(
                f"--server {shown(url)}; expected a URL such as http://127.0.0.1:8000"
            )
        if not _HEADER_VALUE.fullmatch(key):
            raise ConfigError("the API key has invalid characters; expected only one key")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._path = urllib.parse.urlsplit(self.url).path
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = host, port or (443 if self._tls else 80)
        self._netloc = parts.netloc
        self._key = key
        self._timeout_s = timeout_s

    async def models(self) -> tuple[str, ...]:
        """Return the names of the server's models.

        Raises:
            EarshotError: see `transcribe`.
        """
        answer = await self._ask("GET", "/v1/models")
        return tuple(model.id for model in _read(_ModelList, answer).data)

    async def transcribe(
        self, utterance: WyomingUtterance, options: TranscribeOptions
    ) -> SpeechApiAnswer:
        """Transcribe an utterance.

        Raises:
            UnavailableError: the server is not reachable, it closed the connection, or its answer
                is malformed.
            DeadlineError: the timeout expired.
            EarshotError: the server rejected the request, with its message.
        """
        fields = [
            ("response_format", "verbose_json"),
            *(("keywords[]", word) for word in options.keywords),
        ]
        fields += [
            (name, value)
            for name, value in (("model", options.name), ("language", options.language))
            if value
        ]
        kind, body = _form(fields, utterance.wav())
        received = await self._ask("POST", "/v1/audio/transcriptions", kind, body)
        answer = _read(SpeechApiAnswer, received)
        return SpeechApiAnswer(answer.text.strip(), language_code(answer.language or ""))

    async def _ask(
        self, method: str, path: str, kind: str = "", body: Sequence[bytes] = ()
    ) -> bytes:
        head = {
            "Host": self._netloc,
            "Connection": "close",
            "Content-Length": str(sum(map(len, body))),
        }
        head |= {"Content-Type": kind} if kind else {}
        head |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        lines = (f"{name}: {value}\r\n" for name, value in head.items())
        request = f"{method} {self._path}{path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()
        try:
            async with asyncio.timeout(self._timeout_s):
                received = await self._exchange((request, *body))
        except TimeoutError:
            raise DeadlineError(f"{self.url} did not answer in {self._timeout_s:g} s") from None
        except OSError as error:
            raise UnavailableError(
                f"cannot reach {self.url}: {error.strerror or error}; start the server there, or "
                "name another with --server"
            ) from error
        status, answer = _parsed(received, self.url)
        if status != http.client.OK:
            raise _refusal(status, answer, self.url)
        return answer

    async def _exchange(self, parts: Iterable[bytes]) -> bytes:
        """Send a request, and receive until the server closes the connection."""
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        received = bytearray()
        try:
            # A server that rejects a request may close early; its response may have arrived.
            with contextlib.suppress(ConnectionError):
                for part in parts:  # in pieces, because a transport copies unsent bytes
                    for begin in range(0, len(part), _PIECE_BYTES):
                        writer.write(part[begin : begin + _PIECE_BYTES])
                        await writer.drain()
            with contextlib.suppress(ConnectionError):
                while len(received) <= _MAX_ANSWER_BYTES and (piece := await reader.read(2**16)):
                    received += piece
        finally:
            writer.close()
        return bytes(received)


def _form(fields: Iterable[tuple[str, str]], file: Iterable[bytes]) -> tuple[str, list[bytes]]:
    """Return the media type of a multipart form, and its body in pieces."""
    boundary = secrets.token_hex(16)
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="'
    texts = (f'{part}{name}"\r\n\r\n{value}\r\n' for name, value in fields)
    head = f'{part}file"; filename="speech.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    body = ["".join((*texts, head)).encode(), *file, f"\r\n--{boundary}--\r\n".encode()]
    return f"multipart/form-data; boundary={boundary}", body


class _Received:
    """A stand-in for a socket, with a response that has already been received."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, mode: str) -> io.BytesIO:
        """Return the file object that `http.client` reads."""
        return io.BytesIO(self._received)


def _parsed(received: bytes, url: str) -> tuple[int, bytes]:
    """Return the status and the body of a response."""
    response = http.client.HTTPResponse(cast(Any, _Received(received)))
    try:
        if len(received) > _MAX_ANSWER_BYTES:
            raise http.client.HTTPException("too long")
        response.begin()
        return response.status, response.read()
    except (http.client.HTTPException, ValueError) as error:
        fault = "closed the connection" if not received else "did not answer with valid HTTP"
        raise UnavailableError(
            f"{url} {fault}; expected Earshot, or another server with OpenAI's API"
        ) from error


def _read(kind: Any, answer: bytes) -> Any:
    where = "the server's answer"
    return from_json(kind, answer, where, error=UnavailableError, extra="ignore")


def _refusal(status: int, answer: bytes, url: str) -> EarshotError:
    kind = from_http(status)
    try:
        return kind(_read(_ErrorBody, answer).error.message)
    except UnavailableError:
        return kind(f"{url} returned status {status}")
