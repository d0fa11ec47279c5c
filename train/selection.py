"""Selects the examples to train on: mixtures of sources, limits, distractors, and a count of what is left out.

Rows are read in random order, a block at a time, until there are enough examples. The examples of a block are made by
several processes and kept as an Arrow file under the block's fingerprint: of the data, the rows, the tokenizer, the
segmenter, all settings and the code. So a block is made once, and a run that was killed continues with its next block.
"""

import ast
import dataclasses
import functools
import logging
import os
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import bm25s
import datasets
import numpy as np
from datasets import Features, List, Value
from datasets.fingerprint import Hasher

from .. import encoder_arcaligner, processing_arcaligner, segmentation_arcaligner
from ..common import rows
from ..common.files import printable, stable_number
from ..common.rows import Row
from . import corpora, data
from .corpora import open_corpus
from .data import EXAMPLE_FEATURES, Example, ExampleBuilder
from .recipe import MOST_DISTRACTORS, RecipeArguments

logger = logging.getLogger(__name__)

ROWS_PER_BLOCK = 2048
NAMED_ROWS = 5  # ids in a report
# The nearest passages without an answer are found among so many of the nearest ones.
CANDIDATES = 60

_GROUP_FEATURES = Features(numbers=List(Value("int64")))
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


def own_passages(row: Row) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The passages that the answer needs, and the row's others; all are needed where the row does not say."""
    gold = set(row["gold"]) or set(range(len(row["passages"])))
    own, others = [], []
    for number, passage in enumerate(row["passages"]):
        (own if number in gold else others).append(passage)
    return own, others


def is_held_out(row: Row, share: float, seed: int) -> bool:
    """Whether a row belongs to the validation part: one of its articles, by title or, without one, by text, does."""
    articles = {passage["title"] or passage["text"] for passage in row["passages"]}
    return any(stable_number(f"validation:{seed}:{each}", 10_000) < share * 10_000 for each in articles)


def open_part(recipe: RecipeArguments, source: str, held_out: bool, num_proc: int | None = None) -> datasets.Dataset:
    """The rows of a source that may be used: those of its validation part, or the others."""
    corpus = open_corpus(source, recipe.passage_words, num_proc, recipe.data_dir, recipe.asks_questions)
    share, seed = recipe.validation_share, recipe.validation_seed
    if share and (source in recipe.training_sources or not held_out):
        corpus = corpus.select(
            [number for number, row in enumerate(corpus) if is_held_out(row, share, seed) == held_out]
        )
    if not len(corpus):
        raise ValueError(
            f"{source}: no row is left to {'validate with' if held_out else 'train on'} with `validation_share` "
            f"{share}. Change it, or name other files."
        )
    return corpus


def _key(passage: dict[str, str]) -> tuple[str, str]:
    return passage["title"], passage["text"]


class NearestPassages:
    """Finds, among the passages of rows, those nearest to a question that do not answer it (BM25).

    Args:
        rows (`Iterable[Row]`): Whose passages are searched.
    """

    def __init__(self, rows: Iterable[Row]):
        unique, self.questions = {}, defaultdict(list)  # passages, and numbers of the rows asked about each alone
        for number, row in enumerate(rows):
            unique |= {_key(each): each for each in row["passages"] if each["text"]}
            if len(own := own_passages(row)[0]) == 1 and not missing_part(row, needs_question=True):
                self.questions[_key(own[0])].append(number)
        self.passages = list(unique.values())
        self.titles = np.array([each["title"] for each in self.passages])
        texts = [f"{each['title']} {each['text']}" for each in self.passages]
        self.index = bm25s.BM25()
        self.index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def without_answer(
        self, question: str, answers: list[str], others: Sequence[dict], number: int, in_article: bool = False
    ) -> list[dict]:
        """The `number` nearest passages, nearest first, that hold none of `answers` and are none of `others`; with
        `in_article` only those of the articles of `others`."""
        words = bm25s.tokenize([question], stopwords="en", show_progress=False, return_ids=False)
        depth = min(len(self.passages), CANDIDATES)
        if not words[0] or not depth:
            return []
        weights = np.isin(self.titles, [each["title"] for each in others]) if in_article else None
        found, scores = self.index.retrieve(words, k=depth, show_progress=False, weight_mask=weights)
        taken, texts = [], {each["text"] for each in others}
        for place, score in zip(found[0].tolist(), scores[0].tolist(), strict=True):
            passage = self.passages[place]
            if (score > 0 or not in_article) and passage["text"] not in texts and not contains_answer(passage, answers):
                taken.append(passage)
            if len(taken) == number:
                break
        return taken


