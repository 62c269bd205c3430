"""A stand-in for a server of OpenAI's API, which says what it is told."""

import asyncio
import contextlib
import json
import re


class Stub:
    """`answer`: status and body; bytes are all that is said; None: nothing is, for ever.

    `asked`: head and body of each request; `left`: an event, that a client went without an answer.
    """

    def __init__(self):
        self.asked = []
        self.left = asyncio.Event()
        self.answer = (200, {"text": " Turn on the light. ", "language": "english"})

    @contextlib.asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self.take, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def take(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sizes = re.findall(r"content-length: (\d+)", head.lower())
            size = int(sizes[0]) if sizes else 0
            self.asked.append((head, await reader.readexactly(size)))
            if self.answer is None:
                await reader.read()
                self.left.set()
            elif isinstance(self.answer, bytes):
                writer.write(self.answer)
            else:
                status, body = self.answer
                if head.startswith("GET /v1/models "):
                    status, body = 200, {"data": [{"id": "nano", "object": "model"}]}
                text = json.dumps(body)
                writer.write(f"HTTP/1.1 {status} so\r\n\r\n{text}".encode())
            await writer.drain()
        writer.close()
