"""Rows of questions and passages, where they come from, and the scores of an answer.

    {"id": str, "question": str, "answers": [str], "passages": [{"title": str, "text": str}], "gold": [int]}

`gold` are the numbers of the passages that the answer needs, all of them if it is empty; in files it is `meta.gold`. A
source is a path or a Hub id, with options after a question mark:

    questions.jsonl.gz                                               rows in our schema
    letters.parquet?text=body                                        one text per row
    wikimedia/wikipedia?name=20231101.en&split=train&title=title     a text corpus of the Hub
    hotpotqa/hotpot_qa?name=distractor                               HotpotQA

The paper's EM is non-strict: a prediction is right if it contains a gold answer. Both sides are normalized by SQuAD's
rule first (lower case, no punctuation, no articles, single spaces). A gold answer that normalizes to nothing would be
contained in everything, so it is dropped.

This file and its imports need the standard library only.
"""

import os
import re
import reprlib
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tokenization_arcaligner import readable
from .files import counted, find_path, read_numbered_lines

ROW_FIELDS = ("id", "question", "answers", "passages")
JSON_LINES = (".jsonl", ".jsonl.gz")
FILES = (*JSON_LINES, ".json", ".parquet")  # of data
OTHER_FILES = (".csv", ".tsv", ".txt", ".xlsx", ".ndjson", ".arrow", ".gz", ".zip", ".zst")  # that are not supported
OPTIONS = {"name": None, "split": "train", "text": "text", "title": None}

Row = dict[str, Any]


def parse_source(source: str) -> tuple[str, dict[str, str | None]]:
    """A path or Hub id, and its options, with defaults for missing ones.

    Raises:
        `ValueError`: an unknown option, or an option without a value.

    >>> parse_source("org/corpus?text=body")
    ('org/corpus', {'name': None, 'split': 'train', 'text': 'body', 'title': None})
    """
    path, _, query = source.partition("?") if not os.path.exists(source) else (source, "", "")  # "What now?.txt"
    options = dict(pair.partition("=")[::2] for pair in query.split("&") if pair)
    unknown = sorted(set(options) - set(OPTIONS))
    empty = sorted(key for key, value in options.items() if not value)
    if unknown or empty:
        raise ValueError(
            f"The source {source!r} has {'unknown options' if unknown else 'options without a value'} "
            f"({', '.join(unknown or empty)}); expected PATH?OPTION=VALUE&OPTION=VALUE with the options "
            f"{', '.join(sorted(OPTIONS))}. Correct the source, or leave the options out."
        )
    return path, OPTIONS | options


