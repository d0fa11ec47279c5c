"""WebQuestions, test set: questions whose answers are entities of Freebase; no passages of its own."""

from .task import Row, Task


def to_row(row: dict) -> Row:
    return {"id": row["question"], "question": row["question"], "answers": row["answers"], "passages": []}


TASK = Task("webq", "WebQuestions", "stanfordnlp/web_questions", None, "test", to_row, num_questions=2032)
