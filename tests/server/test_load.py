"""Many clients at once: all are answered, memory stays, and the benchmark tells what it has measured."""

import asyncio

import pytest

from arcaligner.benchmarks import serving
from arcaligner.common.files import CASE_STUDIES


def test_the_benchmark_tells_what_it_has_measured(url, capsys, monkeypatch):
    settings = {"url": url, "api_key": "a key"}
    serving.main(CASE_STUDIES, clients="1,3", requests=4, **settings)
    told = capsys.readouterr().out
    head, _, *rows = [line for line in told.splitlines() if line.startswith("|")]
    assert head.startswith("| Clients | Answers/s | p50 s | p95 s | p99 s |") and len(rows) == 2
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 3"] and all(row.endswith("| 0 |") for row in rows)
    assert '"kept": 1.0' in told  # the second time, both passages are kept
    monkeypatch.setattr(serving, "read_rows", lambda path: [{"question": f"Where is {name}?"} for name in "ABCDEF"])
    serving.main(CASE_STUDIES, clients="2", requests=6, distinct=2, **settings)
    told = capsys.readouterr().out
    assert '"kept": 1.0' in told and told.count("| 100% |") == 1


@pytest.mark.load
def test_memory_stays_over_two_thousand_requests(url):
    questions = [f"Who wrote letter {number}?" for number in range(2000)]
    asyncio.run(serving.ask_all(url, "a key", questions[:200], 8))
    before = serving.memory(url, "a key")
    answers = asyncio.run(serving.ask_all(url, "a key", questions, 32))
    assert [each["status"] for each in answers] == [200] * 2000
    assert serving.memory(url, "a key") < before + 100
