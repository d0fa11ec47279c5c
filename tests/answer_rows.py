"""Answers of an evaluation, as a run writes them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arcaligner.evaluation.runs import AnswerFile

_ANSWER = {"row": "same", "answers": ["Ada"], "prediction": ""}
_ANSWER |= {"f1": 0.0, "em": 0.0, "recall": 1.0}
_ANSWER |= {"context_tokens": 2, "passage_tokens": 60, "prompt_tokens": 30}


def write_answers(run: Path, task: str, method: str, answers: Iterable[dict[str, Any]], **settings: Any) -> None:
    """Writes a method's answers to the questions of a task; where an answer names none, to 0, 1, ..."""
    file = AnswerFile(run, task, method)
    file.open({"machine": "here"} | settings, [{"id": "new"}])
    numbered = ({"id": str(number), "question": f"Question {number}?"} | each for number, each in enumerate(answers))
    file.append(_ANSWER | each for each in numbered)
