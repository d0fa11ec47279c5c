"""Reads rows from a JSON Lines or Parquet file or a data set of the Hub, through memory-mapped Arrow files.

A source is a path or a Hub id, with options behind a question mark:

    questions.jsonl.gz                                               rows in our schema
    letters.parquet?text=body                                        one text per row
    wikimedia/wikipedia?name=20231101.en&split=train&title=title     a text corpus of the Hub
    hotpotqa/hotpot_qa?name=distractor&passages=supporting           HotpotQA, the gold paragraphs only

Its columns say which of three kinds it is, and each kind becomes rows of our schema,

    {"id": str, "question": str, "answers": [str], "passages": [{"title": str, "text": str}]}

- `passages`: our schema, taken as it is; further columns are left out;
- `context` and `supporting_facts`: HotpotQA, with `passages=supporting` (the default: the paragraphs that the answer
  needs) or `passages=distractor` (all ten);
- a column of texts: cut into passages of `passage_words` words, each a row without a question.
"""

import functools
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Features, List, Value
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

from ..files import read_json_lines

ROW_FIELDS = ("id", "question", "answers", "passages")
ROW_FEATURES = Features(
    id=Value("string"),
    question=Value("string"),
    answers=List(Value("string")),
    passages=List({"title": Value("string"), "text": Value("string")}),
)
PASSAGE_FEATURES = Features(id=Value("string"), title=Value("string"), text=Value("string"))
JSON_LINES = (".jsonl", ".jsonl.gz")
FILES = (*JSON_LINES, ".json", ".parquet")
OPTIONS = {"name": None, "split": "train", "text": "text", "title": None, "passages": "supporting"}

Row = dict[str, Any]


def parse_source(source: str) -> tuple[str, dict[str, str | None]]:
    """A path or Hub id and its options, the missing ones with their defaults.

    Raises:
        `ValueError`: an unknown option, or `passages` other than `supporting` and `distractor`.

    >>> parse_source("org/corpus?text=body")
    ('org/corpus', {'name': None, 'split': 'train', 'text': 'body', 'title': None, 'passages': 'supporting'})
    """
    path, _, query = source.partition("?")
    given = dict(pair.partition("=")[::2] for pair in query.split("&") if pair)
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown or "" in given.values():
        raise ValueError(
            f"The source {source!r} has {f'unknown options {unknown}' if unknown else 'an option without a value'}; "
            f"expected path?key=value&key=value with keys of {sorted(OPTIONS)}."
        )
    options = OPTIONS | given
    if options["passages"] not in ("supporting", "distractor"):
        raise ValueError(f"The source {source!r} asks for {options['passages']!r}: `supporting` or `distractor`.")
    return path, options


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a JSON Lines file in our schema, gzipped or not, with all their fields.

    Raises:
        `ValueError`: a line that is not a JSON object with `id`, `question`, `answers` and `passages`, or not of texts.
    """
    rows = list(read_json_lines(path))
    for number, row in enumerate(rows, start=1):
        missing = [field for field in ROW_FIELDS if field not in row]
        if missing:
            raise ValueError(f"{path}, line {number} has no {', '.join(missing)}; a row needs {ROW_FIELDS}.")
    return [row | _own_row(row, index, where=f"{path}, line {index + 1}") for index, row in enumerate(rows)]


@dataclass
class RowSource:
    """Rows of our schema, converted one by one as they are read; a sequence.

    Args:
        source (`str`): Where they come from, for messages.
        dataset (`datasets.Dataset`): What is stored.
        convert (`Callable`): A stored row and its number to a row of our schema.
        has_questions (`bool`): Whether the rows ask something; else they are passages only.
    """

    source: str
    dataset: datasets.Dataset
    convert: Callable[[dict, int], Row]
    has_questions: bool

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        return self.convert(self.dataset[index], index)

    def __iter__(self) -> Iterator[Row]:
        return (self.convert(row, index) for index, row in enumerate(self.dataset))

    @property
    def fingerprint(self) -> str:
        """Changes with the data and with how they are read."""
        return Hasher.hash((self.dataset._fingerprint, self.convert))


def open_corpus(source: str, passage_words: int = 100, num_proc: int | None = None, data_dir: str = "") -> RowSource:
    """
    Reads a source, or finds it in the cache of 🤗 Datasets.

    Args:
        source (`str`): See the top of this file.
        passage_words (`int`): Words of a passage that a longer text is cut into; the last one may be shorter. Texts
            are cut between words, wherever a sentence ends: passages of a fixed length, as in the paper.
        num_proc (`int`, *optional*): Processes that cut texts.
        data_dir (`str`): Folder of files with a relative path; the working directory by default.

    Raises:
        `ValueError`: columns of none of the three kinds, a source that cannot be read or is empty.
        `FileNotFoundError`: no such file, with the folder it was looked for in.
    """
    path, options = parse_source(source)
    if path.endswith(FILES):
        path = _find_file(path, data_dir)
    dataset = _load(path, options)
    columns = set(dataset.column_names)
    if "passages" in columns:
        dataset = dataset.select_columns([field for field in ROW_FIELDS if field in columns])
        return RowSource(source, dataset, functools.partial(_own_row, where=source), "question" in columns)
    if {"context", "supporting_facts"} <= columns:
        convert = functools.partial(hotpotqa_row, all_paragraphs=options["passages"] == "distractor")
        return RowSource(source, dataset, convert, True)
    missing = [options[key] for key in ("text", "title") if options[key] and options[key] not in columns]
    if missing:
        raise ValueError(
            f"{source} has columns {sorted(columns)}, but no {missing}. Expected {ROW_FIELDS}; HotpotQA's; or a column "
            "of texts, named as in `?text=body`."
        )
    return RowSource(source, _cut_texts(dataset, options, passage_words, num_proc), _passage_row, False)


def check_files(sources: Iterable[str], data_dir: str) -> None:
    """Raises `FileNotFoundError` for a source that is a file and is not there."""
    for path, _ in map(parse_source, sources):
        if path.endswith(FILES):
            _find_file(path, data_dir)


def _find_file(path: str, data_dir: str) -> str:
    found = os.path.join(data_dir, path)
    if not (os.path.exists(found) or glob.glob(found)):
        raise FileNotFoundError(
            f"There is no file {found}. Data files with a relative path are looked for in `data_dir`, which is "
            f"{data_dir or '.'!r}: set it in the recipe or on the command line, as in `--data_dir ../data`, or name "
            "other files."
        )
    return found


def hotpotqa_row(row: dict, index: int, *, all_paragraphs: bool) -> Row:
    """A row of HotpotQA with its supporting paragraphs, or all ten, in their order."""
    context, gold = row["context"], set(row["supporting_facts"]["title"])
    passages = [
        {"title": title, "text": " ".join(sentence.strip() for sentence in sentences)}
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
        if all_paragraphs or title in gold
    ]
    answers = [row["answer"]] if row["answer"] else []
    return {
        "id": _id_or_number(row.get("id"), index),
        "question": row["question"] or "",
        "answers": answers,
        "passages": passages,
    }


def _id_or_number(row_id: Any, index: int) -> str:
    """A row's id, or its number, from 0, if it has none."""
    return str(index if row_id is None else row_id)


