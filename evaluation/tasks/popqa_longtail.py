"""PopQA, long tail: questions about subjects with less than a hundred page views a month; no passages on the Hub."""

import json

from .task import Row, Task

MOST_PAGE_VIEWS = 100


def to_row(row: dict) -> Row | None:
    if row["s_pop"] >= MOST_PAGE_VIEWS:
        return None
    answers = json.loads(row["possible_answers"])
    return {"id": str(row["id"]), "question": row["question"], "answers": answers, "passages": []}


TASK = Task("popqa_longtail", "PopQA_longtail", "akariasai/PopQA", None, "test", to_row, num_questions=1399)
