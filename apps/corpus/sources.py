"""Documents of a corpus from files, folders and data sets.

A source is a file of text (`PLAIN`), Markdown, HTML, PDF or DOCX, a JSON Lines or Parquet file, a folder of such files,
or a data set of the Hub. Columns are named as in `common/rows.py`:

    letters/                                          all files in it and its subfolders, read by their suffixes
    paragraphs.jsonl.gz                               rows of {"title", "text"}, or questions with `passages`
    letters.parquet?text=body                         one text per row
    wikimedia/wikipedia?name=20231101.en&title=title  a data set of the Hub
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet

from ...common.files import digest, read_numbered_lines
from ...common.passages import Document, no_text
from ...common.reading import CONVERTED, LONGEST_TITLE, MARKDOWN, PLAIN, read_file
from ...common.rows import JSON_LINES, parse_source

TEXTS = (*PLAIN, *MARKDOWN, *CONVERTED)
FILES = (*filter(None, TEXTS), *JSON_LINES, ".parquet")
_NO_SOURCE = re.compile(r"^\.|\.lance$")  # hidden files, and a corpus in the folder of its texts
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def read_documents(
    sources: Iterable[str], skip: Callable[..., None], corpus_parent: Path = Path()
) -> Iterator[Document]:
    """Yield the documents of sources.

    Args:
        sources (`Iterable[str]`): See the top of this file.
        corpus_parent (`Path`): The folder that contains the corpus. The id of a file is its path relative to this
            folder, or its absolute path if it is outside, however the source names it.
        skip (`Callable`): Called with a line that says what cannot be read, and why. Its argument `id` is that of the
            only document that is lost, if it is known. `may_contain_documents=False` means that no document is lost, as
            with an empty file or one of another kind.
    """
    for source in sources:
        for document in _read_source(source, skip, corpus_parent):
            if (length := len(document.title)) > LONGEST_TITLE:
                reason = (
                    f"{document.id} has a title of {length} characters; expected at most {LONGEST_TITLE}. Shorten it"
                )
                skip(reason, may_contain_documents=False)
            elif document.text.strip():
                texts = (text.encode("utf-8", "replace").decode() for text in document[:3])
                yield Document(*texts, document.sections)
            else:
                skip(no_text(document.id), may_contain_documents=False)


def check_source(source: str) -> None:
    """Raise for a source that is neither on this machine nor a possible id of a data set on the Hub."""
    path, _ = parse_source(source)
    if not path.strip():  # for example an unset variable; it would mean the current folder
        raise ValueError(
            f"One of the sources is empty ({source!r}); expected a file, a folder or a data set of the Hub."
        )
    is_hub_id = _HUB_ID.fullmatch(path) and not path.endswith(FILES) and not Path(path).parent.is_dir()
    if not is_hub_id and not Path(path).exists():
        raise FileNotFoundError(
            f"There is no file or folder {path}. Correct the path, or pass a data set of the Hub as user/name."
        )


def _read_source(source: str, skip: Callable[..., None], corpus_parent: Path) -> Iterator[Document]:
    check_source(source)
    path, options = parse_source(source)
    local = Path(path)
    if local.is_dir():
        files = sorted(file for file in local.rglob("*") if file.is_file())
        files = [file for file in files if not any(map(_NO_SOURCE.search, file.relative_to(local).parts))]
        if not files:
            skip(f"{path} contains no files, apart from hidden ones")
        for file in files:
            yield from _read_file(file, _id_of(file, corpus_parent), options, skip)
    elif local.exists():
        yield from _read_file(local, _id_of(local, corpus_parent), options, skip)
    else:
        rows = enumerate(datasets.load_dataset(path, options["name"], split=options["split"], streaming=True), start=1)
        yield from _documents_of_rows(source, rows, options, skip)  # `source` names the split: each has a row 1


def _id_of(file: Path, corpus_parent: Path) -> str:
    path, folder = file.parent.resolve() / file.name, corpus_parent.resolve()  # resolve links of folders, not of files
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _read_file(path: Path, name: str, options: dict[str, Any], skip: Callable[..., None]) -> Iterator[Document]:
    try:
        if path.suffix.lower() in TEXTS:
            try:
                title_text_sections = read_file(path)
            except (ValueError, OSError) as error:
                skip(str(error), id=name)
            else:
                yield Document(name, *title_text_sections)
        elif path.name.lower().endswith(JSON_LINES):
            yield from _read_json_lines(path, name, options, skip)
        elif path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                columns = [options["text"], options["title"] or "title", "id", "passages"]  # if they exist
                rows = (row for batch in file.iter_batches(1024, columns=columns) for row in batch.to_pylist())
                yield from _documents_of_rows(name, enumerate(rows, start=1), options, skip)
        else:
            reason = f"{path} has the suffix {path.suffix}; expected one of {', '.join(FILES)}, or none"
            skip(reason, may_contain_documents=False)
    except (ValueError, OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        skip(f"{path} cannot be read: {error}")


def _read_json_lines(path: Path, name: str, options: dict[str, Any], skip: Callable[..., None]) -> Iterator[Document]:
    """Yield the documents of the rows of a file. If rows are identified by their line, the id of the document of a
    broken line is known; otherwise that line may hold any document."""
    broken: list[tuple[int, str]] = []
    num_rows = num_by_line = 0
    try:
        for number, row in read_numbered_lines(path, lambda number, reason: broken.append((number, reason))):
            num_rows += 1
            num_by_line += row.get("id") is None and "passages" not in row
            yield from _documents_of_rows(name, [(number, row)], options, skip)
    finally:
        for number, reason in broken:
            skip(reason, id=_id_of_row(name, number) if num_rows and num_by_line == num_rows else None)


def _id_of_row(source: str, number: int) -> str:
    return f"{source}#{number}"


def _documents_of_rows(
    source: str, rows: Iterable[tuple[int, dict[str, Any]]], options: dict[str, Any], skip: Callable[..., None]
) -> Iterator[Document]:
    """Yield documents of rows. A row without an `id` is identified by its number or line in `source`."""
    for number, row in rows:
        where, text, passages = _id_of_row(source, number), row.get(options["text"]), row.get("passages")
        title, document_id = row.get(options["title"] or "title"), where if row.get("id") is None else str(row["id"])
        if isinstance(text, str) and isinstance(title, str | None):
            yield Document(document_id, title or "", text)
        elif isinstance(passages, list) and all(_is_passage(passage) for passage in passages):
            # Questions share passages, so each passage is a document, identified by its content.
            for passage in passages:
                title, text = passage.get("title") or "", passage["text"]
                yield Document(digest([title, text]), title, text)
        else:
            reason = f"{where} has neither a string in `{options['text']}` nor a list of {{title, text}} in `passages`"
            skip(reason, id=None if "passages" in row else document_id)


def _is_passage(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("text"), str) and isinstance(value.get("title"), str | None)
