"""The question sets as tasks of lm-evaluation-harness: functions that the YAML files in this folder name.

A prompt is JSON, so that the model gets question and documents separately: `{"question": str, "documents": [...]}`.
"""

from pathlib import Path
from typing import Any

from datasets import Dataset

from ...common.rows import ROW_FIELDS
from ..metrics import contains_match, token_f1
from ..tasks import TASKS


def rows(task: str, data: str | None = None, **_: Any) -> dict[str, Dataset]:
    """The rows of `task`, from `<task>.jsonl.gz` or `<task>.jsonl` in the folder `data` (`--metadata data=...`) or, by
    default, from the Hub."""
    questions = TASKS[task].load(Path(data) if data else None)
    return {"test": Dataset.from_list([{key: row[key] for key in ROW_FIELDS} for row in questions])}


def scores(row: dict, predictions: list[str]) -> dict[str, float]:
    """Non-strict EM and token F1 of the prediction; there is one."""
    (prediction,) = predictions
    return {"em": contains_match(prediction, row["answers"]), "f1": token_f1(prediction, row["answers"])}
