"""Many clients at once: all are answered, memory stays, and the benchmark writes what it has measured."""

import asyncio

import pytest

from arcaligner.benchmarks import serving
from arcaligner.common.files import CASE_STUDIES, write_whole

PLACE = "Before\n<!-- load kept -->\nold\n<!-- end -->\nAfter\n"


def test_the_benchmark_writes_its_table(url, tmp_path, capsys, monkeypatch):
    questions, page = CASE_STUDIES, tmp_path / "page.md"
    write_whole(page, PLACE)
    settings = {"url": url, "api_key": "a key", "write": page}
    serving.main(questions, clients="1,3", requests=4, name="kept", **settings)
    head, _, *rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert head.startswith("| Clients | Answers/s | p50 s | p95 s | p99 s |") and len(rows) == 2
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 3"] and all(row.endswith("| 0 |") for row in rows)
    before, after = PLACE.split("old\n")
    assert page.read_text().startswith(before.strip()) and page.read_text().endswith(after)
    assert '"kept": 1.0' in capsys.readouterr().out  # the second time, both passages are kept
    monkeypatch.setattr(serving, "read_rows", lambda path: [{"question": f"Where is {name}?"} for name in "ABCDEF"])
    serving.main(questions, clients="2", requests=6, distinct=2, name="kept", **settings)
    assert '"kept": 1.0' in capsys.readouterr().out and page.read_text().count("| 100% |") == 1
    with pytest.raises(ValueError, match="has 0 places `<!-- load new -->`"):
        serving.main(questions, clients="1", requests=1, name="new", **settings)


@pytest.mark.load
def test_memory_stays_over_two_thousand_requests(url):
    questions = [f"Who wrote letter {number}?" for number in range(2000)]
    asyncio.run(serving.ask_all(url, "a key", questions[:200], 8))
    before = serving.memory(url, "a key")
    answers = asyncio.run(serving.ask_all(url, "a key", questions, 32))
    assert [each["status"] for each in answers] == [200] * 2000
    assert serving.memory(url, "a key") < before + 100
