"""The bridge's own server: takes connections in, as many as there may be, and lets them end."""

import asyncio
import contextlib

from serve.contract.errors import OverloadedError, UnavailableError
from serve.wyoming.events import MAX_LINE_BYTES
from serve.wyoming.session import BridgeSettings, WyomingSession

MAX_CONNECTIONS = 16

_CLOSE_S = 2.0


class Bridge:
    """A server of the Wyoming protocol.

    Args:
        settings: of its sessions.
    """

    def __init__(self, settings: BridgeSettings) -> None:
        self._settings = settings
        self._sessions: dict[asyncio.Task[None], WyomingSession] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, which 0 leaves to the system.

        Raises:
            UnavailableError: it cannot.
        """
        try:
            self._server = await asyncio.start_server(self._take, host, port, limit=MAX_LINE_BYTES)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {host}:{port}: {error.strerror}; stop what runs there, or name "
                "another port with --listen"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, drain_s: float) -> None:
        """Take nobody in any more, and let utterances that are under way become text.

        Args:
            drain_s: how long that may take.
        """
        assert self._server is not None
        self._server.close()
        tasks = set(self._sessions)
        for task, session in self._sessions.items():
            session.finish()
            if not session.busy:
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=drain_s)
            for task in late:
                task.cancel()
            await asyncio.wait(tasks)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session, task = WyomingSession(reader, writer, self._settings), asyncio.current_task()
        assert task is not None
        try:
            if len(self._sessions) >= MAX_CONNECTIONS:
                await session.refuse(
                    OverloadedError(f"{MAX_CONNECTIONS} connections are open; try again later")
                )
                return
            self._sessions[task] = session
            await session.run()
            await _hear_out(reader, writer)
        except asyncio.CancelledError:  # by `stop`; asyncio would log it
            return
        finally:
            self._sessions.pop(task, None)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await writer.wait_closed()


async def _hear_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let a client that still sends read why nobody listens: closed now, it might lose that."""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write_eof()
        async with asyncio.timeout(_CLOSE_S):
            while await reader.read(MAX_LINE_BYTES):
                pass