def _load(path: str, options: dict) -> datasets.Dataset:
    """The stored rows, memory-mapped."""
    try:
        if path.endswith(JSON_LINES):
            first = next(read_json_lines(path), None)
            if first is None:
                raise ValueError("it is empty.")
            if {"passages", "answers"} & first.keys():
                return _load_own(path)
        if path.endswith(FILES):
            builder = "parquet" if path.endswith(".parquet") else "json"
            return datasets.load_dataset(builder, data_files=path, split=options["split"])
        return datasets.load_dataset(path, options["name"], split=options["split"])
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error.__cause__ or error}") from error


def _load_own(path: str) -> datasets.Dataset:
    """Rows of our schema. The JSON builder refuses rows whose other fields differ, and does not name a bad line."""
    status = os.stat(path)
    version = (os.path.abspath(path), status.st_size, status.st_mtime_ns)
    return datasets.Dataset.from_generator(
        _rows_of_file, features=ROW_FEATURES, gen_kwargs={"path": path, "version": version}
    )


def _rows_of_file(path: str, version: tuple) -> Iterator[Row]:
    """Rows of our schema; `version` makes a changed file another data set."""
    for index, row in enumerate(read_json_lines(path)):
        yield _own_row(row, index, where=f"{path}, line {index + 1}")


_SCHEMA = '{"id": str, "question": str, "answers": [str], "passages": [{"title": str, "text": str}]}'


def _own_row(row: dict, index: int, *, where: str) -> Row:
    """A row in our schema; what is missing or null is empty."""
    try:
        question, answers = row.get("question") or "", [answer or "" for answer in row.get("answers") or ()]
        passages = [{key: each.get(key) or "" for key in ("title", "text")} for each in row.get("passages") or ()]
        texts = [question, *answers, *(text for each in passages for text in each.values())]
        if isinstance(row.get("answers"), str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("a text is not where it belongs")
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {error}; expected {_SCHEMA}.") from error
    answers = [answer.strip() for answer in answers if answer.strip()]
    return {"id": _id_or_number(row.get("id"), index), "question": question, "answers": answers, "passages": passages}


def _passage_row(row: dict, index: int) -> Row:
    passage = {"title": row["title"], "text": row["text"]}
    return {"id": row["id"], "question": "", "answers": [], "passages": [passage]}


def _cut_texts(dataset: datasets.Dataset, options: dict, passage_words: int, num_proc: int | None) -> datasets.Dataset:
    """One row per passage: `id`, `title`, `text`."""
    if passage_words < 1:
        raise ValueError(f"`passage_words` is {passage_words}; a passage needs at least 1 word.")
    cut = functools.partial(_passages_of_texts, text=options["text"], title=options["title"], words=passage_words)
    return dataset.map(
        cut,
        batched=True,
        with_indices=True,
        num_proc=num_proc,
        remove_columns=dataset.column_names,
        features=PASSAGE_FEATURES,
        new_fingerprint=Hasher.hash((dataset._fingerprint, options["text"], options["title"], passage_words)),
        desc="cutting texts into passages",
    )


def _passages_of_texts(batch: dict, indices: list[int], *, text: str, title: str | None, words: int) -> dict:
    passages = {"id": [], "title": [], "text": []}
    ids = batch.get("id", indices)
    titles = batch[title] if title else [""] * len(indices)
    for index, row_id, row_title, row_text in zip(indices, ids, titles, batch[text], strict=True):
        split = (row_text or "").split() or [""]  # an empty text stays a row, to be counted
        for number, start in enumerate(range(0, len(split), words)):
            passages["id"].append(f"{_id_or_number(row_id, index)}-{number}")
            passages["title"].append(row_title or "")
            passages["text"].append(" ".join(split[start : start + words]))
    return passages
