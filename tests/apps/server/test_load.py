"""Many clients at once: all get answers, memory stays constant, and the load generator reports its measurements."""

import asyncio
import json

import pytest

from arcaligner.benchmarks import serving
from arcaligner.common.files import CASE_STUDIES


def test_load_generator_prints_table(url, capsys, monkeypatch):
    """A row for each number of clients; questions that were asked before have cached passages."""
    settings = {"url": url, "api_key": "a key"}
    serving.main(CASE_STUDIES, clients="1,3", requests=4, **settings)
    printed = capsys.readouterr().out
    head, _, *rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert head.startswith("| Clients | Answers/s | Latency p50, s | p95, s | p99, s |") and len(rows) == 2
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 3"] and all(row.endswith("| 0 |") for row in rows)
    assert json.loads(printed.splitlines()[-1])["load"]["3"]["cached"] == 1.0  # the second time
    monkeypatch.setattr(serving, "read_rows", lambda path: [{"question": f"Where is {name}?"} for name in "ABCDEF"])
    serving.main(CASE_STUDIES, clients="2", requests=6, distinct=2, **settings)
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["load"]["2"]["cached"] == 1.0 and printed.count("| 100% |") == 1
    with pytest.raises(OSError, match="There is no server at http://127.0.0.1:9. Start one"):
        serving.main(CASE_STUDIES, url="http://127.0.0.1:9")


@pytest.mark.load
def test_memory_stays_over_many_requests(url):
    """Memory does not grow with the requests."""
    questions = [f"Who wrote letter {number}?" for number in range(2000)]
    asyncio.run(serving.ask_all(url, "a key", questions[:200], 8))
    before = serving.memory(url, "a key")
    answers = asyncio.run(serving.ask_all(url, "a key", questions, 32))
    assert [answer["status"] for answer in answers] == [200] * 2000
    assert serving.memory(url, "a key") < before + 100
