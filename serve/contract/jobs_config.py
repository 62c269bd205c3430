"""The section [jobs] of a configuration: asynchronous transcription."""

import dataclasses
import ipaddress
import re
from typing import Annotated

from serve.contract.codec import text_that
from serve.contract.fields import Count, NameOrNone, Seconds

PLACE = re.compile(r"(?:(https?)://)?((?:\*\.)?[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
"""An allowed host for URLs: a name, with https unless it says http, and perhaps a port."""
POSTGRESQL = "postgresql://"


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


Place = Annotated[
    str,
    text_that(
        PLACE.fullmatch,
        "a host such as files.example.org, *.example.org or http://files.example.org:8080",
    ),
]
Network = Annotated[str, text_that(_is_network, "a network such as 10.1.0.0/16")]
Database = Annotated[
    str,
    text_that(
        lambda text: text == "" or text.startswith(POSTGRESQL),
        f"{POSTGRESQL}host/name, or empty for a SQLite file in jobs.folder",
    ),
]


@dataclasses.dataclass(frozen=True)
class JobsConfig:
    """Keys of jobs; without a folder there are no jobs."""

    # Folder for the jobs' audio and, without `database`, for their SQLite table; empty: no jobs.
    folder: NameOrNone = ""
    # PostgreSQL database of jobs, such as `postgresql://host/name`; empty: a SQLite file.
    database: Database = ""
    # Maximum number of jobs that are transcribed concurrently.
    workers: Count = 2
    # Seconds that a job and its result are kept after its end.
    keep_s: Seconds = 86_400.0
    # Maximum number of queued and running jobs.
    max_queued: Count = 10_000
    # Hosts from which audio may be fetched, and to which webhooks may be sent; empty: none.
    allowed_hosts: tuple[Place, ...] = ()
    # Private networks that these hosts may be in.
    allowed_networks: tuple[Network, ...] = ()
    # File with the secret that signs webhooks, `whsec_` and base64; empty: no webhooks.
    webhook_secret_file: NameOrNone = ""
