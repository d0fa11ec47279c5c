"""MuSiQue, development set, answerable questions: two to four of twenty paragraphs. Not in the paper."""

from .task import Row, Task


def to_row(row: dict) -> Row | None:
    if not row["answerable"]:
        return None
    paragraphs = row["paragraphs"]
    return {
        "id": row["id"],
        "question": row["question"],
        "answers": [row["answer"], *row["answer_aliases"]],
        "passages": [{"title": each["title"], "text": each["paragraph_text"]} for each in paragraphs],
        "meta": {"gold": [index for index, each in enumerate(paragraphs) if each["is_supporting"]]},
    }


TASK = Task("musique", "MuSiQue", "dgslibisey/MuSiQue", None, "validation", to_row)
