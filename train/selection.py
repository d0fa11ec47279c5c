"""Selects the examples to train on: mixtures of sources, limits, distractors, and a count of what is left out.

Rows are read in random order, a block at a time, until there are enough examples. The examples of a block are made by
several processes and kept as an Arrow file under the block's fingerprint: of the data, the rows, the tokenizer, the
segmenter, all settings and the code. So a block is made once, and a run that was killed continues with its next block.
"""

import ast
import dataclasses
import functools
import logging
import random
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
from datasets import Features, Value
from datasets.fingerprint import Hasher

from .. import encoder_arcaligner, processing_arcaligner, rows, segmentation_arcaligner
from ..files import printable
from ..rows import Row
from . import corpora, data
from .corpora import open_corpus
from .data import EXAMPLE_FEATURES, Example, ExampleBuilder
from .recipe import RecipeArguments

logger = logging.getLogger(__name__)

ROWS_PER_BLOCK = 2048
NAMED_ROWS = 5  # ids in a report
MAX_DISTRACTORS = 4
# Draws per distractor: with few passages, or an answer that most of them hold, there may be none.
DRAWS = 50

_BLOCK_FEATURES = Features(EXAMPLE_FEATURES | {"problem": Value("string")})
# The code that decides what an example is: another version of it, comments aside, makes other blocks.
_MODULES = (corpora, data, rows, encoder_arcaligner, processing_arcaligner, segmentation_arcaligner)
_FILES = (__file__, *(module.__file__ for module in _MODULES))
_CODE = Hasher.hash([ast.dump(ast.parse(Path(file).read_bytes())) for file in _FILES])


def missing_part(row: Row, needs_question: bool) -> str:
    """What a row lacks, `"question"`, `"answer"` or `"passage"`; empty when it is whole."""
    if needs_question and not row["question"].strip():
        return "question"
    if needs_question and not any(answer.strip() for answer in row["answers"]):
        return "answer"
    if not any(passage["text"].strip() for passage in row["passages"]):
        return "passage"
    return ""


def contains_answer(passage: dict[str, str], answers: list[str]) -> bool:
    """Whether title or text hold an answer as whole words, in capitals or not: "no" is not in "known"."""
    text = f"{passage['title']}\n{passage['text']}".casefold()
    words = (re.escape(" ".join(answer.casefold().split())).replace(r"\ ", r"\s+") for answer in answers)
    return any(re.search(rf"(?<!\w){answer}(?!\w)", text) for answer in words)


@dataclass
class Distractors:
    """
    Adds 1 to `MAX_DISTRACTORS` passages of other questions, which do not hold the answer, to some rows.

    The draw depends on the seed and the row's id only, so a row has the same passages in each run and process.

    Args:
        corpus (`datasets.Dataset`): Whose passages may be drawn.
        share (`float`): Share of rows that get some.
        seed (`int`): Another one draws others.
    """

    corpus: datasets.Dataset
    share: float
    seed: int

    def __call__(self, row: Row) -> Row:
        """The row with its own passages and the drawn ones, in random order; fewer where the corpus has no more."""
        draw = random.Random(f"distractors:{self.seed}:{row['id']}")
        if draw.random() >= self.share:
            return row
        number = draw.randint(1, MAX_DISTRACTORS)
        drawn: dict[str, dict[str, str]] = {}  # by their texts
        own = {passage["text"] for passage in row["passages"]}
        for _ in range(DRAWS * number):
            others = self.corpus[draw.randrange(len(self.corpus))]["passages"] or [{"title": "", "text": ""}]
            passage = draw.choice(others)
            if passage["text"].strip() and passage["text"] not in own and not contains_answer(passage, row["answers"]):
                drawn[passage["text"]] = passage
            if len(drawn) == number:
                break
        passages = [*row["passages"], *drawn.values()]
        draw.shuffle(passages)
        return row | {"passages": passages}


