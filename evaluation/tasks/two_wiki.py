"""2WikiMultiHopQA, development set, in HotpotQA's form: questions about two to four of ten paragraphs."""

from .hotpotqa import to_row
from .task import Task

TASK = Task(
    "2wikimultihopqa",
    "2WikiMultiHopQA",
    "framolfese/2WikiMultihopQA",
    None,
    "validation",
    to_row,
    num_questions=500,
)