@dataclass
class Distractors:
    """
    Adds 1 to `most` of the passages nearest to the questions, which do not hold the answer, to some rows.

    The draw depends on the seed and the row's id only, so a row has the same passages in each run and process.

    Args:
        nearest (`NearestPassages`): Where they come from.
        share (`float`): Share of rows that get some.
        seed (`int`): Another one draws others.
        most (`int`): The most that a row gets.
    """

    nearest: NearestPassages
    share: float
    seed: int
    most: int = 4

    def __call__(self, rows: list[Row]) -> list[dict[str, str]]:
        """The passages for `rows`, which share theirs, in random order. None of the added ones holds an answer to any
        of the rows; fewer are added where there are no more."""
        own, others = own_passages(rows[0])
        draw = random.Random(f"distractors:{self.seed}:{rows[0]['id']}")
        if draw.random() >= self.share:
            return own
        number = draw.randint(1, self.most)
        question = " ".join(row["question"] for row in rows)
        answers = [answer for row in rows for answer in row["answers"]]
        near = [each for each in others if not contains_answer(each, answers)]  # a retriever chose them already
        near = near or self.nearest.without_answer(question, answers, own, MOST_DISTRACTORS)
        passages = [*own, *draw.sample(near, min(number, len(near)))]
        draw.shuffle(passages)
        return passages

    def questions_about(self, passages: list[dict[str, str]], row: Row) -> list[int]:
        """The numbers of rows asked about those of `passages` that are not the row's own, at most one about each."""
        own = own_passages(row)[0]
        draw = stable_number(f"joined:{self.seed}:{row['id']}", 2**32)
        asked = [self.nearest.questions.get(_key(each)) for each in passages if each not in own]
        return [numbers[draw % len(numbers)] for numbers in asked if numbers]


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
        None is about an article that is held out.
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
        """The stage's held-out examples; none without `eval_files`. Of a file that is trained on as well, these are
        the ones about held-out articles."""
        if not self.recipe.eval_files:
            return None
        return self.select(self.recipe.eval_files, self.recipe.max_eval_samples, held_out=True)

    def select(
        self, sources: dict[str, float], max_examples: int | None = None, held_out: bool = False
    ) -> datasets.Dataset:
        """A mixture of several sources.

        Args:
            sources (`dict[str, float]`): Each source and its weight: its share of the mixture is weight / sum of
                weights.
            max_examples (`int`, *optional*): Size of the mixture. Nothing is repeated: when a source holds less than
                its share, the mixture gets smaller and keeps its shares. Default: as many as that allows.
            held_out (`bool`): Whether rows of the validation part are taken, rather than the others.
        """
        if not sources or any(weight <= 0 for weight in sources.values()):
            raise ValueError(f"Got files and weights {sources}; expected files with positive weights.")
        total = sum(sources.values())
        shares = {source: weight / total for source, weight in sources.items()}
        taken = {}
        for source, share in shares.items():
            taken[source] = self._take(source, None if max_examples is None else round(max_examples * share), held_out)
        size = min(len(taken[source]) / share for source, share in shares.items())
        if max_examples is not None and size < max_examples - len(sources):
            logger.warning("%s: found %d examples of the %d asked for.", list(sources), size, max_examples)
        counts = {source: min(len(taken[source]), round(size * share)) for source, share in shares.items()}
        if not sum(counts.values()):
            raise ValueError(
                f"No examples in {list(sources)}: {max_examples=}, max_tokens={self.builder.max_tokens}. Raise the "
                "limits or name other files."
            )
        return datasets.concatenate_datasets([taken[source].select(range(counts[source])) for source in sources])

    def _take(self, source: str, quota: int | None, held_out: bool) -> datasets.Dataset:
        """The first `quota` examples of a source that are not too long, its rows in random order."""
        recipe, asks = self.recipe, self.recipe.asks_questions
        # Distractors are of the same part: no held-out passage is trained on.
        corpus = open_part(recipe, source, held_out, self.num_proc)
        mix = drawn = None
        if recipe.distractors:
            mix = Distractors(NearestPassages(corpus), recipe.distractors, self.seed, recipe.max_distractors)
            drawn = [recipe.distractors, recipe.max_distractors, MOST_DISTRACTORS, self.seed]
        joins = recipe.max_questions > 1
        make = functools.partial(
            _examples_of_rows, corpus=corpus, mix=mix, joins=joins, builder=self.builder, asks=asks
        )
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
                groups[tuple(map(_key, row["passages"]))].append(number)
            keys = sorted(groups)  # so that the draw depends on the seed and not on the order of the file
            draw.shuffle(keys)
            order = []
            for numbers in (groups[key] for key in keys):
                draw.shuffle(numbers)
                order += [numbers[i : i + size] for i in range(0, len(numbers), size)]
        draw.shuffle(order)
        return order

    def _block(self, make, settings: str, groups: list[list[int]]) -> datasets.Dataset:
        """Examples of some rows, and a line for each row that lacks a part; from the cache if they were made before."""
        fingerprint = Hasher.hash((settings, groups))
        folder = _writable(Path(self.recipe.examples_cache_dir).expanduser())
        return datasets.Dataset.from_dict({"numbers": groups}, features=_GROUP_FEATURES).map(
            make,
            batched=True,
            batch_size=64,
            num_proc=self.num_proc,
            remove_columns=["numbers"],
            features=_BLOCK_FEATURES,
            cache_file_name=str(folder / f"{fingerprint}.arrow"),
            new_fingerprint=fingerprint,
            desc="segmenting and tokenizing",
        )


