"""The server of the bridge: it accepts connections up to a maximum, and drains them."""

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
        settings: the sessions' settings.
    """

    def __init__(self, settings: BridgeSettings) -> None:
        self._settings = settings
        self._sessions: dict[asyncio.Task[None], WyomingSession] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, which the system chooses for port 0.

        Raises:
            UnavailableError: the address cannot be used.
        """
        try:
            self._server = await asyncio.start_server(
                self._serve_client, host, port, limit=MAX_LINE_BYTES
            )
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {host}:{port}: {error.strerror}; stop the other process, or "
                "choose another port with --listen"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, drain_s: float) -> None:
        """Stop accepting connections, and finish the current utterances.

        Args:
            drain_s: the maximum wait for these utterances.
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

    async def _serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
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
            await _read_to_end(reader, writer)
        except asyncio.CancelledError:  # from `stop`; asyncio would log it
            return
        finally:
            self._sessions.pop(task, None)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await writer.wait_closed()


async def _read_to_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read until the client closes; closing while it sends could discard our last event."""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write_eof()
        async with asyncio.timeout(_CLOSE_S):
            while await reader.read(MAX_LINE_BYTES):
                pass
