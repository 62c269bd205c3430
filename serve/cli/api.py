"""A client of the HTTP API of the server that a config names."""

import contextlib
import dataclasses
import json
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from serve.cli.options import api_key, server_url
from serve.contract.config import Config
from serve.contract.errors import EarshotError, UnavailableError, from_response

if TYPE_CHECKING:  # only some commands load it
    import httpx2

_WAIT_S = 60.0  # timeout of each read and write


class ResponseLostError(UnavailableError):
    """The server accepted the connection, but its response was lost; it may have acted on it."""


@dataclasses.dataclass(frozen=True)
class ApiClient:
    """A client of one server; see `open_api`."""

    _server: str
    _client: "httpx2.Client"

    def text(self, method: str, path: str, **sent: Any) -> str:
        """Send a request and return the response's body as text.

        Args:
            method: the HTTP method.
            path: the path on the server.
            sent: arguments of httpx2: params, json, data, files, headers.

        Raises:
            UnavailableError: the server does not accept connections.
            ResponseLostError: the connection ended before the response.
            EarshotError: the server rejects the request.
        """
        import httpx2  # noqa: PLC0415

        url = f"{self._server}{path}"
        try:
            answer = self._client.request(method, url, **sent)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise UnavailableError(f"cannot connect to {url}: {error}") from error
        except httpx2.HTTPError as error:
            raise ResponseLostError(f"the response of {url} was lost: {error}") from error
        if answer.is_success:
            return answer.text
        raise from_response(url, answer.status_code, answer.content)

    def object(self, method: str, path: str, **sent: Any) -> Any:
        """Send a request and return the response's JSON value; see `text`."""
        text = self.text(method, path, **sent)
        try:
            return json.loads(text)
        except ValueError as error:
            raise EarshotError(
                f"{self._server}{path} did not return JSON; expected an Earshot server there"
            ) from error


@contextlib.contextmanager
def open_api(config: Config) -> Iterator[ApiClient]:
    """Open the API of the server that a config names, with the API key of the environment."""
    import httpx2  # noqa: PLC0415

    key = api_key()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    trusted = ssl.create_default_context()  # the system's certificates
    with httpx2.Client(headers=headers, timeout=_WAIT_S, verify=trusted) as client:
        yield ApiClient(server_url(config, "http"), client)
