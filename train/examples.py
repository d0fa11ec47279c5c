"""From sources to examples: read, select and tokenize rows, a block at a time.

A source is a JSON Lines or Parquet file or a data set of the Hub; rows have the schema of `common/rows.py`. In stage I,
the passages of a row are split into spans of a few consecutive segments, and each span becomes an example: the slots,
then a turn that reconstructs their text and, with `continues`, one that continues with the text that follows. In stages
II and III, the questions about the same passages become one example: the slots of all segments, and after them a turn
for each question with its first answer. Questions that do not fit into `max_tokens` become a further example.

The number of slots of a segment is decided later, when the collator draws the tokens per slot of each batch (`sft.py`).
An example therefore contains the tokens of its segments, and the prompt before and after the slots.

Several processes make the examples of a block of rows. A block is cached as an Arrow file under a fingerprint of the
data, the rows, the tokenizer, the segmenter, all settings and the code, so it is made once, and a killed run continues
with the next block.
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import gc
import logging
import math
import os
import random
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import pyarrow as pa
from datasets import Features, List, Value
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from tqdm.auto import tqdm

from .. import encoder_arcaligner, processing_arcaligner, segmentation_arcaligner, tokenization_arcaligner
from ..common import rows
from ..common.data_sets import hotpotqa_row
from ..common.files import counted, printable, read_json_lines, read_numbered_lines, stable_number, write_atomically
from ..common.rows import FILES, JSON_LINES, ROW_FIELDS, Row, find_file, id_or_number, normalized_row, parse_source
from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import EMPTY_SEGMENT, SegmentTokens, count_slots, segment_document, tokenize_segments
from ..tokenization_arcaligner import readable
from . import distractors
from .distractors import NearestPassages, needed_and_others, passage_key
from .recipe import RecipeArguments

logger = logging.getLogger(__name__)

Turn = dict[str, list[int]]
Example = dict[str, Any]

ROW_FEATURES = Features(
    id=Value("string"),
    question=Value("string"),
    answers=List(Value("string")),
    passages=List({"title": Value("string"), "text": Value("string")}),
    gold=List(Value("int32")),
)
# The paper's Table "Stage-I instruction templates", in its order. A template there is "... [B] ... [T]": [B] are the
# slots, and [T] is the assistant's turn. These are the user's words before and after the slots; the full stop after [T]
# belongs to the target. The prompt of stages II and III is the processor's, the same as at inference.
RECONSTRUCTION_TEMPLATES = (
    ("Background: ", ". This is equivalent to:"),
    ("Rewrite the background in your own words: ", " →"),
    ("Provide a restatement of the background: ", ". Return:"),
    ("", " is a paraphrase of what? Answer with:"),
    ("These two expressions convey the same meaning: (1) ", " (2)"),
    ("Restate ", " using a single sentence. Output only"),
)
# Not in the paper: the user's words after the slots in a turn that continues with the text after theirs.
CONTINUATION = " Continue:"
# An example: the ids before the slots, the turns after them, and the text of the slots. Turns are packed: each attends
# to the slots and itself, and to no other turn. Labels are what the assistant says, -100 elsewhere. `length` counts
# tokens for the number of tokens per slot that gives the most slots.
EXAMPLE_FEATURES = Features(
    row_id=Value("string"),
    head=List(Value("int32")),
    turns=List({"input_ids": List(Value("int32")), "labels": List(Value("int32"))}),
    segments=List(
        {
            "document": Value("int32"),
            "encoder_text": Value("string"),
            "encoder_start": Value("int32"),
            "word_ids": List(Value("int32")),
            "word_ends": List(Value("int32")),
        }
    ),
    length=Value("int32"),
)
_BLOCK_FEATURES = Features(EXAMPLE_FEATURES | {"problem": Value("string")})
ROWS_PER_BLOCK = 2048
# What a process caches: about 10 KB for a passage, and 3 KB for a question.
MAX_CACHED_PASSAGES, MAX_CACHED_QUESTIONS = 2**14, 2**15
GROUPS_PER_CALL = 256  # groups of rows whose passages and questions are tokenized together
SPECIAL_TOKENS = 8  # upper bound of what an encoder's tokenizer adds to a text
NAMED_ROWS = 5  # ids in a report
# Passages to stream per example: a passage becomes one or several examples, or none if it is too long or empty.
SPARE_PASSAGES = 1.2
# The code that decides what an example is: a change in it, comments aside, invalidates cached blocks.
_MODULES = (
    distractors, rows, encoder_arcaligner, processing_arcaligner, segmentation_arcaligner, tokenization_arcaligner,
)  # fmt: skip
_FILES = (__file__, *(module.__file__ for module in _MODULES))
_CODE = Hasher.hash([ast.dump(ast.parse(Path(file).read_bytes())) for file in _FILES])


# A source to rows


def open_corpus(
    source: str,
    passage_words: int = 100,
    num_proc: int | None = None,
    data_dir: str = "",
    asks: bool = False,
    at_least: int | None = None,
) -> datasets.Dataset:
    """
    Reads a source, or loads it from the cache of 🤗 Datasets.

    Args:
        source (`str`): See the top of this file.
        passage_words (`int`): Words of a passage that a longer text is cut into; the last one may be shorter. Texts are
            cut between words, regardless of sentences: passages have a fixed length, as in the paper.
        num_proc (`int`, *optional*): Processes that cut or convert.
        data_dir (`str`): Folder of files with a relative path; the working directory by default.
        asks (`bool`): Whether questions are needed.
        at_least (`int`, *optional*): How many passages are needed, if the source is a data set of texts on the Hub.
            They are streamed, equally many from each file of the set, so that no more is downloaded. Default: all.

    Returns:
        `datasets.Dataset`: Rows with the schema of `common/rows.py`; a missing or null field is empty.
    """
    path, options = parse_source(source)
    path = find_file(path, data_dir)
    streams = at_least is not None and "[" not in options["split"]  # a part such as `train[:5%]` cannot be streamed
    if streams and not path.endswith(FILES):
        stream = datasets.load_dataset(path, options["name"], split=options["split"], streaming=True)
        columns = next(iter(stream), {}).keys()
        if _are_texts(columns):
            _check_columns(source, columns, options)
            drawn = {"path": path, **options, "words": passage_words, "at_least": at_least}
            return datasets.Dataset.from_generator(_stream_passages, features=ROW_FEATURES, gen_kwargs=drawn)
    try:
        if path.endswith(JSON_LINES) and _has_row_schema(path):
            # The JSON builder refuses rows whose other fields differ, and does not name a bad line.
            version = (os.path.abspath(path), os.path.getsize(path), os.stat(path).st_mtime_ns)
            arguments = {"path": path, "version": version}
            return datasets.Dataset.from_generator(_rows_of_file, features=ROW_FEATURES, gen_kwargs=arguments)
        if path.endswith(FILES):
            builder = "parquet" if path.endswith(".parquet") else "json"
            dataset = datasets.load_dataset(builder, data_files=path, split=options["split"])
        else:
            dataset = datasets.load_dataset(path, options["name"], split=options["split"])
    except (DatasetGenerationError, ValueError) as error:
        reason = str(error.__cause__ or error)
        names_line = reason.startswith(f"{path}, line ")
        raise ValueError(reason if names_line else f"{path} cannot be read: {reason}") from error
    columns = set(dataset.column_names)
    if asks and "question" not in columns:
        raise ValueError(
            f"{source} has no column `question`, which the stages `grounding` and `gating` need; expected rows with "
            f"all of the keys {', '.join(ROW_FIELDS)}, or rows of HotpotQA. Choose another file or data set."
        )
    is_text = _are_texts(columns)
    if "passages" in columns:
        convert = functools.partial(normalized_row, where=source)
    elif not is_text:
        convert = functools.partial(_hotpotqa, where=source)
    else:
        _check_columns(source, columns, options)
        convert = functools.partial(_rows_of_texts, text=options["text"], title=options["title"], words=passage_words)
    return dataset.map(
        convert,
        with_indices=True,
        batched=is_text,
        num_proc=num_proc,
        remove_columns=dataset.column_names,
        features=ROW_FEATURES,
        new_fingerprint=Hasher.hash((data_fingerprint(dataset), convert)),
        desc="reading rows",
    )


def data_fingerprint(dataset: datasets.Dataset) -> str:
    """The fingerprint of a data set in 🤗 Datasets: it covers the origin, and all changes since."""
    return dataset._fingerprint


def _are_texts(columns: Collection[str]) -> bool:
    """Whether a data set's columns are neither those of `common/rows.py` nor HotpotQA's."""
    return "passages" not in columns and not {"context", "supporting_facts"} <= set(columns)


def _check_columns(source: str, columns: Collection[str], options: dict[str, str | None]) -> None:
    """Raises `ValueError` for a data set of texts without the columns that the source names."""
    if missing := [options[key] for key in ("text", "title") if options[key] and options[key] not in columns]:
        raise ValueError(
            f"{source} has the columns {', '.join(sorted(columns))}, but not {', '.join(missing)}; expected either "
            f"questions (with all of the columns {', '.join(ROW_FIELDS)}, or with HotpotQA's columns), or texts in one "
            "column. If the texts are in the column `body`, append `?text=body` to the name of the file or data set."
        )


def _stream_passages(
    path: str, name: str | None, split: str, text: str, title: str | None, words: int, at_least: int
) -> Iterator[Row]:
    """Passages of the first texts of each file of a set, about equally many from each, `at_least` in all."""
    stream = datasets.load_dataset(path, name, split=split, streaming=True)
    index = num_taken = 0
    for number in range(files := stream.num_shards):
        for row in stream.shard(files, number):
            if num_taken >= at_least * (number + 1) // files:
                break
            batch = {column: [value] for column, value in row.items()}
            passages = _rows_of_texts(batch, [index], text=text, title=title, words=words)
            yield from (dict(zip(passages, values, strict=True)) for values in zip(*passages.values(), strict=True))
            index, num_taken = index + 1, num_taken + len(passages["id"])


def _hotpotqa(row: dict, index: int, *, where: str) -> Row:
    """A row of HotpotQA in the schema of `common/rows.py`, with only the paragraphs that the answer needs."""
    converted = normalized_row(hotpotqa_row(row), index, where=where)
    return converted | {"passages": needed_and_others(converted)[0], "gold": []}


def _has_row_schema(path: str) -> bool:
    """Whether the first row of a JSON Lines file has the schema of `common/rows.py`."""
    first = next(read_json_lines(path), None)
    if first is None:
        raise ValueError("it is empty. Choose another file.")
    return bool({"passages", "answers"} & first.keys())


def _rows_of_file(path: str, version: tuple) -> Iterator[Row]:
    """Rows of a file with the schema of `common/rows.py`. With another `version`, 🤗 Datasets does not use what it
    cached of the file."""
    for line, row in read_numbered_lines(path):
        yield normalized_row(row, line - 1, where=f"{path}, line {line}")


def _rows_of_texts(batch: dict, indices: list[int], *, text: str, title: str | None, words: int) -> dict:
    """A row without a question for each passage of the texts."""
    rows = {field: [] for field in ROW_FEATURES}
    ids = batch.get("id", indices)
    titles = batch[title] if title else [""] * len(indices)
    for index, row_id, row_title, row_text in zip(indices, ids, titles, batch[text], strict=True):
        split = (row_text or "").split() or [""]  # an empty text remains a row, so that it is counted
        for number, start in enumerate(range(0, len(split), words)):
            rows["id"].append(f"{id_or_number(row_id, index)}-{number}")
            rows["question"].append("")
            rows["answers"].append([])
            rows["passages"].append([{"title": row_title or "", "text": " ".join(split[start : start + words])}])
            rows["gold"].append([])
    return rows


def iterate_rows(corpus: datasets.Dataset, *columns: str) -> Iterator[Row]:
    """The `columns` of all rows in order. This is ten times as fast as iterating over the data set."""
    for table in corpus.select_columns([*columns]).with_format("arrow").iter(ROWS_PER_BLOCK):
        yield from table.to_pylist()


def missing_part(row: Row, asks: bool) -> str:
    """What a row lacks, such as "without a passage"; empty if the row is complete. Questions and answers are needed if
    it `asks`."""
    if asks and not row["question"].strip():
        return "without a question"
    if asks and not row["answers"]:
        return "without an answer"
    return "" if any(passage["text"].strip() for passage in row["passages"]) else "without a passage"


def open_part(
    recipe: RecipeArguments, source: str, held_out: bool, num_proc: int | None = None, quota: int | None = None
) -> datasets.Dataset:
    """The rows of a source that may be used: those of its validation part if `held_out`, else the others. A row belongs
    to the validation part if one of its articles does, identified by title or, without one, by text. Of texts on the
    Hub, only enough rows for `quota` examples are read."""
    share = recipe.validation_share
    share_of_part = share if held_out and share and source in recipe.training_sources else 1 - share
    at_least = None if quota is None else math.ceil(SPARE_PASSAGES * quota / share_of_part)
    corpus = open_corpus(source, recipe.passage_words, num_proc, recipe.data_dir, recipe.asks_questions, at_least)

    @functools.cache
    def is_held_out(article: str) -> bool:
        return stable_number(f"validation:{recipe.validation_seed}:{article}", 10_000) < share * 10_000

    if share and (source in recipe.training_sources or not held_out):
        numbers = []
        for number, row in enumerate(iterate_rows(corpus, "passages")):
            if any(is_held_out(passage["title"] or passage["text"]) for passage in row["passages"]) == held_out:
                numbers.append(number)
        corpus = corpus.select(numbers)
    if not len(corpus):
        raise ValueError(
            f"`validation_share` is {share}, which leaves no row of {source} for "
            f"{'validation. Raise' if held_out else 'training. Lower'} `validation_share`, or choose a file with more "
            "articles."
            if share
            else f"{source} has no rows. Choose another file or data set."
        )
    return corpus


# Rows to examples


def choose_template(example_id: str) -> tuple[str, str]:
    """The stage-I template of an example, fixed by its id."""
    return RECONSTRUCTION_TEMPLATES[stable_number(f"template:{example_id}", len(RECONSTRUCTION_TEMPLATES))]


class CachedResults:
    """Caches the results of a function that takes a list of keys and returns a result for each, about the last
    `max_results` of them."""

    def __init__(self, compute: Callable[[list], list], max_results: int):
        self.compute, self.max_results, self.results = compute, max_results, {}

    def __call__(self, keys: Sequence) -> list:
        if missing := [key for key in dict.fromkeys(keys) if key not in self.results]:
            self.results |= zip(missing, self.compute(missing), strict=True)
        results = [self.results[key] for key in keys]
        for key in list(self.results)[: max(0, len(self.results) - self.max_results)]:
            del self.results[key]
        return results


def _question_of(row: Row) -> tuple[str, str, str]:
    return row["id"], row["question"], row["answers"][0]


@dataclass
class ExampleBuilder:
    """
    Turns rows into examples, with the prompt that the processor writes at inference.

    Args:
        processor ([`ArcAlignerProcessor`]): Tokenizer, chat template and segmenter.
        max_segments (`int`): Maximum number of segments of a reconstruction example, at least 1.
        continues (`bool`): Whether a reconstruction example has a second turn, which continues with the next segment.
        tokens_per_slot (`Sequence`): The numbers of tokens per slot that batches will have. The smallest decides how
            long examples are.
        max_tokens (`int`, *optional*): Questions about the same passages share an example up to this length.
    """

    processor: ArcAlignerProcessor
    max_segments: int = 1
    continues: bool = False
    tokens_per_slot: Sequence[int | str] = ("segment",)
    max_tokens: int | None = None

    def with_caches(self) -> "ExampleBuilder":
        """A builder of the same examples that caches the segments of a passage, and the turn of a question. Its
        processor must not change meanwhile."""
        builder = copy.copy(self)
        builder._prefix_ids = functools.lru_cache(self._prefix_ids)
        builder._ends_of_turns = functools.cache(self._ends_of_turns)
        builder._passages_tokens = CachedResults(self._passages_tokens, MAX_CACHED_PASSAGES)
        builder._question_turns = CachedResults(builder._question_turns, MAX_CACHED_QUESTIONS)
        return builder

    def load(self) -> None:
        """Load spaCy and the like now rather than with the first example, so that processes forked later share it."""
        self._passages_tokens([("", "A sentence.")])

    def tokenize(self, passages: Sequence[dict[str, str]], rows: Sequence[Row] = ()) -> None:
        """Tokenize passages and questions of rows together, which is faster than one by one. Only for a builder that
        caches them."""
        self._passages_tokens([(passage["title"], passage["text"]) for passage in passages])
        self._question_turns([_question_of(row) for row in rows])

    def reconstruction_examples(self, rows: list[Row]) -> Iterator[Example]:
        """Stage I: each span of 1 to `max_segments` segments of a passage as slots, its text as the target."""
        for row in rows:
            for document, passage in enumerate(row["passages"]):
                (segments,), start = self._passages_tokens([(passage["title"], passage["text"])]), 0
                while start < len(segments):
                    end = start + 1 + stable_number(f"chunk:{row['id']}:{document}:{start}", self.max_segments)
                    chunk, following = segments[start:end], segments[end : end + 1]
                    yield self._reconstruction(row["id"], document, passage["text"], chunk, following)
                    start = end

    def passage_examples(self, row: Row) -> Iterator[Example]:
        """An example of stage I for each passage that has a text: all of its segments as slots, its text as the
        target."""
        for document, passage in enumerate(row["passages"]):
            (segments,) = self._passages_tokens([(passage["title"], passage["text"])])
            if segments:
                yield self._reconstruction(row["id"], document, passage["text"], segments, [])

    def _reconstruction(
        self, row_id: str, document: int, text: str, chunk: list[SegmentTokens], following: list[SegmentTokens]
    ) -> Example:
        """Consecutive segments of a document's text as slots; their text and that of the `following` segment as
        targets."""
        first, last = chunk[0].segment, chunk[-1].segment
        before, after = choose_template(f"{row_id}:{document}:{first.start}")
        prefix_ids, turn = self._turn(before, after, text[first.start : last.end].strip(), row_id)
        turns = [turn]
        if self.continues and following:
            # The words before the slots are shared: the two turns differ only in what follows the slots.
            _, turn = self._turn(before, CONTINUATION, following[0].segment.text.strip(), row_id)
            turns.append(turn)
        return self._example(row_id, prefix_ids, turns, [(document, segment) for segment in chunk])

    def question_examples(self, rows: list[Row]) -> Iterator[Example]:
        """Stages II and III: the passages that `rows` share as slots, a turn for each question."""
        passages = self._passages_tokens([(passage["title"], passage["text"]) for passage in rows[0]["passages"]])
        tokens = [(document, segment) for document, segments in enumerate(passages) for segment in segments]
        example = None
        for row, (prefix_ids, turn) in zip(rows, self._question_turns(list(map(_question_of, rows))), strict=True):
            # The slots count once: a further question adds only its turn.
            added = len(turn["input_ids"])
            if example and (self.max_tokens is None or example["length"] + added <= self.max_tokens):
                example["turns"].append(turn)
                example["length"] += added
                continue
            if example:
                yield example
            example = self._example(row["id"], prefix_ids, [turn], tokens)
        yield example

    def _passages_tokens(self, passages: Sequence[tuple[str, str]]) -> list[list[SegmentTokens]]:
        """The segments of each passage, a title and a text."""
        documents = [{"title": readable(title).text, "text": readable(text).text} for title, text in passages]
        encoder, limit = self.processor.encoder, self.processor.encoder.tokenizer.model_max_length

        def num_parts(text: str) -> int:
            # ASCII text has at most one token per character, special ones aside: cheaper to check than to tokenize.
            fits = limit is None or (text.isascii() and len(text) + SPECIAL_TOKENS <= limit)
            return 1 if fits else encoder.num_parts(text)

        cut = {key: getattr(self.processor, key) for key in ("sentences_per_segment", "spacy_model")}
        segments = [
            segment
            for number, document in enumerate(documents)
            for segment in segment_document(document["text"], number, num_parts=num_parts, **cut)
        ]
        tokens_by_passage: list[list[SegmentTokens]] = [[] for _ in passages]
        for tokens in tokenize_segments(self.processor.tokenizer, segments, documents):
            tokens_by_passage[tokens.segment.document].append(tokens)
        return tokens_by_passage

    def _question_turns(self, questions: Sequence[tuple[str, str, str]]) -> list[tuple[list[int], Turn]]:
        """For each id, question and answer, the ids before the slots, and the turn."""
        if not questions:
            return []
        chats = [[{"role": "user", "content": question}] for _, question, _ in questions]
        prompts = self.processor.split_prompts(chats, add_generation_prompt=True)
        answers = [answer for _, _, answer in questions]
        chats = [[*chat, {"role": "assistant", "content": answer}] for chat, answer in zip(chats, answers, strict=True)]
        conversations = self.processor.split_prompts(chats)
        return self._split([row_id for row_id, *_ in questions], prompts, conversations)

    def _example(self, row_id, prefix_ids, turns, tokens: list[tuple[int, SegmentTokens]]) -> Example:
        """An example of segments and the numbers of their documents. Without segments it has one slot, the encoding of
        the empty string."""
        segments = [
            {
                "document": document,
                "encoder_text": segment.encoder_text,
                "encoder_start": segment.encoder_start,
                "word_ids": list(segment.word_ids),
                "word_ends": list(segment.word_ends),
            }
            for document, segment in tokens or [(0, EMPTY_SEGMENT)]
        ]
        finest = min(self.tokens_per_slot, key=lambda entry: math.inf if entry == "segment" else entry)
        num_slots = sum(count_slots(len(segment["word_ids"]), finest) for segment in segments)
        length = len(prefix_ids) + num_slots + sum(len(turn["input_ids"]) for turn in turns)
        return {"row_id": row_id, "head": prefix_ids, "turns": turns, "segments": segments, "length": length}

    def _turn(self, before: str, after: str, target: str, row_id: str) -> tuple[list[int], Turn]:
        """The ids before the slots, and the turn after them; `before` and `after` are the user's words."""
        mark = uuid.uuid4().hex
        messages = [{"role": "user", "content": before + mark + after}, {"role": "assistant", "content": target}]
        prompt = self.processor.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        conversation = self.processor.apply_chat_template(messages, tokenize=False)
        return self._split([row_id], [prompt.split(mark)], [conversation.split(mark)])[0]

    def _split(
        self, row_ids: Sequence[str], prompts: Sequence[Sequence[str]], conversations: Sequence[Sequence[str]]
    ) -> list[tuple[list[int], Turn]]:
        """Split conversations into prompts and targets: for each, the ids before the slots, and the turn. Its labels
        are on the assistant's words and the token that ends the assistant's turn."""
        ids = self.processor.tokenize_prompts([text for _, text in (*prompts, *conversations)])
        turns = []
        rows = zip(row_ids, prompts, conversations, ids[: len(prompts)], ids[len(prompts) :], strict=True)
        for row_id, prompt, conversation, prompt_ids, conversation_ids in rows:
            if prompt[0] != conversation[0] or conversation_ids[: len(prompt_ids)] != prompt_ids:
                raise ValueError(
                    f"The chat template writes the prompt of row {row_id} differently if an answer follows, so the "
                    "answer cannot be separated from the prompt. Set `chat_template_path` to the file of another "
                    "template."
                )
            target = self._end_of_turn(conversation_ids[len(prompt_ids) :])
            turn = {"input_ids": prompt_ids + target, "labels": [-100] * len(prompt_ids) + target}
            turns.append((self._prefix_ids(prompt[0]), turn))
        return turns

    def _prefix_ids(self, text: str) -> list[int]:
        return self.processor.tokenize_prompt(text)

    def _ends_of_turns(self) -> set[int]:
        """Ids of the special tokens, one of which ends a turn."""
        tokenizer = self.processor.tokenizer
        added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        return {*tokenizer.all_special_ids, *added}

    def _end_of_turn(self, target: list[int]) -> list[int]:
        """Remove what follows the end of the turn; add EOS if the template does not end turns."""
        tokenizer, special = self.processor.tokenizer, self._ends_of_turns()
        end = len(target)
        while end and target[end - 1] not in special and not tokenizer.decode(target[end - 1 : end]).strip():
            end -= 1
        target = target[:end]
        return target if target and target[-1] in special else [*target, tokenizer.eos_token_id]


