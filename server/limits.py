"""What a client may hold: a connection that asks for nothing, headers that never end, a body that is long or slow."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """
    A connection that is closed unless it asks: `seconds` after its first byte of a request, or after it was opened, the
    headers have arrived. Of more than `most` connections the oldest that does not ask is closed.

    uvicorn itself limits the time between two requests only.
    """

    seconds = 10.0
    most = 512  # each is an open file, of which a process often has 1,024

    deadline: asyncio.TimerHandle | None = None
    since = 0.0

    @property
    def asks(self) -> bool:
        """Whether it has sent a request that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.since = self.loop.time()
        if len(self.connections) >= self.most:
            silent = [each for each in self.connections if not each.asks and not each.transport.is_closing()]
            oldest = min(silent, key=lambda each: each.since, default=None)
            (transport if oldest is None else oldest.transport).abort()
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        if self.asks:
            self._forget()
        elif self.deadline is None:
            self.deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def _forget(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


class BodyLimit:
    """Refuses a request with a body that is too long, before it is read whole, or does not arrive within `seconds`, and
    counts answers by status. `others` are addresses with a limit of their own."""

    seconds = 30.0

    def __init__(self, app: Callable, max_body_bytes: int, count: Callable[[int], Any], others: dict[str, int]):
        self.app, self.max_body_bytes, self.count, self.others = app, max_body_bytes, count, others

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        most = self.others.get(scope["path"], self.max_body_bytes)
        seen, end = 0, asyncio.get_running_loop().time() + self.seconds

        async def limited():
            nonlocal seen, end
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"The body did not arrive within {self.seconds:g} seconds.") from error
            if not message.get("more_body"):
                end = None  # what is received then is that the client leaves
            seen += len(message.get("body", b""))
            if seen > most:
                text = f"The body is longer than {most} bytes. Pass fewer or shorter documents."
                raise HTTPException(413, text)
            return message

        async def counted(message):
            if message["type"] == "http.response.start":
                self.count(message["status"])
            await send(message)

        await self.app(scope, limited, counted)
