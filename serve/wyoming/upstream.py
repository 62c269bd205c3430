"""A client of OpenAI's speech API over HTTP."""

import asyncio
import dataclasses
import http.client
import re
import secrets
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

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
            host, _ = parts.hostname, parts.port  # the port may be out of range
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.username:
            raise ConfigError(
                f"--server {shown(url)}; expected a URL such as http://127.0.0.1:8000"
            )
        if not _HEADER_VALUE.fullmatch(key):
            raise ConfigError("the API key has invalid characters; expected only one key")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Accept-Encoding": "identity"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._tls = ssl.create_default_context() if parts.scheme == "https" else False
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
        import httpx2  # noqa: PLC0415 - other commands do not load it

        headers = {**self._headers, "Content-Length": str(sum(map(len, body)))}
        headers |= {"Content-Type": kind} if kind else {}
        limits = httpx2.Timeout(None, connect=_CONNECT_S)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx2.AsyncClient(verify=self._tls, timeout=limits, trust_env=False) as client,
                client.stream(
                    method, f"{self.url}{path}", headers=headers, content=_pieces(body)
                ) as response,
            ):
                answer = bytearray()
                async for piece in response.aiter_raw():
                    answer += piece
                    if len(answer) > _MAX_ANSWER_BYTES:
                        raise httpx2.RemoteProtocolError(f"more than {_MAX_ANSWER_BYTES} bytes")
        except TimeoutError:
            raise DeadlineError(f"{self.url} did not answer in {self._timeout_s:g} s") from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise UnavailableError(
                f"cannot reach {self.url}: {error}; start the server there, or name another with "
                "--server"
            ) from error
        except httpx2.HTTPError as error:
            raise UnavailableError(
                f"{self.url} did not answer with valid HTTP: {error}; expected Earshot, or another "
                "server with OpenAI's API"
            ) from error
        if response.status_code != http.client.OK:
            raise _refusal(response.status_code, bytes(answer), self.url)
        return bytes(answer)


async def _pieces(body: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield a body in small pieces, because a transport copies unsent bytes."""
    for part in body:
        for begin in range(0, len(part), _PIECE_BYTES):
            yield part[begin : begin + _PIECE_BYTES]


def _form(fields: Iterable[tuple[str, str]], file: Iterable[bytes]) -> tuple[str, list[bytes]]:
    """Return the media type of a multipart form, and its body in pieces."""
    boundary = secrets.token_hex(16)
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="'
    texts = (f'{part}{name}"\r\n\r\n{value}\r\n' for name, value in fields)
    head = f'{part}file"; filename="speech.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    body = ["".join((*texts, head)).encode(), *file, f"\r\n--{boundary}--\r\n".encode()]
    return f"multipart/form-data; boundary={boundary}", body


def _read(kind: Any, answer: bytes) -> Any:
    where = "the server's answer"
    return from_json(kind, answer, where, error=UnavailableError, extra="ignore")


def _refusal(status: int, answer: bytes, url: str) -> EarshotError:
    kind = from_http(status)
    try:
        return kind(_read(_ErrorBody, answer).error.message)
    except UnavailableError:
        return kind(f"{url} returned status {status}")