# Which rows


@dataclass
class ExampleSelector:
    """
    Selects examples from sources, as a recipe says.

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
        """The stage's examples, with reconstruction examples mixed in if the recipe says so. None is about a held-out
        article.
        """
        share, limit = self.recipe.reconstruction_share, self.recipe.max_train_samples
        examples = self.select(self.recipe.train_files, None if limit is None else round(limit * (1 - share)))
        if share:
            of_stage_one = {"stage": "reconstruction", "distractors": 0.0, "reconstruction_share": 0.0}
            selector = dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, **of_stage_one))
            number = round(len(examples) * share / (1 - share))
            others = selector.select(self.recipe.reconstruction_files, number)
            examples = datasets.concatenate_datasets([examples, others])
        return examples

    def eval_examples(self) -> datasets.Dataset | None:
        """The stage's held-out examples, or `None` without `eval_files`. Of a file that is also trained on, these are
        the examples about held-out articles."""
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
            max_examples (`int`, *optional*): Size of the mixture. If a source has fewer examples than its share, the
                mixture shrinks and keeps its shares; with the recipe's `oversample` its rows are used again instead.
                Default: as many as the sources allow; with `oversample` all examples of each source, at least once.
            held_out (`bool`): Whether rows of the validation part are taken, rather than the others.
        """
        if not sources or any(weight <= 0 for weight in sources.values()):
            raise ValueError(
                f"The data files with their weights are {sources}; expected at least one file, and weights above 0. "
                "Correct `train_files`, `eval_files` or `reconstruction_files` in the recipe."
            )
        total = sum(sources.values())
        shares = {source: weight / total for source, weight in sources.items()}
        examples, left_out = {}, {}
        for source, share in shares.items():
            quota = None if max_examples is None else round(max_examples * share)
            examples[source], left_out[source] = self._take(source, quota, held_out)
        oversample = self.recipe.oversample and not held_out
        size = (max if oversample else min)(len(examples[source]) / share for source, share in shares.items())
        if max_examples is not None and size < max_examples - len(sources):
            logger.warning(
                "%s: there are only %d of the %d examples that the recipe asks for, so fewer are used.",
                ", ".join(sources),
                size,
                max_examples,
            )
        counts = {source: round(size * share) for source, share in shares.items()}
        empty = [source for source in sources if not len(examples[source])]
        if empty or not sum(counts.values()):
            reasons = [self._why_empty(source, left_out[source]) for source in empty if left_out[source]]
            number = "" if max_examples is None else f"at most {max_examples} examples, and "
            raise ValueError(
                " ".join(reasons)
                or f"No examples can be made from {', '.join(sources)}; the recipe allows {number}at most "
                f"{self.builder.max_tokens} tokens per example (`max_tokens`). Raise these limits, or choose other "
                "files."
            )
        if oversample:
            examples = {source: self._repeat(source, examples[source], counts[source]) for source in sources}
        return datasets.concatenate_datasets(
            [examples[source].select(range(min(len(examples[source]), counts[source]))) for source in sources]
        )

    def _repeat(self, source: str, examples: datasets.Dataset, number: int) -> datasets.Dataset:
        """At least `number` examples of a source: first `examples`, then further ones of the same rows, used again as
        often as needed, each time in another order and with other distractors."""
        passes = [examples]
        while (missing := number - sum(map(len, passes))) > 0:
            again, _ = dataclasses.replace(self, seed=self.seed + len(passes))._take(source, missing, held_out=False)
            if not len(again):
                raise ValueError(
                    f"{source} gives {sum(map(len, passes))} of the {number} examples that its weight asks for. Its "
                    "rows cannot be used again to make more, because with other distractors each example is longer "
                    f"than {self.builder.max_tokens} tokens. Raise `max_tokens`, or set `oversample` to false."
                )
            passes.append(again)
        if len(passes) > 1:
            logger.info("%s: rows are used up to %d times to make %d examples", source, len(passes), number)
        return datasets.concatenate_datasets(passes)

    def _why_empty(self, source: str, left_out: dict[str, list[str]]) -> str:
        """Why all rows of a source were left out, and which keys its first row has."""
        problems = ", ".join(f"{len(ids)} {problem}" for problem, ids in left_out.items())
        path = find_file(parse_source(source)[0], self.recipe.data_dir)
        if not (path.endswith(JSON_LINES) and any(problem.startswith("without") for problem in left_out)):
            advice = (
                "Raise `max_tokens`"
                if any(problem.startswith("longer") for problem in left_out)
                else "Complete the rows"
            )
            return f"{source} has no usable row: {problems}. {advice}, or choose another file."
        keys = list(next(read_json_lines(path)))
        return (
            f"{source} has no usable row: {problems}. Its first row has the keys {', '.join(keys)}; expected the keys "
            f"{', '.join(ROW_FIELDS)}, with values that are not empty. Correct the rows, or choose another file."
        )

    def preview(self, source: str) -> tuple[int, list[int]]:
        """An estimate of the number of examples of a source, and the lengths of those in its first block."""
        settings, maker, order = self._prepare(source, None, held_out=False)
        with _Makers(maker, self.num_proc) as makers:
            block = self._block(makers, settings, order[:ROWS_PER_BLOCK])
        lengths = [length for length, problem in zip(block["length"], block["problem"], strict=True) if not problem]
        return round(len(lengths) * max(1.0, len(order) / ROWS_PER_BLOCK)), lengths

    def _prepare(self, source: str, quota: int | None, held_out: bool) -> tuple[str, "_ExampleMaker", list[list[int]]]:
        """The cache key of a source's blocks, the maker of the blocks, and the rows of each example in random order."""
        recipe = self.recipe
        # Distractors come from the same part, so that no held-out passage is trained on.
        corpus = open_part(recipe, source, held_out, self.num_proc, quota)
        columns = ("question", "answers", "passages", "gold")
        nearest = NearestPassages(iterate_rows(corpus, *columns)) if recipe.distractors else None
        drawn = nearest and [recipe.distractors, recipe.max_distractors, self.seed]
        row_settings = (recipe.asks_questions, recipe.max_questions, drawn)
        settings = Hasher.hash((_CODE, data_fingerprint(corpus), self.builder, *row_settings))
        return settings, _ExampleMaker(corpus, nearest, self.builder, recipe, self.seed), self._order(corpus)

    def _take(self, source: str, quota: int | None, held_out: bool) -> tuple[datasets.Dataset, dict[str, list[str]]]:
        """The first `quota` examples of a source that are not too long, in random order of its rows, and the ids of the
        rows that were left out, by reason."""
        settings, maker, order = self._prepare(source, quota, held_out)
        left_out: dict[str, list[str]] = defaultdict(list)  # ids of rows, by reason
        blocks = [datasets.Dataset.from_dict({name: [] for name in EXAMPLE_FEATURES}, features=EXAMPLE_FEATURES)]
        with (
            _Makers(maker, self.num_proc) as makers,
            tqdm(total=len(order), desc="making examples", unit=" groups of rows") as bar,
        ):
            for start in range(0, len(order), ROWS_PER_BLOCK):
                if quota is not None and sum(map(len, blocks)) >= quota:
                    break
                block = self._block(makers, settings, order[start : start + ROWS_PER_BLOCK])
                problems = block["problem"][:]
                is_complete = [not problem for problem in problems]
                blocks.append(block.select(np.flatnonzero(is_complete)).remove_columns("problem"))
                for row_id, problem in zip(block["row_id"][:], problems, strict=True):
                    if problem:
                        left_out[problem].append(row_id)
                bar.update(min(ROWS_PER_BLOCK, len(order) - start))
        examples = datasets.concatenate_datasets(blocks)
        examples = examples.select(range(min(len(examples), len(examples) if quota is None else quota)))
        logger.info("%s: %s", source, counted(len(examples), "example"))
        for problem, row_ids in left_out.items():
            first = printable(", ".join(row_ids[:NAMED_ROWS])) + (", ..." if len(row_ids) > NAMED_ROWS else "")
            logger.warning("%s: left out %s %s; row ids: %s", source, counted(len(row_ids), "example"), problem, first)
        return examples, left_out

    def _order(self, corpus: datasets.Dataset) -> list[list[int]]:
        """Numbers of the rows in random order, grouped by example."""
        draw = random.Random(self.seed)
        size = self.recipe.max_questions if self.recipe.asks_questions else 1
        if size == 1:
            order = [[number] for number in range(len(corpus))]
        else:
            groups = defaultdict(list)
            for number, row in enumerate(iterate_rows(corpus, "passages")):
                groups[tuple(map(passage_key, row["passages"]))].append(number)
            keys = sorted(groups)  # the draw must depend on the seed, not on the order of the file
            draw.shuffle(keys)
            order = []
            for numbers in (groups[key] for key in keys):
                draw.shuffle(numbers)
                order += [numbers[i : i + size] for i in range(0, len(numbers), size)]
        draw.shuffle(order)
        return order

    def _block(self, makers: "_Makers", settings: str, groups: list[list[int]]) -> datasets.Dataset:
        """The examples of the rows of `groups`, and a line for each row that lacks a part; cached."""
        folder = Path(self.recipe.examples_cache_dir).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"Tokenized examples cannot be cached in {folder} ({error}). Set `examples_cache_dir` in the recipe, "
                "or the environment variable ARCALIGNER_CACHE, to a folder that you may write to."
            ) from error
        path = folder / f"{Hasher.hash((settings, groups))}.arrow"
        if path.exists() and not _is_complete(path):
            logger.warning("%s, a file of cached examples, is truncated. These examples are made again.", path)
            path.unlink()
        if not path.exists():
            table = makers.make(groups)

            def write(file: BinaryIO) -> None:
                with pa.ipc.new_stream(file, table.schema) as stream:
                    stream.write_table(table)

            write_atomically(path, write)
        return datasets.Dataset.from_file(str(path))


