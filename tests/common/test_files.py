"""Reading JSON Lines: empty lines and byte order marks are ignored, and only a broken line itself is lost."""

import gzip
import io
import json
import os
import signal
import sys

import pytest

from arcaligner.common import files
from arcaligner.common.files import (
    MAX_BROKEN_LISTED,
    escape_unknown_characters,
    read_json_lines,
    read_numbered_lines,
    temporary_folder,
    tracked,
)

ROWS = [{"text": "Stra\u00dfe \u2028 6"}, {"text": "Two."}]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_empty_lines_are_ignored(tmp_path, caplog, name, encoding, ending):
    """Rows keep their line numbers, also if a file has a byte order mark in the middle."""
    data = ending.join([LINES[0], "", " \t", "\ufeff" + LINES[1], "", ""]).encode(encoding)
    (path := tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    messages = []
    assert list(read_numbered_lines(path, lambda *message: messages.append(message))) == [(1, ROWS[0]), (4, ROWS[1])]
    assert list(read_json_lines(path)) == ROWS and not messages and not caplog.text


@pytest.mark.parametrize("line", [b"{", b'{"text": "\xff"}', b"[1]", b"\0\0\0", b"[" * 10**5, b'{"text": "cut'])
def test_broken_line_is_left_out(tmp_path, caplog, line):
    """A line that is not a JSON object is left out with a message; the other lines are read."""
    (path := tmp_path / "rows.jsonl").write_bytes(b"\n".join([LINES[0].encode(), line, LINES[1].encode()]))
    messages = []
    assert list(read_numbered_lines(path, lambda number, what: messages.append((number, what)))) == [
        (1, ROWS[0]),
        (3, ROWS[1]),
    ]
    ((number, message),) = messages
    assert number == 2 and message.startswith(f"{path}, line 2 is not a JSON object: ")
    assert not caplog.text
    assert list(read_json_lines(path)) == ROWS and message in caplog.text


def test_broken_file_is_refused(tmp_path, caplog):
    (path := tmp_path / "rows.jsonl").write_text("\nno\n" * 30)
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 is not a JSON object"):
        list(read_json_lines(path))
    assert caplog.text.count("is not a JSON object") == MAX_BROKEN_LISTED
    path.write_text("no\n" * (MAX_BROKEN_LISTED + 2) + LINES[0])
    assert list(read_json_lines(path)) == ROWS[:1] and "skipped 2 more broken lines" in caplog.text
    path.write_text("\n\n")
    assert list(read_json_lines(path)) == []


def test_torn_gzip_file_is_named(tmp_path):
    data = gzip.compress("\n".join(LINES * 999).encode())
    for torn in (data[:-20], data[:50] + b"\xff" * 20, b"no gzip"):
        (path := tmp_path / "rows.jsonl.gz").write_bytes(torn)
        with pytest.raises(ValueError, match=r"rows\.jsonl\.gz is a broken gzip file"):
            list(read_json_lines(path))


def test_progress_prints_lines(monkeypatch, capsys):
    """Progress is printed every few seconds if standard error is not a terminal."""
    monkeypatch.setattr(files, "PROGRESS_SECONDS", 0.0)
    assert list(tracked([7, 8, 9], "Answering")) == [7, 8, 9]
    assert "Answering: 1 of 3" in capsys.readouterr().err


def test_unprintable_characters_are_escaped(monkeypatch):
    """An answer in another script does not end a command with a traceback."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    escape_unknown_characters()
    print("Zo\u00eb \u6f22", flush=True)
    assert written.getvalue() == b"Zo\\xeb \\u6f22\n"


def test_terminated_command_leaves_no_folder(tmp_path):
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"), temporary_folder(tmp_path, "x-") as folder:
        (folder / "file").touch()
        assert folder.parent == tmp_path and folder.name.startswith("x-")
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("It went on.")
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) is former
