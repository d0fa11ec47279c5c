"""Connections that ask for nothing, or slowly, are closed, and keep nobody out who asks; the command that listens."""

import contextlib
import json
import logging
import signal
import socket

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
        yield lambda: opened.enter_context(socket.create_connection(address, timeout=20))


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**16):
            found += data
    return found


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


def test_a_connection_without_a_whole_request_is_closed_in_time_also_after_an_answer(connect, monkeypatch):
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


def test_who_waits_for_an_answer_is_not_closed(connect, held, monkeypatch):
    monkeypatch.setattr(TimedConnection, "seconds", 0.2)
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 64})
    asking = connect()
    asking.sendall(f"{HEADERS}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    assert held.begun.wait(20)
    assert received(connect()) == b""  # one that came later has had its time
    held.go_on.set()
    assert received(asking).startswith(b"HTTP/1.1 200")


def test_of_too_many_connections_the_oldest_that_does_not_ask_makes_room(connect, monkeypatch, url):
    monkeypatch.setattr(TimedConnection, "most", 4)
    silent = [connect() for _ in range(6)]
    assert httpx.get(f"{url}/health").status_code == 200
    assert [received(each) for each in silent[:3]] == [b""] * 3
    silent[-1].sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert received(silent[-1]).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_arrive_is_not_waited_for(connect, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
    connection = connect()
    connection.sendall(f"{HEADERS}Connection: close\r\nContent-Length: 50\r\n\r\n{{".encode())
    answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.1 seconds" in answer


def test_the_command_serves_a_checkpoint_and_a_corpus(run_cli, monkeypatch, checkpoint_dir, retriever):
    served = []
    monkeypatch.setattr("uvicorn.run", lambda app, **settings: served.append((app, settings)))
    monkeypatch.setenv("ARCALIGNER_API_KEY", "")
    command = ("serve", "--checkpoint", checkpoint_dir, "--corpus", retriever.corpus.path, "--port", 8001)
    code, _, err = run_cli(*command, "--host", "0.0.0.0")
    assert code == 1 and "there is no API key" in err and not served
    assert run_cli(*command)[0] == 0
    ((served_app, settings),) = served
    assert {"host": "127.0.0.1", "port": 8001, "http": TimedConnection}.items() <= settings.items()
    with TestClient(served_app, base_url="http://127.0.0.1:8001") as client:
        body = {"model": checkpoint_dir.name, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=body).json()["arcaligner"]["sources"]


def test_the_command_ends_when_it_is_told_to_and_where_others_listen(run_cli, monkeypatch, checkpoint_dir):
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
        assert code != 0 and "Choose another with `--port`" in err and "Loading" not in err and len(ports) == 1
