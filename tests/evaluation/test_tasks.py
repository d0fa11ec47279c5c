"""Each task reads its data set's rows and local files alike, and asks only what can be scored."""

import logging

import datasets
import pytest
from training_rows import write_rows

from arcaligner.evaluation.tasks import TASKS, Task, choose_passages

HOTPOT = {
    "id": "h1",
    "question": "Who was born earlier?",
    "answer": "Ada",
    "supporting_facts": {"title": ["Ada", "Ben"], "sent_id": [0, 1]},
    "context": {"title": ["Cy", "Ada", "Ben"], "sentences": [["No."], ["Ada was born. ", "In 1815."], ["Ben. "]]},
}
# A row as the data set of the Hub has it, and the row that is asked.
HUB_ROWS = {
    "2wikimultihopqa": (HOTPOT, None),
    "hotpotqa": (
        HOTPOT,
        {
            "id": "h1",
            "question": "Who was born earlier?",
            "answers": ["Ada"],
            "passages": [
                {"title": "Cy", "text": "No."},
                {"title": "Ada", "text": "Ada was born. In 1815."},
                {"title": "Ben", "text": "Ben."},
            ],
            "meta": {"gold": [1, 2]},
        },
    ),
    "nq": (
        {"question": "who wrote it", "answer": ["Ada", "Ada L."]},
        {"id": "who wrote it", "question": "who wrote it", "answers": ["Ada", "Ada L."], "passages": []},
    ),
    "popqa_longtail": (
        {"id": 7, "question": "What is Ada's occupation?", "s_pop": 99, "possible_answers": '["poet", "writer"]'},
        {"id": "7", "question": "What is Ada's occupation?", "answers": ["poet", "writer"], "passages": []},
    ),
    "triviaqa": (
        {"question_id": "t1", "question": "Which?", "answer": {"value": "Bill", "aliases": ["Bill", "The Bill"]}},
        {"id": "t1", "question": "Which?", "answers": ["Bill", "The Bill"], "passages": []},
    ),
    "webq": (
        {"url": "u", "question": "what?", "answers": ["Ada"]},
        {"id": "what?", "question": "what?", "answers": ["Ada"], "passages": []},
    ),
    "squad": (
        {"id": "s1", "title": "Ada_L", "context": "Ada.", "question": "Who?", "answers": {"text": ["Ada", "Ada"]}},
        {"id": "s1", "question": "Who?", "answers": ["Ada"], "passages": [{"title": "Ada L", "text": "Ada."}]},
    ),
    "musique": (
        {
            "id": "m1",
            "question": "Who?",
            "answer": "Ada",
            "answer_aliases": ["A."],
            "answerable": True,
            "paragraphs": [
                {"title": "x", "paragraph_text": "y", "is_supporting": False},
                {"title": "z", "paragraph_text": "w", "is_supporting": True},
            ],
        },
        {
            "id": "m1",
            "question": "Who?",
            "answers": ["Ada", "A."],
            "passages": [{"title": "x", "text": "y"}, {"title": "z", "text": "w"}],
            "meta": {"gold": [1]},
        },
    ),
}
HUB_ROWS["2wikimultihopqa"] = HUB_ROWS["hotpotqa"]
HUB_ROWS["adversarialqa"] = HUB_ROWS["squad_more"] = HUB_ROWS["squad"]
HUB_ROWS["squad_unanswerable"] = tuple(
    row | {"answers": {"text": []} if row is HUB_ROWS["squad"][0] else []} for row in HUB_ROWS["squad"]
)


def row(number: int, answers=("Ada",), question="Who?") -> dict:
    return {"id": str(number), "question": question, "answers": list(answers), "passages": []}


def test_the_papers_six_tasks_ask_as_many_questions_as_its_table_says():
    counts = {name: TASKS[name].num_questions for name in list(TASKS)[:6]}
    assert counts == {
        "2wikimultihopqa": 500,
        "hotpotqa": 500,
        "nq": 3610,
        "popqa_longtail": 1399,
        "triviaqa": 500,
        "webq": 2032,
    }


