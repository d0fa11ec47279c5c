"""Distractors: the passages nearest to a question (BM25) that do not answer it."""

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from ..common.bm25 import import_bm25s
from ..common.files import stable_number
from ..common.rows import Row

bm25s = import_bm25s()

# How many of the nearest passages distractors are drawn from.
MAX_DISTRACTORS = 12
# How many of the nearest passages are searched for those without an answer.
CANDIDATES = 60


def contains_answer(passage: dict[str, str], answers: list[str]) -> bool:
    """Whether title or text contains an answer as whole words ("no" is not in "known"), regardless of case."""
    return bool(answers) and answer_pattern(answers).search(_folded(passage)) is not None


def answer_pattern(answers: Sequence[str]) -> re.Pattern:
    """Finds any of one or several answers as whole words in a case-folded text."""
    words = (re.escape(" ".join(answer.casefold().split())).replace(r"\ ", r"\s+") for answer in answers)
    return re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)")


def _folded(passage: dict[str, str]) -> str:
    return f"{passage['title']}\n{passage['text']}".casefold()


def needed_and_others(row: Row) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The passages that the answer needs, and the row's others. All are needed if the row does not say which."""
    gold = row["gold"] or range(len(row["passages"]))
    needed = [passage for number, passage in enumerate(row["passages"]) if number in gold]
    return needed, [passage for number, passage in enumerate(row["passages"]) if number not in gold]


def passage_key(passage: dict[str, str]) -> tuple[str, str]:
    return passage["title"], passage["text"]


class NearestPassages:
    """Finds, among the passages of `rows`, those nearest to a question that do not answer it (BM25)."""

    def __init__(self, rows: Iterable[Row]):
        unique, self.questions = {}, defaultdict(list)  # passages, and for each the rows whose question needs it alone
        for number, row in enumerate(rows):
            unique |= {passage_key(passage): passage for passage in row["passages"] if passage["text"]}
            if len(needed := needed_and_others(row)[0]) == 1 and row["question"].strip() and row["answers"]:
                self.questions[passage_key(needed[0])].append(number)
        self.passages = list(unique.values())
        self.folded = [_folded(passage) for passage in self.passages]
        self.titles = np.array([passage["title"] for passage in self.passages])
        texts = [f"{passage['title']} {passage['text']}" for passage in self.passages]
        self.index = bm25s.BM25()
        self.index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def without_answer(
        self, question: str, answers: list[str], others: Sequence[dict], number: int, in_article: bool = False
    ) -> list[dict]:
        """The `number` nearest passages, nearest first, that contain none of `answers` and are not among `others`; with
        `in_article` only those of the articles of `others`."""
        words = bm25s.tokenize([question], stopwords="en", show_progress=False, return_ids=False)
        depth = min(len(self.passages), CANDIDATES)
        if not words[0] or not depth:
            return []
        weights = np.isin(self.titles, [passage["title"] for passage in others]) if in_article else None
        numbers, scores = self.index.retrieve(
            words, k=depth, show_progress=False, weight_mask=weights, backend_selection="numpy"
        )
        selected, texts = [], {passage["text"] for passage in others}
        answer = answer_pattern(answers) if answers else None
        for index, score in zip(numbers[0].tolist(), scores[0].tolist(), strict=True):
            passage = self.passages[index]
            if passage["text"] in texts or (in_article and score <= 0):
                continue
            if answer is None or not answer.search(self.folded[index]):
                selected.append(passage)
            if len(selected) == number:
                break
        return selected

    def mixed(self, rows: list[Row], share: float, seed: int, max_distractors: int = 4) -> list[dict[str, str]]:
        """The passages that the answers to `rows` need. In a `share` of calls, 1 to `max_distractors` of the nearest
        other passages are added, in random order.

        None of the added ones contains an answer to any of the rows. If there are not enough, fewer are added. The draw
        depends on the seed and the first row's id only, so a row has the same passages in each run and process.
        """
        needed, others = needed_and_others(rows[0])
        draw = random.Random(f"distractors:{seed}:{rows[0]['id']}")
        if draw.random() >= share:
            return needed
        number = draw.randint(1, max_distractors)
        question = " ".join(row["question"] for row in rows)
        answers = [answer for row in rows for answer in row["answers"]]
        # The row's other passages, which the data set's retriever found, are preferred.
        near = [passage for passage in others if not contains_answer(passage, answers)]
        near = near or self.without_answer(question, answers, needed, MAX_DISTRACTORS)
        passages = [*needed, *draw.sample(near, min(number, len(near)))]
        draw.shuffle(passages)
        return passages

    def questions_about(self, passages: list[dict[str, str]], row: Row, seed: int) -> list[int]:
        """Numbers of rows whose question is about one of `passages`, at most one row for each passage. The passages
        that `row` needs are left out."""
        needed = needed_and_others(row)[0]
        draw = stable_number(f"joined:{seed}:{row['id']}", 2**32)
        candidates = [self.questions.get(passage_key(passage)) for passage in passages if passage not in needed]
        return [numbers[draw % len(numbers)] for numbers in candidates if numbers]
