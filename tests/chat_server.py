"""A small OpenAI-compatible server for tests: what a chat model behind an endpoint replies, and how it fails."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class ChatServer:
    """What the server does.

    Args:
        reply (`Callable`): From the user's turn to the model's; an `int` is a status, `bytes` a body as it is, and
            `None` keeps the client waiting for as long as the server runs.
        url (`str`): Its address.
        requests (`list`): The payload of each request, in order.
        keys (`set`): What came as the key.
        closing (`Event`): Set when it ends.
    """

    reply: Callable[[str], str | int | bytes | None]
    url: str = ""
    requests: list[dict] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)


@contextmanager
def running_chat_server(reply: Callable[[str], str | int | bytes | None]):
    """A [`ChatServer`] that listens on a free port of this machine."""
    chat = ChatServer(reply)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, chat))
    chat.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield chat
    finally:
        chat.closing.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, chat: ChatServer, *args):
        self.chat = chat
        super().__init__(*args)

    def do_POST(self):  # noqa: N802 (the name is the library's)
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        self.chat.requests.append(payload)
        self.chat.keys.add(self.headers["Authorization"])
        reply = self.chat.reply(payload["messages"][-1]["content"])
        if reply is None:
            self.chat.closing.wait()
            return
        status, body = (reply, b'{"error": {"message": "so it is"}}') if isinstance(reply, int) else (200, reply)
        if isinstance(body, str):
            message = {"role": "assistant", "content": body}
            body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Quiet."""
