"""Documents, and the passages that they are cut into, with headings and pages. `cut_text` in
`segmentation_arcaligner.py` decides where to cut, both for files and for documents of a question.
"""

import functools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..tokenization_arcaligner import ReadableText, readable
from .files import DEFAULT_CHECKPOINT, digest
from .reading import LONGEST_TITLE


class Document(NamedTuple):
    """A text to cut into passages; `sections` as in `reading.py`."""

    id: str
    title: str
    text: str
    sections: list[tuple[int, str | int]] = []

    @property
    def digest(self) -> str:
        """A digest of title and text."""
        return digest([self.title, self.text])


def tokens_of_words(words: int) -> int:
    """Convert a length in English words, the unit of earlier versions, to tokens: 1.4 per word, as measured on SQuAD's
    held-out paragraphs.

    >>> tokens_of_words(100)
    140
    """
    return round(1.4 * words)


def no_text(name: str) -> str:
    """The message for a file without a text, with a possible reason.

    >>> no_text("a.PDF")
    'a.PDF contains no text; its pages may be pictures'
    """
    return f"{name} contains no text{'; its pages may be pictures' * name.lower().endswith('.pdf')}"


@functools.cache
def _default_tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(DEFAULT_CHECKPOINT / "tokenizer.json"))


def cut_passages(
    text: str,
    passage_tokens: int,
    spacy_model: str = "en",
    sections: Sequence[tuple[int, Any]] = (),
    tokenizer: Any = None,
) -> list[tuple[int, int]]:
    """First and end character of each passage of a text. Passages have at most `passage_tokens` tokens; see `cut_text`.
    The default `tokenizer` is that of the shipped checkpoint.

    >>> cut_passages("One two. Three. Four five six seven.", passage_tokens=5)
    [(0, 15), (16, 36)]
    """
    return [span for span, _ in _cut(readable(text), passage_tokens, spacy_model, sections, tokenizer)]


def _cut(
    document: ReadableText, passage_tokens: int, spacy_model: str, sections: Sequence[tuple[int, Any]], tokenizer: Any
) -> list[tuple[tuple[int, int], str]]:
    """The passages of a text: their characters in the given text, and the text that is encoded."""
    from ..segmentation_arcaligner import cut_text

    starts, passages = [document.from_original(start) for start, _ in sections], []
    tokenizer = _default_tokenizer() if tokenizer is None else tokenizer
    for start, end in cut_text(document.text, tokenizer, passage_tokens, spacy_model=spacy_model, sections=starts):
        if text := document.text[start:end].strip():
            start = document.text.index(text, start, end)
            passages.append((document.to_original(start, start + len(text)), text))
    return passages


def _section(starts: Sequence[int], character: int) -> int:
    """The number of the section that contains a character; -1 before the first section."""
    return bisect_right(starts, character) - 1


class Passage(NamedTuple):
    """A passage of a document: its number, first and end character, the text and title that are encoded, and its
    page."""

    document: Document
    number: int
    start: int
    end: int
    text: str
    title: str
    page: int | None


def passages_of(
    documents: Iterable[Document], passage_tokens: int, spacy_model: str, tokenizer: Any = None
) -> list[Passage]:
    """The passages of documents, as [`cut_passages`] cuts them. The headings above a passage are part of its title."""
    passages = []
    for document in documents:
        starts, document_title = [start for start, _ in document.sections], readable(document.title).text
        cut = _cut(readable(document.text), passage_tokens, spacy_model, document.sections, tokenizer)
        for number, ((start, end), text) in enumerate(cut):
            section = _section(starts, start)
            name = document.sections[section][1] if section >= 0 else ""
            page = name if isinstance(name, int) else None
            title = document_title if page else " › ".join(filter(None, (document_title, name)))[:LONGEST_TITLE]
            passages.append(Passage(document, number, start, end, text, title, page))
    return passages
