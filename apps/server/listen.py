"""The server listens: connections that ask for nothing are closed, and what was begun is finished before it ends."""

import asyncio
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import ServerSettings, create_app
from .engine import Engine


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


def check_port(host: str, port: int) -> None:
    """Raises `OSError` for an address that cannot be listened on, before anything is loaded for it."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise OSError(f"Nobody can listen on {host}, port {port} ({error}). Choose another with `--port`.") from error


def serve(engine: Engine, settings: ServerSettings) -> None:
    """Serves until it is asked to end; then what was begun is answered first. uvicorn says where it listens."""
    app, timeout = create_app(engine, settings), int(engine.limits.seconds)
    limits = {"http": TimedConnection, "ws": "none", "timeout_graceful_shutdown": timeout}
    uvicorn.run(app, host=settings.host, port=settings.port, access_log=False, **limits)
