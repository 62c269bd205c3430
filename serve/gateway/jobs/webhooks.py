"""Webhooks: tell a receiver that a job has ended, again and again until it has taken that.

They follow Standard Webhooks (https://www.standardwebhooks.com): the headers are webhook-id, which
is the same in each try, webhook-timestamp, and webhook-signature, HMAC-SHA256 of both and the body.
"""

import base64
import binascii
import datetime
import hashlib
import hmac
import logging
import random
import time
from pathlib import Path

from prometheus_client import Counter

from serve.contract.codec import to_json
from serve.contract.config import Config
from serve.contract.errors import ConfigError
from serve.contract.files import read_text
from serve.gateway.errors import ApiError
from serve.gateway.jobs.fetch import OutboundClient
from serve.gateway.jobs.storage import JobStorage
from serve.gateway.jobs.table import JobRecord
from serve.gateway.jobs.wire import described
from serve.gateway.jobs.workers import KeyTurns, WorkerPool, keys_with

logger = logging.getLogger("earshot.gateway")

_PREFIX = "whsec_"
_MADE = f'`echo "{_PREFIX}$(openssl rand -base64 32)"` makes one'
AT_A_TIME, _OF_A_KEY = 64, 8  # webhooks on their way, of all and of one key
_LEASE_S = 60.0  # longer than the longest try
FIRST_S, _MAX_S = 5.0, 3600.0  # waits between two tries, each twice the one before
_GONE = 410  # the status of a receiver that wants no more


def read_secret(path: str) -> bytes:
    """Read the secret that webhooks are signed with.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    text = read_text(Path(path), f"jobs.webhook_secret_file names it; {_MADE}").strip()
    try:
        secret = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        secret = b""
    if not text.startswith(_PREFIX) or not 24 <= len(secret) <= 64:
        raise ConfigError(
            f"{path} (jobs.webhook_secret_file) holds no secret; expected {_PREFIX} and 24 to 64 "
            f"bytes in base64; {_MADE}"
        )
    return secret


def signed(secret: bytes, id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a webhook."""
    text = f"{id}.{timestamp}.".encode() + body
    signature = base64.b64encode(hmac.digest(secret, text, hashlib.sha256)).decode()
    return {
        "content-type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }


def body_of(job: JobRecord) -> bytes:
    """Return the body of an ended job's webhook, the same in each try."""
    ended = datetime.datetime.fromtimestamp(job.ended or 0.0, datetime.UTC)
    event = {
        "type": f"audio.job.{job.status}",
        "timestamp": ended.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "data": described(job, delivery=False),
    }
    return to_json(event).encode()


class Webhooks(WorkerPool):
    """A process's senders of webhooks. For one event loop.

    Args:
        config: the secret's file, and the time after which to give up.
        storage: the table.
        outbound: posts them.
        tries: counts them by their outcome.

    Raises:
        ConfigError: the secret cannot be read.
    """

    def __init__(
        self, config: Config, storage: JobStorage, outbound: OutboundClient, tries: Counter
    ) -> None:
        super().__init__()
        path = config.jobs.webhook_secret_file
        self._secret = read_secret(path) if path else None
        self._give_up_s = config.jobs.webhook_give_up_s
        self._storage = storage
        self._outbound = outbound
        self._tries = tries
        self._turns = KeyTurns()

    @property
    def on(self) -> bool:
        """Tell whether there is a secret, without which none is sent."""
        return self._secret is not None

    async def _claimed(self) -> JobRecord | None:
        if self._secret is None or len(self.tasks) >= AT_A_TIME:
            return None
        now, table = time.time(), self._storage.table
        full = keys_with(self.jobs.values(), _OF_A_KEY)
        keys = await self._storage.quietly(table.webhook_keys, now, full)
        if (key := self._turns.next(keys or ())) is None:
            return None
        return await self._storage.quietly(table.claim_webhook, now, now + _LEASE_S, key)

    async def _work(self, job: JobRecord) -> None:
        assert self._secret is not None  # else none is claimed
        body, now = body_of(job), int(time.time())
        headers = signed(self._secret, f"msg_{job.id}", now, body)
        try:
            status, why = await self._outbound.post(job.webhook_url, headers, body), ""
        except ApiError as refusal:
            status, why = 0, str(refusal)
        done, due = self._next(job, status)
        self._tries.labels(done if done != "pending" else "failed").inc()
        if done != "delivered":
            logger.warning(
                "the webhook of %s was not taken: %s; %s",
                job.id,
                why or f"status {status}",
                "it is given up" if done == "given_up" else f"again in {due - time.time():.0f} s",
            )
        await self._storage.quietly(self._storage.table.webhook_done, job, done, due)

    def _next(self, job: JobRecord, status: int) -> tuple[str, float]:
        """Return a webhook's state after a try, and the time at which it is due again."""
        if 200 <= status < 300:
            return "delivered", 0.0
        wait_s = min(FIRST_S * 2 ** min(job.webhook_tries - 1, 20), _MAX_S)
        due = time.time() + wait_s * random.uniform(1.0, 1.2)
        late = due > (job.ended or 0.0) + self._give_up_s
        return ("given_up" if late or status == _GONE else "pending"), due
