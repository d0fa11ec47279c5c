"""A file that is dropped into the page, as passages: read and never kept, its name data, never a path."""

from typing import Any

from ..common.passages import Document, no_text, passages_of
from ..common.reading import read_file

MAX_FILE_BYTES = 16 * 2**20
# Of its text: about 1,800 passages of 100 words. A corpus has room for more.
MAX_CHARACTERS = 2**20


def read_passages(name: str, data: bytes, passage_words: int, spacy_model: str) -> dict[str, Any]:
    """The passages of a file, as a corpus would cut it; the suffix of its `name` says how `data` is read.

    Returns:
        `dict`: The `name` without folders, `passages` with `title`, `text` and `page` (or `None`), the `characters` of
        the text, and how many of these were `read`.
    """
    name = name.replace("\\", "/").rstrip("/").rpartition("/")[2][-255:] or "file"
    title, text, sections = read_file(name, data)
    title, text = (each.encode("utf-8", "replace").decode() for each in (title, text))  # a PDF may have halves
    if not text.strip():
        raise ValueError(f"{no_text(name)}.")
    found = passages_of([Document(name, title, text[:MAX_CHARACTERS], sections)], passage_words, spacy_model)
    passages = [{"title": each.title, "text": text[each.start : each.end], "page": each.page} for each in found]
    return {"name": name, "passages": passages, "characters": len(text), "read": min(len(text), MAX_CHARACTERS)}
