"""Several passages a question: its own and, around them, passages of other questions that do not answer it.

Everything is drawn from the seed and the row's id, so a row has the same passages in each run, in each process, and
whatever rows are trained on besides.
"""

import random
import re
from dataclasses import dataclass

from .corpora import Corpus, Row

# Draws for each passage wanted: a file of few passages, or an answer that stands in most of them, must not hang.
DRAWS = 50


def contains_answer(passage: dict[str, str], answers: list[str]) -> bool:
    """Whether title or text hold an answer, as whole words, in capitals or not: "no" is not in "known"."""
    text = f"{passage['title']}\n{passage['text']}".casefold()
    words = (re.escape(" ".join(answer.casefold().split())).replace(r"\ ", r"\s+") for answer in answers)
    return any(re.search(rf"(?<!\w){answer}(?!\w)", text) for answer in words)


@dataclass
class Distractors:
    """
    Adds distractors to rows of a corpus.

    Args:
        corpus ([`Corpus`]): Whose passages may be drawn.
        min_passages (`int`), max_passages (`int`): How many passages a row gets, drawn evenly from this range. A row's
            own passages always stay, also when there are more.
        seed (`int`): Another one draws others.
    """

    corpus: Corpus
    min_passages: int
    max_passages: int
    seed: int

    def __call__(self, row: Row) -> Row:
        """The row with its own passages and the drawn ones, in random order; fewer where not enough are to be had."""
        draw = random.Random(f"passages:{self.seed}:{row['id']}")
        wanted = draw.randint(self.min_passages, self.max_passages)
        passages = list(row["passages"])
        texts = {passage["text"] for passage in passages}
        for _ in range(DRAWS * max(0, wanted - len(passages))):
            others = self.corpus[draw.randrange(len(self.corpus))]["passages"]
            if not others:
                continue
            passage = draw.choice(others)
            is_new = passage["text"].strip() and passage["text"] not in texts
            if is_new and not contains_answer(passage, row["answers"]):
                passages.append(passage)
                texts.add(passage["text"])
            if len(passages) >= wanted:
                break
        draw.shuffle(passages)
        return row | {"passages": passages}
