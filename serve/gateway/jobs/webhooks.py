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

from serve.contract.codec import to_json
from serve.contract.errors import ConfigError
from serve.contract.files import read_text
from serve.gateway.errors import ApiError
from serve.gateway.jobs.fetch import OutboundClient
from serve.gateway.jobs.table import JobRecord
from serve.gateway.jobs.wire import described

logger = logging.getLogger("earshot.gateway")

_PREFIX = "whsec_"
_MADE = f'`echo "{_PREFIX}$(openssl rand -base64 32)"` makes one'
FIRST_S, _MAX_S = 5.0, 3600.0  # waits between two tries, each twice the one before
GIVE_UP_S = 86_400.0  # after a job's end its webhook is tried no more
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


async def post_webhook(
    outbound: OutboundClient, secret: bytes, job: JobRecord
) -> tuple[str, float]:
    """Post the webhook of an ended job once; its id and body are the same in each try.

    Returns:
        The webhook's state, "delivered", "given_up" or "pending", and the time of the next try.
    """
    ended = datetime.datetime.fromtimestamp(job.ended or 0.0, datetime.UTC)
    event = {
        "type": f"audio.job.{job.status}",
        "timestamp": ended.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "data": described(job, delivery=False),
    }
    body = to_json(event).encode()
    headers = signed(secret, f"msg_{job.id}", int(time.time()), body)
    try:
        status = await outbound.post(job.webhook_url, headers, body)
        reason = f"status {status}"
    except ApiError as error:
        status, reason = 0, str(error)
    if 200 <= status < 300:
        return "delivered", 0.0
    wait_s = min(FIRST_S * 2 ** min(job.webhook_tries - 1, 20), _MAX_S) * random.uniform(1.0, 1.2)
    due = time.time() + wait_s
    given_up = status == _GONE or due > (job.ended or 0.0) + GIVE_UP_S
    plan = "it is given up" if given_up else f"again in {wait_s:.0f} s"
    logger.warning("the webhook of %s was not taken: %s; %s", job.id, reason, plan)
    return ("given_up" if given_up else "pending"), due