def find_file(path: str, data_dir: str) -> str:
    """The path of a data file; the id of a data set of the Hub is returned unchanged.

    Raises:
        `FileNotFoundError`: a missing file; the message has its whole path.
        `ValueError`: a file with a suffix that is not supported.
    """
    if not path.endswith(FILES):
        if os.path.isfile(os.path.join(data_dir, path)) or path.endswith(OTHER_FILES):
            raise ValueError(
                f"{path} is a file of an unsupported kind; expected one of {', '.join(FILES)}. Convert the file."
            )
        return path
    file = str(find_path(os.path.join(data_dir, path)))
    if not os.path.exists(file):
        raise FileNotFoundError(
            f"There is no file {file}; paths are relative to the folder of the data, {data_dir or '.'!r}. Correct the "
            "path, or the folder: `data_dir` in a recipe, or the option `--data-dir`, if the command has it. To make "
            "the files that the recipes use, run `python -m arcaligner.train.prepare_data`."
        )
    return file


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a JSON Lines file in our schema, gzipped or not, with all their fields. A line that is not a JSON object
    is left out, with a warning.

    Raises:
        `ValueError`: an object without `id`, `question`, `answers` and `passages`, or with values of other types.
    """
    rows = []
    for number, row in read_numbered_lines(path):
        missing = [field for field in ROW_FIELDS if field not in row]
        if missing:
            raise ValueError(
                f"{path}, line {number} lacks {', '.join(missing)}; expected the keys {', '.join(ROW_FIELDS)}. "
                "Add the missing keys."
            )
        rows.append(row | normalized_row(row, number - 1, where=f"{path}, line {number}"))
    return rows


_LIST, _PASSAGE = 'a list of strings, such as ["..."]', 'a string or {"title": "...", "text": "..."}'

_PASSAGES = f"a list of passages, each {_PASSAGE}"


def normalized_row(row: dict, index: int, *, where: str) -> Row:
    """A row in our schema. Missing and null fields are empty, and a passage may be just its text.

    Raises:
        `ValueError`: a field of a different type; the message names it, its value and what is expected.
    """

    def checked(field: str, value: Any, kind: type, expected: str) -> Any:
        if value is not None and not isinstance(value, kind):
            shown = f"{reprlib.repr(value)} ({type(value).__name__})"
            raise ValueError(f"{where}: `{field}` is {shown}; expected {expected}.")
        return kind() if value is None else value

    question, passages = checked("question", row.get("question"), str, "a string"), []
    answers = checked("answers", row.get("answers"), list, _LIST)
    answers = [checked(f"answers[{number}]", answer, str, "a string") for number, answer in enumerate(answers)]
    for number, passage in enumerate(checked("passages", row.get("passages"), list, _PASSAGES)):
        name = f"passages[{number}]"
        passage = {"text": passage} if isinstance(passage, str) else checked(name, passage, dict, _PASSAGE)
        passages.append({key: checked(f"{name}.{key}", passage.get(key), str, "a string") for key in ("title", "text")})
    meta = checked("meta", row.get("meta"), dict, 'an object such as {"gold": [0]}')
    gold = checked("meta.gold", meta.get("gold"), list, "a list of numbers of passages, such as [0]")
    if not all(number in range(len(passages)) for number in gold):
        raise ValueError(
            f"{where}: `meta.gold` is {gold}; expected numbers of passages, counted from 0, in a row with "
            f"{counted(len(passages), 'passage')}. Correct the row."
        )
    answers = [answer.strip() for answer in answers if answer.strip()]
    return {
        "id": id_or_number(row.get("id"), index),
        "question": question,
        "answers": answers,
        "passages": passages,
        "gold": gold,
    }


def id_or_number(row_id: Any, index: int) -> str:
    """A row's id, or its number, from 0, if it has none."""
    return str(index if row_id is None else row_id)


# Scores


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """SQuAD's normalization.

    >>> normalize_answer("The  Beatles, live!")
    'beatles live'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def usable_golds(golds: Sequence[str]) -> list[str]:
    """The gold answers that still contain a word after normalization.

    >>> usable_golds(["The", "Paris"])
    ['Paris']
    """
    return [gold for gold in golds if normalize_answer(gold)]


def contains_match(prediction: str, golds: Sequence[str]) -> float:
    """Non-strict EM: 1.0 when the normalized prediction contains a normalized gold answer.

    >>> contains_match("The capital is PARIS.", ["Paris"])
    1.0
    """
    normalized = normalize_answer(prediction)
    return float(any(normalize_answer(gold) in normalized for gold in usable_golds(golds)))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """SQuAD's F1 of the normalized tokens, the best over the gold answers.

    >>> token_f1("the capital is Paris", ["Paris"])
    0.5
    """
    predicted, best = Counter(normalize_answer(prediction).split()), 0.0
    for gold in usable_golds(golds):
        expected = Counter(normalize_answer(gold).split())
        if common := (predicted & expected).total():
            precision, recall = common / predicted.total(), common / expected.total()
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def find_answer(answer: str, text: str) -> dict[str, int] | None:
    """Find an answer verbatim in a text, regardless of case, spaces, surrounding punctuation and invisible characters.

    >>> find_answer("Ski  jumper.", "A Kazakh ski jumper since 2003.")
    {'start': 9, 'end': 19}
    """
    if not (words := answer.strip(" \n\t.,;:!?\"'").split()):
        return None
    pattern = r"\s+".join(map(re.escape, words))
    # Not inside of a word or a number, in scripts that have spaces between words.
    ends = words[0][0], words[-1][-1]
    before, after = (character.isdigit() or character.lower() != character.upper() for character in ends)
    pattern = (r"(?<!\w)" if before else "") + pattern + (r"(?!\w)" if after else "")
    normalized = readable(text)
    if (match := re.search(pattern, normalized.text, re.IGNORECASE)) is None:
        return None
    start, end = normalized.to_original(*match.span())
    return {"start": start, "end": end}