# The last bytes of an Arrow stream.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def _is_complete(path: Path) -> bool:
    """Whether the file of a block is complete. A full disk or an interrupted copy may have truncated it."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(_END_OF_STREAM)))
        return file.read() == _END_OF_STREAM


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Inside, no garbage is collected: the collector would walk a block's many lists again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass
class _ExampleMaker:
    """Makes examples of rows of a data set, which are named by their numbers."""

    corpus: datasets.Dataset
    nearest: NearestPassages | None
    builder: ExampleBuilder
    recipe: RecipeArguments
    seed: int

    def __post_init__(self):
        self.corpus = self.corpus.with_format("arrow")

    def with_caches(self) -> "_ExampleMaker":
        return dataclasses.replace(self, builder=self.builder.with_caches())

    def __call__(self, groups: list[list[int]]) -> tuple[pa.Table, list[int]]:
        """Columns of `_BLOCK_FEATURES`, and how many examples each group has. A row that lacks a part becomes an empty
        example with a `problem`."""
        with _collecting_nothing():
            return self._make(groups)

    def _make(self, groups: list[list[int]]) -> tuple[pa.Table, list[int]]:
        asks, examples, prepared, counts = self.recipe.asks_questions, [], [], []
        rows = self._rows([number for numbers in groups for number in numbers])
        for numbers in groups:
            problems = [missing_part(rows[number], asks) for number in numbers]
            complete = [rows[number] for number, problem in zip(numbers, problems, strict=True) if not problem]
            passages, joined = self._passages(complete) if complete and asks else (None, [])
            prepared.append((numbers, problems, complete, passages, joined))
        others = self._rows([number for *_, joined in prepared for number in joined])
        complete_groups = [
            complete
            if passages is None
            else [row | {"passages": passages} for row in (*complete, *map(others.get, joined))]
            for _, _, complete, passages, joined in prepared
        ]
        for index, ((numbers, problems, *_), complete) in enumerate(zip(prepared, complete_groups, strict=True)):
            if index % GROUPS_PER_CALL == 0:
                together = [group for group in complete_groups[index : index + GROUPS_PER_CALL] if group]
                passages = [passage for group in together for passage in group[0]["passages"]]
                self.builder.tokenize(passages, [row for group in together for row in group] if asks else ())
            before = len(examples)
            for number, problem in zip(numbers, problems, strict=True):
                if problem:
                    empty = {"head": [], "turns": [], "segments": [], "length": 0}
                    examples.append(empty | {"row_id": rows[number]["id"], "problem": problem})
            if complete:
                examples += self._examples(complete)
            counts.append(len(examples) - before)
        return pa.Table.from_pylist(examples, _BLOCK_FEATURES.arrow_schema), counts

    def _rows(self, numbers: list[int]) -> dict[int, Row]:
        """Rows by their numbers, read together."""
        unique = sorted(set(numbers))
        return dict(zip(unique, self.corpus[unique].to_pylist(), strict=True)) if unique else {}

    def _passages(self, rows: list[Row]) -> tuple[list[dict[str, str]], list[int]]:
        """The passages of questions that share an example, and the numbers of the rows whose questions join them."""
        recipe, nearest = self.recipe, self.nearest
        if nearest is None:
            return needed_and_others(rows[0])[0], []
        # One draw for all questions: no distractor may contain an answer to any of them.
        passages = nearest.mixed(rows, recipe.distractors, self.seed, recipe.max_distractors)
        # A further question adds its turn and no slot.
        return passages, nearest.questions_about(passages, rows[0], self.seed) if recipe.max_questions > 1 else []

    def _examples(self, rows: list[Row]) -> Iterator[Example]:
        """The examples of complete rows; those that are too long have a `problem`."""
        builder, limit = self.builder, self.builder.max_tokens or math.inf
        asks = self.recipe.asks_questions
        for example in builder.question_examples(rows) if asks else builder.reconstruction_examples(rows):
            too_long = f"longer than {limit} tokens (`max_tokens`, or the base model's `max_position_embeddings`)"
            yield example | {"problem": too_long if example["length"] > limit else ""}


class _Makers:
    """Runs an [`_ExampleMaker`] in several processes. In all blocks, a process gets rows of the same part of the
    corpus: neighboring rows are about the same articles, so most of their passages are in its cache."""

    def __init__(self, maker: _ExampleMaker, num_proc: int | None):
        self.num_proc = num_proc or 1
        self.maker = maker.with_caches() if self.num_proc == 1 else maker
        self.workers: list[ProcessPoolExecutor] = []

    def __enter__(self) -> "_Makers":
        return self

    def __exit__(self, *error) -> None:
        for worker in self.workers:
            worker.shutdown(cancel_futures=True)

    def make(self, groups: list[list[int]]) -> pa.Table:
        """The examples of all groups, in order."""
        if self.num_proc == 1:
            return self.maker(groups)[0]
        if not self.workers:
            self.maker.builder.load()
            begin = {"initializer": _set_maker, "initargs": (self.maker,)}
            self.workers = [ProcessPoolExecutor(1, **begin) for _ in range(self.num_proc)]
        places = [[] for _ in self.workers]  # of each process, indices into `groups`
        for place, numbers in enumerate(groups):
            places[numbers[0] * self.num_proc // len(self.maker.corpus)].append(place)
        made = [
            worker.submit(_make_part, [groups[place] for place in worker_places])
            for worker, worker_places in zip(self.workers, places, strict=True)
        ]
        tables, counts = zip(*(part.result() for part in made), strict=True)
        place_of_example = np.repeat([*chain(*places)], [*chain(*counts)])
        return pa.concat_tables(tables).take(np.argsort(place_of_example, kind="stable")).combine_chunks()


_maker: _ExampleMaker | None = None  # one for each process of `_Makers`


def _set_maker(maker: _ExampleMaker) -> None:
    global _maker
    gc.freeze()  # the garbage collector would write to memory that forked processes share, and so copy it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # "true" would wait for threads that a forked process does not have
    _maker = maker.with_caches()  # here, because caches cannot be sent to another process


def _make_part(groups: list[list[int]]) -> tuple[pa.Table, list[int]]:
    return _maker(groups)


# Words

# Minimum weight of a word, so that a slot with only frequent words has a weight as well.
MIN_RARITY = 0.02


def word_rarity(examples: Sequence[dict[str, Any]], vocab_size: int) -> np.ndarray:
    """Inverse document frequency of each token over the segments of `examples`, scaled to (0, 1]; (vocab_size,)."""
    counts, num_segments = np.zeros(vocab_size), 0
    for example in examples:
        for segment in example["segments"]:
            counts[np.unique(segment["word_ids"]).astype(np.int64)] += 1
            num_segments += 1
    rarity = np.log((num_segments + 1) / (counts + 1)) / math.log(num_segments + 1)
    return np.maximum(rarity, MIN_RARITY)
