"""Each task reads rows of its data set and local files alike, and leaves out what cannot be scored."""

import logging
from unittest.mock import Mock

import datasets
import pytest
from training_rows import HOTPOTQA, MUSIQUE, SQUAD, write_rows

from arcaligner.evaluation.tasks import TASKS, Task


def full_row(row_id: str, question: str, answers: list[str], passages=(), **meta) -> dict:
    """A row of the schema; passages are pairs of title and text."""
    passages = [{"title": title, "text": text} for title, text in passages]
    made = {"id": row_id, "question": question, "answers": answers, "passages": passages}
    return made | ({"meta": meta} if meta else {})


THREE = [("Cy", "No."), ("Ada", "Ada was born. In 1815."), ("Ben", "Ben.")]
HOTPOTQA_ROW = full_row("h1", "Was Ada born before Ben?", ["yes"], THREE, gold=[1, 2])
POPQA = {"id": 7, "question": "What is Ada's occupation?", "s_pop": 99, "possible_answers": '["poet", "writer"]'}
TRIVIAQA = {"question_id": "t1", "question": "Which?", "answer": {"value": "Bill", "aliases": ["Bill", "The Bill"]}}
SQUAD_ROW = full_row("s1", "Who?", ["Ada"], [("Ada L", "Ada.")])
# A row of the data set on the Hub, and the row of the task.
HUB_ROWS = {
    "2wikimultihopqa": (HOTPOTQA, HOTPOTQA_ROW),
    "hotpotqa": (HOTPOTQA, HOTPOTQA_ROW),
    "nq": ({"question": "who?", "answer": ["Ada", "Ada L."]}, full_row("who?", "who?", ["Ada", "Ada L."])),
    "popqa_longtail": (POPQA, full_row("7", "What is Ada's occupation?", ["poet", "writer"])),
    "triviaqa": (TRIVIAQA, full_row("t1", "Which?", ["Bill", "The Bill"])),
    "webq": ({"url": "u", "question": "what?", "answers": ["Ada"]}, full_row("what?", "what?", ["Ada"])),
    **dict.fromkeys(("squad", "squad_more", "adversarialqa"), (SQUAD, SQUAD_ROW)),
    "squad_unanswerable": (SQUAD | {"answers": {"text": []}}, SQUAD_ROW | {"answers": []}),
    "musique": (MUSIQUE, full_row("m1", "Who?", ["Ada", "A."], [("x", "y"), ("z", "w")], gold=[1])),
}


def row(number: int, answers=("Ada",), question="Who?") -> dict:
    return full_row(str(number), question, list(answers))


@pytest.fixture
def hub(monkeypatch) -> Mock:
    """A mock in place of `load_dataset`."""
    monkeypatch.setattr(datasets, "load_dataset", mock := Mock())
    return mock


@pytest.mark.parametrize("name", TASKS)
def test_hub_rows_become_ours(name, hub):
    """A row of the Hub becomes a row of the project's schema."""
    stored, expected = HUB_ROWS[name]
    hub.return_value = datasets.Dataset.from_list([stored])
    (loaded,) = TASKS[name].load()
    assert loaded | {"gold": None} == expected | {"gold": None}
    hub.assert_called_once_with(TASKS[name].hub_id, TASKS[name].config, split=TASKS[name].split)
    outside = {"popqa_longtail": {"s_pop": 100}, "musique": {"answerable": False}, "squad_unanswerable": SQUAD}
    assert name not in outside or TASKS[name].to_row(stored | outside[name]) is None


def test_sample_is_fixed(hub):
    """A sample of the Hub is random and always the same."""
    hub.return_value = datasets.Dataset.from_list([row(number) for number in range(50)])
    task = Task("t", "T", "org/t", None, "test", dict, num_questions=10)
    ids = [record["id"] for record in task.load()]
    assert ids == [record["id"] for record in task.load()] and len(ids) == 10
    assert ids != [str(number) for number in range(10)]
    assert [record["id"] for record in task.load(num_questions=3)] == ids[:3]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl"])
def test_local_file_replaces_the_hub(tmp_path, caplog, suffix):
    """A local file is used in place of the Hub, without rows that cannot be scored."""
    rows = [row(0), row(1, answers=["The", "..."]), row(2, answers=[]), row(3, question=" "), row(4)]
    rows = [record | {"gold": []} for record in rows]
    write_rows(tmp_path / f"squad{suffix}", rows)
    with caplog.at_level(logging.WARNING):
        assert TASKS["squad"].load(tmp_path) == [rows[0], rows[4]]
    assert "SQuAD: left out 3 rows without a question" in caplog.text
    assert TASKS["squad"].load(tmp_path, num_questions=1) == rows[:1]


def test_impossible_tasks_are_refused(tmp_path, hub):
    """A task that has no data, or that cannot be evaluated, is refused."""
    with pytest.raises(FileNotFoundError, match=r"no squad\.jsonl\.gz in .*to load rajpurkar/squad"):
        TASKS["squad"].load(tmp_path)
    hub.assert_not_called()
    write_rows(tmp_path / "squad.jsonl", [row(0), row(1), row(0, question="Else?")])
    with pytest.raises(ValueError, match=r"has several rows with the id '0'.*\(1 in all\)"):
        TASKS["squad"].load(tmp_path)
    write_rows(tmp_path / "nq.jsonl", [row(0, answers=[])])
    with pytest.raises(ValueError, match=r"nq\.jsonl has no row with both a question and a gold answer"):
        TASKS["nq"].load(tmp_path)
    hub.side_effect = ConnectionError("offline")
    with pytest.raises(OSError, match=r"rajpurkar/squad: ConnectionError.*squad\.jsonl\.gz in a folder"):
        TASKS["squad"].load()
