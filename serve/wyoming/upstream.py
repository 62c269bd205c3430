"""A client of OpenAI's speech API over HTTP."""

import asyncio
import dataclasses
import http.client
import ssl
import urllib.parse
from typing import Any, TypeVar

from serve.contract.codec import from_json
from serve.contract.errors import ConfigError, DeadlineError, UnavailableError, from_response, shown
from serve.speech.languages import language_code
from serve.wyoming.utterance import TranscribeOptions, WyomingUtterance

T = TypeVar("T")

_MAX_ANSWER_BYTES = 2**22
_CONNECT_S = 10.0


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


class SpeechApiClient:
    """A client of one server.

    Args:
        url: http://host:port or https://host:port, with or without /v1.
        key: the API key, if the server needs one.
        timeout_s: the timeout of a request.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            host, _ = parts.hostname, parts.port  # the port may be out of range
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.username:
            raise ConfigError(
                f"--server {shown(url)}; expected a URL such as http://127.0.0.1:8000"
            )
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
        answer = await self._ask(_ModelList, "GET", "/v1/models")
        return tuple(model.id for model in answer.data)

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
        fields = {"model": options.name, "language": options.language}
        form = {
            "response_format": "verbose_json",
            "keywords[]": options.keywords,
            **{name: value for name, value in fields.items() if value},
        }
        file = ("speech.wav", utterance.wav(), "audio/wav")
        answer = await self._ask(
            SpeechApiAnswer, "POST", "/v1/audio/transcriptions", data=form, files={"file": file}
        )
        return SpeechApiAnswer(answer.text.strip(), language_code(answer.language or ""))

    async def _ask(self, kind: type[T], method: str, path: str, **form: Any) -> T:
        import httpx2  # noqa: PLC0415 - other commands do not load it

        limits = httpx2.Timeout(None, connect=_CONNECT_S)
        url = f"{self.url}{path}"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx2.AsyncClient(verify=self._tls, timeout=limits, trust_env=False) as client,
                client.stream(method, url, headers=self._headers, **form) as response,
            ):
                body = bytearray()
                async for block in response.aiter_raw():
                    body += block
                    if len(body) > _MAX_ANSWER_BYTES:
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
            raise from_response(self.url, response.status_code, bytes(body))
        return from_json(
            kind, bytes(body), "the server's answer", error=UnavailableError, extra="ignore"
        )
