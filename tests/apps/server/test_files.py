"""Files that are dropped on the page become passages, or give one clear sentence if they cannot be read."""

import httpx
import pytest
from fastapi.testclient import TestClient
from pdf_files import line, pdf

from arcaligner.apps.server import app
from arcaligner.apps.server.app import ServerSettings, create_app

PAGE = line(50, 700, "It was written by Ada.")


@pytest.fixture
def drop(url):
    """Sends a file as the page does."""

    def drop(name, data, kind="application/octet-stream", key="a key"):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
        return httpx.post(f"{url}/passages", params={"name": name}, content=data, headers=headers, timeout=60)

    return drop


def test_file_becomes_titled_passages(drop, monkeypatch):
    text = "# Ships\n\nOf wood. And tar.\n\n## Sails\n\nOf linen."
    reply = drop("../../etc/ships.md", text.encode()).json()
    assert reply["name"] == "ships.md" and reply["characters"] == reply["read"] == len(text)
    (passage,) = reply["passages"]
    assert passage["title"] == "Ships" and passage["text"].startswith("Of wood.") and passage["page"] is None
    reply = drop("..\\..\\report.pdf", pdf(PAGE, PAGE)).json()
    assert (reply["name"], [passage["page"] for passage in reply["passages"]]) == ("report.pdf", [1])
    monkeypatch.setattr(app, "MAX_CHARACTERS", 60)
    reply = drop("a.txt", b"It was written. " * 20).json()
    assert (reply["characters"], reply["read"]) == (320, 60)
    assert sum(len(passage["text"]) for passage in reply["passages"]) <= 60


@pytest.mark.parametrize(
    ("status", "message", "sent"),
    [
        (400, "a.pdf contains no text; its pages may be", {"name": "a.pdf", "data": pdf("50 50 100 100 re f")}),
        (400, "a.txt is not text in UTF-8 or in any other known encoding", {"name": "x/a.txt", "data": b"\0\1\2"}),
        (400, "file contains no text.", {"name": "", "data": b""}),
        (413, f"longer than the limit of {app.MAX_FILE_BYTES} bytes", {"data": b"x" * (app.MAX_FILE_BYTES + 1)}),
        (401, "The API key is missing or wrong", {"key": "another"}),
        # The content type of a form on another page.
        (415, "`Content-Type: text/plain`; expected `Content-Type: application/octet-stream`", {"kind": "text/plain"}),
    ],
    ids=["no text", "binary", "nothing", "large", "key", "form"],
)
def test_unreadable_file_is_refused(drop, status, message, sent):
    """A file that cannot be read is refused with the reason."""
    refused = drop(**{"name": "a.txt", "data": b"A text."} | sent)
    assert refused.status_code == status and message in refused.json()["error"]["message"]
    assert not refused.json()["error"]["message"].startswith("x/")


def test_too_many_files_are_refused(engine, monkeypatch):
    """More files at a time than the limit are refused, and the others are answered."""
    request = {"params": {"name": "a.txt"}, "content": b"A", "headers": {"Content-Type": "application/octet-stream"}}
    statuses = []

    def read(*arguments):
        if statuses:  # only while the first one is read
            return {}
        statuses.append("a file is read")
        statuses.extend([client.post("/passages", **request).status_code, client.get("/health").status_code])
        return {}

    monkeypatch.setattr(app, "passages_of_file", read)
    monkeypatch.setattr(app, "MAX_FILES", 1)
    client = TestClient(create_app(engine, ServerSettings()), base_url="http://localhost")
    assert client.post("/passages", **request).status_code == 200 and statuses[1:] == [429, 200]
