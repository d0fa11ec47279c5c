"""SQuAD 1.1, development set: a question about its paragraph. Not in the paper."""

from .task import Row, Task


def to_row(row: dict) -> Row:
    passage = {"title": row["title"].replace("_", " "), "text": row["context"]}
    answers = list(dict.fromkeys(row["answers"]["text"]))
    return {"id": row["id"], "question": row["question"], "answers": answers, "passages": [passage]}


TASK = Task("squad", "SQuAD", "rajpurkar/squad", None, "validation", to_row)
