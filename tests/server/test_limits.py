"""Connections that ask for nothing, or slowly, are closed, and keep nobody out who asks."""

import json
import socket

import httpx
import pytest

from arcaligner.server.limits import BodyLimit, TimedConnection

HEADERS = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a key\r\n"
HEADERS += "Content-Type: application/json\r\n"


@pytest.fixture
def connect(url):
    """Opens connections to the server, which are closed at the end."""
    opened = []

    def connect() -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=20))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    try:
        while data := connection.recv(2**16):
            found += data
    except ConnectionResetError:
        pass
    return found


def drip(connection: socket.socket, data: bytes) -> None:
    """Sends a byte at a time for as long as the connection is open."""
    connection.settimeout(0.02)
    for byte in data:
        try:
            connection.send(bytes([byte]))
            assert connection.recv(1) == b""
            return
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return
    raise AssertionError("the server has waited for all of it")


@pytest.mark.parametrize("begun", [b"", b"GET /health HTT"])
def test_a_connection_without_a_request_is_closed_in_time(connect, monkeypatch, begun):
    monkeypatch.setattr(TimedConnection, "seconds", 0.2)
    connection = connect()
    connection.sendall(begun)
    assert received(connection) == b""
    drip(connect(), HEADERS.encode() + b"X: " + b"y" * 1000)


def test_the_time_counts_anew_for_a_second_request_on_the_same_connection(connect, monkeypatch):
    monkeypatch.setattr(TimedConnection, "seconds", 0.2)
    connection = connect()
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(2**16)
    assert answer.startswith(b"HTTP/1.1 200")
    drip(connection, HEADERS.encode() + b"X: " + b"y" * 1000)


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
    silent[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert received(silent[-1]).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_arrive_is_not_waited_for(connect, monkeypatch):
    monkeypatch.setattr(BodyLimit, "seconds", 0.1)
    connection = connect()
    connection.sendall(f"{HEADERS}Connection: close\r\nContent-Length: 50\r\n\r\n{{".encode())
    answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.1 seconds" in answer
