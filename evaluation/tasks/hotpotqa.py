"""HotpotQA, development set: questions about two of ten paragraphs."""

from ...train.corpora import hotpotqa_row
from .task import Row, Task


def to_row(row: dict) -> Row:
    supporting = set(row["supporting_facts"]["title"])
    gold = [index for index, title in enumerate(row["context"]["title"]) if title in supporting]
    return hotpotqa_row(row, 0, all_paragraphs=True) | {"meta": {"gold": gold}}


TASK = Task("hotpotqa", "HotpotQA", "hotpotqa/hotpot_qa", "distractor", "validation", to_row, num_questions=500)
