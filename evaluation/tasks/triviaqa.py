"""TriviaQA*, the paper's name for 500 random questions of TriviaQA's development set; no passages of its own."""

from .task import Row, Task


def to_row(row: dict) -> Row:
    answers = list(dict.fromkeys([row["answer"]["value"], *row["answer"]["aliases"]]))
    return {"id": row["question_id"], "question": row["question"], "answers": answers, "passages": []}


TASK = Task(
    "triviaqa", "TriviaQA*", "mandarjoshi/trivia_qa", "unfiltered.nocontext", "validation", to_row, num_questions=500
)
