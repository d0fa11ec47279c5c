"""Passages to segments, the units that become one slot each: sentences, halves of them, or several merged.

spaCy finds the sentences. Offsets always count characters of the document's text, so an answer can be traced back to
it.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

# spaCy refuses longer texts by default; its rule-based sentence splitter needs little memory for each character.
_MAX_SPACY_CHARACTERS = 100_000_000


@dataclass(frozen=True)
class Segment:
    """Characters `start` to `end` of the text of document number `document`, as `text`."""

    document: int
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class SegmentTokens:
    """A segment's tokens in the backbone's vocabulary, and what the encoder reads for it."""

    segment: Segment
    encoder_text: str
    word_ids: tuple[int, ...]
    word_ends: tuple[int, ...]  # the character of the segment's text where each token ends; 0 for those of a title

    @property
    def encoder_start(self) -> int:
        """Where the segment's text begins in what the encoder reads."""
        return len(self.encoder_text) - len(self.segment.text)

    def runs(self, tokens_per_slot: int | str) -> list[tuple[int, int]]:
        """First and end token of each slot."""
        return equal_runs(len(self.word_ids), tokens_per_slot)

    def pieces(self, tokens_per_slot: int | str) -> list[Segment]:
        """The part of the segment's text that each slot stands for, with its characters in the document."""
        pieces, start = [], 0
        for _, last in self.runs(tokens_per_slot):
            end = self.word_ends[last - 1] if last < len(self.word_ids) else len(self.segment.text)
            text = self.segment.text[start:end]
            pieces.append(Segment(self.segment.document, self.segment.start + start, self.segment.start + end, text))
            start = end
        return pieces


def equal_runs(num_tokens: int, tokens_per_slot: int | str) -> list[tuple[int, int]]:
    """Cuts a segment's tokens into equal runs of about `tokens_per_slot`, one run for `"segment"` and at least one.

    >>> equal_runs(10, 4), equal_runs(2, 4), equal_runs(10, "segment")
    ([(0, 3), (3, 6), (6, 10)], [(0, 2)], [(0, 10)])
    """
    count = 1 if tokens_per_slot == "segment" else max(1, (2 * num_tokens + tokens_per_slot) // (2 * tokens_per_slot))
    bounds = [number * num_tokens // count for number in range(count + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def check_tokens_per_slot(tokens_per_slot: int | str) -> None:
    """Raises `ValueError` unless it is `"segment"` or a whole number of at least 1."""
    is_number = isinstance(tokens_per_slot, int) and not isinstance(tokens_per_slot, bool)
    if tokens_per_slot != "segment" and not (is_number and tokens_per_slot >= 1):
        raise ValueError(
            f'`tokens_per_slot` is {tokens_per_slot!r}; expected a whole number of tokens of at least 1, or "segment" '
            "for one slot per segment."
        )


@functools.lru_cache(maxsize=4)
def _load_spacy(spacy_model: str):
    try:
        spacy = importlib.import_module("spacy")
    except ImportError as error:
        raise ImportError(
            "Passages are split into sentences by spaCy, which is not installed: `pip install spacy`. Or pass "
            "precomputed `context_embeds`, which need no splitting."
        ) from error
    if len(spacy_model) <= 3:  # a language code
        nlp = spacy.blank(spacy_model)
        nlp.add_pipe("sentencizer")
    else:
        nlp = spacy.load(spacy_model)
    nlp.max_length = _MAX_SPACY_CHARACTERS
    return nlp


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    """`start` and `end` moved inwards over white space; equal when nothing else is there."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end


def _sentences(text: str, spacy_model: str) -> list[tuple[int, int]]:
    spans = [_strip(text, s.start_char, s.end_char) for s in _load_spacy(spacy_model)(text).sents]
    return [(start, end) for start, end in spans if start < end]


def _halves(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Two halves, cut at the white space nearest to the middle; one piece when it has none."""
    middle = (start + end) // 2
    spaces = [i for i in range(start + 1, end - 1) if text[i].isspace()]
    if not spaces:
        return [(start, end)]
    cut = min(spaces, key=lambda i: abs(i - middle))
    return [_strip(text, start, cut), _strip(text, cut, end)]


def _fitting_pieces(text: str, start: int, end: int, fits: Callable[[str], bool]) -> list[tuple[int, int]]:
    """Pieces the encoder reads whole: cut in two at a space (or anywhere in one long word) until each fits."""
    if end - start <= 1 or fits(text[start:end]):
        return [(start, end)]
    pieces = _halves(text, start, end)
    if len(pieces) == 1:
        middle = (start + end) // 2
        pieces = [(start, middle), (middle, end)]
    return [small for piece in pieces for small in _fitting_pieces(text, *piece, fits)]


def check_sentences_per_segment(sentences_per_segment: int | float) -> None:
    """Raises `ValueError` unless it is 0.5 or a whole number of at least 1."""
    whole = float(sentences_per_segment).is_integer() and sentences_per_segment >= 1
    if sentences_per_segment != 0.5 and not whole:
        raise ValueError(
            f"`sentences_per_segment` is {sentences_per_segment}; expected 0.5 (half sentences, the paper's 12x), 1 "
            "(sentences, 24x) or a whole number of sentences to merge (3: 72x)."
        )


def segment_document(
    text: str,
    document: int = 0,
    *,
    sentences_per_segment: int | float = 1,
    spacy_model: str = "en",
    fits: Callable[[str], bool] = lambda text: True,
) -> list[Segment]:
    """Cuts a document into segments.

    Args:
        text (`str`): The document. White space between segments belongs to none.
        document (`int`): Its number, kept in the segments.
        sentences_per_segment (`int` or `float`): 0.5 for half sentences, 1 for sentences, n to merge n of them.
        spacy_model (`str`): A language code (rule-based sentences) or the name of an installed spaCy pipeline.
        fits (`Callable`): Whether the encoder reads a text whole; what does not fit is split further.

    Returns:
        `list[Segment]`: In order, without overlap; empty for a document of white space.

    >>> [s.text for s in segment_document("One. Two!  Three?")]
    ['One.', 'Two!', 'Three?']
    """
    check_sentences_per_segment(sentences_per_segment)
    spans = _sentences(text, spacy_model)
    if sentences_per_segment == 0.5:
        spans = [half for span in spans for half in _halves(text, *span)]
    elif sentences_per_segment > 1:
        size = int(sentences_per_segment)
        spans = [(spans[i][0], spans[min(i + size, len(spans)) - 1][1]) for i in range(0, len(spans), size)]
    pieces = [piece for span in spans for piece in _fitting_pieces(text, *span, fits)]
    return [Segment(document, start, end, text[start:end]) for start, end in pieces]


__all__ = ["Segment", "SegmentTokens", "segment_document"]
