"""SQLite files that several gateway processes write."""

import sqlite3
import time

_LOOK_S = 0.002


def join(connection: sqlite3.Connection, most_s: float) -> None:
    """Have a file's changes logged ahead, waiting for who closes it as its last process.

    For that one SQLite does not wait by itself.

    Args:
        connection: to the file, just opened.
        most_s: that another process is waited for.

    Raises:
        sqlite3.Error: the file cannot be used.
    """
    end_s = time.monotonic() + most_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end_s:
                raise
            time.sleep(_LOOK_S)
        else:
            return
