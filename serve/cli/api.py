"""The HTTP API of the server that a config names, as commands ask it."""

import contextlib
import dataclasses
import json
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from serve.cli.options import api_key, server_url
from serve.contract.config import Config
from serve.contract.errors import EarshotError, UnavailableError, from_http

if TYPE_CHECKING:  # other commands do without it
    import httpx2

_WAIT_S = 60.0  # that a server may take nothing, and say nothing


class ResponseLostError(UnavailableError):
    """A server was there and its answer did not come: it may have done what it was asked for."""


@dataclasses.dataclass(frozen=True)
class ApiClient:
    """The addresses of a server; see `open_api`."""

    _server: str
    _client: "httpx2.Client"

    def text(self, method: str, path: str, **sent: Any) -> str:
        """Ask for a text.

        Args:
            method: of HTTP.
            path: of the server's.
            sent: as httpx2 takes it: params, json, data and files.

        Raises:
            UnavailableError: there is no server.
            LostAnswerError: it went away before it answered.
            EarshotError: it refuses.
        """
        import httpx2  # noqa: PLC0415

        url = f"{self._server}{path}"
        try:
            answer = self._client.request(method, url, **sent)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise UnavailableError(f"no server answers at {url}: {error}") from error
        except httpx2.HTTPError as error:
            raise ResponseLostError(f"the answer of {url} was lost: {error}") from error
        if answer.is_success:
            return answer.text
        raise refused(url, answer.status_code, answer.content)

    def object(self, method: str, path: str, **sent: Any) -> Any:
        """Ask for what JSON holds; see `text`."""
        text = self.text(method, path, **sent)
        try:
            return json.loads(text)
        except ValueError as error:
            raise EarshotError(f"{self._server}{path} is not JSON; is it an Earshot?") from error


def refused(url: str, status: int, body: bytes) -> EarshotError:
    """Read why a server refuses what was asked of an address, by its answer's status and body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return from_http(status)(json.loads(body)["error"]["message"])
    return EarshotError(f"{url} answered {status}; is it an Earshot?")


@contextlib.contextmanager
def open_api(config: Config) -> Iterator[ApiClient]:
    """Open the API of the server that a config names, with the key of the environment."""
    import httpx2  # noqa: PLC0415

    key = api_key()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    trusted = ssl.create_default_context()  # by this system
    with httpx2.Client(headers=headers, timeout=_WAIT_S, verify=trusted) as client:
        yield ApiClient(server_url(config, "http"), client)
