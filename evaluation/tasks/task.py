"""A set of questions: where it comes from, and which of its rows can be asked."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from ...train.corpora import read_rows
from ..metrics import usable_golds

logger = logging.getLogger(__name__)

Row = dict[str, Any]
LOCAL_SUFFIXES = (".jsonl.gz", ".jsonl")
SAMPLE_SEED = 0


@dataclass(frozen=True)
class Task:
    """
    A set of questions.

    Args:
        name (`str`): In commands, and of a local file `<name>.jsonl.gz`.
        title (`str`): In tables.
        hub_id (`str`): Data set of the Hub.
        config (`str` or `None`), split (`str`): Of that data set.
        to_row (`Callable`): A row of that data set to `{"id", "question", "answers", "passages", "meta"?}`, or `None`
            where it is not part of the task.
        num_questions (`int`, *optional*): How many are asked; of the paper's six as many as in its table of data sets.
            A random sample of them, always the same; `None` for all.
    """

    name: str
    title: str
    hub_id: str
    config: str | None
    split: str
    to_row: Callable[[dict], Row | None]
    num_questions: int | None = None

    def load(self, data: Path | None = None, num_questions: int | None = None) -> list[Row]:
        """Rows with a question and a gold that does not normalise to nothing; others are counted and left out.

        Args:
            data (`Path`, *optional*): Folder with a file `<name>.jsonl.gz` or `<name>.jsonl` that takes the Hub's
                place, its rows in their order.
            num_questions (`int`, *optional*): How many to ask at most, in place of the task's own number.

        Raises:
            `ValueError`: no row to ask; a row that is not of the schema; two rows of one id.
            `OSError`: no such file in `data`; without `data`, the Hub does not have it or is not there.
        """
        num_questions = num_questions or self.num_questions
        path = self._local_file(data) if data else None
        rows = [_checked(path, row) for row in read_rows(path)] if path else self._from_hub()
        asked = [row for row in rows if row["question"].strip() and usable_golds(row["answers"])]
        if len(asked) < len(rows):
            num_lost = len(rows) - len(asked)
            logger.warning("%s: %d rows left out, without a question or a usable gold", self.title, num_lost)
        if not asked:
            raise ValueError(f"{path or self.hub_id} has no row with a question and an answer to compare with.")
        twice = [each for each, count in Counter(row["id"] for row in asked).items() if count > 1]
        if twice:
            raise ValueError(f"{path or self.hub_id} has {len(twice)} ids more than once, such as {twice[0]!r}.")
        return asked[:num_questions]

    def _local_file(self, data: Path) -> Path:
        for suffix in LOCAL_SUFFIXES:
            if (path := data / f"{self.name}{suffix}").is_file():
                return path
        raise FileNotFoundError(
            f"There is no {self.name}{LOCAL_SUFFIXES[0]} in {data}. Put it there, or leave `--data` out to take "
            f"{self.hub_id} of the Hub."
        )

    def _from_hub(self) -> list[Row]:
        try:
            dataset = datasets.load_dataset(self.hub_id, self.config, split=self.split)
        except (OSError, ValueError) as error:
            raise OSError(
                f"{self.title} is neither on this machine nor to be had from the Hub ({self.hub_id}: "
                f"{type(error).__name__}). Put {self.name}{LOCAL_SUFFIXES[0]} into the folder named with `--data`, "
                'a line a question: {"id", "question", "answers", "passages": [{"title", "text"}]}.'
            ) from error
        rows = [row for row in map(self.to_row, dataset.shuffle(seed=SAMPLE_SEED)) if row is not None]
        return rows


def _checked(path: Path, row: Row) -> Row:
    """The row, if it is of the schema; a title that is left out is empty.

    Raises:
        `ValueError`: it is not.
    """
    answers, passages = row["answers"], row["passages"]
    is_right = isinstance(row["question"], str) and isinstance(answers, list) and isinstance(passages, list)
    is_right = is_right and all(isinstance(answer, str) for answer in answers)
    is_right = is_right and all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in passages)
    gold = (row.get("meta") or {}).get("gold") or []
    if not is_right or not all(index in range(len(passages)) for index in gold):
        raise ValueError(
            f"{path}, row {row['id']!r} is not of the schema: a text `question`, a list of texts `answers`, a list "
            '`passages` of {"title", "text"}, and in `meta.gold` numbers of passages.'
        )
    titled = [{"title": each.get("title") or "", "text": each["text"]} for each in passages]
    return row | {"id": str(row["id"]), "passages": titled}


def choose_passages(rows: list[Row], passages: str = "given", top_k: int | None = None) -> list[Row]:
    """
    Rows with the passages that are read.

    Args:
        rows (`list[dict]`): Of a task.
        passages (`str`): `"given"`, those of the row, or `"gold"`, those of them that the answer needs where the row
            says which (`meta.gold`, their numbers).
        top_k (`int`, *optional*): The first so many of these.
    """
    chosen = []
    for row in rows:
        found = row["passages"]
        gold = (row.get("meta") or {}).get("gold")
        if passages == "gold" and gold is not None:
            found = [found[index] for index in gold]
        chosen.append(row | {"passages": found[:top_k]})
    return chosen
