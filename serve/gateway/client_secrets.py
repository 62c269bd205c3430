"""Client secrets: short-lived keys with which browsers open live sessions.

A secret is signed and is not kept, so every gateway of a run can read it. It holds its expiry
time, the id of the API key that made it and settings for the sessions that it opens. Its holder can
read all three.
"""

import base64
import dataclasses
import hashlib
import hmac
import json
import time
import zlib
from collections.abc import Callable
from typing import Any

from serve.contract.errors import AccessError
from serve.contract.keys import CLIENT_SECRET_PREFIX
from serve.gateway.errors import ApiError, field_error

MAX_CHARS = 4096
"""Most characters of a secret: it has to fit into a header of any proxy."""


@dataclasses.dataclass(frozen=True)
class ClientSecret:
    """The content of a secret."""

    expires_at: int  # seconds since 1970; sessions that are open then go on
    key_id: str  # `Key.public_id`
    session: dict[str, Any]  # an update of the default settings


class ClientSecrets:
    """Signs and reads secrets.

    Args:
        signing_key: the secret that only the gateways of a run share.
        clock: in seconds since 1970.
    """

    def __init__(self, signing_key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._signing_key = signing_key
        self.clock = clock

    def sign(self, secret: ClientSecret) -> str:
        """Write a secret as its holder sends it: the prefix, the content, a point, the signature.

        Raises:
            ApiError: its settings are too long.
        """
        text = json.dumps(dataclasses.asdict(secret), separators=(",", ":"))
        content = _encoded(zlib.compress(text.encode()))
        value = f"{CLIENT_SECRET_PREFIX}{content}.{self._signature(content)}"
        if len(value) > MAX_CHARS:
            found = f"a client secret with this session has {len(value)} characters"
            expected = f"expected at most {MAX_CHARS}: shorten the session"
            raise field_error("session", f"{found}; {expected}")
        return value

    def read(self, value: str) -> ClientSecret:
        """Read a secret.

        Raises:
            ApiError: another run made it, it was changed, or it has expired.
        """
        content, _, signature = value.removeprefix(CLIENT_SECRET_PREFIX).partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(content).encode()):
            raise _rejected("is none of this server's since its last start")
        text = zlib.decompress(base64.urlsafe_b64decode(content + "=" * (-len(content) % 4)))
        secret = ClientSecret(**json.loads(text))
        if self.clock() >= secret.expires_at:
            raise _rejected("has expired")
        return secret

    def _signature(self, content: str) -> str:
        return _encoded(hmac.digest(self._signing_key, content.encode(), hashlib.sha256))


def _rejected(why: str) -> ApiError:
    advice = "make another with POST /v1/realtime/client_secrets"
    return ApiError(AccessError(f"this client secret {why}; {advice}"))


def _encoded(data: bytes) -> str:
    """Encode bytes in characters that a header's token may have."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
