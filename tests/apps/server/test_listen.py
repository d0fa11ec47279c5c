"""Idle and slow connections are closed and keep no other client out; the command that listens."""

import contextlib
import json
import logging
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from arcaligner.apps.server import app
from arcaligner.apps.server.listen import TimedConnection

HEADERS = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a key\r\n"
HEADERS += "Content-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def connect(url):
    """Opens connections to the server, which are closed at the end."""
    with contextlib.ExitStack() as opened:
        address = ("127.0.0.1", httpx.URL(url).port)

        def connect(room: int | None = None) -> socket.socket:
            connection = opened.enter_context(socket.socket())
            connection.settimeout(20)
            if room is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
            connection.connect(address)
            return connection

        yield connect


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**16):
            content += data
    return content


def drip(connection: socket.socket) -> None:
    """Sends headers, a byte at a time, for as long as the connection is open."""
    connection.settimeout(0.02)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for byte in HEADERS.encode() + b"X: " + b"y" * 1000:
            connection.send(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                assert connection.recv(1) == b""
                return
        pytest.fail("the server has waited for all of it")


def test_incomplete_requests_time_out(connect, monkeypatch):
    """A connection without a complete request is closed in time, also after an answer."""
    monkeypatch.setattr(TimedConnection, "seconds", 0.2)
    for begun in (b"", HEALTH[:14]):
        (connection := connect()).sendall(begun)
        assert received(connection) == b""
    drip(connect())
    (connection := connect()).sendall(HEALTH)
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(2**16)
    assert answer.startswith(b"HTTP/1.1 200")
    drip(connection)


def test_waiting_client_stays_connected(connect, held, monkeypatch):
    monkeypatch.setattr(TimedConnection, "seconds", 0.2)
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 64})
    asking = connect()
    asking.sendall(f"{HEADERS}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    assert held.begun.wait(20)
    assert received(connect()) == b""  # a later connection has been closed in time
    held.go_on.set()
    assert received(asking).startswith(b"HTTP/1.1 200")


def test_oldest_idle_connection_is_closed(connect, monkeypatch, url):
    """If there are too many connections, the oldest one without a request is closed."""
    monkeypatch.setattr(TimedConnection, "max_connections", 4)
    silent = [connect() for _ in range(6)]
    assert httpx.get(f"{url}/health").status_code == 200
    assert [received(connection) for connection in silent[:3]] == [b""] * 3
    silent[-1].sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert received(silent[-1]).startswith(b"HTTP/1.1 200")


PAGES = HEALTH.replace(b"/health", b"/") * 300  # the answers have some megabytes


@pytest.fixture
def lost(monkeypatch):
    """The ports of the clients whose connections the server has lost so far."""
    ports, connection_lost = set(), TimedConnection.connection_lost

    def record(self, exc):
        connection_lost(self, exc)
        ports.add(self.client[1])

    monkeypatch.setattr(TimedConnection, "connection_lost", record)
    return ports


def ask_for_pages(connect) -> socket.socket:
    """A connection with a small receive buffer, after the first byte of a large answer."""
    connection = connect(2**14)
    connection.sendall(PAGES)
    assert connection.recv(1)  # the answer has begun
    return connection


def wait_until(is_so, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


def test_silent_reader_closed(connect, lost, monkeypatch):
    """The connection of a client that sends a request and never reads the answer is closed."""
    monkeypatch.setattr(TimedConnection, "seconds", 0.2)
    connection = ask_for_pages(connect)
    assert wait_until(lambda: connection.getsockname()[1] in lost)


def test_unread_short_answer_closed(connect, lost, monkeypatch):
    """The connection is closed too if the client does not read a short answer that the server has written whole."""
    monkeypatch.setattr(TimedConnection, "seconds", 0.3)
    monkeypatch.setattr(TimedConnection, "send_bytes", 2**10)
    monkeypatch.setattr(app, "PAGE", Path(__file__))
    (connection := connect(2**11)).sendall(
        HEALTH.replace(b"/health", b"/").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    )
    assert wait_until(lambda: connection.getsockname()[1] in lost)


@pytest.mark.parametrize(("most", "is_closed"), [(60.0, False), (0.5, True)])
def test_slow_reader_has_its_time(connect, lost, monkeypatch, most, is_closed):
    """A client that reads slowly keeps its connection for `unread_seconds`, and no longer."""
    monkeypatch.setattr(TimedConnection, "seconds", 0.5)
    monkeypatch.setattr(TimedConnection, "unread_seconds", most)
    connection, end = ask_for_pages(connect), time.monotonic() + 3
    port = connection.getsockname()[1]
    while time.monotonic() < end and port not in lost:
        connection.recv(2**15)
        time.sleep(0.02)
    assert (port in lost) == is_closed


def test_unread_answers_make_room(connect, lost, monkeypatch):
    """If there are too many connections, those whose clients do not read are closed for new ones."""
    monkeypatch.setattr(TimedConnection, "max_connections", 8)
    ports = [ask_for_pages(connect).getsockname()[1] for _ in range(8)]
    for _ in range(3):
        (new := connect()).sendall(HEALTH)
        assert new.recv(2**16).startswith(b"HTTP/1.1 200")
    assert wait_until(lambda: ports[0] in lost)


def test_unsent_body_makes_room(connect, lost, url, monkeypatch):
    """Requests whose bodies do not arrive keep no other client out."""
    monkeypatch.setattr(TimedConnection, "max_connections", 4)
    for _ in range(4):
        connect().sendall(f"{HEADERS}Content-Length: 50\r\n\r\n{{".encode())
    assert httpx.get(f"{url}/health").status_code == 200


def test_late_body_times_out(connect, monkeypatch):
    """A request whose body does not arrive ends in time."""
    monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
    connection = connect()
    connection.sendall(f"{HEADERS}Connection: close\r\nContent-Length: 50\r\n\r\n{{".encode())
    answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.1 seconds" in answer


BODY = "Content-Length: 50\r\n\r\n"


IDLE = (
    HEALTH,
    HEALTH * 2,
    HEALTH.replace(b"\r\n\r\n", f"\r\n{BODY}".encode()),  # answered before its body has come
    f"{HEADERS}{BODY}".encode(),
    f"{HEADERS}{BODY}".replace("a key", "another").encode(),
    f"{HEADERS}{BODY}".replace("/chat", "/nothing").encode(),
    f"{HEADERS}Expect: 100-continue\r\n{BODY}".encode(),
    f"{HEADERS}Transfer-Encoding: chunked\r\n\r\n5\r\n{{".encode(),
    f"{HEADERS}Content-Length: 1\r\n\r\n{{".encode() + HEALTH[:20],
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    HEADERS.encode(),
)


def test_idle_connections_closed(connect, lost, monkeypatch):
    """A connection on which nothing is sent or read any more is closed, whatever was sent before."""
    monkeypatch.setattr(TimedConnection, "seconds", 0.2)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    idle = [connect() for _ in IDLE]
    for connection, sent in zip(idle, IDLE, strict=True):
        connection.sendall(sent)
    assert wait_until(lambda: lost.issuperset(connection.getsockname()[1] for connection in idle))


def test_serve_command_answers(run_cli, monkeypatch, checkpoint_dir, retriever):
    served = []
    monkeypatch.setattr("uvicorn.run", lambda app, **settings: served.append((app, settings)))
    monkeypatch.setenv("ARCALIGNER_API_KEY", "")
    command = ("serve", "--checkpoint", checkpoint_dir, "--corpus", retriever.corpus.path, "--port", 8001)
    code, _, err = run_cli(*command, "--host", "0.0.0.0")
    assert code == 1 and "no API key is set" in err and not served
    assert run_cli(*command)[0] == 0
    ((served_app, settings),) = served
    assert {"host": "127.0.0.1", "port": 8001, "http": TimedConnection}.items() <= settings.items()
    with TestClient(served_app, base_url="http://127.0.0.1:8001") as client:
        body = {"model": checkpoint_dir.name, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=body).json()["arcaligner"]["sources"]


def test_command_stops_and_reports_ports(run_cli, monkeypatch, checkpoint_dir):
    """The command ends on a signal, and with an error if another process listens on its port."""
    startup, ports = uvicorn.Server.startup, []

    async def stopped(server, sockets=None):
        await startup(server, sockets)
        ports.append(server.servers[0].sockets[0].getsockname()[1])
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(uvicorn.Server, "startup", stopped)
    monkeypatch.setattr(logging.getLogger("uvicorn"), "handlers", [])  # uvicorn's write to what is closed after a test
    command = ("serve", "--checkpoint", checkpoint_dir, "--port")
    code, _, err = run_cli(*command, 0)
    assert code == 0 and f"http://127.0.0.1:{ports[0]} " in err and checkpoint_dir.name in err
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, _, err = run_cli(*command, other.getsockname()[1])  # before anything is loaded
        assert code != 0 and "Choose another `--port`" in err and "Loading" not in err and len(ports) == 1
