"""The server that the bridge asks, by OpenAI's API over HTTP."""

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
    language: str | None = None  # a code; None: not known


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
    """A server.

    Args:
        url: http://host:port or https://host:port; /v1 may follow.
        key: an API key; empty: none.
        timeout_s: that an answer may take.

    Raises:
        ConfigError: the URL or the key is none.
    """

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.username:
            raise ConfigError(f"--server {shown(url)}; expected such as http://127.0.0.1:8000")
        if not _HEADER_VALUE.fullmatch(key):
            raise ConfigError("the API key has characters that no key has; expected one key alone")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._path = urllib.parse.urlsplit(self.url).path
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = host, port or (443 if self._tls else 80)
        self._netloc = parts.netloc
        self._key = key
        self._timeout_s = timeout_s

    async def models(self) -> tuple[str, ...]:
        """Return the names of the models that there are.

        Raises:
            EarshotError: as of `transcribe`.
        """
        answer = await self._ask("GET", "/v1/models")
        return tuple(model.id for model in _read(_ModelList, answer).data)

    async def transcribe(
        self, utterance: WyomingUtterance, options: TranscribeOptions
    ) -> SpeechApiAnswer:
        """Ask for an utterance's text.

        Raises:
            UnavailableError: there is no server, it hung up, or it answered with nonsense.
            DeadlineError: it takes too long.
            EarshotError: it refuses; the message is its own.
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
            raise DeadlineError(f"{self.url} has not answered in {self._timeout_s:g} s") from None
        except OSError as error:
            raise UnavailableError(
                f"{self.url} cannot be reached: {error.strerror or error}; start the server there, "
                "or name another with --server"
            ) from error
        status, answer = _parsed(received, self.url)
        if status != http.client.OK:
            raise _refusal(status, answer, self.url)
        return answer

    async def _exchange(self, parts: Iterable[bytes]) -> bytes:
        """Send a request, and receive all until the server hangs up."""
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        received = bytearray()
        try:
            # A server that refuses need not read all of a request; it may have said why.
            with contextlib.suppress(ConnectionError):
                for part in parts:  # piece by piece, for a transport copies what it cannot send
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
    """Make a multipart form: its media type, and its body in pieces."""
    boundary = secrets.token_hex(16)
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="'
    texts = (f'{part}{name}"\r\n\r\n{value}\r\n' for name, value in fields)
    head = f'{part}file"; filename="speech.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    body = ["".join((*texts, head)).encode(), *file, f"\r\n--{boundary}--\r\n".encode()]
    return f"multipart/form-data; boundary={boundary}", body


class _Received:
    """Stands for a socket from which an answer can be read that has been received already."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, mode: str) -> io.BytesIO:
        """Return the file that `http.client` reads from."""
        return io.BytesIO(self._received)


def _parsed(received: bytes, url: str) -> tuple[int, bytes]:
    """Return status and body of an answer."""
    response = http.client.HTTPResponse(cast(Any, _Received(received)))
    try:
        if len(received) > _MAX_ANSWER_BYTES:
            raise http.client.HTTPException("too long")
        response.begin()
        return response.status, response.read()
    except (http.client.HTTPException, ValueError) as error:
        fault = "hung up without an answer" if not received else "did not answer as HTTP has it"
        raise UnavailableError(
            f"{url} {fault}; expected an Earshot, or another server of OpenAI's API"
        ) from error


def _read(kind: Any, answer: bytes) -> Any:
    where = "the server's answer"
    return from_json(kind, answer, where, error=UnavailableError, extra="ignore")


def _refusal(status: int, answer: bytes, url: str) -> EarshotError:
    kind = from_http(status)
    try:
        return kind(_read(_ErrorBody, answer).error.message)
    except UnavailableError:
        return kind(f"{url} answered with status {status}")