def _writable(folder: Path) -> Path:
    """The folder, made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("no permission to write")
    except OSError as error:
        raise OSError(
            f"Tokenized examples cannot be kept in {folder} ({error}). Name a folder that you may write to: "
            "`examples_cache_dir` of the recipe, or the variable ARCALIGNER_CACHE."
        ) from error
    return folder


def _examples_of_rows(batch: dict, *, corpus, mix, joins: bool, builder, asks: bool) -> dict[str, list]:
    """Columns of `_BLOCK_FEATURES`. A row that lacks a part gives an empty example with a `problem`."""
    columns = {name: [] for name in _BLOCK_FEATURES}
    for numbers in batch["numbers"]:
        whole, examples = [], []
        for row in (corpus[number] for number in numbers):
            if problem := missing_part(row, asks):
                examples.append((Example(row["id"], [], [], []), problem))
            else:
                whole.append(row)
        if whole and asks:
            passages = own_passages(whole[0])[0]
            if mix is not None:
                passages = mix(whole)  # one draw: no distractor may hold an answer to any of the questions
                joined = mix.questions_about(passages, whole[0]) if joins else []
                whole += [corpus[number] for number in joined]  # a further question costs its turn, and no slot
            whole = [row | {"passages": passages} for row in whole]
        if whole:
            of_rows = builder.question_examples(whole) if asks else builder.reconstruction_examples(whole)
            limit = builder.max_tokens or float("inf")
            examples += [(example, "too long" if example.length > limit else "") for example in of_rows]
        for example, problem in examples:
            for name, value in dataclasses.asdict(example).items():
                columns[name].append(value)
            columns["problem"].append(problem)
    return columns
