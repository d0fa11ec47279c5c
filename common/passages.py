"""Documents, and the passages that they are cut into: between sentences where it goes, with headings and pages."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .files import digest
from .reading import LONGEST_TITLE

PASSAGE_WORDS = 100  # of a passage, where nobody says otherwise
# A word, or a part of one: text without spaces is cut as well.
_WORD = re.compile(r"\S{1,16}")


class Document(NamedTuple):
    """A text to be cut into passages; `sections` as those of `reading.py`."""

    id: str
    title: str
    text: str
    sections: list[tuple[int, str | int]] = []

    @property
    def digest(self) -> str:
        """Changes with what is read."""
        return digest([self.title, self.text])


def count_words(text: str) -> int:
    """Words as passages count them: a long one, or text without spaces, is several.

    >>> count_words("Ada wrote."), count_words("x" * 40)
    (2, 3)
    """
    return sum(1 for _ in _WORD.finditer(text))


def no_text(name: str) -> str:
    """Says that a file has no text, and why that may be.

    >>> no_text("a.PDF")
    'a.PDF holds no text; its pages may be pictures'
    """
    return f"{name} holds no text{'; its pages may be pictures' * name.lower().endswith('.pdf')}"


def cut_passages(
    text: str, passage_words: int, spacy_model: str = "en", sections: Sequence[tuple[int, Any]] = ()
) -> list[tuple[int, int]]:
    """First and end character of passages of at most `passage_words` words, cut between sentences where one fits, and
    where a section begins if the passage before it is half full.

    >>> cut_passages("One two. Three. Four five six seven.", passage_words=3)
    [(0, 15), (16, 29), (30, 36)]
    """
    from ..segmentation_arcaligner import segment_document

    passages: list[tuple[int, int]] = []
    room, starts = 0, [start for start, _ in sections]
    for sentence in segment_document(text, spacy_model=spacy_model):
        if (
            passages
            and room <= passage_words / 2
            and _section(starts, sentence.start) != _section(starts, passages[-1][0])
        ):
            room = 0
        words = [found.span() for found in _WORD.finditer(sentence.text)]
        for first in range(0, len(words), passage_words):
            piece = words[first : first + passage_words]
            start, end = sentence.start + piece[0][0], sentence.start + piece[-1][1]
            if len(piece) <= room:
                passages[-1] = (passages[-1][0], end)
                room -= len(piece)
            else:
                passages.append((start, end))
                room = passage_words - len(piece)
    return passages


def _section(starts: Sequence[int], character: int) -> int:
    """The number of the section that a character is in; -1 before the first."""
    return bisect_right(starts, character) - 1


class Passage(NamedTuple):
    """A piece of a document: its number, its first and end character, the title that is read with it, its page."""

    document: Document
    number: int
    start: int
    end: int
    title: str
    page: int | None


def passages_of(documents: Iterable[Document], passage_words: int, spacy_model: str) -> list[Passage]:
    """The passages of documents. Headings that a passage stands under are part of its title."""
    passages = []
    for document in documents:
        starts = [start for start, _ in document.sections]
        cut = cut_passages(document.text, passage_words, spacy_model, document.sections)
        for number, (start, end) in enumerate(cut):
            place = _section(starts, start)
            name = document.sections[place][1] if place >= 0 else ""
            page = name if isinstance(name, int) else None
            title = document.title if page else " › ".join(filter(None, (document.title, name)))[:LONGEST_TITLE]
            passages.append(Passage(document, number, start, end, title, page))
    return passages