@pytest.mark.parametrize("name", TASKS)
def test_a_row_of_the_hub_becomes_one_of_our_schema(name, monkeypatch):
    stored, expected = HUB_ROWS[name]
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((*args, kwargs["split"]))
        return datasets.Dataset.from_list([stored])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (loaded,) = TASKS[name].load()
    assert loaded | {"gold": None} == expected | {"gold": None}
    assert calls == [(TASKS[name].hub_id, TASKS[name].config, TASKS[name].split)]


def test_rows_outside_of_a_task_are_not_asked():
    popular = HUB_ROWS["popqa_longtail"][0] | {"s_pop": 100}
    assert TASKS["popqa_longtail"].to_row(popular) is None
    assert TASKS["musique"].to_row(HUB_ROWS["musique"][0] | {"answerable": False}) is None


def test_a_sample_of_the_hub_is_random_and_always_the_same(monkeypatch):
    rows = [row(number) for number in range(50)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    task = Task("t", "T", "org/t", None, "test", dict, num_questions=10)
    ids = [each["id"] for each in task.load()]
    assert ids == [each["id"] for each in task.load()] and len(ids) == 10
    assert ids != [str(number) for number in range(10)]
    assert [each["id"] for each in task.load(num_questions=3)] == ids[:3]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl"])
def test_a_local_file_replaces_the_hub_without_rows_that_cannot_be_scored(tmp_path, caplog, suffix):
    rows = [row(0), row(1, answers=["The", "..."]), row(2, answers=[]), row(3, question=" "), row(4)]
    rows = [each | {"gold": []} for each in rows]
    write_rows(tmp_path / f"squad{suffix}", rows)
    with caplog.at_level(logging.WARNING):
        assert TASKS["squad"].load(tmp_path) == [rows[0], rows[4]]
    assert "SQuAD: 3 rows left out" in caplog.text
    assert TASKS["squad"].load(tmp_path, num_questions=1) == rows[:1]


def test_a_folder_without_the_file_is_not_replaced_by_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(FileNotFoundError, match=r"no squad\.jsonl\.gz in .*to take rajpurkar/squad"):
        TASKS["squad"].load(tmp_path)


@pytest.mark.parametrize(
    "change", [{"answers": "Paris"}, {"answers": [1]}, {"passages": "text"}, {"passages": ["text"]}]
)
def test_a_row_that_is_not_of_the_schema_is_named(tmp_path, change):
    write_rows(tmp_path / "squad.jsonl", [row(0), row(1) | change])
    with pytest.raises(ValueError, match=r"squad\.jsonl, line 2: .*; expected"):
        TASKS["squad"].load(tmp_path)


def test_two_rows_of_one_id_are_refused(tmp_path):
    write_rows(tmp_path / "squad.jsonl", [row(0), row(1), row(0, question="Else?")])
    with pytest.raises(ValueError, match="has 1 duplicate ids, such as '0'"):
        TASKS["squad"].load(tmp_path)


def test_a_task_that_is_nowhere_says_where_it_could_be(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(OSError, match=r"rajpurkar/squad: ConnectionError.*squad\.jsonl\.gz into the folder"):
        TASKS["squad"].load()


def test_passages_are_those_given_or_the_gold_ones_and_the_first_of_them():
    texts = [{"title": "", "text": text} for text in "abcd"]
    rows = [row(0) | {"passages": texts, "meta": {"gold": [3, 1]}}, row(1) | {"passages": texts}]

    def read(*choice) -> list[str]:
        return ["".join(each["text"] for each in found["passages"]) for found in choose_passages(rows, *choice)]

    assert read() == ["abcd", "abcd"]
    assert read("given", 2) == ["ab", "ab"]
    assert read("gold") == ["db", "abcd"]
    assert read("gold", 1) == ["d", "a"]
    assert rows[0]["passages"] == texts
    rows[1]["meta"] = {"gold": [4]}
    with pytest.raises(ValueError, match=r"Row '1' has 4 passages, but `meta.gold` \[4\]"):
        choose_passages(rows, "gold")
