"""NaturalQA, the open questions of Natural Questions, development set: no passages of its own on the Hub."""

from .task import Row, Task


def to_row(row: dict) -> Row:
    return {"id": row["question"], "question": row["question"], "answers": row["answer"], "passages": []}


TASK = Task("nq", "NaturalQA", "google-research-datasets/nq_open", None, "validation", to_row, num_questions=3610)
