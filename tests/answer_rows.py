"""Answers of an evaluation, in the format that a run writes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arcaligner.evaluation.runs import AnswerFile

_ANSWER = {"row": "same", "answers": ["Ada"], "prediction": ""}
_ANSWER |= {"f1": 0.0, "em": 0.0, "recall": 1.0}
_ANSWER |= {"context_tokens": 2, "passage_tokens": 60, "prompt_tokens": 30}


def write_answers(run: Path, task: str, method: str, answers: Iterable[dict[str, Any]], **settings: Any) -> None:
    """Writes the answers of a method to a task; answers without an `id` get the ids 0, 1, ..."""
    file = AnswerFile(run, task, method)
    file.open({"machine": "here"} | settings, [{"id": "new"}])
    rows = ({"id": str(number), "question": f"Question {number}?"} | answer for number, answer in enumerate(answers))
    file.append(_ANSWER | row for row in rows)
