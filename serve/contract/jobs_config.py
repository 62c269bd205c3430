"""The section [jobs] of a configuration: requests that are kept and answered later."""

import dataclasses
import ipaddress
import re
from typing import Annotated

from serve.contract.codec import text_that
from serve.contract.fields import Count, CountOrNone, NameOrNone, Seconds

PLACE = re.compile(r"(?:(https?)://)?((?:\*\.)?[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
"""A place that urls may name: a host, with https unless it says http, and a port."""
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
        f"{POSTGRESQL}host/name, or nothing for a file of SQLite's in jobs.folder",
    ),
]


@dataclasses.dataclass(frozen=True)
class JobsConfig:
    """Keys of jobs. Without a folder there are none."""

    # Folder of jobs' audio and, without `database`, of their table; empty: there are no jobs.
    folder: NameOrNone = ""
    # PostgreSQL database of jobs, as `postgresql://host/name`; empty: a SQLite file.
    database: Database = ""
    # Jobs that are transcribed at a time.
    workers: Count = 2
    # A job starts only while fewer requests than this are under way, jobs among them; 0 = as many
    # as all engines together have slots.
    below: CountOrNone = 0
    # So often a job is begun whose server is lost; then it has failed.
    tries: Count = 10
    give_up_s: Seconds = 259_200.0  # a job that has no end by then has failed
    # Seconds for which an ended job and its result are kept.
    keep_s: Seconds = 86_400.0
    # Jobs without an end at most.
    max_queued: Count = 10_000
    # MiB of their audio, and of all jobs' fields and results, ended ones among them; shared alike.
    max_queued_mb: Count = 10_240
    # Hosts that audio is fetched from and webhooks go to; empty: none.
    allowed_hosts: tuple[Place, ...] = ()
    # Private networks in which these hosts may lie.
    allowed_networks: tuple[Network, ...] = ()
    fetch_timeout_s: Seconds = 600.0  # until a url's audio is here
    # Until each MiB of it, or its end, is here; what comes more slowly is tried again later.
    fetch_mb_timeout_s: Seconds = 60.0
    # File of the secret that signs webhooks, `whsec_` and base64; empty: there are no webhooks.
    webhook_secret_file: NameOrNone = ""
    webhook_give_up_s: Seconds = 86_400.0  # after a job's end a webhook is tried no more
