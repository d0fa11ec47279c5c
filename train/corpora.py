"""Reads rows from a JSON Lines or Parquet file or a data set of the Hub, through memory-mapped Arrow files.

The columns of a source (`rows.py`) say which of three kinds it is, and each kind becomes rows of our schema:

- `passages`: our schema, with `meta.gold` for `gold`, taken unchanged; further columns are left out;
- `context` and `supporting_facts`: HotpotQA, with `passages=supporting` (the default: the paragraphs that the answer
  needs) or `passages=distractor` (all ten);
- a column of texts: cut into passages of `passage_words` words, each a row without a question.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator

import datasets
from datasets import Features, List, Value
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

from ..common.data_sets import hotpotqa_row
from ..common.files import find_path, read_json_lines
from ..common.rows import JSON_LINES, ROW_FIELDS, Row, id_or_number, own_row, parse_source

ROW_FEATURES = Features(
    id=Value("string"),
    question=Value("string"),
    answers=List(Value("string")),
    passages=List({"title": Value("string"), "text": Value("string")}),
    gold=List(Value("int32")),
)
FILES = (*JSON_LINES, ".json", ".parquet")


def open_corpus(
    source: str, passage_words: int = 100, num_proc: int | None = None, data_dir: str = "", asks: bool = False
) -> datasets.Dataset:
    """
    Reads a source, or finds it in the cache of 🤗 Datasets.

    Args:
        source (`str`): See the top of this file.
        passage_words (`int`): Words of a passage that a longer text is cut into; the last one may be shorter. Texts
            are cut between words, wherever a sentence ends: passages of a fixed length, as in the paper.
        num_proc (`int`, *optional*): Processes that cut or convert.
        data_dir (`str`): Folder of files with a relative path; the working directory by default.
        asks (`bool`): Whether questions are needed.

    Returns:
        `datasets.Dataset`: Rows of our schema; what is missing or null in a row is empty.
    """
    path, options = parse_source(source)
    if path.endswith(FILES):
        path = find_file(path, data_dir)
    try:
        if path.endswith(JSON_LINES) and _is_own(path):
            return _load_own(path)
        if path.endswith(FILES):
            builder = "parquet" if path.endswith(".parquet") else "json"
            dataset = datasets.load_dataset(builder, data_files=path, split=options["split"])
        else:
            dataset = datasets.load_dataset(path, options["name"], split=options["split"])
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error.__cause__ or error}") from error
    columns = set(dataset.column_names)
    if asks and "question" not in columns:
        raise ValueError(f"{source} has no questions. Stages II and III need rows of {ROW_FIELDS}, or HotpotQA's.")
    if "passages" in columns:
        return _converted(dataset, functools.partial(own_row, where=source), num_proc)
    if {"context", "supporting_facts"} <= columns:
        convert = functools.partial(_hotpotqa, all_paragraphs=options["passages"] == "distractor", where=source)
        return _converted(dataset, convert, num_proc)
    missing = [options[key] for key in ("text", "title") if options[key] and options[key] not in columns]
    if missing:
        raise ValueError(
            f"{source} has columns {sorted(columns)}, but no {missing}. Expected {ROW_FIELDS}; HotpotQA's; or a column "
            "of texts, named as in `?text=body`."
        )
    if passage_words < 1:
        raise ValueError(f"`passage_words` is {passage_words}; a passage needs at least 1 word.")
    cut = functools.partial(_rows_of_texts, text=options["text"], title=options["title"], words=passage_words)
    return _converted(dataset, cut, num_proc, batched=True)


def check_files(sources: Iterable[str], data_dir: str) -> None:
    """Raises `FileNotFoundError` for a source that is a file and is not there."""
    for path, _ in map(parse_source, sources):
        if path.endswith(FILES):
            find_file(path, data_dir)


def find_file(path: str, data_dir: str) -> str:
    """The path of a data file; raises `FileNotFoundError` with where it was looked for."""
    found = str(find_path(os.path.join(data_dir, path)))
    if not os.path.exists(found):
        raise FileNotFoundError(
            f"There is no file {found}. Data files with a relative path are looked for in `data_dir`, which is "
            f"{data_dir or '.'!r}: set it in the recipe or on the command line, as in `--data_dir ../data`, or name "
            "other files. `python -m arcaligner.train.prepare_data` makes those of the recipes."
        )
    return found


def _hotpotqa(row: dict, index: int, *, all_paragraphs: bool, where: str) -> Row:
    """A row of HotpotQA with its supporting paragraphs, or all ten, in their order."""
    found = own_row(hotpotqa_row(row), index, where=where)
    if not all_paragraphs:
        found["passages"] = [found["passages"][number] for number in found["gold"]]
        found["gold"] = list(range(len(found["passages"])))
    return found


def _converted(dataset: datasets.Dataset, convert: Callable, num_proc: int | None, **options) -> datasets.Dataset:
    return dataset.map(
        convert,
        with_indices=True,
        num_proc=num_proc,
        remove_columns=dataset.column_names,
        features=ROW_FEATURES,
        new_fingerprint=Hasher.hash((dataset._fingerprint, convert)),
        desc="reading rows",
        **options,
    )


def _is_own(path: str) -> bool:
    """Whether the first row of a JSON Lines file is of our schema."""
    first = next(read_json_lines(path), None)
    if first is None:
        raise ValueError("it is empty.")
    return bool({"passages", "answers"} & first.keys())


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
        yield own_row(row, index, where=f"{path}, line {index + 1}")


def _rows_of_texts(batch: dict, indices: list[int], *, text: str, title: str | None, words: int) -> dict:
    """A row without a question for each passage of the texts."""
    rows = {field: [] for field in ROW_FEATURES}
    ids = batch.get("id", indices)
    titles = batch[title] if title else [""] * len(indices)
    for index, row_id, row_title, row_text in zip(indices, ids, titles, batch[text], strict=True):
        split = (row_text or "").split() or [""]  # an empty text stays a row, to be counted
        for number, start in enumerate(range(0, len(split), words)):
            rows["id"].append(f"{id_or_number(row_id, index)}-{number}")
            rows["question"].append("")
            rows["answers"].append([])
            rows["passages"].append([{"title": row_title or "", "text": " ".join(split[start : start + words])}])
            rows["gold"].append([])
    return rows
