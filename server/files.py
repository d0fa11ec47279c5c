"""What the page can ask about: a file that is dropped into it, as passages, read and never kept, its name data, never a
path; and questions to begin with, which fit the texts of the corpus."""

import re
from typing import Any

from ..common.passages import Document, no_text, passages_of
from ..common.reading import read_file
from ..corpus.table import Corpus

MAX_FILE_BYTES = 16 * 2**20
# Of its text: about 1,800 passages of 100 words. A corpus has room for more.
MAX_CHARACTERS = 2**20
# Passages of a corpus that are looked at for questions.
LOOKED_AT = 2_000
# A text that begins by saying what something is: the thing, and the verb.
_SAYS_WHAT = re.compile(
    r"(?:#.*\n+)*(?P<thing>(?:(?:The|An?) )?(?:[\w.'’-]+ ){0,4}?[\w'’-]+)"
    r"(?: \([^()\n]*\))? (?P<verb>is|are|was|were) (?:an?|the|one) \w"
)
_STAND_FOR_A_NAME = ("He", "She", "It", "They")
_NO_NAMES = (
    "there this that these those what which who one each all both some another other first here we you i not he "
)
_NO_NAMES += "she it they everything nothing when where how why as in at on if for with"
_NO_NAMES = frozenset(_NO_NAMES.split())


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


def ask_what(title: str, text: str) -> str | None:
    """The question that a passage answers with its first sentence, if that says what something is.

    >>> ask_what("", "Radik Zhaparov is a Kazakh ski jumper.")
    'Who or what is Radik Zhaparov?'
    >>> ask_what("Sailing ships", "They were the only ones.")
    'What were sailing ships?'
    """
    if (found := _SAYS_WHAT.match(text)) is None:
        return None
    thing, verb = found["thing"], found["verb"]
    if thing in _STAND_FOR_A_NAME:
        thing = title.rpartition(" › ")[2]
        if not 1 <= len(thing.split()) <= 5:
            return None
    first, *others = thing.split()
    if first.lower() in _NO_NAMES or not first[0].isupper():
        return None
    if first in ("The", "A", "An") or others and not any(each[0].isupper() for each in others):
        return f"What {verb} {' '.join([first.lower(), *others])}?" if others else None
    return f"{'Who or what' if verb in ('is', 'was') else 'What'} {verb} {thing}?"


def example_questions(corpus: Corpus, most: int = 3) -> list[str]:
    """Questions that texts of a corpus answer with their first words, of documents far from each other; none where no
    text says what something is."""
    rows = corpus.table.search().select(["document", "title", "text"]).limit(LOOKED_AT).to_arrow().to_pylist()
    found: dict[str, str] = {}
    for row in rows:
        if row["document"] not in found and (question := ask_what(row["title"], row["text"])):
            found[row["document"]] = question
    questions = list(dict.fromkeys(found.values()))
    number = min(most, len(questions))
    return [questions[place * len(questions) // number] for place in range(number)]
