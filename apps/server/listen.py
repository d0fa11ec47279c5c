"""Listen for connections. A connection that is idle, or whose client does not read its answer, is closed. Running
requests are finished before the server stops."""

import asyncio
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import ServerSettings, create_app
from .engine import Engine


class TimedConnection(H11Protocol):
    """A connection with time limits; uvicorn itself limits only the time between two requests. A connection is closed
    if complete headers do not arrive within `seconds`, if the client reads nothing of an answer for that long, or if it
    needs longer than `unread_seconds` to read an answer. Above `max_connections` connections the oldest one without a
    request is closed, else the oldest that the server waits for."""

    seconds = 10.0
    unread_seconds = 120.0
    max_connections = 512  # each is an open file, of which a process may often have 1,024
    send_bytes = 2**17  # size of the system's send buffer, which by default grows to 4 MiB

    deadline: asyncio.TimerHandle | None = None
    since = 0.0
    is_ended = False
    # Bytes of the answer that wait to be sent, since when there are any, and whether many were sent since the last
    # check.
    unread, unread_since, has_sent = 0, 0.0, False
    next_check: asyncio.TimerHandle | None = None

    @property
    def has_request(self) -> bool:
        """Whether this connection has a request that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits_for_client(self) -> bool:
        """Whether the server waits for the client: for the rest of a body, or until an answer is read. Also true if the
        client has sent further requests before it got its answer, which common clients never do."""
        is_behind = self.cycle.more_body or self.transport.get_write_buffer_size() > 0
        return is_behind or bool(self.conn.trailing_data[0])

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.since = self.loop.time()
        if len(self.connections) >= self.max_connections:
            live = [connection for connection in self.connections if not connection.is_ended]
            idle = [connection for connection in live if not connection.has_request]
            idle = idle or [connection for connection in live if connection.waits_for_client]
            oldest = min(idle, key=lambda connection: connection.since, default=None)
            transport.abort() if oldest is None else oldest._end()
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_bytes)
        super().connection_made(transport)
        self._set_deadline()
        self.next_check = self.loop.call_later(self.seconds, self._check_client)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.has_sent = True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.is_ended = True
        self.next_check.cancel()
        self._cancel_deadline()

    def _end(self) -> None:
        self.is_ended = True
        self.transport.abort()

    def _check_client(self) -> None:
        """Abort the connection if the client does not read its answer. This is needed even after uvicorn has closed the
        connection, because closing waits until everything is read."""
        before, self.unread = self.unread, self.transport.get_write_buffer_size()
        if not before or not self.unread:
            self.unread_since = self.loop.time()
        is_stuck = 0 < before <= self.unread and not self.has_sent
        self.has_sent = False
        if is_stuck or self.loop.time() - self.unread_since > self.unread_seconds:
            self._end()
        else:
            self.next_check = self.loop.call_later(self.seconds, self._check_client)

    def _set_deadline(self) -> None:
        if self.has_request:
            self._cancel_deadline()
        elif self.deadline is None:
            self.deadline = self.loop.call_later(self.seconds, self._end)

    def _cancel_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def check_port(host: str, port: int) -> None:
    """Raise `OSError` if the server cannot listen on this address, before models are loaded."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise OSError(
            f"The server cannot listen on port {port} of {host} ({error}). Choose another `--port` or `--host`."
        ) from error


def serve(engine: Engine, settings: ServerSettings) -> None:
    """Serve until the process gets a signal to stop, and answer running requests before it ends. uvicorn logs the
    address."""
    app, timeout = create_app(engine, settings), int(engine.limits.seconds)
    limits = {"http": TimedConnection, "ws": "none", "timeout_graceful_shutdown": timeout}
    uvicorn.run(app, host=settings.host, port=settings.port, access_log=False, **limits)
