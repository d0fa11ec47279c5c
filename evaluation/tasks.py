"""The sets of questions: the paper's six, in its order, then three more."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import datasets

from ..common.data_sets import HOTPOTQA, MUSIQUE, SQUAD, hotpotqa_row, musique_row, squad_row
from ..common.files import counted
from ..common.rows import JSON_LINES, Row, contains_match, read_rows, usable_golds

logger = logging.getLogger(__name__)

SAMPLE_SEED = 0
MAX_PAGE_VIEWS = 100  # per month, for a subject in the long tail


@dataclass(frozen=True)
class Task:
    """A set of questions."""

    name: str  # in commands, and of a local file `<name>.jsonl.gz`
    title: str  # in tables
    hub_id: str  # a data set of the Hub, its configuration and split
    config: str | None
    split: str
    # Converts a row of the data set to our schema, with `meta` if it has any; `None` leaves the row out.
    to_row: Callable[[dict], Row | None]
    # The number of questions, always the same random sample. The paper's six have the numbers of its table of data
    # sets.
    num_questions: int | None = None
    is_answered: bool = True  # whether the passages contain the answers; else the right answer is to abstain

    def load(self, data: Path | None = None, num_questions: int | None = None) -> list[Row]:
        """Load the rows with a question and a usable gold answer (in a set of unanswerable questions: without one).
        Other rows are counted and left out.

        Args:
            data (`Path`, *optional*): Folder with a file `<name>.jsonl.gz` or `<name>.jsonl` that replaces the Hub.
            num_questions (`int`, *optional*): Maximum number of questions, instead of the task's own number.
        """
        num_questions = num_questions or self.num_questions
        path = self._local_file(data) if data else None
        rows = read_rows(path) if path else self._from_hub()
        usable = [
            row for row in rows if row["question"].strip() and bool(usable_golds(row["answers"])) == self.is_answered
        ]
        if num_lost := len(rows) - len(usable):
            lack = "without a usable gold answer" if self.is_answered else "with a gold answer"
            logger.warning("%s: left out %s without a question or %s", self.title, counted(num_lost, "row"), lack)
        if not usable:
            need = "both a question and a gold answer" if self.is_answered else "a question and no gold answer"
            raise ValueError(f"{path or self.hub_id} has no row with {need}. Pass another folder with `--data`.")
        duplicates = [row_id for row_id, count in Counter(row["id"] for row in usable).items() if count > 1]
        if duplicates:
            raise ValueError(
                f"{path or self.hub_id} has several rows with the id {duplicates[0]!r}; expected a different id in "
                f"each row. Change the duplicate ids ({len(duplicates)} in all)."
            )
        return usable[:num_questions]

    def _local_file(self, data: Path) -> Path:
        for suffix in reversed(JSON_LINES):  # gzipped first
            if (path := data / f"{self.name}{suffix}").is_file():
                return path
        raise FileNotFoundError(
            f"There is no {self.name}.jsonl.gz in {data}. Put this file there, pass another folder with `--data`, or "
            f"leave out `--data` to load {self.hub_id} from the Hub."
        )

    def _from_hub(self) -> list[Row]:
        try:
            dataset = datasets.load_dataset(self.hub_id, self.config, split=self.split)
        except (OSError, ValueError) as error:
            raise OSError(
                f"{self.title} is neither on this machine nor available from the Hub ({self.hub_id}: "
                f"{type(error).__name__}). Write the questions to {self.name}.jsonl.gz in a folder, one a line as "
                '{"id", "question", "answers", "passages": [{"title", "text"}]}, and pass this folder with `--data`.'
            ) from error
        return [row for row in map(self.to_row, dataset.shuffle(seed=SAMPLE_SEED)) if row is not None]


def select_passages(rows: list[Row], passages: str, top_k: int | None) -> list[Row]:
    """Rows with the first `top_k` of the passages to use: `"given"`, those of the row, or `"gold"`, those that the
    answer needs, if the row has their numbers (`meta.gold`)."""
    selected = []
    for row in rows:
        used = row["passages"]
        gold = (row.get("meta") or {}).get("gold")
        if passages == "gold" and gold is not None:
            used = [used[index] for index in gold]
        selected.append(row | {"passages": used[:top_k]})
    return selected


def wrong_passages(rows: list[Row], title: str) -> list[Row]:
    """Each row with the passages of another question. None of them is among its passages or contains an answer to it.
    They come from the nearest such row before it, else after it. The score on these rows is the floor of a method.

    Raises:
        `ValueError`: a question for which no other row has such passages.
    """
    changed = []
    for number, row in enumerate(rows):
        texts = {passage["text"] for passage in row["passages"]}
        others = [*reversed(rows[:number]), *rows[number + 1 :]]
        wrong = (other["passages"] for other in others if other["passages"] and _is_wrong(row, texts, other))
        if (passages := next(wrong, None)) is None:
            raise ValueError(
                f"The floor of {title} cannot be measured: all passages of other questions contain an answer to "
                f"{row['question']!r}. Use more questions (`-n`), or do not measure the "
                "floor (leave out `--floor`; `arcaligner reproduce` has `--no-floor`)."
            )
        changed.append(row | {"passages": passages})
    return changed


def _is_wrong(row: Row, row_texts: set[str], other: Row) -> bool:
    texts = [passage["text"] for passage in other["passages"]]
    answers = [answer for answer in row["answers"] if answer.lower() not in ("yes", "no")]  # any text may contain these
    return row_texts.isdisjoint(texts) and not contains_match(" ".join(texts), answers)


def with_passages(row: Row, documents: list[dict]) -> Row:
    """A row with the passages that a search returned."""
    return row | {"passages": [{"title": document["title"], "text": document["text"]} for document in documents]}


# Rows of the Hub to rows of our schema. Sets without passages are for `--passages retrieved`.


def _open_row(row: dict, row_id: str, answers: list[str]) -> Row:
    return {"id": row_id, "question": row["question"], "answers": answers, "passages": []}


def _nq(row: dict) -> Row:
    return _open_row(row, row["question"], row["answer"])


def _popqa(row: dict) -> Row | None:
    return (
        _open_row(row, str(row["id"]), json.loads(row["possible_answers"])) if row["s_pop"] < MAX_PAGE_VIEWS else None
    )


def _triviaqa(row: dict) -> Row:
    return _open_row(row, row["question_id"], list(dict.fromkeys([row["answer"]["value"], *row["answer"]["aliases"]])))


def _webq(row: dict) -> Row:
    return _open_row(row, row["question"], row["answers"])


def _unanswerable(row: dict) -> Row | None:
    """A question that its paragraph does not answer."""
    return None if row["answers"]["text"] else squad_row(row)


TASKS = {
    task.name: task
    for task in (
        Task("2wikimultihopqa", "2WikiMultiHopQA", "framolfese/2WikiMultihopQA", None, "validation", hotpotqa_row, 500),
        Task("hotpotqa", "HotpotQA", HOTPOTQA, "distractor", "validation", hotpotqa_row, 500),
        Task("nq", "Natural Questions", "google-research-datasets/nq_open", None, "validation", _nq, 3610),
        Task("popqa_longtail", "PopQA_longtail", "akariasai/PopQA", None, "test", _popqa, 1399),
        # The asterisk is the paper's, for 500 random questions.
        Task("triviaqa", "TriviaQA*", "mandarjoshi/trivia_qa", "unfiltered.nocontext", "validation", _triviaqa, 500),
        Task("webq", "WebQuestions", "stanfordnlp/web_questions", None, "test", _webq, 2032),
        # Not in the paper.
        Task("squad", "SQuAD", SQUAD, None, "validation", squad_row),
        Task("squad_more", "SQuAD, more", SQUAD, None, "validation", squad_row),
        Task(
            "squad_unanswerable",
            "SQuAD, unanswerable",
            "rajpurkar/squad_v2",
            None,
            "validation",
            _unanswerable,
            num_questions=500,
            is_answered=False,
        ),
        Task("adversarialqa", "AdversarialQA", "UCLNLP/adversarial_qa", "adversarialQA", "validation", squad_row),
        Task("musique", "MuSiQue", MUSIQUE, None, "validation", musique_row),
    )
}