@dataclass
class ExampleSelector:
    """
    Takes examples from sources, as a recipe says.

    Args:
        recipe ([`RecipeArguments`]): Its stage decides what a row needs and becomes.
        builder ([`ExampleBuilder`]): Makes examples of rows that share their passages. Those longer than its
            `max_tokens` are left out and counted.
        seed (`int`): Order of the rows, and their distractors.
        num_proc (`int`, *optional*): Processes that segment and tokenize.
    """

    recipe: RecipeArguments
    builder: ExampleBuilder
    seed: int = 0
    num_proc: int | None = None

    def training_examples(self) -> datasets.Dataset:
        """The stage's examples, a row per [`Example`], with reconstruction examples mixed in when the recipe says so.

        Raises:
            `ValueError`: a weight that is not positive, a source without questions where they are needed, no examples
                at all.
        """
        share, limit = self.recipe.reconstruction_share, self.recipe.max_train_samples
        examples = self.select(self.recipe.train_files, None if limit is None else round(limit * (1 - share)))
        if share:
            stage_one = dataclasses.replace(
                self.recipe, stage="reconstruction", distractors=0.0, reconstruction_share=0.0
            )
            selector = dataclasses.replace(self, recipe=stage_one)
            number = round(len(examples) * share / (1 - share))
            others = selector.select(self.recipe.reconstruction_files, number)
            examples = datasets.concatenate_datasets([examples, others])
        return examples

    def eval_examples(self) -> datasets.Dataset | None:
        """The stage's held-out examples; none without `eval_files`."""
        if not self.recipe.eval_files:
            return None
        return self.select(self.recipe.eval_files, self.recipe.max_eval_samples)

    def select(self, sources: dict[str, float], max_examples: int | None = None) -> datasets.Dataset:
        """A mixture of several sources.

        Args:
            sources (`dict[str, float]`): Each source and its weight: its share of the mixture is weight / sum of
                weights.
            max_examples (`int`, *optional*): Size of the mixture. Nothing is repeated: when a source holds less than
                its share, the mixture gets smaller and keeps its shares. Default: as many as that allows.
        """
        if not sources or any(weight <= 0 for weight in sources.values()):
            raise ValueError(f"Got files and weights {sources}; expected files with positive weights.")
        total = sum(sources.values())
        shares = {source: weight / total for source, weight in sources.items()}
        found = {}
        for source, share in shares.items():
            found[source] = self._take(source, None if max_examples is None else round(max_examples * share))
        size = min(len(found[source]) / share for source, share in shares.items())
        if max_examples is not None and size < max_examples - len(sources):
            logger.warning("%s: found %d examples of the %d asked for.", list(sources), size, max_examples)
        counts = {source: min(len(found[source]), round(size * share)) for source, share in shares.items()}
        if not sum(counts.values()):
            raise ValueError(
                f"No examples in {list(sources)}: {max_examples=}, max_tokens={self.builder.max_tokens}. Raise the "
                "limits or name other files."
            )
        return datasets.concatenate_datasets([found[source].select(range(counts[source])) for source in sources])

    def _take(self, source: str, quota: int | None) -> datasets.Dataset:
        """The first `quota` examples of a source that are not too long, its rows in random order."""
        recipe, asks = self.recipe, self.recipe.asks_questions
        corpus = open_corpus(source, recipe.passage_words, self.num_proc, recipe.data_dir, asks)
        make = functools.partial(
            _examples_of_rows,
            corpus=corpus,
            mix=Distractors(corpus, recipe.distractors, self.seed) if recipe.distractors else None,
            builder=self.builder,
            asks=asks,
        )
        drawn = recipe.distractors and (recipe.distractors, self.seed)
        settings = Hasher.hash((_CODE, corpus._fingerprint, self.builder, asks, recipe.max_questions, drawn))
        left_out: dict[str, list[str]] = defaultdict(list)  # ids of rows, by what is wrong with them
        taken = [datasets.Dataset.from_dict({name: [] for name in EXAMPLE_FEATURES}, features=EXAMPLE_FEATURES)]
        order = self._order(corpus)
        for start in range(0, len(order), ROWS_PER_BLOCK):
            if quota is not None and sum(map(len, taken)) >= quota:
                break
            block = self._block(make, settings, order[start : start + ROWS_PER_BLOCK])
            problems = block["problem"][:]
            taken.append(block.select(np.flatnonzero([not each for each in problems])).remove_columns("problem"))
            for row_id, problem in zip(block["row_id"][:], problems, strict=True):
                if problem:
                    left_out[problem].append(row_id)
        examples = datasets.concatenate_datasets(taken)
        examples = examples.select(range(min(len(examples), len(examples) if quota is None else quota)))
        logger.info("%s: %d examples", source, len(examples))
        for problem, row_ids in left_out.items():
            self._report(source, problem, row_ids)
        return examples

    def _report(self, source: str, problem: str, row_ids: list[str]) -> None:
        reason = f"without {'an' if problem == 'answer' else 'a'} {problem}"
        if problem == "too long":
            limit = self.builder.max_tokens
            reason = f"longer than {limit} tokens (`max_tokens`, or the backbone's `max_position_embeddings`)"
        first = printable(", ".join(row_ids[:NAMED_ROWS])) + (", ..." if len(row_ids) > NAMED_ROWS else "")
        logger.warning("%s: left out %d %s: %s", source, len(row_ids), reason, first)

    def _order(self, corpus: datasets.Dataset) -> list[list[int]]:
        """Numbers of the rows in random order, grouped by the example that they become."""
        draw = random.Random(self.seed)
        size = self.recipe.max_questions if self.recipe.asks_questions else 1
        if size == 1:
            order = [[number] for number in range(len(corpus))]
        else:
            groups = defaultdict(list)
            for number, row in enumerate(corpus):
                groups[tuple((passage["title"], passage["text"]) for passage in row["passages"])].append(number)
            keys = sorted(groups)
            draw.shuffle(keys)
            order = []
            for numbers in (groups[key] for key in keys):
                draw.shuffle(numbers)
                order += [numbers[i : i + size] for i in range(0, len(numbers), size)]
        draw.shuffle(order)
        return order

    def _block(self, make, settings: str, numbers: list[list[int]]) -> datasets.Dataset:
        """Examples of some rows, and a line for each row that lacks a part; from the cache if they were made before."""
        fingerprint = Hasher.hash((settings, numbers))
        folder = Path(self.recipe.examples_cache_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return datasets.Dataset.from_dict({"numbers": numbers}).map(
            make,
            batched=True,
            batch_size=64,
            num_proc=self.num_proc,
            remove_columns="numbers",
            features=_BLOCK_FEATURES,
            cache_file_name=str(folder / f"{fingerprint}.arrow"),
            new_fingerprint=fingerprint,
            desc="segmenting and tokenizing",
        )


def _examples_of_rows(batch: dict, *, corpus, mix, builder, asks: bool) -> dict[str, list]:
    """Columns of `_BLOCK_FEATURES`. A row that lacks a part gives an empty example with a `problem`."""
    columns = {name: [] for name in _BLOCK_FEATURES}
    for numbers in batch["numbers"]:
        whole, found = [], []
        for row in (corpus[number] for number in numbers):
            if problem := missing_part(row, asks):
                found.append((Example(row["id"], [], [], []), problem))
            else:
                whole.append(row)
        if whole and mix is not None:
            # One draw for the questions that share their passages; no distractor may hold an answer to any of them.
            drawn = mix(whole[0] | {"answers": [answer for row in whole for answer in row["answers"]]})
            whole = [row | {"passages": drawn["passages"]} for row in whole]
        if whole:
            made = builder.question_examples(whole) if asks else builder.reconstruction_examples(whole)
            limit = builder.max_tokens or float("inf")
            found += [(example, "too long" if example.length > limit else "") for example in made]
        for example, problem in found:
            for name, value in dataclasses.asdict(example).items():
                columns[name].append(value)
            columns["problem"].append(problem)
    return columns
